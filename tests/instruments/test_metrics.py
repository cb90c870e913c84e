"""Prometheus metrics: what each event adds to, and that the number of series is bounded."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from instruments.recording import Hand, events, op, overlap, play, tell
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.parser import text_string_to_metric_families

from pulse.errors import ConfigError, PluginUnavailable
from pulse.instruments import PrometheusMetrics
from pulse.instruments.metrics import METRICS
from pulse.types import Pace, Placement

disable_created_metrics()  # type: ignore[no-untyped-call]


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
def metrics(clock: Hand) -> PrometheusMetrics:
    return PrometheusMetrics(clock=clock)


def value(metrics: PrometheusMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_request_from_arrival_to_its_end(metrics: PrometheusMetrics, clock: Hand) -> None:
    calls: list[Any] = [
        (1.0, lambda i: i.request_submitted("a", 7)),
        (3.0, lambda i: i.request_admitted("a", Placement.OFFLOAD)),
        (4.0, lambda i: i.token("a", 0)),
        (4.5, lambda i: i.token("a", 1)),
    ]
    tell(metrics, clock, calls[:1])
    assert value(metrics, "pulse_requests_waiting") == 1
    tell(metrics, clock, calls[1:])
    assert value(metrics, "pulse_requests_waiting") == 0
    assert value(metrics, "pulse_requests_running", placement="offload") == 1
    tell(metrics, clock, [(6.0, lambda i: i.token("a", 2))])
    tell(metrics, clock, [(6.0, lambda i: i.request_ended("a", "length"))])
    assert value(metrics, "pulse_requests_running", placement="offload") == 0
    assert value(metrics, "pulse_requests_total", reason="length") == 1
    assert value(metrics, "pulse_queue_time_seconds_sum") == 2.0
    assert value(metrics, "pulse_time_to_first_token_seconds_sum") == 3.0
    assert value(metrics, "pulse_time_per_output_token_seconds_sum") == 1.0
    assert value(metrics, "pulse_inter_token_latency_seconds_sum") == 2.0
    assert value(metrics, "pulse_inter_token_latency_seconds_count") == 2
    assert value(metrics, "pulse_prompt_tokens_total") == 7
    assert value(metrics, "pulse_generation_tokens_total") == 3
    assert metrics._requests == {}


def test_a_preempted_request_waits_again(metrics: PrometheusMetrics, clock: Hand) -> None:
    calls: list[Any] = [
        (0.0, lambda i: i.request_submitted("a", 7)),
        (1.0, lambda i: i.request_admitted("a", Placement.NORMAL)),
        (2.0, lambda i: i.token("a", 0)),
        (3.0, lambda i: i.request_preempted("a", "priority")),
    ]
    tell(metrics, clock, calls)
    assert value(metrics, "pulse_preemptions_total") == 1
    assert value(metrics, "pulse_requests_waiting") == 1
    assert value(metrics, "pulse_requests_running", placement="normal") == 0
    calls = [
        (8.0, lambda i: i.request_admitted("a", Placement.OFFLOAD)),
        (9.0, lambda i: i.token("a", 1)),
        (9.0, lambda i: i.request_ended("a", "stop")),
    ]
    tell(metrics, clock, calls)
    assert value(metrics, "pulse_queue_time_seconds_sum") == 1.0 + 5.0
    assert value(metrics, "pulse_queue_time_seconds_count") == 2
    assert value(metrics, "pulse_time_to_first_token_seconds_count") == 1
    assert value(metrics, "pulse_requests_waiting") == 0


def test_a_request_that_ends_in_the_queue_or_before(metrics: PrometheusMetrics) -> None:
    metrics.request_submitted("a", 1)
    metrics.request_ended("a", "cancelled")
    metrics.request_ended("never told of", "error")
    assert value(metrics, "pulse_requests_waiting") == 0
    assert value(metrics, "pulse_requests_total", reason="cancelled") == 1
    assert value(metrics, "pulse_requests_total", reason="error") == 1
    assert value(metrics, "pulse_time_to_first_token_seconds_count") == 0


def test_operations_and_lanes(metrics: PrometheusMetrics, clock: Hand) -> None:
    play(metrics, clock, overlap())
    busy = {
        lane: value(metrics, "pulse_lane_busy_seconds_total", lane=lane)
        for lane in ("compute", "recall", "write_back")
    }
    assert busy == {
        "compute": pytest.approx(5.5e-3),
        "recall": pytest.approx(4e-3),
        "write_back": 0,
    }
    kinds = {"lane": "compute", "kind": "layer", "status": "done"}
    assert value(metrics, "pulse_operations_total", **kinds) == 3
    assert value(metrics, "pulse_recall_bytes_total") == 160
    assert value(metrics, "pulse_write_back_bytes_total") == 0
    assert value(metrics, "pulse_transfer_seconds_sum", lane="recall") == pytest.approx(6e-3)


def test_transfers_that_did_not_end_well_move_nothing(
    metrics: PrometheusMetrics, clock: Hand
) -> None:
    ends = ("failed", "cancelled", "late", "odd")
    play(
        metrics,
        clock,
        [op(i, "recall", "offload", 0, 1, 2, bytes=8, status=s) for i, s in enumerate(ends)],
    )
    play(metrics, clock, [op(9, "recall", "offload", 3, math.nan, 4, bytes=8, status="cancelled")])
    assert value(metrics, "pulse_recall_bytes_total") == 0
    assert value(metrics, "pulse_lane_busy_seconds_total", lane="recall") == 1
    for status, count in {"failed": 1, "cancelled": 2, "late": 1, "other": 1}.items():
        labels = {"lane": "recall", "kind": "recall", "status": status}
        assert value(metrics, "pulse_operations_total", **labels) == count


def test_selections_steps_pace_and_quarantine(metrics: PrometheusMetrics) -> None:
    metrics.selection(0, 10, 4)
    metrics.selection(1, 10, 1)
    assert value(metrics, "pulse_selected_units_total") == 20
    assert value(metrics, "pulse_missed_units_total") == 5
    metrics.request_submitted("a", 1)
    metrics.request_admitted("a", Placement.OFFLOAD)
    metrics.step_ended("offload", ("gone", "a"))
    metrics.step_ended("offload", ())
    assert value(metrics, "pulse_steps_total", placement="offload") == 1
    assert value(metrics, "pulse_steps_total", placement="other") == 1
    assert value(metrics, "pulse_offload_cohorts") == 1
    metrics.pace_changed(Pace(3, True))
    assert value(metrics, "pulse_offload_cohorts") == 3
    assert value(metrics, "pulse_recall_prediction") == 1
    metrics.quarantined("a", 2)
    metrics.quarantined("b", 1)
    metrics.request_ended("a", "error")
    assert value(metrics, "pulse_quarantined_transfers") == 3
    metrics.quarantined("a", 0)
    metrics.quarantined("b", 0)
    metrics.quarantined("c", 0)
    assert value(metrics, "pulse_quarantined_transfers") == 0


def test_series_are_there_before_anything_happened(metrics: PrometheusMetrics) -> None:
    for reason in ("stop", "length", "cancelled", "error"):
        assert value(metrics, "pulse_requests_total", reason=reason) == 0
    assert value(metrics, "pulse_lane_busy_seconds_total", lane="recall") == 0


def test_the_number_of_series_is_bounded(metrics: PrometheusMetrics, clock: Hand) -> None:
    def series() -> int:
        return sum(len(family.samples) for family in metrics.registry.collect())

    play(metrics, clock, [op(i, f"kind{i}", "normal", i, i, i + 1) for i in range(40)])
    before = series()
    for i in range(200):
        play(metrics, clock, [op(i, f"more{i}", f"offload-{i}", 99, 99, 99)])
        metrics.request_submitted(f"r{i}", 1)
        metrics.request_ended(f"r{i}", "cancelled")
    assert series() == before
    labels = {"lane": "compute", "kind": "other", "status": "done"}
    assert value(metrics, "pulse_operations_total", **labels) == 8 + 200


def test_all_metrics_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("pulse_")
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert metric.type in ("counter", "gauge", "histogram")
        assert bool(metric.buckets) == (metric.type == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        if "time" in metric.name or "latency" in metric.name:
            assert "_seconds" in metric.name


def test_the_exposition_is_what_a_scraper_reads(metrics: PrometheusMetrics) -> None:
    metrics.request_submitted("a", 5)
    families = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
    assert set(families) == {metric.name.removesuffix("_total") for metric in METRICS}
    assert {f.name: f.type for f in families.values()} == {
        metric.name.removesuffix("_total"): metric.type for metric in METRICS
    }
    assert families["pulse_prompt_tokens"].samples[0].value == 5


def test_two_engines_need_two_registries() -> None:
    registry = CollectorRegistry()
    assert PrometheusMetrics(registry).registry is registry
    with pytest.raises(ConfigError, match="pulse_requests_total already"):
        PrometheusMetrics(registry)
    assert PrometheusMetrics().registry is not PrometheusMetrics().registry


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(PluginUnavailable, match=r"pip install 'pulse-llm\[metrics\]'"):
        PrometheusMetrics()


def test_an_operation_that_began_before_the_metrics(
    metrics: PrometheusMetrics, clock: Hand
) -> None:
    late = op(0, "layer", "normal", 0, 1, 2)
    tell(metrics, clock, events([late])[-1:])
    assert value(metrics, "pulse_lane_busy_seconds_total", lane="compute") == 0


def test_importing_the_instruments_does_not_import_what_they_need() -> None:
    code = (
        "import sys, pulse, pulse.instruments, pulse.cli\n"
        "assert not {'prometheus_client', 'opentelemetry'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
