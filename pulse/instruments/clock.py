"""The engine's clock, for events that carry no time of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["Clock", "engine_clock"]

Clock = Callable[[], float]
"""Gives the time in seconds, on the scale of the times that operations carry."""


def engine_clock() -> float:
    """Seconds of the engine's clock: monotonic, or the running loop's where that is virtual."""
    exact = time.monotonic()
    try:
        loop = asyncio.get_running_loop().time()
    except RuntimeError:
        return exact
    # uvloop's clock is the system's, read once per iteration and rounded to milliseconds.
    return exact if abs(exact - loop) < 1 else loop
