"""Settings of all tests: Hypothesis draws the same examples in every run, idle threads sleep."""

from __future__ import annotations

import os

# Threads that spin between two operations of a tiny model starve whatever else runs; this must be
# said before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pulse",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("pulse")
