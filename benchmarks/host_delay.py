"""How late a coroutine of the host application runs while an engine is at work on its loop.

Another process writes the time to a pipe every millisecond; how much later the loop has read it is
the delay. (A coroutine that sleeps would tell less: loops round their timers up to milliseconds.)
The same is measured with no engine, which is what the machine does by itself. An engine can delay
the loop by a long callback, by a thread that keeps the interpreter's lock, and by taking the loop's
core; on cores of its own it does not do the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any

from pulse import Engine, Stream

__all__ = ["host_delay", "slow_callbacks"]

LIMIT = 0.002
"""Seconds of delay that the engine should never cause."""
SLICES = 3
"""Times that each arm is measured, in turns; fewer if that is less than a second each."""
BESIDE = 2
"""Requests at work at any time, so that prompts are read while others decode."""

MakeLoop = Callable[[], asyncio.AbstractEventLoop]

TICKS = """
import os, struct, time
due = time.perf_counter()
while True:
    due = max(due + 0.001, time.perf_counter())
    time.sleep(max(0.0, due - time.perf_counter()))
    os.write(1, struct.pack("d", time.perf_counter()))
"""


def host_delay(
    model: str, make_loop: MakeLoop, seconds: float, threads: int | None = None
) -> dict[str, dict[str, float]]:
    """Delays in milliseconds: without an engine, while one opens, while one is at work.

    Opening an engine and its first request, where code is loaded and compiled, count apart: once
    for each slice, so only the first of them is the first of the process. The last arm is an
    engine that keeps to cores of its own, all but one (not on a machine with a single core).

    seconds: what each arm is measured for, in several slices. threads: of the compute lane.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    late: dict[str, list[float]] = {"none": [], "opening": [], "decoding": []}
    if len(cores) > 1:
        late["own cores"] = []
    slices = min(SLICES, max(1, int(seconds)))

    async def main() -> None:
        for _ in range(slices):
            late["none"] += await delays(seconds / slices)
            for arm in list(late)[2:]:
                load = Load(model, threads, cores[:-1] if arm == "own cores" else None)
                late["opening"] += await delays_during(load.open())
                try:
                    late[arm] += await delays(seconds / slices)
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
    """How late the loop read what was written, in seconds, over so many seconds."""
    return await delays_during(asyncio.sleep(seconds))


async def delays_during(work: Coroutine[Any, Any, object]) -> list[float]:
    """The same, until `work` is done."""
    async with _ticking() as late:
        await work
    return late


@contextlib.asynccontextmanager
async def _ticking() -> AsyncIterator[list[float]]:
    """Delays are added to the list while this is open; there is at least one."""
    loop, late, clock, first = asyncio.get_running_loop(), [], time.perf_counter, asyncio.Event()
    ends, begins = os.pipe()

    def read() -> None:
        now, data = clock(), os.read(ends, 1 << 16)
        late.extend(now - written for (written,) in struct.iter_unpack("d", data))
        first.set()

    with _ticker(begins) as ticker:
        os.close(begins)
        loop.add_reader(ends, read)
        try:
            await first.wait()
            late.clear()
            first.clear()
            yield late
            await first.wait()
        finally:
            loop.remove_reader(ends)
            ticker.kill()
            os.close(ends)


def _ticker(pipe: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", TICKS], stdout=pipe)


class Load:
    """An engine that is never idle: offloaded requests follow one another, with recalls."""

    def __init__(
        self, model: str, threads: int | None = None, cores: Collection[int] | None = None
    ) -> None:
        # Little is read and little is kept, so that every step of the longer prompts recalls.
        self.engine = Engine(
            model,
            admit="threshold:0",
            budget=256,
            local=64,
            fast_tier="64MiB",
            hot_factor=1.0,
            threads=threads,
            cores=cores,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Open the engine, serve one request of each kind, and go on with others."""
        await self.engine.open()
        await asyncio.gather(*(self._request(n).result() for n in range(BESIDE)))
        # What a service is told to do: else a collection of all that was loaded may come later.
        gc.collect()
        gc.freeze()
        self._tasks = [asyncio.create_task(self._follow(n)) for n in range(BESIDE)]

    async def close(self) -> None:
        """End the requests and close the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engine.aclose()
        gc.unfreeze()

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
