"""Lanes: named serial resources on which every computation and every transfer is awaited."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pulse.errors import EngineClosed
from pulse.kernel.instruments import Instruments
from pulse.ports import Arbiter
from pulse.types import LaneName, Operation, TransferReport, Work

__all__ = ["Kernel", "Lane"]

log = logging.getLogger("pulse")

T = TypeVar("T")
Start = Callable[[Callable[[], None]], Awaitable[T]]


class Kernel:
    """The lanes of one engine and what they share: clock, instruments, operation numbers."""

    def __init__(self, arbiter: Arbiter, instruments: Instruments) -> None:
        self.instruments = instruments
        self.in_flight: dict[int, Operation] = {}
        self._ids = itertools.count()
        self.compute = Lane(LaneName.COMPUTE, self, arbiter)
        self.recall = Lane(LaneName.RECALL, self)
        self.write_back = Lane(LaneName.WRITE_BACK, self)
        self.lanes = (self.compute, self.recall, self.write_back)

    def now(self) -> float:
        """Seconds of the event loop's clock (virtual under test)."""
        exact, loop = time.monotonic(), asyncio.get_running_loop().time()
        # uvloop's clock is the system's, read once per iteration and rounded to milliseconds.
        return exact if abs(exact - loop) < 1 else loop

    def operation(
        self, kind: str, lane: LaneName, work: Work, cohort: str, **fields: Any
    ) -> Operation:
        """A new operation with a number of its own."""
        return Operation(next(self._ids), kind, lane, work, cohort, **fields)

    def ended(self) -> None:
        """Something ended: a lane that was held back may have a choice now."""
        for lane in self.lanes:
            lane.decide()


class Lane:
    """A serial resource. At most one operation runs, and one more is committed behind it.

    The next operation is chosen when the running one ends or reaches its decision milestone,
    whichever is first, so a lane neither runs dry nor commits more than one operation ahead
    (PulseInfer, semi-synchronous detection). Without an arbiter the lane is first come, first
    served.
    """

    def __init__(self, name: LaneName, kernel: Kernel, arbiter: Arbiter | None = None) -> None:
        self.name = name
        self._kernel = kernel
        self._arbiter = arbiter
        self._waiting: dict[int, tuple[Operation, asyncio.Future[None]]] = {}
        self._deciding = 0  # granted operations that are before their decision milestone
        self._running = 0
        self._closed = False

    async def run(self, operation: Operation, start: Start[T]) -> T:
        """Wait for the lane's grant, then `start` the operation and await its end.

        `start` gets the function that publishes the decision milestone (call it on the loop).
        Cancelled while waiting, the operation never starts; cancelled while running, this returns
        when `start`'s awaitable does.
        """
        emit = self._kernel.instruments.emit
        operation.submitted = self._kernel.now()
        emit("operation_submitted", operation)
        report: TransferReport | None = None
        granted = False
        try:
            await self._grant(operation)
            granted = True
            operation.started, operation.status = self._kernel.now(), "running"
            emit("operation_started", operation)
            result = await start(lambda: self._milestone(operation))
            operation.status = "done"
            report = result if isinstance(result, TransferReport) else None
            return result
        except asyncio.CancelledError:
            operation.status = "cancelled"
            raise
        except BaseException:
            operation.status = "failed"
            raise
        finally:
            operation.ended = self._kernel.now()
            emit("operation_ended", operation, report)
            if granted:
                self._leave(operation)

    @property
    def contended(self) -> bool:
        """Whether operations wait for the lane. May be read from any thread."""
        return bool(self._waiting)

    def decide(self) -> None:
        """Grant the next operation if the lane can take one."""
        while self._deciding == 0 and self._running < 2:
            # Whoever was cancelled in this tick is still listed, but nobody awaits the grant.
            waiting = [operation for operation, grant in self._waiting.values() if not grant.done()]
            chosen = self._choose(tuple(waiting)) if waiting else None
            if chosen is None:
                return
            for operation in waiting:
                operation.skipped += operation is not chosen
            _, grant = self._waiting.pop(chosen.id)
            self._take(chosen)
            grant.set_result(None)

    def close(self) -> None:
        """Refuse operations from now on; those that wait fail with EngineClosed."""
        self._closed = True
        for _, grant in self._waiting.values():
            if not grant.done():
                grant.set_exception(EngineClosed(f"the {self.name} lane is closed"))
        self._waiting.clear()

    async def _grant(self, operation: Operation) -> None:
        if self._closed:
            raise EngineClosed(f"the {self.name} lane is closed")
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[operation.id] = (operation, grant)
        self.decide()
        try:
            await grant
        except asyncio.CancelledError:
            if self._waiting.pop(operation.id, None) is None and not grant.cancelled():
                self._leave(operation)  # granted in the same tick as it was cancelled
            raise

    def _choose(self, waiting: Sequence[Operation]) -> Operation | None:
        if self._arbiter is None:
            return waiting[0]
        in_flight = tuple(self._kernel.in_flight.values())
        try:
            chosen = self._arbiter.choose(waiting, in_flight)
        except Exception:
            log.exception("the arbiter raised; from now on it is first come, first served")
            self._arbiter = None
            return waiting[0]
        if chosen is None and in_flight:
            return None
        # With nothing in flight, nothing could ever wake the lane: an arbiter may not stall it.
        # An answer that was not on offer counts as none.
        return chosen if any(chosen is offered for offered in waiting) else waiting[0]

    def _take(self, operation: Operation) -> None:
        self._kernel.in_flight[operation.id] = operation
        self._running += 1
        self._deciding += 1

    def _milestone(self, operation: Operation) -> None:
        if operation.status == "running" and not operation.decided:
            operation.decided = True
            self._deciding -= 1
            self._kernel.instruments.emit("operation_milestone", operation)
            self.decide()

    def _leave(self, operation: Operation) -> None:
        if self._kernel.in_flight.pop(operation.id, None) is None:
            return
        self._running -= 1
        if not operation.decided:
            self._deciding -= 1
        self._kernel.ended()
