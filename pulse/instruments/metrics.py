"""Prometheus metrics of one engine; needs the package prometheus-client."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pulse.errors import ConfigError, PluginUnavailable
from pulse.instruments.clock import Clock, engine_clock
from pulse.ports import Instrument
from pulse.types import FinishReason, LaneName, Operation, Pace, Placement, TransferReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["METRICS", "Metric", "PrometheusMetrics"]

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_TRANSFER = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_KINDS = 32
_OTHER = "other"
_REASONS = frozenset(FinishReason)
_STATUSES = frozenset({"done", "failed", "cancelled", "late"})


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as it is exported.

    type: counter, gauge or histogram. buckets: upper bounds in seconds, of a histogram.
    """

    name: str
    type: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric("pulse_requests_total", "counter", "Requests that ended.", ("reason",)),
    Metric("pulse_requests_running", "gauge", "Requests that hold KV slots.", ("placement",)),
    Metric("pulse_requests_waiting", "gauge", "Requests that wait to be admitted."),
    Metric("pulse_preemptions_total", "counter", "Times that a request lost its KV slots."),
    Metric(
        "pulse_queue_time_seconds",
        "histogram",
        "From a request's arrival or preemption to its admission.",
        buckets=_TTFT,
    ),
    Metric(
        "pulse_time_to_first_token_seconds",
        "histogram",
        "From a request's arrival, its prompt in tokens, to its first token.",
        buckets=_TTFT,
    ),
    Metric(
        "pulse_time_per_output_token_seconds",
        "histogram",
        "Mean time per token after the first, once per request.",
        buckets=_PER_TOKEN,
    ),
    Metric(
        "pulse_inter_token_latency_seconds",
        "histogram",
        "Between two tokens of a request.",
        buckets=_PER_TOKEN,
    ),
    Metric("pulse_prompt_tokens_total", "counter", "Prompt tokens of requests that arrived."),
    Metric("pulse_generation_tokens_total", "counter", "Tokens generated."),
    Metric("pulse_steps_total", "counter", "Decode steps of cohorts that ended.", ("placement",)),
    Metric("pulse_offload_cohorts", "gauge", "Cohorts that offloaded requests are spread over."),
    Metric("pulse_recall_prediction", "gauge", "1 if recalls are predicted a layer ahead."),
    Metric(
        "pulse_lane_busy_seconds_total",
        "counter",
        "Time in which a lane ran at least one operation.",
        ("lane",),
    ),
    Metric(
        "pulse_operations_total", "counter", "Operations that ended.", ("lane", "kind", "status")
    ),
    Metric(
        "pulse_transfer_seconds",
        "histogram",
        "From a transfer's submission to its end, of those that ended well.",
        ("lane",),
        buckets=_TRANSFER,
    ),
    Metric("pulse_recall_bytes_total", "counter", "Bytes recalled from the slow tier."),
    Metric("pulse_write_back_bytes_total", "counter", "Bytes written back to the slow tier."),
    Metric("pulse_selected_units_total", "counter", "KV units that attention selected."),
    Metric("pulse_missed_units_total", "counter", "Selected KV units that had to be recalled."),
    Metric(
        "pulse_quarantined_transfers", "gauge", "Late transfers whose slots cannot be reused yet."
    ),
)
"""Every metric of `PrometheusMetrics`."""


@dataclass(slots=True)
class _Request:
    submitted: float
    queued: float
    placement: Placement | None = None
    first: float = math.nan
    last: float = math.nan
    tokens: int = 0


class PrometheusMetrics(Instrument):
    """Counts what the kernel reports. One for each engine, for request ids are the engine's own.

    No label names a request, so that the number of series is bounded. What is kept of a request
    is dropped when it ends.

    registry: a ``prometheus_client.CollectorRegistry``; one of its own by default.
    clock: gives seconds on the scale of the operations' times.

    Raises PluginUnavailable without prometheus-client, ConfigError when `registry` has these
    metrics already.
    """

    registry: CollectorRegistry

    def __init__(
        self, registry: CollectorRegistry | None = None, *, clock: Clock = engine_clock
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise PluginUnavailable(
                "PrometheusMetrics needs prometheus-client: pip install 'pulse-llm[metrics]'"
            ) from error
        if registry is None:
            registry = prometheus_client.CollectorRegistry()
        self.registry = registry
        self._render = prometheus_client.generate_latest
        self._clock = clock
        self._metrics = {metric.name: _make(metric, registry) for metric in METRICS}
        self._requests: dict[str, _Request] = {}
        self._late: dict[str, int] = {}
        self._running = dict.fromkeys(LaneName, 0)
        self._since = dict.fromkeys(LaneName, -math.inf)
        self._kinds: set[str] = set()
        self._start_at_zero()

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format, as an endpoint ``/metrics`` answers."""
        return bytes(self._render(self.registry))

    # -- operations --------------------------------------------------------------------------

    def operation_started(self, operation: Operation) -> None:
        """The lane is busy from here on, if it was not."""
        if not self._running[operation.lane]:
            # What a worker started is told of later; the time up to `_since` is counted already.
            self._since[operation.lane] = max(self._since[operation.lane], operation.started)
        self._running[operation.lane] += 1

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        """Count it, the time since the lane's last count, and the bytes that it moved."""
        lane, status = operation.lane, operation.status
        status = status if status in _STATUSES else _OTHER
        self._metric("pulse_operations_total", lane.value, self._kind(operation), status).inc()
        if math.isfinite(operation.started) and self._running[lane]:
            busy = max(0.0, operation.ended - self._since[lane])
            self._metric("pulse_lane_busy_seconds_total", lane.value).inc(busy)
            self._since[lane] += busy
            self._running[lane] -= 1
        if report is None or operation.status != "done":
            return
        took = max(0.0, operation.ended - operation.submitted)
        self._metric("pulse_transfer_seconds", lane.value).observe(took)
        if lane is LaneName.RECALL:
            self._metric("pulse_recall_bytes_total").inc(report.bytes)
        elif lane is LaneName.WRITE_BACK:
            self._metric("pulse_write_back_bytes_total").inc(report.bytes)

    def selection(self, layer: int, selected: int, missed: int) -> None:
        """Add up what one layer of one step selected and missed."""
        self._metric("pulse_selected_units_total").inc(selected)
        self._metric("pulse_missed_units_total").inc(missed)

    def step_ended(self, cohort: str, requests: tuple[str, ...]) -> None:
        """Count the step by where the KV of its members is; they have all the same placement."""
        states = (self._requests.get(request) for request in requests)
        placement = next((state.placement for state in states if state), None)
        self._metric("pulse_steps_total", placement.value if placement else _OTHER).inc()

    def pace_changed(self, pace: Pace) -> None:
        """The number of offload cohorts, and whether they predict."""
        self._metric("pulse_offload_cohorts").set(pace.cohorts)
        self._metric("pulse_recall_prediction").set(int(pace.predict))

    # -- requests ----------------------------------------------------------------------------

    def request_submitted(self, request: str, prompt_tokens: int) -> None:
        """It waits."""
        now = self._clock()
        self._requests[request] = _Request(now, now)
        self._metric("pulse_requests_waiting").inc()
        self._metric("pulse_prompt_tokens_total").inc(prompt_tokens)

    def request_admitted(self, request: str, placement: Placement) -> None:
        """It runs, after so much time in the queue."""
        state = self._requests.get(request)
        if state is not None:
            waited = max(0.0, self._clock() - state.queued)
            self._metric("pulse_queue_time_seconds").observe(waited)
        self._move(request, placement)

    def request_preempted(self, request: str, reason: str) -> None:
        """It waits again."""
        self._metric("pulse_preemptions_total").inc()
        state = self._requests.get(request)
        if state is not None:
            state.queued = self._clock()
        self._move(request, None)

    def token(self, request: str, index: int) -> None:
        """Observe the time to the first token, or between two."""
        self._metric("pulse_generation_tokens_total").inc()
        state = self._requests.get(request)
        if state is None:
            return
        now = self._clock()
        if state.tokens == 0:
            state.first = now
            self._metric("pulse_time_to_first_token_seconds").observe(now - state.submitted)
        else:
            self._metric("pulse_inter_token_latency_seconds").observe(now - state.last)
        state.last = now
        state.tokens += 1

    def quarantined(self, request: str, transfers: int) -> None:
        """What is late counts until it ended, which may be after the request did."""
        self._late[request] = transfers
        if not transfers:
            del self._late[request]
        self._metric("pulse_quarantined_transfers").set(sum(self._late.values()))

    def request_ended(self, request: str, reason: str) -> None:
        """Count it by reason and forget it."""
        known = reason if reason in _REASONS else _OTHER
        self._metric("pulse_requests_total", known).inc()
        state = self._requests.pop(request, None)
        if state is None:
            return  # it ended before its prompt was read
        self._gauge(state.placement).dec()
        if state.tokens > 1:
            mean = (state.last - state.first) / (state.tokens - 1)
            self._metric("pulse_time_per_output_token_seconds").observe(mean)

    # -- helpers -----------------------------------------------------------------------------

    def _move(self, request: str, placement: Placement | None) -> None:
        state = self._requests.get(request)
        if state is not None:
            self._gauge(state.placement).dec()
            state.placement = placement
            self._gauge(placement).inc()

    def _gauge(self, placement: Placement | None) -> Any:
        if placement is None:
            return self._metric("pulse_requests_waiting")
        return self._metric("pulse_requests_running", placement.value)

    def _kind(self, operation: Operation) -> str:
        # Executors may bring kinds of their own; however many, the series stay bounded.
        if operation.kind not in self._kinds and len(self._kinds) < _KINDS:
            self._kinds.add(operation.kind)
        return operation.kind if operation.kind in self._kinds else _OTHER

    def _metric(self, name: str, *labels: str) -> Any:
        metric = self._metrics[name]
        return metric.labels(*labels) if labels else metric

    def _start_at_zero(self) -> None:
        # Rates and sums need the series to be there before anything has happened.
        for reason in FinishReason:
            self._metric("pulse_requests_total", reason.value)
        for placement in Placement:
            self._metric("pulse_requests_running", placement.value)
            self._metric("pulse_steps_total", placement.value)
        for lane in LaneName:
            self._metric("pulse_lane_busy_seconds_total", lane.value)
        for lane in (LaneName.RECALL, LaneName.WRITE_BACK):
            self._metric("pulse_transfer_seconds", lane.value)
        self.pace_changed(Pace())


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    try:
        if metric.type == "histogram":
            return Histogram(
                metric.name, metric.text, metric.labels, buckets=metric.buckets, registry=registry
            )
        cls = Counter if metric.type == "counter" else Gauge
        return cls(metric.name, metric.text, metric.labels, registry=registry)
    except ValueError as error:
        raise ConfigError(
            f"the registry has a metric {metric.name} already; give each PrometheusMetrics a "
            "registry of its own"
        ) from error
