"""How late a coroutine of the host application runs while an engine is at work on its loop.

The coroutine sleeps for a millisecond, again and again; what it oversleeps is its delay. The same
is measured with no engine, which is what the machine and the loop's timers do to it by themselves.
An engine can delay it by a long callback on the loop, by a thread that keeps the interpreter's
lock (for up to `sys.getswitchinterval()` at a time), and by taking every core that there is.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pulse import Engine, Stream

__all__ = ["host_delay", "slow_callbacks"]

SLEEP = 0.001
LIMIT = 0.002
"""Seconds of delay that the engine should never cause."""
SLICES = 5
"""Times that each arm is measured, in turns; fewer if that is less than a second each."""
SHORT_INTERVAL = 1e-4
BESIDE = 2
"""Requests at work at any time, so that prompts are read while others decode."""

MakeLoop = Callable[[], asyncio.AbstractEventLoop]


def host_delay(
    model: str, make_loop: MakeLoop, seconds: float, threads: int | None = None
) -> dict[str, dict[str, float]]:
    """Delays in milliseconds: alone, beside an engine, and so with a short switch interval.

    Opening an engine and its first request, where code is loaded and compiled, count apart: once
    for each slice, so only the first of them is the first of the process.

    seconds: what each arm is measured for, in several slices. threads: of the compute lane.
    """
    late: dict[str, list[float]] = {
        arm: [] for arm in ("none", "opening", "decoding", "short switch interval")
    }

    slices = min(SLICES, max(1, int(seconds)))

    async def main() -> None:
        for _ in range(slices):
            late["none"] += await delays(seconds / slices)
            load = Load(model, threads)
            late["opening"] += await delays_during(load.open())
            try:
                late["decoding"] += await delays(seconds / slices)
                with switch_interval(SHORT_INTERVAL):
                    late["short switch interval"] += await delays(seconds / slices)
            finally:
                await load.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())
    return {arm: _summary(some) for arm, some in late.items()}


def _summary(late: Sequence[float]) -> dict[str, float]:
    ordered = sorted(late)
    return {
        "median": round(statistics.median(ordered) * 1e3, 3),
        "p99": round(ordered[math.ceil(0.99 * len(ordered)) - 1] * 1e3, 3),
        "max": round(ordered[-1] * 1e3, 3),
        "over_2_ms": round(sum(one > LIMIT for one in ordered) / len(ordered), 5),
        "samples": len(ordered),
    }


async def delays(seconds: float) -> list[float]:
    """What the sleeps of a coroutine took too long, over so many seconds."""
    return await delays_during(asyncio.sleep(seconds))


async def delays_during(work: Coroutine[Any, Any, object]) -> list[float]:
    """The same, until `work` is done."""
    late, clock, task = [], time.perf_counter, asyncio.create_task(work)
    while not task.done():
        began = clock()
        await asyncio.sleep(SLEEP)
        late.append(clock() - began - SLEEP)
    await task
    return late


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Let threads ask for the interpreter's lock after so long."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Load:
    """An engine that is never idle: offloaded requests follow one another, with recalls."""

    def __init__(self, model: str, threads: int | None = None) -> None:
        # Little is read and little is kept, so that every step of the longer prompts recalls.
        self.engine = Engine(
            model,
            admit="threshold:0",
            budget=256,
            local=64,
            fast_tier="64MiB",
            hot_factor=1.0,
            threads=threads,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Open the engine, serve one request of each kind, and go on with others."""
        await self.engine.open()
        await asyncio.gather(*(self._request(n).result() for n in range(BESIDE)))
        self._tasks = [asyncio.create_task(self._follow(n)) for n in range(BESIDE)]

    async def close(self) -> None:
        """End the requests and close the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engine.aclose()

    async def _follow(self, number: int) -> None:
        while True:
            await self._request(number).result()

    def _request(self, number: int) -> Stream:
        length = 800 + 400 * number
        return self.engine.generate(_prompt(length), max_tokens=96, ignore_eos=True)


def _prompt(length: int) -> list[int]:
    return [7 + n % 90 for n in range(length)]


def slow_callbacks(model: str, seconds: float, over: float = 0.001) -> list[dict[str, Any]]:
    """Callbacks that kept asyncio's loop for longer than `over`, the longest first.

    wall_ms against cpu_ms tells work on the loop from waiting for the interpreter's lock, or for
    a core.
    """
    found: list[dict[str, Any]] = []
    plain = asyncio.Handle._run
    ours = threading.get_ident()

    def timed(handle: Any) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        plain(handle)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        if wall > over and threading.get_ident() == ours:
            found.append({"wall_ms": wall * 1e3, "cpu_ms": cpu * 1e3, "callback": repr(handle)})

    async def main() -> None:
        load = Load(model)
        await load.open()
        asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]
        try:
            await delays(seconds)
        finally:
            asyncio.Handle._run = plain  # type: ignore[method-assign]
            await load.close()

    asyncio.run(main())
    return sorted(found, key=lambda one: -one["wall_ms"])
