"""All instruments on an engine in virtual time: they tell the same story, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from kernel.harness import Scattered, Setup, prompt_of
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pulse import Instrument
from pulse.instruments import (
    ChromeTrace,
    OpenTelemetrySpans,
    PrometheusMetrics,
    Stats,
    Timeline,
)
from pulse.testing import run
from pulse.types import LaneName, Operation, TransferReport

LENGTHS = (100, 12, 90)
"""Prompt tokens: two requests are offloaded, one is not."""
NEW = 12


class Everything:
    """One engine with every instrument, after `LENGTHS` have run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.operations: list[Operation] = []
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.trace = ChromeTrace(path)
        self.stats = Stats()
        self.metrics = PrometheusMetrics()
        self.spans = OpenTelemetrySpans(provider, wall=lambda: 0)
        run(self._serve())
        self.trace.close()

    async def _serve(self) -> None:
        engine = Setup(policy=Scattered(), budget=32, layers=3).engine(
            self.trace, self.stats, self.metrics, self.spans, Recorder(self.operations)
        )
        async with engine:
            streams = [
                engine.generate(prompt_of(length, salt), ignore_eos=True, max_tokens=NEW)
                for salt, length in enumerate(LENGTHS)
            ]
            await asyncio.gather(*(stream.result() for stream in streams))

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(name, labels)
        assert found is not None, (name, labels)
        return found

    def roots(self) -> list[dict[str, Any]]:
        spans = self.exporter.get_finished_spans()
        return [dict(s.attributes or {}) for s in spans if s.name == "text_completion"]


class Recorder(Instrument):
    def __init__(self, operations: list[Operation]) -> None:
        self.operations = operations

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        self.operations.append(operation)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    return Everything(tmp_path_factory.mktemp("trace") / "trace.json")


def test_a_trace_has_every_operation(everything: Everything) -> None:
    read = Timeline.read(everything.path)
    made = Timeline.of(everything.operations)
    assert len(read.operations) == len(everything.operations) > 100
    assert read.text(90) == made.text(90)
    assert read.depth() == made.depth()
    for lane in LaneName:
        assert read.busy_s(lane) == pytest.approx(made.busy_s(lane), abs=1e-6)


def test_causes_are_operations_and_came_first(everything: Everything) -> None:
    by_id = {operation.id: operation for operation in everything.operations}
    recalls = [o for o in everything.operations if o.lane is LaneName.RECALL]
    assert recalls
    caused = [o for o in everything.operations if o.cause >= 0]
    assert {o.lane for o in caused} == {LaneName.COMPUTE, LaneName.RECALL}
    for operation in caused:
        cause = by_id[operation.cause]
        assert cause.started <= operation.started
        assert cause.cohort == operation.cohort
        assert (cause.lane is LaneName.COMPUTE) == (operation.lane is LaneName.RECALL)
    arrows = [e for e in _events(everything.path) if e["ph"] == "s"]
    assert {e["id"] for e in arrows} == {o.id for o in caused}


def _events(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text())["traceEvents"]
    assert isinstance(found, list)
    return found


def test_steps_are_told_of(everything: Everything) -> None:
    steps = [e for e in _events(everything.path) if e.get("cat") == "step"]
    begun = [e for e in steps if e["name"].startswith("step begins")]
    assert len(begun) * 2 == len(steps) >= 2 * (NEW - 1)
    ended = everything.value("pulse_steps_total", placement="offload")
    ended += everything.value("pulse_steps_total", placement="normal")
    assert ended == len(begun)


def test_metrics_are_those_of_the_counters(everything: Everything) -> None:
    stats = everything.stats
    assert everything.value("pulse_recall_bytes_total") == stats.recall_bytes > 0
    assert everything.value("pulse_write_back_bytes_total") == stats.write_back_bytes > 0
    assert everything.value("pulse_selected_units_total") == stats.selected > 0
    assert everything.value("pulse_missed_units_total") == stats.missed > 0
    made = Timeline.of(everything.operations)
    for lane in LaneName:
        busy = everything.value("pulse_lane_busy_seconds_total", lane=lane.value)
        assert busy == pytest.approx(stats.lanes[lane].busy_s)
        assert busy == pytest.approx(made.busy_s(lane))


def test_metrics_of_requests(everything: Everything) -> None:
    assert everything.value("pulse_requests_total", reason="length") == len(LENGTHS)
    assert everything.value("pulse_prompt_tokens_total") == sum(LENGTHS)
    assert everything.value("pulse_generation_tokens_total") == len(LENGTHS) * NEW
    assert everything.value("pulse_time_to_first_token_seconds_count") == len(LENGTHS)
    assert everything.value("pulse_inter_token_latency_seconds_count") == len(LENGTHS) * (NEW - 1)
    for gauge in ("pulse_requests_waiting", "pulse_quarantined_transfers"):
        assert everything.value(gauge) == 0
    for placement in ("normal", "offload"):
        assert everything.value("pulse_requests_running", placement=placement) == 0


def test_bytes_of_requests_are_all_bytes(everything: Everything) -> None:
    roots = everything.roots()
    assert len(roots) == len(LENGTHS)
    total = sum(root["pulse.recall.bytes"] for root in roots)
    assert total == everything.stats.recall_bytes
    total = sum(root["pulse.write_back.bytes"] for root in roots)
    assert total == everything.stats.write_back_bytes


def test_time_of_requests_is_accounted_for(everything: Everything) -> None:
    spans = everything.exporter.get_finished_spans()
    for span in spans:
        known = dict(span.attributes or {})
        if span.name == "text_completion":
            offload = known["pulse.placement"] == "offload"
            assert known["gen_ai.usage.output_tokens"] == NEW
            assert known["pulse.compute.seconds"] > 0
            assert (known["pulse.recall.wait_seconds"] > 0) == offload
        told = [v for n, v in known.items() if re.search(r"(compute|wait|queue)[._]?\w*seconds", n)]
        assert all(value >= 0 for value in told)
        assert sum(told) <= _seconds(span) + 1e-6


def _seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_decode_is_computing_or_waiting_and_nothing_else(everything: Everything) -> None:
    decodes = [s for s in everything.exporter.get_finished_spans() if s.name == "decode"]
    assert len(decodes) == len(LENGTHS)
    for span in decodes:
        known = dict(span.attributes or {})
        names = ("compute.seconds", "lane.wait_seconds", "recall.wait_seconds")
        parts = sum(known[f"pulse.{name}"] for name in names)
        # Before its first step, a request waits for the boundary of its cohort.
        assert 0.5 * _seconds(span) <= parts <= _seconds(span) + 1e-6


def test_nothing_of_a_request_is_kept(everything: Everything) -> None:
    assert everything.spans._requests == {} and everything.spans._cohorts == {}
    assert everything.metrics._requests == {} and everything.metrics._late == {}
    assert everything.trace._running == {} and everything.trace._causes == {}


def test_the_same_run_gives_the_same_trace(everything: Everything, tmp_path: Path) -> None:
    again = Everything(tmp_path / "trace.json")
    assert Timeline.of(again.operations).text(200) == Timeline.of(everything.operations).text(200)
    assert again.metrics.exposition().count(b"\n") == everything.metrics.exposition().count(b"\n")


def test_an_engine_goes_on_without_an_instrument_that_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Recorder):
        def selection(self, layer: int, selected: int, missed: int) -> None:
            raise RuntimeError("drawn")

    broken, whole = Broken([]), Recorder([])

    async def serve() -> list[int]:
        async with Setup(policy=Scattered(), budget=32).engine(broken, whole) as engine:
            stream = engine.generate(prompt_of(90), ignore_eos=True, max_tokens=6)
            return list((await stream.result()).token_ids)

    with caplog.at_level(logging.ERROR, "pulse"):
        assert len(run(serve())) == 6
    assert [record.getMessage().count("is removed") for record in caplog.records] == [1]
    assert 0 < len(broken.operations) < len(whole.operations)
