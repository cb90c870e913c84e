"""Shapes, buffers and memory that the stores share."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.errors import StoreError, TransferError

__all__ = ["Bytes", "Layout", "reserve", "rows", "unit_ids"]

Bytes = NDArray[np.uint8]

HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape ``[planes, slots, units, unit_bytes]`` of an arena."""

    slots: int
    planes: int
    units: int
    unit_bytes: int

    def __post_init__(self) -> None:
        for name in ("slots", "planes", "units", "unit_bytes"):
            if getattr(self, name) < 1:
                raise StoreError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all planes."""
        return self.planes * self.units * self.unit_bytes

    @property
    def total(self) -> int:
        """How many unit ids there are."""
        return self.planes * self.slots * self.units

    def limit(self, limit_bytes: int | None) -> int:
        """`limit_bytes`, or the bytes of all slots. Raises StoreError for less than nothing."""
        if limit_bytes is None:
            return self.slots * self.slot_bytes
        if limit_bytes < 0:
            raise StoreError(f"limit_bytes={limit_bytes} must be 0 or more")
        return limit_bytes


def reserve(size: int) -> Bytes:
    """`size` bytes of zeroed anonymous memory that is not backed until it is touched.

    Aligned to a huge page, in huge pages where the system has them: 4 KB pages cost a scattered
    copy a fifth and more. The memory goes when the last view of it does. Raises StoreError.
    """
    try:
        # Private: shared anonymous memory lives in tmpfs, which rarely has huge pages.
        area = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise StoreError(
            f"cannot reserve {size} bytes of memory: {error}; give the tier fewer bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower, not wrong
            area.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(area, dtype=np.uint8)
    start = -int(memory.ctypes.data) % HUGE_PAGE
    return memory[start : start + size]


def unit_ids(units: Any) -> NDArray[np.int64]:
    """`units` as a contiguous int64 array. Raises TransferError for what are not integers."""
    ids = np.asarray(units)
    if not ids.size:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TransferError(
            f"units must be a list of integers, not {ids.dtype} of shape {ids.shape}"
        )
    return np.ascontiguousarray(ids, dtype=np.int64)


def rows(buffer: Any, count: int, unit_bytes: int, *, writable: bool) -> Bytes:
    """A byte buffer seen as uint8 ``[count, unit_bytes]``, without a copy.

    Raises TransferError when it is not contiguous, has another size or cannot be written.
    """
    try:
        flat = np.frombuffer(buffer, dtype=np.uint8) if count else np.empty(0, dtype=np.uint8)
    except (ValueError, TypeError, BufferError) as error:
        raise TransferError(f"{type(buffer).__name__} is no contiguous byte buffer") from error
    if flat.size != count * unit_bytes:
        raise TransferError(
            f"a buffer of {flat.size} bytes does not hold {count} units of {unit_bytes} bytes"
        )
    if writable and not flat.flags.writeable:
        raise TransferError("the buffer to read into is read-only")
    return flat.reshape(count, unit_bytes)
