"""One direction of an engine: worker threads that share a plan and end together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, Protocol

from pulse import Landing, Worker
from pulse.errors import EngineClosed, TransferError
from pulse.types import TransferPlan, TransferReport
from pulse_transfer.plan import Units, check_plan

__all__ = ["Channel", "Mover", "close_all"]

LEAST_SHARE = 256 << 10
"""Bytes of a plan below which another thread costs more than it saves."""


class Mover(Protocol):
    """Moves units on a worker thread; one mover belongs to one thread."""

    def __call__(
        self, plan: TransferPlan, source: Units, target: Units, stopped: Callable[[], bool]
    ) -> int:
        """Move ``source[i]`` to ``target[i]`` for all i; the contiguous pieces are returned.

        Ends early, between two pieces, once `stopped()`.
        """


class Channel:
    """Runs plans on one thread per mover, in order, a plan's units shared among the threads.

    Threads start with the first plan, are called ``pulse-<name>-<number>`` and keep to `cores`.
    """

    def __init__(
        self, name: str, movers: Sequence[Mover], cores: Collection[int] | None = None
    ) -> None:
        self.name = name
        self._movers = tuple(movers)
        self._workers = tuple(Worker(f"pulse-{name}-{i}", cores) for i in range(len(movers)))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def run(self, plan: TransferPlan) -> asyncio.Future[TransferReport]:
        """Move the plan's units; the future ends only when no byte of them moves any more.

        To be called on the loop, and on any thread once it has been. A failure or a cancellation
        ends the plan after the pieces that are moving. The future raises TransferError or
        EngineClosed.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for worker in self._workers:
                worker.start()
        moving = _Moving(plan, self._loop)
        try:
            if self._closed:
                raise EngineClosed(f"transfer engine {self.name!r} is closed; build a new one")
            source, target = check_plan(plan)
            if source.size:
                self._share_out(moving, source, target)
            else:
                moving.set_result(TransferReport(0, 0, 0.0))
        except (EngineClosed, TransferError) as error:
            moving.set_exception(error)
        return moving

    async def close(self) -> None:
        """Wait for what is queued and join the threads. Idempotent."""
        self._closed = True
        await close_all(*self._workers)

    def _share_out(self, moving: _Moving, source: Units, target: Units) -> None:
        shares = min(len(self._workers), max(1, moving.plan.bytes // LEAST_SHARE))
        bounds = [source.size * i // shares for i in range(shares + 1)]
        moving.left = shares
        for i, (low, high) in enumerate(pairwise(bounds)):
            move = moving.part(self._movers[i], source[low:high], target[low:high])
            self._workers[i].submit(move, _Share(moving))


async def close_all(*things: Any) -> None:
    """Close one after the other, all of them even if cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    for thing in things:
        try:
            await thing.close()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


_Part = tuple[int, float, float]
"""Pieces moved, when the first began, when the last ended (seconds)."""


class _Moving(Landing[TransferReport]):
    """A plan under way, on one or several threads.

    Cancelling asks the threads to stop; it ends, cancelled, when they have.
    """

    def __init__(self, plan: TransferPlan, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.plan = plan
        self.left = 0
        # Not a `threading.Event`: nobody waits for it, and making one takes microseconds.
        self._stop = False
        self._cancelled = False
        self._parts: list[_Part] = []
        self._error: BaseException | None = None

    def cancel(self, msg: Any = None) -> bool:
        """Ask the threads to stop; whoever awaits is told when they have."""
        if not self.done():
            self._stop = self._cancelled = True
        return False

    def part(self, mover: Mover, source: Units, target: Units) -> Callable[[], _Part]:
        """A function that moves some of the units, for one thread."""

        def move() -> _Part:
            began = time.perf_counter()
            try:
                pieces = mover(self.plan, source, target, lambda: self._stop)
            except BaseException as error:
                self._stop = True  # the other threads' shares are of no use any more
                if isinstance(error, TransferError):
                    raise
                raise TransferError(
                    f"moving units from {self.plan.source.description} to "
                    f"{self.plan.target.description} failed: {type(error).__name__}: {error}"
                ) from error
            return pieces, began, time.perf_counter()

        return move

    def landed(self, part: _Part | None, error: BaseException | None) -> None:
        """A thread is done with its share. On the loop."""
        self.left -= 1
        self._error = self._error or error
        if part is not None:
            self._parts.append(part)
        if self.left:
            return
        if self._cancelled:
            asyncio.Future.cancel(self)
        elif self._error is not None:
            self.set_exception(self._error)
        else:
            began, ended = min(p[1] for p in self._parts), max(p[2] for p in self._parts)
            pieces = sum(p[0] for p in self._parts)
            self.set_result(TransferReport(self.plan.bytes, pieces, ended - began))


class _Share(Landing[_Part]):
    """Tells the plan that a thread is done with its share; awaited by nobody."""

    def __init__(self, moving: _Moving) -> None:
        super().__init__(loop=moving.get_loop())
        self._moving = moving

    def set_result(self, result: _Part) -> None:
        """All moved."""
        self._moving.landed(result, None)

    def set_exception(self, error: type[BaseException] | BaseException) -> None:
        """It failed."""
        assert isinstance(error, BaseException)
        self._moving.landed(None, error)
