"""OpenTelemetry spans of requests; needs the package opentelemetry-api."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pulse.errors import PluginUnavailable
from pulse.instruments.clock import Clock, engine_clock
from pulse.ports import Instrument
from pulse.types import FinishReason, LaneName, Operation, Placement, TransferReport

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

__all__ = ["ATTRIBUTES", "OpenTelemetrySpans"]

ATTRIBUTES = {
    "pulse.placement": "`normal` or `offload`, of the last admission",
    "pulse.preemptions": "times that the request lost its KV slots",
    "pulse.time_to_first_token_seconds": "from its arrival, in tokens, to its first token",
    "pulse.queue.seconds": "in which it waited to be admitted, again after each preemption",
    "pulse.compute.seconds": "in which its cohort ran on the compute lane",
    "pulse.lane.wait_seconds": "in which its cohort was ready and waited for the compute lane",
    "pulse.recall.wait_seconds": "in which its cohort could do nothing but wait for recalls",
    "pulse.recall.bytes": "recalled for the request alone",
    "pulse.recall.tier": "the tier that they came from, of a request that recalled any",
    "pulse.write_back.bytes": "written back for the request alone",
}
"""The attributes of spans that are pulse's own, and what they say."""


@dataclass(slots=True)
class _Usage:
    """Where the time of a request or a cohort went, in seconds, and what was moved for it."""

    computed: float = 0.0
    lane_wait: float = 0.0
    recall_wait: float = 0.0
    recalled: int = 0
    written: int = 0

    def add(self, other: _Usage) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def attributes(self, tier: str) -> dict[str, Any]:
        found = {
            "pulse.compute.seconds": self.computed,
            "pulse.lane.wait_seconds": self.lane_wait,
            "pulse.recall.wait_seconds": self.recall_wait,
            "pulse.recall.bytes": self.recalled,
            "pulse.write_back.bytes": self.written,
        }
        return {**found, "pulse.recall.tier": tier} if self.recalled else found


@dataclass(slots=True)
class _Request:
    """What is known of a request until it ends; times are seconds of the engine's clock."""

    span: Span
    submitted: float
    phase: Span | None = None
    name: str = ""
    began: float = 0.0
    queued: float = 0.0
    placement: Placement | None = None
    cohort: str | None = None
    """The cohort whose present step it takes part in; its own in prefill."""
    tokens: int = 0
    preemptions: int = 0
    first: float | None = None
    usage: _Usage = field(default_factory=_Usage)
    """What it used in the present phase."""
    total: _Usage = field(default_factory=_Usage)
    """What it used in the phases before."""


class _Cohort:
    """What a cohort does at present, and where its time went since its step began."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.computing: set[int] = set()
        self.recalling: set[int] = set()
        self.usage = _Usage()
        self._since = 0.0

    def settle(self, now: float) -> None:
        """Count the time since the last call as what the cohort was doing in it."""
        # A recall that a worker started is told of later; what was counted since stays counted.
        elapsed = max(0.0, now - self._since)
        self._since += elapsed
        # A recall for later, while the cohort has something to compute, is not waited for.
        if self.computing:
            self.usage.computed += elapsed
        elif self.waiting:
            self.usage.lane_wait += elapsed
        elif self.recalling:
            self.usage.recall_wait += elapsed

    @property
    def idle(self) -> bool:
        """Whether it has no operation at all."""
        return not (self.waiting or self.computing or self.recalling)


class OpenTelemetrySpans(Instrument):
    """One span per request, with a child for each wait in the queue, prefill and decode phase.

    The span's parent is the span that is current where the request is made. Its attributes are
    those of the semantic conventions for generative AI where they exist, and those of
    `ATTRIBUTES`. Phases carry what belongs to them alone. Seconds are those of the cohort: its
    members compute together and wait together. Preemptions and quarantines are events.

    tracer_provider: the global one by default. model: the model's name, for
    ``gen_ai.request.model``. slow_tier: what the slow tier is called in ``pulse.recall.tier``,
    ``host`` or ``disk``. clock: gives seconds on the scale of the operations' times; wall:
    nanoseconds since the epoch, asked once.

    Raises PluginUnavailable without opentelemetry-api.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        *,
        model: str | None = None,
        slow_tier: str = "slow",
        clock: Clock = engine_clock,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise PluginUnavailable(
                "OpenTelemetrySpans needs opentelemetry-api: pip install 'pulse-llm[otel]'"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("pulse", tracer_provider=tracer_provider)
        self._model = model
        self._tier = slow_tier
        self._clock = clock
        self._wall = wall
        self._offset: int | None = None
        self._requests: dict[str, _Request] = {}
        self._cohorts: dict[str, _Cohort] = {}

    # -- requests ----------------------------------------------------------------------------

    def request_submitted(self, request: str, prompt_tokens: int) -> None:
        """The request's span begins, and the wait in the queue."""
        now = self._clock()
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "pulse",
            "gen_ai.response.id": request,
            "gen_ai.usage.input_tokens": prompt_tokens,
        }
        name = "text_completion"
        if self._model:
            attributes["gen_ai.request.model"] = self._model
            name += f" {self._model}"
        span = self._tracer.start_span(name, attributes=attributes, start_time=self._ns(now))
        self._requests[request] = state = _Request(span, now)
        self._begin(state, "queue", now)

    def request_admitted(self, request: str, placement: Placement) -> None:
        """Prefill begins."""
        state = self._requests.get(request)
        if state is None:
            return
        state.placement = placement
        # In prefill it is a cohort of its own, with nothing of what it did before it was admitted.
        self._cohorts[request] = _Cohort()
        state.cohort = request
        self._begin(state, "prefill", self._clock())

    def request_preempted(self, request: str, reason: str) -> None:
        """An event of the request's span; it waits in the queue again."""
        state = self._requests.get(request)
        if state is None:
            return
        now = self._clock()
        state.preemptions += 1
        state.span.add_event("preempted", {"pulse.reason": reason}, self._ns(now))
        self._leave(request, state, now)
        self._begin(state, "queue", now)

    def token(self, request: str, index: int) -> None:
        """Prefill is over."""
        state = self._requests.get(request)
        if state is None:
            return
        state.tokens += 1
        now = self._clock()
        if state.first is None:
            state.first = now
        self._decode(request, state, now)

    def quarantined(self, request: str, transfers: int) -> None:
        """An event of the request's span."""
        state = self._requests.get(request)
        if state is not None:
            attributes = {"pulse.transfers": transfers}
            state.span.add_event("quarantined", attributes, self._ns(self._clock()))

    def request_ended(self, request: str, reason: str) -> None:
        """The span ends with what it took, and the request is forgotten."""
        state = self._requests.pop(request, None)
        if state is not None:
            self._end(request, state, reason)
        self._cohorts.pop(request, None)  # it may have ended before its prompt was read

    def close(self) -> None:
        """End the spans of requests that are under way. Idempotent."""
        while self._requests:
            request, state = self._requests.popitem()
            self._end(request, state, FinishReason.CANCELLED)
        self._cohorts.clear()

    # -- cohorts -----------------------------------------------------------------------------

    def step_started(self, cohort: str, requests: tuple[str, ...]) -> None:
        """What the cohort does from here on is done for these requests."""
        state = self._cohorts.setdefault(cohort, _Cohort())
        now = self._clock()
        state.settle(now)
        state.usage = _Usage()
        for request in requests:
            member = self._requests.get(request)
            if member is not None:
                self._decode(request, member, now)
                member.cohort = cohort

    def step_ended(self, cohort: str, requests: tuple[str, ...]) -> None:
        """Every member has spent the time that the step took."""
        state = self._cohorts.get(cohort)
        if state is None:
            return
        state.settle(self._clock())
        for member in self._known(requests):
            if member.cohort == cohort:
                member.usage.add(state.usage)
                member.cohort = None
        if state.idle:
            del self._cohorts[cohort]

    def operation_submitted(self, operation: Operation) -> None:
        """Its cohort waits, for the lane or for the recall."""
        if operation.lane is LaneName.WRITE_BACK:
            return
        cohort = self._cohorts.setdefault(operation.cohort, _Cohort())
        cohort.settle(operation.submitted)
        recall = operation.lane is LaneName.RECALL
        (cohort.recalling if recall else cohort.waiting).add(operation.id)

    def operation_started(self, operation: Operation) -> None:
        """Its cohort computes, if it is not a recall."""
        cohort = self._cohorts.get(operation.cohort)
        if cohort is not None and operation.id in cohort.waiting:
            cohort.settle(operation.started)
            cohort.waiting.remove(operation.id)
            cohort.computing.add(operation.id)

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        """Its cohort goes on to something else; the bytes of a transfer count for its requests."""
        cohort = self._cohorts.get(operation.cohort)
        if cohort is not None:
            cohort.settle(operation.ended)
            for pending in (cohort.waiting, cohort.computing, cohort.recalling):
                pending.discard(operation.id)
        if operation.status != "done" or operation.lane is LaneName.COMPUTE:
            return
        for request, share in zip(operation.requests, operation.shares, strict=False):
            state = self._requests.get(request)
            if state is not None and operation.lane is LaneName.RECALL:
                state.usage.recalled += share
            elif state is not None:
                state.usage.written += share

    # -- helpers -----------------------------------------------------------------------------

    def _known(self, requests: tuple[str, ...]) -> list[_Request]:
        found = (self._requests.get(request) for request in requests)
        return [state for state in found if state is not None]

    def _leave(self, request: str, state: _Request, now: float) -> None:
        """Count what its cohort did so far, though the step or the prefill is not over."""
        cohort = self._cohorts.get(state.cohort) if state.cohort is not None else None
        if cohort is not None:
            cohort.settle(now)
            state.usage.add(cohort.usage)
        self._cohorts.pop(request, None)
        state.cohort = None

    def _decode(self, request: str, state: _Request, now: float) -> None:
        # After a preemption its steps are repeated, and tell of no token before there is a new one.
        if state.name == "prefill":
            self._leave(request, state, now)
            self._begin(state, "decode", now)

    def _begin(self, state: _Request, name: str, now: float) -> None:
        self._close_phase(state, now)
        parent = self._trace.set_span_in_context(state.span)
        state.phase = self._tracer.start_span(name, context=parent, start_time=self._ns(now))
        state.began = now
        state.name = name

    def _close_phase(self, state: _Request, now: float) -> None:
        if state.phase is None:
            return
        if state.name == "queue":
            state.queued += now - state.began
        else:
            state.phase.set_attributes(state.usage.attributes(self._tier))
        state.phase.end(self._ns(now))
        state.phase = None
        state.total.add(state.usage)
        state.usage = _Usage()

    def _end(self, request: str, state: _Request, reason: str) -> None:
        now = self._clock()
        self._leave(request, state, now)
        self._close_phase(state, now)
        attributes: dict[str, Any] = {
            "gen_ai.usage.output_tokens": state.tokens,
            "gen_ai.response.finish_reasons": [str(reason)],
            "pulse.preemptions": state.preemptions,
            "pulse.queue.seconds": state.queued,
            **state.total.attributes(self._tier),
        }
        if state.placement is not None:
            attributes["pulse.placement"] = state.placement.value
        if state.first is not None:
            attributes["pulse.time_to_first_token_seconds"] = state.first - state.submitted
        state.span.set_attributes(attributes)
        if reason == FinishReason.ERROR:
            state.span.set_status(self._trace.StatusCode.ERROR)
            state.span.set_attribute("error.type", "_OTHER")
        state.span.end(self._ns(now))

    def _ns(self, seconds: float) -> int:
        # Spans are dated by the calendar, operations by a clock that began at any time.
        if self._offset is None:
            self._offset = self._wall() - round(self._clock() * 1e9)
        return self._offset + round(seconds * 1e9)
