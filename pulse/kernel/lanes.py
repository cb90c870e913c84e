"""Lanes: named resources with a bounded number of operations in flight, each of them awaitable."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pulse.errors import EngineClosed
from pulse.kernel.instruments import Instruments
from pulse.kernel.turn import Turn, Unit
from pulse.ports import Arbiter
from pulse.types import LaneName, Operation, Pace, StepCosts, TransferReport, Work

__all__ = ["Kernel", "Lane", "on_offer"]

log = logging.getLogger("pulse")

T = TypeVar("T")
Launch = Callable[[Sequence[Turn[Any]]], None]
"""Starts granted operations (several are to be computed as one) and returns at once."""

TIMER_S = 0.002
"""Timers of some event loops come so much too early."""
RECALLS_IN_FLIGHT = 4
"""Recalls that an engine may have in hand: it never runs dry, and a cohort's waits for few."""


class Kernel:
    """The lanes of one engine and what they share: clock, instruments, operation numbers.

    timeout_s: seconds that a transfer may take before it counts as late.
    """

    def __init__(
        self, arbiter: Arbiter, instruments: Instruments, timeout_s: float | None = None
    ) -> None:
        self.arbiter: Arbiter | None = arbiter
        self.instruments = instruments
        self.in_flight: dict[int, Operation] = {}
        self.stragglers: dict[str, dict[asyncio.Future[Any], None]] = {}
        """Transfers that are late and have not ended, by request."""
        self.timeout_s = timeout_s
        self.now = _clock()
        self._ids = itertools.count()
        self.compute = Lane(LaneName.COMPUTE, self, depth=2, width=1)
        self.recall = Lane(LaneName.RECALL, self, depth=RECALLS_IN_FLIGHT, timeout_s=timeout_s)
        self.write_back = Lane(LaneName.WRITE_BACK, self, depth=2, timeout_s=timeout_s)
        self.lanes = (self.compute, self.recall, self.write_back)

    def operation(
        self, kind: str, lane: LaneName, work: Work, cohort: str, **fields: Any
    ) -> Operation:
        """A new operation with a number of its own."""
        return Operation(next(self._ids), kind, lane, work, cohort, **fields)

    def ended(self) -> None:
        """Something ended: a lane that was held back may have a choice now."""
        for lane in self.lanes:
            lane.decide()

    def pace(self, costs: StepCosts) -> Pace:
        """What the arbiter wants of offloaded sequences; one cohort if it cannot say."""
        if self.arbiter is None:
            return Pace()
        try:
            pace = self.arbiter.pace(costs)
            return Pace(max(1, int(pace.cohorts)), bool(pace.predict))
        except Exception:
            self.dismiss("pace")
            return Pace()

    def dismiss(self, method: str) -> None:
        """The arbiter raised: go on without it."""
        log.exception(
            "the arbiter raised in %s; from now on it is first come, first served", method
        )
        self.arbiter = None

    def strayed(self, operation: Operation, transfer: asyncio.Future[Any]) -> None:
        """A transfer is late: remember it until it has ended."""
        for request in operation.requests:
            self.stragglers.setdefault(request, {})[transfer] = None

        def over(_: Any) -> None:
            for request in operation.requests:
                late = self.stragglers.get(request, {})
                late.pop(transfer, None)
                if not late:
                    self.stragglers.pop(request, None)

        transfer.add_done_callback(over)


class Lane:
    """At most `depth` operations are in flight, of which `width` are before their milestone.

    With a width of 1 the next operation is chosen when the running one ends or reaches its
    decision milestone, whichever is first, so the lane neither runs dry nor commits more than one
    operation ahead (PulseInfer, semi-synchronous detection). The compute lane asks the kernel's
    arbiter; the others are first come, first served. An operation starts in the very callback
    that grants it.
    """

    def __init__(
        self,
        name: LaneName,
        kernel: Kernel,
        *,
        depth: int,
        width: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.name = name
        self.depth = depth
        self.width = depth if width is None else width
        self._kernel = kernel
        self._timeout_s = timeout_s
        self._waiting: dict[int, Turn[Any]] = {}
        self._units: dict[Unit, None] = {}
        self._reserved = 0
        self._watch: asyncio.TimerHandle | None = None
        self._closed = False

    # -- for whoever has work ------------------------------------------------------------------

    def submit(
        self,
        operation: Operation,
        launch: Launch,
        payload: Any = None,
        then: Callable[[Turn[T], T | None], None] | None = None,
    ) -> Turn[T]:
        """Put `operation` in line; it is launched as soon as the lane grants it.

        payload: what `launch` needs to know. then: called with the turn and its result (None if
        there is none) when the operation ends, before the lane chooses again. Raises EngineClosed.
        """
        if self._closed:
            raise EngineClosed(f"the {self.name} lane is closed")
        turn: Turn[T] = Turn(self, operation, launch, payload, then)
        operation.submitted = self._kernel.now()
        self._kernel.instruments.emit("operation_submitted", operation)
        self._waiting[operation.id] = turn
        self.decide()
        return turn

    def reserve(self) -> bool:
        """Keep a place for an operation that another thread may start; `adopt` or `release` it."""
        if self._closed or self._waiting or self._load >= self.depth:
            return False
        self._reserved += 1
        return True

    def adopt(
        self, operation: Operation, started: float, transfer: Awaitable[TransferReport]
    ) -> Turn[TransferReport]:
        """Take in an operation that was started at `started` in a reserved place."""
        self._reserved -= 1
        turn: Turn[TransferReport] = Turn(self, operation, lambda _: None)
        operation.submitted = started
        self._kernel.instruments.emit("operation_submitted", operation)
        self._start([turn], started)
        turn.attach(transfer)
        return turn

    def release(self) -> None:
        """Nobody came to a reserved place."""
        self._reserved -= 1
        self.decide()

    @property
    def contended(self) -> bool:
        """Whether operations wait for the lane. May be read from any thread."""
        return bool(self._waiting)

    def close(self) -> None:
        """Refuse operations from now on; those that wait fail with EngineClosed."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for turn in list(self._waiting.values()):
            turn.set_exception(EngineClosed(f"the {self.name} lane is closed"))

    # -- granting ------------------------------------------------------------------------------

    @property
    def _load(self) -> int:
        return len(self._units) + self._reserved

    def decide(self) -> None:
        """Grant what the lane can take."""
        while self._waiting and self._load < self.depth:
            undecided = 0
            for unit in tuple(self._units):
                if unit.passed and not unit.decided:
                    self._decided(unit)
                undecided += not unit.decided
            if undecided + self._reserved >= self.width:
                return
            group = self._choose()
            if not group:
                return
            self._grant(group)

    def _choose(self) -> Sequence[Operation]:
        waiting = tuple(turn.operation for turn in self._waiting.values())
        arbiter = self._kernel.arbiter
        if arbiter is None or self is not self._kernel.compute:
            return waiting[:1]
        in_flight = tuple(self._kernel.in_flight.values())
        try:
            chosen = arbiter.choose(waiting, in_flight)
            if len(waiting) == 1 and chosen is waiting[0]:
                return waiting
            group = [chosen] if isinstance(chosen, Operation) else list(chosen or ())
        except Exception:
            self._kernel.dismiss("choose")
            return waiting[:1]
        if not group and in_flight:
            return ()
        # With nothing in flight, nothing could ever wake the lane: an arbiter may not stall it.
        # An answer that was not on offer counts as none.
        return group if on_offer(group, waiting) else waiting[:1]

    def _grant(self, group: Sequence[Operation]) -> None:
        turns = [self._waiting.pop(operation.id) for operation in group]
        for other in self._waiting.values():
            other.operation.skipped += 1
        for operation in group[1:]:
            operation.leader = group[0].id
        self._start(turns, self._kernel.now())
        try:
            turns[0].launch(turns)
        except Exception as error:
            for turn in turns:
                turn.set_exception(error)

    def _start(self, turns: Sequence[Turn[Any]], now: float) -> None:
        unit = Unit(len(turns))
        self._units[unit] = None
        for turn in turns:
            operation, turn.unit = turn.operation, unit
            unit.turns.append(turn)
            operation.started, operation.status = now, "running"
            self._kernel.in_flight[operation.id] = operation
            if self._timeout_s is not None:
                operation.deadline = now + self._timeout_s
                if self._watch is None:
                    self._watch = turn.get_loop().call_later(self._timeout_s, self._look)
            self._kernel.instruments.emit("operation_started", operation)

    def _look(self) -> None:
        """One timer for all: those in flight are late in the order in which they started."""
        self._watch = None
        now = self._kernel.now()
        for unit in tuple(self._units):
            for turn in unit.turns:
                left = turn.operation.deadline - now
                if left > TIMER_S:
                    self._watch = turn.get_loop().call_later(left, self._look)
                    return
                turn.late()

    def publish(self, unit: Unit) -> None:
        """The unit has reached its decision milestone. On the loop."""
        if not unit.decided and unit.left:
            self._decided(unit)
            self.decide()

    def _decided(self, unit: Unit) -> None:
        unit.decided = True
        for turn in unit.turns:
            if turn.operation.status == "running":
                turn.operation.decided = True
                self._kernel.instruments.emit("operation_milestone", turn.operation)

    def end(self, turn: Turn[Any], status: str, report: Any = None) -> None:
        """The operation is over; the lane is free for the next."""
        operation = turn.operation
        operation.status, operation.ended = status, self._kernel.now()
        self._waiting.pop(operation.id, None)
        unit = turn.unit
        if unit is not None:
            self._kernel.in_flight.pop(operation.id, None)
            unit.left -= 1
            if not unit.left:
                del self._units[unit]
        report = report if isinstance(report, TransferReport) else None
        self._kernel.instruments.emit("operation_ended", operation, report)
        if unit is not None:
            self._kernel.ended()

    def strayed(self, turn: Turn[Any]) -> None:
        """The operation is late and its transfer still under way."""
        assert turn.inner is not None
        self._kernel.strayed(turn.operation, turn.inner)


def on_offer(group: Sequence[Operation], waiting: Sequence[Operation]) -> bool:
    """Whether an arbiter may choose `group`: one that waits, or decode layers that are alike."""
    offered = {id(operation) for operation in waiting}
    chosen = {id(one) for one in group}
    if not group or len(chosen) < len(group) or not chosen <= offered:
        return False
    first = group[0]
    return len(group) == 1 or all(
        one.kind == "layer" and one.work is not Work.PREFILL and one.layer == first.layer
        for one in group
    )


def _clock() -> Callable[[], float]:
    # uvloop's clock is the system's, read once per iteration and rounded to milliseconds.
    loop = asyncio.get_running_loop()
    return time.monotonic if abs(time.monotonic() - loop.time()) < 1 else loop.time
