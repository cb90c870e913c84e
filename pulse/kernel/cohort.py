"""A cohort: the sequences that decode together. Membership changes only at step boundaries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pulse.kernel.steps import Machine, Member
from pulse.kernel.worker import Landing
from pulse.types import Work

__all__ = ["Cohort"]

log = logging.getLogger("pulse")

OnToken = Callable[[int, float], bool]
"""Takes a token and its log-probability; says whether the request goes on."""


class _Seat:
    """A member's place in the cohort, from the boundary it joins at to the one it leaves at."""

    def __init__(self, member: Member, on_token: OnToken) -> None:
        loop = asyncio.get_running_loop()
        self.member = member
        self.on_token = on_token
        self.over: asyncio.Future[None] = loop.create_future()
        self.left: Landing[None] = Landing(loop=loop)
        self.leaving = False

    def finish(self, error: BaseException | None = None) -> None:
        self.leaving = True
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


class Cohort:
    """One batch (normal or offload) as a coroutine that runs while it has members."""

    def __init__(self, work: Work, machine: Machine) -> None:
        self.work = work
        self.machine = machine
        self._seats: list[_Seat] = []
        self._joining: list[_Seat] = []
        self._task: asyncio.Task[None] | None = None

    async def live(self, member: Member, on_token: OnToken) -> None:
        """Join, decode until `on_token` says stop or the member fails, leave.

        Cancelled, it leaves at the next step boundary and only then returns: nothing of the
        member's is in use any more.
        """
        seat = _Seat(member, on_token)
        self._joining.append(seat)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"pulse-{self.work}-cohort")
        try:
            await seat.over
        finally:
            seat.leaving = True
            await seat.left

    async def ended(self) -> None:
        """Wait until the cohort's coroutine has ended (it does when the last member left)."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._boundary():
                await self._step()
        except BaseException as error:
            for seat in (*self._seats, *self._joining):
                seat.finish(error if isinstance(error, Exception) else None)
            raise
        finally:
            for seat in (*self._seats, *self._joining):
                if not seat.left.done():
                    seat.left.set_result(None)
            self._seats, self._joining, self._task = [], [], None

    def _boundary(self) -> bool:
        staying = []
        for seat in (*self._seats, *self._joining):
            if seat.leaving:
                seat.left.set_result(None)
            else:
                staying.append(seat)
        self._seats, self._joining = staying, []
        return bool(staying)

    async def _step(self) -> None:
        members = [seat.member for seat in self._seats]
        try:
            results = await self.machine.decode(members, self.work, self.work)
        except Exception as error:
            results = await self._apart(members, error)
        for seat, (token, logprob) in zip(self._seats, results, strict=True):
            if seat.member.error is not None:
                seat.finish(seat.member.error)
                continue
            seat.member.token = token
            try:
                if not seat.leaving and not seat.on_token(token, logprob):
                    seat.finish()
            except Exception as error:
                seat.finish(error)

    async def _apart(self, members: Sequence[Member], error: Exception) -> list[tuple[int, float]]:
        # A step can be repeated: it stores the same keys and values at the same positions. Alone,
        # each member shows whether it is the one at fault.
        if len(members) > 1:
            log.warning("a step of %d requests failed (%s); trying each alone", len(members), error)
        results = []
        for member in members:
            try:
                if member.error is not None or len(members) == 1:
                    raise member.error or error
                results.extend(await self.machine.decode([member], self.work, self.work))
            except Exception as alone:
                member.error = member.error or alone
                results.append((-1, 0.0))
        return results
