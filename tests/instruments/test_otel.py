"""OpenTelemetry spans: phases, attributes, and whose time and bytes they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from instruments.recording import Hand, events, op, tell
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pulse.errors import PluginUnavailable
from pulse.instruments import OpenTelemetrySpans
from pulse.instruments.otel import ATTRIBUTES
from pulse.types import Operation, Placement

WALL = 1_700_000_000_000_000_000


class Desk:
    """Spans to make, and those that ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.clock = Hand()
        self.spans = OpenTelemetrySpans(
            self.provider, model="tiny", slow_tier="disk", clock=self.clock, wall=lambda: WALL
        )

    def tell(self, *calls: Any, operations: tuple[Operation, ...] = ()) -> None:
        # Events of operations come first: what a step did is told before it ends.
        tell(self.spans, self.clock, [*events(operations), *calls])

    def ended(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def root(self) -> dict[str, Any]:
        (span,) = self.ended("text_completion tiny")
        return dict(span.attributes or {})


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    assert desk.spans._requests == {}
    assert desk.spans._cohorts == {}
    desk.provider.shutdown()


def at(time: float, event: str, *args: Any) -> Any:
    return time, lambda instrument: getattr(instrument, event)(*args)


def test_phases_are_children_dated_by_the_calendar(desk: Desk) -> None:
    desk.tell(
        at(5.0, "request_submitted", "a", 9),
        at(6.0, "request_admitted", "a", Placement.OFFLOAD),
        at(8.0, "token", "a", 0),
        at(9.0, "token", "a", 1),
        at(9.5, "request_ended", "a", "stop"),
    )
    (root,) = desk.ended("text_completion tiny")
    times = {}
    for name in ("queue", "prefill", "decode"):
        (span,) = desk.ended(name)
        assert span.parent is not None and root.context is not None
        assert span.parent.span_id == root.context.span_id
        assert span.start_time is not None and span.end_time is not None
        times[name] = (span.start_time - WALL, span.end_time - WALL)
    second = 1_000_000_000
    assert times == {
        "queue": (0, second),
        "prefill": (second, 3 * second),
        "decode": (3 * second, 4 * second + second // 2),
    }
    assert (root.start_time, root.end_time) == (WALL, WALL + 4 * second + second // 2)
    assert root.status.status_code is StatusCode.UNSET


def test_the_attributes_of_a_request(desk: Desk) -> None:
    desk.tell(
        at(0.0, "request_submitted", "a", 9),
        at(1.0, "request_admitted", "a", Placement.NORMAL),
        at(3.0, "token", "a", 0),
        at(3.0, "request_ended", "a", "length"),
    )
    assert desk.root() == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pulse",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "a",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 1,
        "pulse.placement": "normal",
        "pulse.preemptions": 0,
        "pulse.queue.seconds": 1.0,
        "pulse.time_to_first_token_seconds": 3.0,
        "pulse.compute.seconds": 0.0,
        "pulse.lane.wait_seconds": 0.0,
        "pulse.recall.wait_seconds": 0.0,
        "pulse.recall.bytes": 0,
        "pulse.write_back.bytes": 0,
    }


def usage(attributes: dict[str, Any]) -> tuple[Any, ...]:
    names = ("compute.seconds", "lane.wait_seconds", "recall.wait_seconds", "recall.bytes")
    return tuple(attributes[f"pulse.{name}"] for name in names)


def test_time_and_bytes_go_to_whoever_they_were_for(desk: Desk) -> None:
    both, one = ("a", "b"), ("b",)
    desk.tell(
        at(0.0, "request_submitted", "a", 9),
        at(0.0, "request_submitted", "b", 9),
        at(0.0, "request_admitted", "a", Placement.OFFLOAD),
        at(0.0, "request_admitted", "b", Placement.OFFLOAD),
        at(1.0, "token", "a", 0),
        at(1.0, "token", "b", 0),
        at(2.0, "step_started", "offload", both),
        at(9.0, "step_ended", "offload", both),
        at(9.0, "step_started", "offload", one),
        at(10.0, "step_ended", "offload", one),
        at(11.0, "request_ended", "a", "stop"),
        at(11.0, "request_ended", "b", "stop"),
        operations=(
            op(0, "embed", "offload", 2, 3, 4, requests=both),  # waits 1, computes 1
            op(1, "recall", "offload", 4, 5, 8, requests=both, shares=(10, 30), bytes=40),
            op(2, "layer", "offload", 8, 8, 9, requests=both),
            op(3, "write_back", "offload", 4, 4, 5, requests=both, shares=(1, 2), bytes=3),
            op(4, "layer", "offload", 9, 9, 10, requests=one),
        ),
    )
    roots = {
        s.attributes["gen_ai.response.id"]: s
        for s in desk.ended("text_completion tiny")
        if s.attributes
    }
    assert usage(dict(roots["a"].attributes or {})) == (2.0, 1.0, 4.0, 10)
    assert usage(dict(roots["b"].attributes or {})) == (3.0, 1.0, 4.0, 30)
    assert (roots["a"].attributes or {})["pulse.recall.tier"] == "disk"
    assert (roots["b"].attributes or {})["pulse.write_back.bytes"] == 2


def test_a_phase_carries_what_belongs_to_it(desk: Desk) -> None:
    desk.tell(
        at(0.0, "request_submitted", "r1", 9),
        at(0.75, "request_admitted", "r1", Placement.OFFLOAD),
        at(4.0, "token", "r1", 0),
        at(4.0, "step_started", "offload", ("r1",)),
        at(6.0, "step_ended", "offload", ("r1",)),
        at(6.0, "request_ended", "r1", "stop"),
        operations=(
            op(0, "tokenize", "r1", 0, 0, 0.5),  # before it was admitted
            op(1, "embed", "r1", 1, 1, 2, requests=("r1",)),
            op(2, "recall", "r1", 2, 2, 3, requests=("r1",), shares=(8,), bytes=8),
            op(3, "prefix", "r1", 3, 3, 4, requests=("r1",)),
            op(4, "layer", "offload", 4.5, 4.5, 6, requests=("r1",)),
        ),
    )
    (prefill,), (decode,) = desk.ended("prefill"), desk.ended("decode")
    assert usage(dict(prefill.attributes or {})) == (2.0, 0.0, 1.0, 8)
    assert usage(dict(decode.attributes or {})) == (1.5, 0.0, 0.0, 0)
    assert usage(desk.root()) == (3.5, 0.0, 1.0, 8)


def test_a_recall_for_later_is_not_waited_for(desk: Desk) -> None:
    desk.tell(
        at(-1.0, "request_submitted", "r1", 9),
        at(-1.0, "request_admitted", "r1", Placement.OFFLOAD),
        at(5.0, "request_ended", "r1", "cancelled"),
        operations=(
            op(0, "recall", "r1", 0, 0, 4, requests=("r1",), shares=(8,), bytes=8),
            op(1, "prefix", "r1", 0, 1, 3, requests=("r1",)),
        ),
    )
    assert usage(desk.root()) == (2.0, 1.0, 1.0, 8)


def test_preempted_it_queues_and_prefills_again(desk: Desk) -> None:
    desk.tell(
        at(0.0, "request_submitted", "a", 9),
        at(1.0, "request_admitted", "a", Placement.OFFLOAD),
        at(2.0, "token", "a", 0),
        at(3.0, "request_preempted", "a", "priority"),
        at(7.0, "request_admitted", "a", Placement.NORMAL),
        at(8.0, "token", "a", 1),
        at(9.0, "quarantined", "a", 2),
        at(9.0, "request_ended", "a", "stop"),
    )
    root = desk.root()
    assert (root["pulse.preemptions"], root["pulse.queue.seconds"]) == (1, 5.0)
    assert (root["pulse.placement"], root["pulse.time_to_first_token_seconds"]) == ("normal", 2.0)
    assert [len(desk.ended(name)) for name in ("queue", "prefill", "decode")] == [2, 2, 2]
    (span,) = desk.ended("text_completion tiny")
    assert [(e.name, dict(e.attributes or {})) for e in span.events] == [
        ("preempted", {"pulse.reason": "priority"}),
        ("quarantined", {"pulse.transfers": 2}),
    ]


def test_steps_that_are_repeated_tell_of_no_token(desk: Desk) -> None:
    desk.tell(
        at(-2.0, "request_submitted", "r1", 9),
        at(-1.0, "request_admitted", "r1", Placement.OFFLOAD),
        at(3.0, "step_started", "offload", ("r1",)),
        at(5.0, "step_ended", "offload", ("r1",)),
        at(5.0, "token", "r1", 7),
        at(6.0, "request_ended", "r1", "stop"),
        operations=(
            op(0, "embed", "r1", 0, 0, 2, requests=("r1",)),
            op(1, "embed", "offload", 3.5, 3.5, 5, requests=("r1",)),
        ),
    )
    (prefill,), (decode,) = desk.ended("prefill"), desk.ended("decode")
    assert usage(dict(prefill.attributes or {}))[0] == 2.0
    assert usage(dict(decode.attributes or {}))[0] == 1.5


def test_a_request_that_ends_in_the_middle_of_a_step(desk: Desk) -> None:
    desk.tell(
        at(0.0, "request_submitted", "a", 9),
        at(0.0, "request_admitted", "a", Placement.OFFLOAD),
        at(1.0, "token", "a", 0),
        at(1.0, "step_started", "offload", ("a",)),
        at(2.0, "request_ended", "a", "error"),
        at(4.0, "step_ended", "offload", ("a",)),
        operations=(op(0, "layer", "offload", 1, 1, 4, requests=("a",)),),
    )
    assert usage(desk.root()) == (1.0, 0.0, 0.0, 0)
    (span,) = desk.ended("text_completion tiny")
    assert span.status.status_code is StatusCode.ERROR


def test_transfers_that_did_not_end_well_move_nothing(desk: Desk) -> None:
    fields: dict[str, Any] = {"requests": ("a",), "shares": (8,), "bytes": 8}
    desk.tell(
        at(0.0, "request_submitted", "a", 9),
        at(9.0, "request_ended", "a", "error"),
        operations=(
            op(0, "recall", "offload", 1, 1, 2, status="late", **fields),
            op(1, "recall", "offload", 1, float("nan"), 2, status="cancelled", **fields),
        ),
    )
    assert desk.root()["pulse.recall.bytes"] == 0
    desk.tell(at(10.0, "step_started", "offload", ()), at(10.0, "step_ended", "offload", ()))


def test_it_ends_before_its_prompt_was_read(desk: Desk) -> None:
    desk.tell(
        at(2.0, "request_ended", "r1", "error"),
        operations=(op(0, "tokenize", "r1", 0, 0, 1, status="failed"),),
    )
    assert desk.exporter.get_finished_spans() == ()


def test_closing_ends_the_spans_under_way(desk: Desk) -> None:
    desk.tell(at(0.0, "request_submitted", "a", 9), at(1.0, "request_submitted", "b", 9))
    desk.spans.close()
    desk.spans.close()
    reasons = [
        (s.attributes or {})["gen_ai.response.finish_reasons"]
        for s in desk.ended("text_completion tiny")
    ]
    assert reasons == [("cancelled",), ("cancelled",)]


def test_the_span_around_the_call_is_the_parent(desk: Desk) -> None:
    with desk.provider.get_tracer("test").start_as_current_span("service"):
        desk.tell(at(0.0, "request_submitted", "a", 9))
    desk.tell(at(1.0, "request_ended", "a", "stop"))
    (service,), (root,) = desk.ended("service"), desk.ended("text_completion tiny")
    assert root.parent is not None and service.context is not None
    assert root.parent.span_id == service.context.span_id


def test_attributes_are_declared(desk: Desk) -> None:
    desk.tell(
        at(0.0, "request_submitted", "a", 9),
        at(0.0, "request_admitted", "a", Placement.NORMAL),
        at(1.0, "token", "a", 0),
        at(1.0, "request_ended", "a", "stop"),
    )
    own = {name for name in desk.root() if name.startswith("pulse.")}
    assert own | {"pulse.recall.tier"} == set(ATTRIBUTES)


def test_without_a_provider_it_is_the_global_one() -> None:
    spans = OpenTelemetrySpans()
    spans.request_submitted("a", 1)  # nothing records
    spans.request_ended("a", "stop")
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(PluginUnavailable, match=r"pip install 'pulse-llm\[otel\]'"):
        OpenTelemetrySpans()
