"""Copies between an arena in memory and a buffer of rows, without the GIL.

Adjacent units become one copy. The copy itself is libc's `memcpy`: it takes any unit size and
alignment, and beats a loop over words that LLVM compiles (1.5 times at 8 KB units).
"""

from __future__ import annotations

from typing import Any

from numba import types

from pulse_store.jit import compiled

__all__ = ["gather_units", "memcpy", "scatter_units"]

# An external symbol and not a ctypes pointer: an address would make the code uncacheable.
memcpy: Any = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))


@compiled
def first_outside(units: Any, total: int) -> int:
    """Position of the first unit id that is not in ``[0, total)``; -1 when all are."""
    for i in range(units.size):
        if units[i] < 0 or units[i] >= total:
            return i
    return -1


@compiled
def gather_units(memory: Any, units: Any, out: Any) -> int:
    """Copy rows `units` (int64) of `memory` into `out`, both uint8 ``[_, unit_bytes]``.

    Returns the number of runs of adjacent units, or ``-1 - i`` without copying anything when
    ``units[i]`` is out of range.
    """
    bad = first_outside(units, memory.shape[0])
    if bad >= 0:
        return -1 - bad
    unit_bytes, source, target = memory.shape[1], memory.ctypes.data, out.ctypes.data
    start = pieces = 0
    while start < units.size:
        end = start + 1
        while end < units.size and units[end] == units[end - 1] + 1:
            end += 1
        size = (end - start) * unit_bytes
        memcpy(target + start * unit_bytes, source + units[start] * unit_bytes, size)
        pieces += 1
        start = end
    return pieces


@compiled
def scatter_units(memory: Any, units: Any, data: Any) -> int:
    """Copy the rows of `data` into rows `units` of `memory`; as `gather_units` otherwise."""
    bad = first_outside(units, memory.shape[0])
    if bad >= 0:
        return -1 - bad
    unit_bytes, target, source = memory.shape[1], memory.ctypes.data, data.ctypes.data
    start = pieces = 0
    while start < units.size:
        end = start + 1
        while end < units.size and units[end] == units[end - 1] + 1:
            end += 1
        size = (end - start) * unit_bytes
        memcpy(target + units[start] * unit_bytes, source + start * unit_bytes, size)
        pieces += 1
        start = end
    return pieces
