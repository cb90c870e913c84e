"""Tiers of Python values: a store and a transfer engine without bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pulse.errors import EngineClosed, StoreError, TransferError
from pulse.hookspecs import StoreShape
from pulse.ports import BlockStore
from pulse.types import TransferPlan, TransferReport

__all__ = ["NullStore", "NullTransfer"]


class NullStore:
    """A `BlockStore` whose units are Python values."""

    kind = "null"
    description = "Python objects"

    def __init__(self, shape: StoreShape) -> None:
        self.slots, self.planes, self.units = shape.slots, shape.planes, shape.units
        self.unit_bytes = shape.unit_bytes
        self.limit_bytes = shape.limit_bytes
        self.memory: dict[int, Any] = {}
        self.trespasses: list[int] = []
        """Slots that something was written to when they were free, or had changed hands."""
        self.leases: dict[int, int] = {}
        """When each slot was last handed out, counted in calls of `allocate`."""
        self._handed_out = 0
        self.used_bytes = self.peak_bytes = 0
        self._free = list(range(shape.slots - 1, -1, -1))

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot counts, all planes together."""
        return self.planes * self.units * self.unit_bytes

    def allocate(self, count: int) -> list[int]:
        """Free slot numbers. Raises StoreError."""
        if count > len(self._free):
            raise StoreError(f"{count} slots asked for, {len(self._free)} are free")
        if self.used_bytes + count * self.slot_bytes > self.limit_bytes:
            raise StoreError(f"{count} slots do not fit in what {self.description} have left")
        taken = [self._free.pop() for _ in range(count)]
        self._handed_out += 1
        self.leases.update(dict.fromkeys(taken, self._handed_out))
        self._count(count)
        return taken

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. Raises StoreError for one that is free."""
        twice = set(slots) & set(self._free)
        if twice or len(set(slots)) != len(slots):
            raise StoreError(f"slot {min(twice, default=slots[0])} is freed twice")
        beyond = [slot for slot in slots if not 0 <= slot < self.slots]
        if beyond:
            raise StoreError(f"slot {beyond[0]} is not one of the {self.slots}")
        for slot in slots:
            for plane in range(self.planes):
                self.memory.pop(plane * self.slots + slot, None)
        self._free.extend(slots)
        self._free.sort(reverse=True)
        self._count(-len(slots))

    def reserve(self, count: int) -> None:
        """Count bytes that are kept beside the slots. Raises StoreError."""
        if self.used_bytes + count > self.limit_bytes:
            raise StoreError(f"{count} bytes do not fit in {self.description}")
        self.used_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, count: int) -> None:
        """Count them no more."""
        self.used_bytes -= count

    def read(self, units: Sequence[int], out: Any) -> int:
        """Values of units. Raises TransferError for one that was never written."""
        for at, unit in enumerate(units):
            if unit not in self.memory:
                raise TransferError(f"unit {unit} was never written")
            out[at] = tuple(self.memory[unit])
        return len(units)

    def write(self, units: Sequence[int], data: Any) -> int:
        """Store values."""
        total = self.planes * self.slots * self.units
        beyond = [unit for unit in units if not 0 <= unit < total]
        if beyond:
            raise TransferError(f"unit {beyond[0]} is not one of the {total}")
        free = set(self._free)
        for unit, value in zip(units, data, strict=True):
            self.memory[unit] = list(value)
            if unit % self.slots in free:
                self.trespasses.append(unit % self.slots)
        return len(units)

    def close(self) -> None:
        """Nothing to give back."""

    def _count(self, slots: int) -> None:
        self.used_bytes += slots * self.slot_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class NullTransfer:
    """A `TransferEngine` that takes `delay(plan)` seconds of the loop's time per plan.

    eager: recalls start when they are called, as those of an engine with threads do; for an
        `InlineWorker`, which calls on the loop.
    """

    def __init__(
        self, delay: Callable[[TransferPlan], float] = lambda _: 0.0, *, eager: bool = False
    ) -> None:
        self.delay = delay
        self.eager = eager
        self._closed = False

    def supports(self, source: BlockStore, target: BlockStore) -> bool:
        """Between null stores."""
        return isinstance(source, NullStore) and isinstance(target, NullStore)

    def recall(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        """Slow tier to fast tier."""
        move = self._move(plan)
        return asyncio.ensure_future(move) if self.eager else move

    def write_back(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        """Fast tier to slow tier."""
        return self._move(plan)

    async def close(self) -> None:
        """Nothing is under way once recall and write_back have ended."""
        self._closed = True

    async def _move(self, plan: TransferPlan, seconds: float | None = None) -> TransferReport:
        if self._closed:
            raise EngineClosed("the transfer engine is closed; make a new one")
        seconds = self.delay(plan) if seconds is None else seconds
        target: NullStore = plan.target
        slots = [unit % target.slots for unit in plan.target_units]
        leases = [target.leases.get(slot) for slot in slots]
        await asyncio.sleep(seconds)
        pairs = zip(slots, leases, strict=True)
        target.trespasses += [slot for slot, lease in pairs if target.leases.get(slot) != lease]
        # Read as late as can be, so that a slot reused too early is noticed.
        data: list[Any] = [None] * plan.units
        pieces = plan.source.read(plan.source_units, data)
        plan.target.write(plan.target_units, data)
        return TransferReport(plan.bytes, pieces, seconds)
