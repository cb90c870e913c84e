"""Hypothesis draws the same examples in every run: a failure here is a failure everywhere."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pulse",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("pulse")
