"""Built-in instruments: counters for reports, traces for Chrome and Perfetto."""

from __future__ import annotations

from pulse.instruments.stats import LaneStats, Stats
from pulse.instruments.trace import ChromeTrace

__all__ = ["ChromeTrace", "LaneStats", "Stats"]
