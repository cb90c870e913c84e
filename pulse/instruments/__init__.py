"""Built-in instruments: counters, Prometheus metrics, traces, OpenTelemetry spans, timelines."""

from __future__ import annotations

from pulse.instruments.metrics import PrometheusMetrics
from pulse.instruments.otel import OpenTelemetrySpans
from pulse.instruments.stats import LaneStats, Stats
from pulse.instruments.timeline import Timeline
from pulse.instruments.trace import ChromeTrace

__all__ = [
    "ChromeTrace",
    "LaneStats",
    "OpenTelemetrySpans",
    "PrometheusMetrics",
    "Stats",
    "Timeline",
]
