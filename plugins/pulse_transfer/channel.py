"""One direction of an engine: worker threads that share a plan and end together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Protocol

from pulse import Worker
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

    Threads start with the first plan and are called ``pulse-<name>-<number>``.
    """

    def __init__(self, name: str, movers: Sequence[Mover]) -> None:
        self.name = name
        self._movers = tuple(movers)
        self._workers = tuple(Worker(f"pulse-{name}-{i}") for i in range(len(movers)))
        self._closed = False

    async def run(self, plan: TransferPlan) -> TransferReport:
        """Move the plan's units; returns or raises only when no byte of them moves any more.

        A failure or a cancellation ends the plan after the pieces that are moving. Raises
        TransferError, EngineClosed.
        """
        if self._closed:
            raise EngineClosed(f"transfer engine {self.name!r} is closed; build a new one")
        source, target = check_plan(plan)
        if not source.size:
            return TransferReport(0, 0, 0.0)
        stop = _Stop()
        landings = self._submit(plan, source, target, stop)
        try:
            await asyncio.wait(landings)
        except asyncio.CancelledError:
            stop.asked = True
            await _ended(landings)
            raise
        return _report(plan, [landing.result() for landing in _failed_first(landings)])

    async def close(self) -> None:
        """Wait for what is queued and join the threads. Idempotent."""
        self._closed = True
        await close_all(*self._workers)

    def _submit(
        self, plan: TransferPlan, source: Units, target: Units, stop: _Stop
    ) -> list[asyncio.Future[_Part]]:
        shares = min(len(self._workers), max(1, plan.bytes // LEAST_SHARE))
        bounds = [source.size * i // shares for i in range(shares + 1)]
        return [
            self._workers[i].submit(
                _part(self._movers[i], plan, source[low:high], target[low:high], stop)
            )
            for i, (low, high) in enumerate(pairwise(bounds))
        ]


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


class _Stop:
    """A flag that the loop or a thread sets and the threads of one plan look at.

    Not a `threading.Event`: nobody waits for it, and making one takes microseconds of each plan.
    """

    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = False


_Part = tuple[int, float, float]
"""Pieces moved, when the first began, when the last ended (seconds)."""


def _part(
    mover: Mover, plan: TransferPlan, source: Units, target: Units, stop: _Stop
) -> Callable[[], _Part]:
    def move() -> _Part:
        began = time.perf_counter()
        try:
            pieces = mover(plan, source, target, lambda: stop.asked)
        except BaseException as error:
            stop.asked = True  # the other threads' shares are of no use any more
            if isinstance(error, TransferError):
                raise
            raise TransferError(
                f"moving units from {plan.source.description} to {plan.target.description} "
                f"failed: {type(error).__name__}: {error}"
            ) from error
        return pieces, began, time.perf_counter()

    return move


async def _ended(landings: Sequence[asyncio.Future[_Part]]) -> None:
    """Return when all have landed, however often the caller is cancelled meanwhile."""
    for landing in landings:
        # A landing cannot be cancelled: whatever is raised here, it has ended.
        with suppress(Exception, asyncio.CancelledError):
            await landing
        landing.exception()  # seen, so that asyncio does not report it as lost


def _failed_first(
    landings: Sequence[asyncio.Future[_Part]],
) -> list[asyncio.Future[_Part]]:
    return sorted(landings, key=lambda landing: landing.exception() is None)


def _report(plan: TransferPlan, parts: Sequence[_Part]) -> TransferReport:
    seconds = max(end for _, _, end in parts) - min(began for _, began, _ in parts)
    return TransferReport(plan.bytes, sum(pieces for pieces, _, _ in parts), seconds)
