"""A tier in the machine's own memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from pulse.errors import StoreError, TransferError
from pulse_store.arena import Layout, reserve, rows, unit_ids
from pulse_store.copy import gather_units, scatter_units
from pulse_store.slots import SlotAllocator, Slots

__all__ = ["HostStore"]


class HostStore:
    """Slots in anonymous memory that is touched only as units are written.

    slots, planes, units, unit_bytes: the arena's shape, see `pulse.ports.BlockStore`.
    limit_bytes: bytes that may be allocated and reserved; those of the slots by default.
    kind: the tier this store stands for, ``host`` or ``device`` (a fast tier in memory).
    memory: the arena, uint8 ``[planes * slots * units, unit_bytes]``; row number is unit id.

    Raises StoreError when the memory cannot be reserved.
    """

    def __init__(
        self,
        slots: int,
        planes: int,
        units: int,
        unit_bytes: int,
        limit_bytes: int | None = None,
        *,
        kind: str = "host",
    ) -> None:
        layout = Layout(slots, planes, units, unit_bytes)
        self.kind = kind
        self.description = f"{kind} memory"
        self.slots = slots
        self.planes = planes
        self.units = units
        self.unit_bytes = unit_bytes
        self.slot_bytes = layout.slot_bytes
        self.limit_bytes = layout.limit(limit_bytes)
        self.used_bytes = 0
        self.peak_bytes = 0
        self._reserved = 0
        self.memory = reserve(layout.total * unit_bytes).reshape(layout.total, unit_bytes)
        self._slots = SlotAllocator(slots, self.limit_bytes // layout.slot_bytes)
        self._compile()

    def allocate(self, count: int) -> Slots:
        """`count` free slot numbers, int64, ascending, in few runs. Raises StoreError."""
        self._fit(count * self.slot_bytes)
        slots = self._slots.allocate(count)
        self._count()
        return slots

    def free(self, slots: Any) -> None:
        """Give slots back. Raises StoreError for a slot that is not allocated."""
        self._slots.free(slots)
        self._count()

    def reserve(self, count: int) -> None:
        """Count `count` bytes that are kept beside the slots (digests). Raises StoreError."""
        self._fit(count)
        self._reserved += count
        self._count()

    def release(self, count: int) -> None:
        """Count them no more. Raises StoreError for more bytes than are reserved."""
        if not 0 <= count <= self._reserved:
            raise StoreError(f"cannot release {count} bytes: {self._reserved} are reserved")
        self._reserved -= count
        self._count()

    def read(self, units: Any, out: Any) -> int:
        """Copy units into `out`; returns the runs of adjacent units. Raises TransferError."""
        ids = unit_ids(units)
        buffer = rows(out, ids.size, self.unit_bytes, writable=True)
        return self._checked(ids, gather_units(self.memory, ids, buffer))

    def write(self, units: Any, data: Any) -> int:
        """Copy the rows of `data` into units; as `read` otherwise."""
        ids = unit_ids(units)
        buffer = rows(data, ids.size, self.unit_bytes, writable=False)
        return self._checked(ids, scatter_units(self.memory, ids, buffer))

    def close(self) -> None:
        """Let go of the memory; it is freed with the last view of it. Idempotent."""
        self.memory = np.empty((0, self.unit_bytes), dtype=np.uint8)

    def _compile(self) -> None:
        # Now, and not in the first decode step: compiling takes a second where nothing is cached.
        nothing = np.empty((0, self.unit_bytes), dtype=np.uint8)
        self.write([], nothing)
        self.read([], nothing)

    def _fit(self, more: int) -> None:
        if self.used_bytes + more > self.limit_bytes:
            raise StoreError(
                f"{more} bytes do not fit in {self.description}: {self.used_bytes} of "
                f"{self.limit_bytes} are taken; free some, or give the tier more bytes"
            )

    def _count(self) -> None:
        self.used_bytes = self._slots.used * self.slot_bytes + self._reserved
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _checked(self, ids: Any, pieces: int) -> int:
        if pieces < 0:
            total = self.planes * self.slots * self.units
            why = "the store is closed" if not len(self.memory) else f"there are {total} units"
            raise TransferError(f"unit {ids[-1 - pieces]} of {self.description}: {why}")
        return pieces
