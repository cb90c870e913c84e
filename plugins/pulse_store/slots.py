"""Which slots of an arena are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.errors import StoreError

__all__ = ["SlotAllocator"]

Slots = NDArray[np.int64]


class SlotAllocator:
    """A free map over ``0 … slots - 1``. Not thread-safe: it belongs to the loop.

    slots: numbers that can be handed out.
    limit: slots that may be taken at once; all of them by default.
    used, peak: slots taken now, and at most so far.
    """

    def __init__(self, slots: int, limit: int | None = None) -> None:
        self.slots = slots
        self.limit = slots if limit is None else min(limit, slots)
        self.used = 0
        self.peak = 0
        self._free = np.ones(slots, dtype=np.bool_)
        self._lowest = 0  # no slot below it is free, so a search may start there

    def allocate(self, count: int) -> Slots:
        """Take `count` slots; their numbers, ascending, int64 ``[count]``.

        They are the lowest run of free slots that is long enough; where there is none, the
        longest runs, so that they form as few runs as possible. Raises StoreError.
        """
        if count < 0:
            raise StoreError(f"cannot allocate {count} slots; ask for 0 or more")
        if count > self.limit - self.used:
            raise StoreError(
                f"no room for {count} slots: {self.used} of {self.limit} are taken; "
                "free some, or give the tier more bytes"
            )
        if not count:
            return np.empty(0, dtype=np.int64)
        chosen = _choose(np.flatnonzero(self._free[self._lowest :]) + self._lowest, count)
        self._free[chosen] = False
        self.used += count
        self.peak = max(self.peak, self.used)
        if chosen[0] == self._lowest:
            self._lowest += 1
        return chosen

    def free(self, slots: Any) -> Slots:
        """Give slots back; they are returned as an int64 array. Raises StoreError, freeing none.

        A slot that is out of range, free already or named twice is an error.
        """
        numbers = _numbers(slots)
        if not numbers.size:
            return numbers
        ordered = np.sort(numbers)
        if ordered[0] < 0 or ordered[-1] >= self.slots:
            wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
            raise StoreError(f"slot {wrong} is not one of the {self.slots} slots; nothing is freed")
        repeated = ordered[1:] == ordered[:-1]
        if repeated.any():
            wrong = ordered[1:][repeated][0]
            raise StoreError(f"slot {wrong} is named twice; nothing is freed")
        if self._free[ordered].any():
            wrong = ordered[self._free[ordered]][0]
            raise StoreError(f"slot {wrong} is not allocated; nothing is freed")
        self._free[ordered] = True
        self.used -= ordered.size
        self._lowest = min(self._lowest, int(ordered[0]))
        return numbers


def _numbers(slots: Any) -> Slots:
    numbers = np.asarray(slots)
    if not numbers.size:
        return np.empty(0, dtype=np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise StoreError(
            f"slots must be a list of integers, not {numbers.dtype} of shape {numbers.shape}"
        )
    return numbers.astype(np.int64, copy=False)


def _choose(free: Slots, count: int) -> Slots:
    """`count` of the ascending numbers `free`, in few runs, ascending."""
    first = np.concatenate(([0], np.flatnonzero(np.diff(free) != 1) + 1))
    length = np.diff(np.append(first, free.size))
    fits = int(np.argmax(length >= count))
    if length[fits] >= count:
        return free[first[fits] : first[fits] + count].astype(np.int64)
    longest = np.argsort(-length, kind="stable")
    total = np.cumsum(length[longest])
    last = int(np.searchsorted(total, count))  # the run that is taken in part, or just whole
    take = np.zeros_like(length)
    take[longest[: last + 1]] = length[longest[: last + 1]]
    take[longest[last]] -= total[last] - count
    # Position k of the answer is the (k - before)-th slot of its run.
    before = np.cumsum(take) - take
    return free[np.repeat(first - before, take) + np.arange(count)].astype(np.int64)
