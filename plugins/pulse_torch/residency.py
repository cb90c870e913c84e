"""Block tables and residency for a whole cohort, in compiled code.

The planning kernel decides per sequence, layer and selection group which needed blocks are
resident, which slots the missing ones take, and the block table that attention reads. Slots are
replaced by least recent selection. Columns ``[0, own)`` of a sequence's slots belong to one layer
and keep their block from step to step; columns ``[own, usable)`` are shared by its layers and hold
a block only until the layer's attention is done, which lets a fast tier smaller than the hot sets
of all layers still serve the sequence.
"""

from __future__ import annotations

import numba
import numpy as np

__all__ = ["OUT_OF_RANGE", "plan_hot", "ring_table"]

OUT_OF_RANGE = -1
"""Returned when a selection names a block that is not open to selection."""
NOT_RESIDENT = -2
"""Returned when the block being written has lost its slot; a fault of the caller."""


@numba.njit(nogil=True, cache=True)
def _middle(selection, low, high, need, at):  # type: ignore[no-untyped-def]
    # Sorted, without duplicates and padding; -1 if a block is out of range.
    first = at
    for block in selection:
        if block < 0:
            continue
        if block < low or block >= high:
            return -1
        need[at] = block
        at += 1
    need[first:at].sort()
    end = first
    for i in range(first, at):
        if i == first or need[i] != need[end - 1]:
            need[end] = need[i]
            end += 1
    return end


@numba.njit(nogil=True, cache=True)
def _victim(resident, stamp, clock, own):  # type: ignore[no-untyped-def]
    # A free column of the layer's own, else the one selected longest ago, else -1.
    best = -1
    for column in range(own):
        if resident[column] < 0:
            return column
        if stamp[column] < clock and (best < 0 or stamp[column] < stamp[best]):
            best = column
    return best


@numba.njit(nogil=True, cache=True)
def _holds(resident, own, block):  # type: ignore[no-untyped-def]
    for column in range(own):  # noqa: SIM110 - numba compiles no generator expressions
        if resident[column] == block:
            return True
    return False


@numba.njit(nogil=True, cache=True)
def plan_hot(  # type: ignore[no-untyped-def]
    rows,
    starts,
    selection,
    plane,
    clock,
    block,
    sink_blocks,
    local_blocks,
    slow_slots,
    units,
    resident,
    stamp,
    own,
    usable,
    slow,
    table,
    count,
    source,
    target,
    bounds,
):
    """Plan one layer of an offload cohort; long because it is one pass over every needed block.

    rows, starts: ``[B]`` pool rows and positions of the token being computed. selection:
    ``[B, S, k]`` block ids, -1 for none. plane: the layer's number among the growing ones.
    units, resident, stamp: ``[rows, planes, S, columns]`` fast unit ids, resident block (or -1)
    and clock of the last selection. own, usable: ``[rows]`` columns. slow: ``[rows, blocks]`` slow
    slots. Written: table ``[B, S, width]``, count ``[B, S]``, source and target (slow and fast
    units of the misses), bounds ``[B + 1]``. Returns the misses, or a negative error.
    """
    groups = units.shape[2]
    width = table.shape[2]
    # Where a block was last seen; entries go stale, so each use checks that it is still there.
    where = np.full(slow.shape[1], -1, np.int32)
    missing = np.empty(width, np.int64)
    misses = 0
    bounds[0] = 0
    # Everything is checked before anything is changed: a plan that fails half-way would leave
    # blocks marked as resident that nobody recalls.
    for b in range(rows.shape[0]):
        local = max(0, starts[b] // block - local_blocks + 1)
        for s in range(groups):
            if _middle(selection[b, s], min(sink_blocks, local), local, table[b, s], 0) < 0:
                return OUT_OF_RANGE
            held = resident[rows[b], plane, s]
            if starts[b] % block and not _holds(held, own[rows[b]], starts[b] // block):
                return NOT_RESIDENT
    for b in range(rows.shape[0]):
        row = rows[b]
        current = starts[b] // block
        local = max(0, current - local_blocks + 1)
        sink = min(sink_blocks, local)
        for s in range(groups):
            held = resident[row, plane, s]
            used = stamp[row, plane, s]
            unit = units[row, plane, s]
            need = table[b, s]
            for i in range(sink):
                need[i] = i
            end = _middle(selection[b, s], sink, local, need, sink)
            middle_end = end
            for i in range(local, current + 1):
                need[end] = i
                end += 1
            count[b, s] = end
            for column in range(own[row], usable[row]):
                held[column] = -1
            for column in range(own[row]):
                if held[column] >= 0:
                    where[held[column]] = column
            # Pinned blocks first: a middle block may have to make room for the one being written,
            # which must not share a slot with other layers.
            for rank in range(2):
                absent = 0
                for i in range(end):
                    if (sink <= i < middle_end) != (rank == 1):
                        continue
                    column = where[need[i]]
                    if 0 <= column < own[row] and held[column] == need[i]:
                        used[column] = clock
                        need[i] = unit[column]
                    else:
                        missing[absent] = i
                        absent += 1
                spill = own[row]
                for m in range(absent):
                    i = missing[m]
                    column = _victim(held, used, clock, own[row])
                    if column < 0:
                        column = spill
                        spill += 1
                    name = need[i]
                    held[column] = name
                    used[column] = clock
                    need[i] = unit[column]
                    if name == current:
                        continue  # it begins here: there is nothing to recall
                    source[misses] = (plane * slow_slots + slow[row, name]) * groups + s
                    target[misses] = unit[column]
                    misses += 1
        bounds[b + 1] = misses
    return misses


@numba.njit(nogil=True, cache=True)
def ring_table(rows, starts, ring, length, window, block, table, count, skip, tail):  # type: ignore[no-untyped-def]
    """Block tables of sequences that keep a layer's last `window` tokens (0: all) in a ring.

    ring: ``[rows, blocks]`` fast slots, of which a row uses ``length[row]``; block b is in slot
    ``b % length``. Written: table ``[B, 1, width]``, count ``[B, 1]``, skip and tail ``[B]``.
    """
    for b in range(rows.shape[0]):
        row = rows[b]
        current = starts[b] // block
        oldest = max(0, starts[b] - window + 1) if window > 0 else 0
        first = oldest // block
        for i in range(first, current + 1):
            table[b, 0, i - first] = ring[row, i % length[row]]
        count[b, 0] = current - first + 1
        skip[b] = oldest - first * block
        tail[b] = starts[b] % block + 1
