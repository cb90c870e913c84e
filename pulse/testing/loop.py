"""Virtual time: an event loop that jumps to its next timer, and a worker without a thread.

A run takes no real time, is the same each time, and with a seed runs the callbacks that are ready
together in another order each seed, which is how tests look for races. Real threads and sockets
cannot be waited for on this loop.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from pulse.errors import EngineClosed
from pulse.kernel.worker import Landing, Worker

__all__ = ["Deadlock", "InlineWorker", "Livelock", "VirtualLoop", "run", "who_waits"]

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, so nothing can ever happen; says who waits where."""


class Livelock(RuntimeError):
    """Callbacks go on for ever without time passing; says which tasks there are, and where."""


STILL = 100_000
"""Steps of the loop at one and the same time after which it is a livelock."""


class _Jump(selectors.SelectSelector):
    """A selector that tells the loop that it would sleep, and never does."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """No file is ever ready."""
        self._jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, which starts at 0.

    seed: None runs ready callbacks in order, a number shuffles those that are ready together.
    steps: how often the loop has looked for callbacks; `call_at_step` counts by it.
    stuck: whether it came to a Deadlock or a Livelock.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, seed: int | None = None) -> None:
        self.steps = 0
        self.stuck = False
        self._now = 0.0
        self._moved = 0  # the step at which time last passed
        self._random = None if seed is None else random.Random(seed)
        self._at_step: dict[int, list[Callable[[], object]]] = {}
        super().__init__(_Jump(self._jump))
        self._clock_resolution = 1e-9  # 0 would leave timers that are due unnoticed

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_at_step(self, step: int, callback: Callable[[], object]) -> None:
        """Run `callback` at the loop's `step`-th step, or never if it does not come to it."""
        self._at_step.setdefault(max(step, self.steps + 1), []).append(callback)

    def still(self) -> None:
        """Count the steps without passing time afresh: what was stuck may clean up."""
        self._moved = self.steps

    def run_in_executor(self, *_: Any) -> NoReturn:  # type: ignore[override]
        """Refuse: a thread takes real time."""
        raise RuntimeError("a virtual loop cannot wait for a thread; use an InlineWorker")

    def _write_to_self(self) -> None:
        """Do nothing: whoever calls `call_soon_threadsafe` is on the loop already."""

    def _jump(self, timeout: float | None) -> None:
        self.steps += 1
        for callback in self._at_step.pop(self.steps, ()):
            self.call_soon(callback)
        if not self._ready and timeout != 0:
            if not self._scheduled:
                self.stuck = True
                raise Deadlock(who_waits(self, "nothing is ready and no timer is set"))
            if self._scheduled[0].when() > self._now:
                self._now, self._moved = self._scheduled[0].when(), self.steps
        if self.steps - self._moved > STILL:
            self.stuck = True
            raise Livelock(who_waits(self, f"no time has passed for {STILL} steps of the loop"))
        if self._random is not None:
            self._shuffle(self._random)

    def _shuffle(self, source: random.Random) -> None:
        due = self._now + self._clock_resolution
        while self._scheduled and self._scheduled[0].when() < due:
            timer: Any = heapq.heappop(self._scheduled)
            timer._scheduled = False
            self._ready.append(timer)
        ready = list(self._ready)
        source.shuffle(ready)
        self._ready.clear()
        self._ready.extend(ready)


def run(coroutine: Coroutine[Any, Any, T], *, seed: int | None = None) -> T:
    """Run `coroutine` on a fresh `VirtualLoop`, then cancel what it left. Raises Deadlock."""
    loop = VirtualLoop(seed)
    try:
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.still()
            _cancel_all(loop)
            loop.still()
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in left:
        task.cancel()
    if left:
        try:
            loop.run_until_complete(asyncio.wait(left))
        except (Deadlock, Livelock):  # they cannot be cancelled either; the first one tells more
            for task in asyncio.all_tasks(loop):
                _abandon(task)


def _abandon(task: Any) -> None:
    """End a task that waits for what will never be, without the noise of its destruction."""
    task._log_destroy_pending = False
    for _ in range(8):  # it may await again where it cleans up
        try:
            task.get_coro().close()
            return
        except RuntimeError:
            continue


def who_waits(loop: asyncio.AbstractEventLoop, why: str) -> str:
    """`why`, and a line for each task of the loop: its name and where it stands."""
    waiting = sorted(f"{task.get_name()}: {_where(task)}" for task in asyncio.all_tasks(loop))
    return "\n  ".join([f"{why}; these wait:", *waiting])


def _where(task: asyncio.Task[Any]) -> str:
    places = []
    at: Any = task.get_coro()
    while (frame := getattr(at, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        at = at.cr_await
    return " > ".join(places) or "not started"


class InlineWorker(Worker):
    """A `Worker` without a thread, for a `VirtualLoop`.

    duration: virtual seconds that the next function takes. A function has its effect at the end
        of its time, when whatever it collides with has had the chance to go wrong.
    """

    def __init__(self, name: str, duration: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(name)
        self.duration = duration
        self._jobs: deque[tuple[Callable[[], Any], Landing[Any]]] = deque()

    def start(self) -> None:
        """There is no thread to start."""
        self._loop = asyncio.get_running_loop()

    def submit(self, function: Callable[[], T], landing: Landing[T] | None = None) -> Landing[T]:
        """Queue `function`; must be called on the loop. Raises EngineClosed after `close`."""
        if self._closed:
            raise EngineClosed(f"worker {self.name!r} is closed; it takes no more work")
        self.start()
        if landing is None:
            landing = Landing(loop=self._loop)
        self._jobs.append((function, landing))
        if len(self._jobs) == 1:
            self._next()
        return landing

    async def close(self) -> None:
        """Finish what is queued. Idempotent, cannot be cut short."""
        if self._loop is None:
            self._closed = True
            return
        if self._ended is None:
            self._ended = self.submit(lambda: None)
            self._closed = True
        await self._ended

    def _next(self) -> None:
        assert self._loop is not None
        self._loop.call_later(self.duration(), self._work)

    def _work(self) -> None:
        self._do(*self._jobs.popleft())
        if self._jobs:
            self._next()
