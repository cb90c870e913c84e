"""Cohorts: sequences that decode together. Membership changes only at step boundaries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pulse.kernel.decode import Step
from pulse.kernel.machine import Machine
from pulse.kernel.member import Member, Preempted
from pulse.kernel.worker import Landing
from pulse.types import Work

__all__ = ["Cohort", "Cohorts"]

log = logging.getLogger("pulse")

OnToken = Callable[[int, float], bool]
"""Takes a token and its log-probability; says whether the request goes on."""
Grow = Callable[[Member], bool]
"""Makes room for the member's next token; False if it has to wait for that."""


class Seat:
    """A member's place in a cohort, from the boundary it joins at to the one it leaves at."""

    def __init__(self, member: Member, on_token: OnToken) -> None:
        loop = asyncio.get_running_loop()
        self.member = member
        self.on_token = on_token
        self.over: asyncio.Future[None] = loop.create_future()
        self.left: Landing[None] = Landing(loop=loop)
        self.leaving = False
        self.preempted: str | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """The member leaves at the next boundary."""
        self.leaving = True
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


class Cohorts:
    """The cohorts of one kind, normal or offload, among which its members are spread.

    grow: see `Grow`; called at each member's step boundaries. repace: called before each step of
    offload cohorts; `machine.pace` says how many of them there should be.
    """

    def __init__(
        self, work: Work, machine: Machine, grow: Grow, repace: Callable[[], None]
    ) -> None:
        self.work = work
        self.machine = machine
        self.grow = grow
        self.repace = repace
        self.cohorts: list[Cohort] = []
        self._seats: dict[str, Seat] = {}

    @property
    def members(self) -> int:
        """How many there are, in all cohorts."""
        return len(self._seats)

    async def live(self, member: Member, on_token: OnToken) -> None:
        """Decode until `on_token` says stop or the member fails or is preempted.

        Cancelled, it leaves at the next step boundary and only then returns: nothing of the
        member's is in use any more.
        """
        seat = Seat(member, on_token)
        self._seats[member.request] = seat
        try:
            self.smallest().join(seat)
            await seat.over
        finally:
            seat.leaving = True
            self.wake()
            await seat.left
            del self._seats[member.request]

    def preempt(self, request: str, reason: str) -> bool:
        """Make a member leave at its next boundary, with Preempted; False if it is none."""
        seat = self._seats.get(request)
        if seat is None or seat.leaving:
            return False
        seat.preempted = reason
        self.wake()
        return True

    def wake(self) -> None:
        """Something changed for members that wait: slots were freed, or one of them leaves."""
        for cohort in self.cohorts:
            cohort.woken.set()

    def wanted(self) -> int:
        """How many cohorts there should be."""
        return self.machine.pace.cohorts if self.work is Work.OFFLOAD else 1

    def smallest(self) -> Cohort:
        """The cohort that the next member should join."""
        while len(self.cohorts) < self.wanted():
            number = len(self.cohorts) + 1
            name = str(self.work) if number == 1 else f"{self.work}-{number}"
            self.cohorts.append(Cohort(name, self))
        return min(self.cohorts[: self.wanted()], key=lambda cohort: cohort.size)

    async def ended(self) -> None:
        """Wait until the cohorts' coroutines have ended (each does when its last member left)."""
        for cohort in self.cohorts:
            await cohort.ended()


class Cohort:
    """One batch as a coroutine that runs while it has members."""

    def __init__(self, name: str, group: Cohorts) -> None:
        self.name = name
        self.woken = asyncio.Event()
        self._group = group
        self._machine = group.machine
        self._work = group.work
        self._seats: list[Seat] = []
        self._joining: list[Seat] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """Members, and those that join at the next boundary."""
        return len(self._seats) + len(self._joining)

    def join(self, seat: Seat) -> None:
        """Take in a member at the next boundary."""
        self._joining.append(seat)
        self.woken.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"pulse-{self.name}-cohort")
            # One that is cancelled before it ran has not told its members.
            self._task.add_done_callback(self._over)

    async def ended(self) -> None:
        """Wait until the cohort's coroutine has ended."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            self.woken.clear()
            ready = self._boundary()
            if ready:
                await self._step(ready)
            elif self._seats:
                await self.woken.wait()
            else:
                return

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        seats = (*self._seats, *self._joining)
        self._seats, self._joining, self._task = [], [], None
        if task.cancelled() or error is not None:
            for seat in seats:
                seat.finish(error if isinstance(error, Exception) else None)
                if not seat.left.done():
                    seat.left.set_result(None)
            return
        for seat in seats:  # they joined between the last boundary and this callback
            self.join(seat)

    def _boundary(self) -> list[Seat]:
        """Let members leave, join and move; those that can step are returned."""
        staying = []
        for seat in (*self._seats, *self._joining):
            if seat.preempted is not None:  # only now: the step's token still counted
                seat.finish(Preempted(seat.preempted))
            if seat.leaving:
                seat.left.set_result(None)
            else:
                staying.append(seat)
        self._seats, self._joining = staying, []
        if self._work is Work.OFFLOAD and staying:
            self._group.repace()
            self._hand_over()
        return [seat for seat in self._seats if self._may_step(seat)]

    def _may_step(self, seat: Seat) -> bool:
        try:
            # Growing may cost a member of this very cohort its place.
            return self._group.grow(seat.member) and seat.preempted is None
        except Exception as error:
            seat.finish(error)
            self.woken.set()
            return False

    def _hand_over(self) -> None:
        """Give members away until no cohort is larger than the smallest by more than one."""
        group = self._group
        surplus = self not in group.cohorts[: group.wanted()]
        while self._seats:
            smallest = group.smallest()
            if not surplus and (smallest is self or smallest.size + 1 >= self.size):
                return
            smallest.join(self._seats.pop())

    async def _step(self, seats: Sequence[Seat]) -> None:
        members = [seat.member for seat in seats]
        names = tuple(member.request for member in members)
        emit = self._machine.kernel.instruments.emit
        emit("step_started", self.name, names)
        step = Step(self._machine, members, self._work, self.name)
        try:
            results = await step.run()
        except Exception as error:
            results = await self._apart(members, error, merged=step.merged)
        emit("step_ended", self.name, names)
        for seat, (token, logprob) in zip(seats, results, strict=True):
            self._tell(seat, token, logprob)

    def _tell(self, seat: Seat, token: int, logprob: float) -> None:
        if seat.member.error is not None:
            seat.finish(seat.member.error)
            return
        new = seat.member.take(token)
        try:
            if new and not seat.leaving and not seat.on_token(token, logprob):
                seat.finish()
        except Exception as error:
            seat.finish(error)

    async def _apart(
        self, members: Sequence[Member], error: Exception, *, merged: bool
    ) -> list[tuple[int, float]]:
        # A step can be repeated: it stores the same keys and values at the same positions. Alone,
        # each member shows whether it is the one at fault.
        if merged or len(members) > 1:
            log.warning("a step of %d requests failed (%s); trying each alone", len(members), error)
        results = []
        for member in members:
            try:
                if member.error is not None or (len(members) == 1 and not merged):
                    raise member.error or error
                step = Step(self._machine, [member], self._work, self.name, alone=True)
                results.extend(await step.run())
            except Exception as alone:
                member.error = member.error or alone
                results.append((-1, 0.0))
        return results
