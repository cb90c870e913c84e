"""A transfer engine that does what it is told to do wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from pulse.errors import ChecksumError, TransferError
from pulse.testing.nulltiers import NullTransfer
from pulse.types import TransferPlan, TransferReport

__all__ = ["FaultyTransfer"]


class FaultyTransfer(NullTransfer):
    """A `NullTransfer` some of whose transfers go wrong; those of different durations overtake.

    faults: (request, n) to what happens to the n-th transfer for that request, counted from 0:
    ``fails``, ``fails-after`` (the units have moved), ``corrupt`` (as a store does that finds a
    wrong checksum), ``late`` (it takes `late_s` seconds). struck: faults per request.
    """

    def __init__(
        self,
        faults: Mapping[tuple[str, int], str],
        delay: Callable[[TransferPlan], float] = lambda _: 0.001,
        *,
        late_s: float = 0.0,
        eager: bool = False,
    ) -> None:
        super().__init__(delay, eager=eager)
        self.faults = faults
        self.late_s = late_s
        self.started: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()

    async def _move(self, plan: TransferPlan, seconds: float | None = None) -> TransferReport:
        told = [self.faults.get((one, self.started[one]), "") for one in plan.requests]
        self.started.update(plan.requests)
        how = max(told, default="")
        if not how:
            return await super()._move(plan)
        self.struck.update(plan.requests)
        if how == "fails":
            raise TransferError("this transfer was told to fail")
        if how == "corrupt":
            raise ChecksumError("this transfer was told to find a wrong checksum")
        if how == "late":
            return await super()._move(plan, self.late_s)
        await super()._move(plan)
        raise TransferError("this transfer was told to fail after it moved")
