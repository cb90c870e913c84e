"""Reads and writes of checksummed units in a file, without the GIL.

Rows of the file are ``stride`` bytes apart, a multiple of 8 and of what the device asks of direct
I/O. Everything passes through a *bounce* buffer with the same stride: runs of adjacent units are
one `pread` or `pwrite`, and each row is hashed and copied while it is in the caches.
"""

from __future__ import annotations

import errno
import sys
from typing import Any

import numba
import numpy as np
from numba import types

from pulse_store.copy import first_outside, memcpy
from pulse_store.jit import compiled

__all__ = ["MISMATCH", "OUTSIDE", "UNWRITTEN", "checksum", "read_blocks", "write_blocks"]

UNWRITTEN = -1
"""Code of a read of a unit that nothing was written to."""
MISMATCH = -2
"""Code of a unit whose bytes are not those that were written."""
OUTSIDE = -3
"""Code of a unit id that is out of range."""

EINTR = errno.EINTR
EIO = errno.EIO

_ERRNO = "__error" if sys.platform == "darwin" else "__errno_location"
errno_address: Any = types.ExternalFunction(_ERRNO, types.CPointer(types.int32)())
_IO = types.int64(types.int32, types.uintp, types.uintp, types.int64)
pread: Any = types.ExternalFunction("pread", _IO)
pwrite: Any = types.ExternalFunction("pwrite", _IO)

PRIME = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
SEEDS = np.array(
    [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
    dtype=np.uint64,
)


@compiled
def checksum(words: Any) -> Any:
    """A 64-bit hash of uint64 words, never 0. Detects accidents, not forgeries.

    Four lanes hide the latency of the multiplication. A step is a bijection of the lane, so one
    changed word always changes the hash; the shift carries high bits down, which a
    multiplication alone never does.
    """
    a, b, c, d = SEEDS[0], SEEDS[1], SEEDS[2], SEEDS[3]
    whole = words.size & ~3
    for i in range(0, whole, 4):
        a = (a ^ words[i]) * PRIME
        b = (b ^ words[i + 1]) * PRIME
        c = (c ^ words[i + 2]) * PRIME
        d = (d ^ words[i + 3]) * PRIME
        a ^= a >> HALF
        b ^= b >> HALF
        c ^= c >> HALF
        d ^= d >> HALF
    for i in range(whole, words.size):
        a = (a ^ words[i]) * PRIME
        a ^= a >> HALF
    for lane in (b, c, d):
        a = (a ^ lane) * PRIME
        a ^= a >> HALF
    return a if a != np.uint64(0) else PRIME


@compiled
def last_errno() -> Any:
    """`errno` of this thread."""
    return numba.carray(errno_address(), 1)[0]


@compiled
def move_fully(reads: bool, fd: int, address: int, size: int, offset: int) -> int:
    """`pread` or `pwrite` all of `size` bytes; 0, or an errno (EIO at the end of the file)."""
    done = 0
    while done < size:
        if reads:
            moved = pread(fd, address + done, size - done, offset + done)
        else:
            moved = pwrite(fd, address + done, size - done, offset + done)
        if moved > 0:
            done += moved
        elif moved == 0:
            return EIO
        else:
            code: int = last_errno()
            if code != EINTR:
                return code
    return 0


@compiled
def run_end(units: Any, start: int, most: int) -> int:
    """End of the run at `start` of ascending units, equal or adjacent, spanning at most `most`."""
    end = start + 1
    while (
        end < units.size and units[end] <= units[end - 1] + 1 and units[end] < units[start] + most
    ):
        end += 1
    return end


@compiled
def read_blocks(
    fd: int, units: Any, order: Any, out: Any, bounce: Any, stride: int, sums: Any
) -> tuple[int, int, int]:
    """Read ``units[k]`` (ascending, int64) into row ``order[k]`` of `out`, for all k.

    out: uint8 ``[n, unit_bytes]``. bounce: uint8, at least `stride` bytes, aligned. sums: uint64
    ``[total units]``, 0 where nothing was written. Returns a code (0, an errno, or one of this
    module's), the unit it is about, and the number of runs read.
    """
    bad = first_outside(units, sums.size)
    if bad >= 0:
        return OUTSIDE, units[bad], 0
    for k in range(units.size):
        if sums[units[k]] == np.uint64(0):
            return UNWRITTEN, units[k], 0
    unit_bytes, row_words = out.shape[1], (out.shape[1] + 7) // 8
    words, buffer, target = bounce.view(np.uint64), bounce.ctypes.data, out.ctypes.data
    start = pieces = 0
    while start < units.size:
        first = units[start]
        end = run_end(units, start, bounce.size // stride)
        span = (units[end - 1] - first + 1) * stride
        code = move_fully(True, fd, buffer, span, first * stride)
        if code:
            return code, first, pieces
        for k in range(start, end):
            row = (units[k] - first) * stride
            if checksum(words[row // 8 : row // 8 + row_words]) != sums[units[k]]:
                return MISMATCH, units[k], pieces
            memcpy(target + order[k] * unit_bytes, buffer + row, unit_bytes)
        pieces += 1
        start = end
    return 0, -1, pieces


@compiled
def write_blocks(
    fd: int, units: Any, order: Any, data: Any, bounce: Any, stride: int, sums: Any
) -> tuple[int, int, int]:
    """Write row ``order[k]`` of `data` to ``units[k]``; as `read_blocks` otherwise.

    A unit whose write fails counts as never written: its bytes may be old, new or both.
    """
    bad = first_outside(units, sums.size)
    if bad >= 0:
        return OUTSIDE, units[bad], 0
    unit_bytes, row_words = data.shape[1], (data.shape[1] + 7) // 8
    words, buffer, source = bounce.view(np.uint64), bounce.ctypes.data, data.ctypes.data
    start = pieces = 0
    while start < units.size:
        first = units[start]
        end = run_end(units, start, bounce.size // stride)
        span = (units[end - 1] - first + 1) * stride
        for k in range(start, end):
            row = (units[k] - first) * stride
            sums[units[k]] = 0
            words[row // 8 + row_words - 1] = 0  # the hash covers the last word's unused bytes
            memcpy(buffer + row, source + order[k] * unit_bytes, unit_bytes)
        code = move_fully(False, fd, buffer, span, first * stride)
        if code:
            return code, first, pieces
        for k in range(start, end):
            row = (units[k] - first) * stride
            sums[units[k]] = checksum(words[row // 8 : row // 8 + row_words])
        pieces += 1
        start = end
    return 0, -1, pieces
