"""A tier in one file, every unit checksummed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pulse.errors import ChecksumError, StoreError, TransferError
from pulse_store.arena import Bytes, Layout, reserve, rows, unit_ids
from pulse_store.blocks import MISMATCH, OUTSIDE, UNWRITTEN, read_blocks, write_blocks
from pulse_store.file import open_file
from pulse_store.slots import SlotAllocator, Slots

__all__ = ["DiskStore"]


class DiskStore:
    """Slots in a file that is removed with the store, also when the process dies.

    path: a file that does not exist yet. Its name is gone as soon as the store is built.
    slots, planes, units, unit_bytes: the arena's shape, see `pulse.ports.BlockStore`.
    limit_bytes: bytes that may be allocated and reserved; those of the slots by default.
    direct: use O_DIRECT where the file system takes it and the unit size suits; `description`
        tells what came of it.
    run_bytes: adjacent units are read and written together up to this size; each thread in
        `read` or `write` has a buffer of it.

    A unit can be read once it was written, until its slot is freed. Bytes on disk may exceed
    `limit_bytes`: with O_DIRECT units are padded to the device's blocks. Raises StoreError.
    """

    kind = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        slots: int,
        planes: int,
        units: int,
        unit_bytes: int,
        limit_bytes: int | None = None,
        *,
        direct: bool = True,
        run_bytes: int = 1 << 20,
    ) -> None:
        layout = Layout(slots, planes, units, unit_bytes)
        self.path = Path(path)
        self.slots = slots
        self.planes = planes
        self.units = units
        self.unit_bytes = unit_bytes
        self.slot_bytes = layout.slot_bytes
        self.limit_bytes = layout.limit(limit_bytes)
        self.used_bytes = 0
        self.peak_bytes = 0
        self._reserved = 0
        self._slots = SlotAllocator(slots, self.limit_bytes // layout.slot_bytes)
        self._sums = np.zeros(layout.total, dtype=np.uint64)
        self._file = open_file(self.path, layout.total, unit_bytes, direct=direct)
        mode = f"buffered: {self._file.reason}" if self._file.reason else "O_DIRECT"
        self.description = f"disk {self.path}, {mode}"
        self._bounce_bytes = max(1, run_bytes // self._file.stride) * self._file.stride
        self._bounces: list[Bytes] = []
        self._gate = _Gate()
        self._compile()

    def allocate(self, count: int) -> Slots:
        """`count` free slot numbers, int64, ascending, in few runs. Raises StoreError."""
        self._fit(count * self.slot_bytes)
        slots = self._slots.allocate(count)
        self._count()
        return slots

    def free(self, slots: Any) -> None:
        """Give slots back; what they hold cannot be read any more. Raises StoreError."""
        freed = self._slots.free(slots)
        # The next owner must not read the last one's bytes.
        self._sums.reshape(self.planes, self.slots, self.units)[:, freed] = 0
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
        """Copy units into `out`; returns the runs of adjacent units.

        Raises TransferError (a failed read, a unit that was never written) and ChecksumError.
        `out` may hold some of the units then.
        """
        ids = unit_ids(units)
        buffer = rows(out, ids.size, self.unit_bytes, writable=True)
        return self._move(read_blocks, "read", ids, buffer)

    def write(self, units: Any, data: Any) -> int:
        """Copy the rows of `data` into units; returns the runs of adjacent units.

        Raises TransferError; the units count as never written then.
        """
        ids = unit_ids(units)
        buffer = rows(data, ids.size, self.unit_bytes, writable=False)
        return self._move(write_blocks, "write", ids, buffer)

    def close(self) -> None:
        """Wait for reads and writes that are under way, and give the space back. Idempotent."""
        if self._gate.close():
            os.close(self._file.fd)
            self._bounces.clear()

    def _move(self, blocks: Callable[..., Any], verb: str, ids: Slots, buffer: Bytes) -> int:
        order = _order(ids)
        with self._gate.held(self.description), self._bounce() as bounce:
            code, unit, pieces = blocks(
                self._file.fd, ids[order], order, buffer, bounce, self._file.stride, self._sums
            )
        if code:
            raise self._error(verb, int(code), int(unit))
        return int(pieces)

    @contextmanager
    def _bounce(self) -> Iterator[Bytes]:
        """A buffer that no other thread uses meanwhile. (A list's append and pop are atomic.)"""
        try:
            bounce = self._bounces.pop()
        except IndexError:
            bounce = reserve(self._bounce_bytes)
        try:
            yield bounce
        finally:
            self._bounces.append(bounce)

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

    def _error(self, verb: str, code: int, unit: int) -> TransferError:
        where = f"unit {unit} of {self.description}"
        if code == UNWRITTEN:
            return TransferError(f"{where} was never written; only written units can be read")
        if code == OUTSIDE:
            return TransferError(f"{where}: there are {self._sums.size} units")
        if code == MISMATCH:
            return ChecksumError(
                f"{where} is not what was written; the disk or its memory is failing"
            )
        name = errno.errorcode.get(code, str(code))
        return TransferError(f"cannot {verb} {where}: {os.strerror(code)} ({name})")


class _Gate:
    """Counts who is inside, so that a descriptor is not closed under a thread that uses it."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed = False
        self._change = threading.Condition()

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """Be inside. Raises TransferError when closed."""
        with self._change:
            if self._closed:
                raise TransferError(f"{what} is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._change:
                self._inside -= 1
                self._change.notify_all()

    def close(self) -> bool:
        """Let nobody in any more and wait until all are out; False when closed before."""
        with self._change:
            already, self._closed = self._closed, True
            self._change.wait_for(lambda: not self._inside)
        return not already


def _order(ids: Slots) -> Slots:
    """Positions of `ids` in ascending order of id, equal ones in their own order."""
    if (ids[1:] >= ids[:-1]).all():
        return np.arange(ids.size, dtype=np.int64)
    return np.argsort(ids, kind="stable").astype(np.int64, copy=False)
