"""A block store beside a model of it: every call is made on both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pulse.errors import StoreError, TransferError
from pulse.hookspecs import StoreShape
from pulse.testing.arrays import Arrays
from pulse.testing.checking import Broken, Rule, refuses, require, told

__all__ = [
    "ASCENDING",
    "BOUNDS",
    "BYTES",
    "CAPACITY",
    "COUNTS",
    "FREES",
    "PIECES",
    "ROOM",
    "SLOTS",
    "StoreRun",
    "pattern",
]

SLOTS = Rule(
    "slots",
    "allocate(n) gives n different slots of the arena that nobody has",
    "keep one set of free slot numbers; take from it in allocate, give back to it in free",
)
ASCENDING = Rule(
    "ascending",
    "an empty store allocates one ascending run of slot numbers",
    "hand out the lowest free slots in order, so that a sequence's blocks are adjacent",
)
CAPACITY = Rule(
    "capacity",
    "what does not fit in the slots or under limit_bytes is refused with StoreError, and nothing "
    "changes",
    "check both before anything is taken: the free slots, and used_bytes plus the new bytes",
)
ROOM = Rule(
    "room",
    "what fits in the free slots and under limit_bytes is given",
    "count exactly: a slot is planes * units * unit_bytes bytes, given back by free and release",
)
COUNTS = Rule(
    "counts",
    "used_bytes is what is allocated and reserved now, peak_bytes its highest value so far",
    "update both in allocate, free, reserve and release, and only when they succeed",
)
FREES = Rule(
    "frees",
    "freeing a slot that is not allocated raises StoreError, and nothing is freed",
    "check all slots (range, allocated, named once) before the first one is given back",
)
BYTES = Rule(
    "bytes",
    "a read returns the bytes that were written last, and no call changes another unit",
    "unit (plane * slots + slot) * units + part must have bytes of its own; copy row i to unit i",
)
PIECES = Rule(
    "pieces",
    "read and write return the number of contiguous pieces: from 1 to the number of units, or 0 "
    "for no units",
    "return the runs of adjacent units that were moved, as an int",
)
BOUNDS = Rule(
    "bounds",
    "a unit outside the arena is refused with TransferError, and nothing is written",
    "check all ids against 0 <= id < planes * slots * units before the first byte moves",
)


def pattern(unit: int, version: int, size: int) -> bytes:
    """`size` bytes that tell which unit they belong to and which write they come from."""
    return hashlib.shake_128(f"{unit}.{version}".encode()).digest(size)


class StoreRun:
    """One store and a model of it: what is taken, what is reserved, what each unit holds."""

    def __init__(self, store: Any, shape: StoreShape, arrays: Arrays) -> None:
        self.store, self.shape, self.arrays = store, shape, arrays
        self.taken: list[int] = []
        self.held: dict[int, bytes] = {}
        self.reserved = self.used = self.peak = self.version = 0
        self.slot_bytes = shape.planes * shape.units * shape.unit_bytes
        self.log: list[str] = []

    def story(self) -> str:
        """The calls so far."""
        s = self.shape
        about = (
            f"slots={s.slots}, planes={s.planes}, units={s.units}, unit_bytes={s.unit_bytes}, "
            f"limit_bytes={s.limit_bytes}"
        )
        return "\n".join([f"a store of {about}", *self.log])

    # -- slots ---------------------------------------------------------------------------------

    def allocate(self, count: int) -> None:
        """Given if it fits, else refused."""
        self.log.append(f"allocate({count})")
        free = self.shape.slots - len(self.taken)
        if count > free or self.used + count * self.slot_bytes > self.shape.limit_bytes:
            why = f"{free} slots and {self.shape.limit_bytes - self.used} bytes are free"
            with refuses(StoreError, CAPACITY, f"allocate({count}), when {why},"):
                self.store.allocate(count)
            return
        with _given():
            got = list(self.arrays.tolist(self.store.allocate(count)))
        self.log[-1] += f" -> {got}"
        require(len(got) == count and len(set(got)) == count, SLOTS, f"{count} asked for: {got}")
        wrong = [s for s in got if not 0 <= s < self.shape.slots or s in self.taken]
        require(not wrong, SLOTS, f"slot {wrong[:1]} is taken or not in the arena")
        ascending = got == list(range(min(got, default=0), min(got, default=0) + count))
        require(self.taken or ascending, ASCENDING, f"allocate({count}) gave {got}")
        self.taken += got
        self._use(count * self.slot_bytes)

    def free(self, picks: Sequence[int]) -> None:
        """Some of the slots that are taken."""
        slots = sorted({self.taken[pick % len(self.taken)] for pick in picks if self.taken})
        self.log.append(f"free({slots})")
        self.store.free(self.arrays.integers(slots))
        self.taken = [slot for slot in self.taken if slot not in slots]
        for unit in self._units(slots):
            self.held.pop(unit, None)
        self._use(-len(slots) * self.slot_bytes)

    def free_wrongly(self, how: str) -> None:
        """A taken slot together with one that cannot be freed."""
        idle = [slot for slot in range(self.shape.slots) if slot not in self.taken]
        wrong = {"free": idle[:1], "twice": self.taken[:1], "beyond": [self.shape.slots]}
        slots = [*self.taken[:1], *wrong.get(how, [-1])]
        if len(slots) == len(self.taken[:1]):
            return
        self.log.append(f"free({slots})")
        with refuses(StoreError, FREES, f"free({slots}), when {sorted(self.taken)} are allocated,"):
            self.store.free(self.arrays.integers(slots))

    def reserve(self, count: int) -> None:
        """Given if it fits, else refused."""
        self.log.append(f"reserve({count})")
        if self.used + count > self.shape.limit_bytes:
            what = f"reserve({count}), when {self.used} of {self.shape.limit_bytes} are used,"
            with refuses(StoreError, CAPACITY, what):
                self.store.reserve(count)
            return
        with _given():
            self.store.reserve(count)
        self.reserved += count
        self._use(count)

    def release(self, count: int) -> None:
        """Some of what is reserved."""
        count = min(count, self.reserved)
        self.log.append(f"release({count})")
        self.store.release(count)
        self.reserved -= count
        self._use(-count)

    def check_counts(self) -> None:
        """The store counts as the model does."""
        for name, want in (("used_bytes", self.used), ("peak_bytes", self.peak)):
            got = getattr(self.store, name)
            require(got == want, COUNTS, f"{name} is {got} instead of {want}")

    # -- bytes ---------------------------------------------------------------------------------

    def chosen(self, picks: Sequence[int]) -> list[int]:
        """Different units of slots that are taken, in the order of `picks`."""
        units = self._units(self.taken)
        return list(dict.fromkeys(units[pick % len(units)] for pick in picks)) if units else []

    def write(self, picks: Sequence[int]) -> None:
        """New bytes to some units."""
        self.version += 1
        units, size = self.chosen(picks), self.shape.unit_bytes
        self.log.append(f"write({units})")
        rows = [pattern(unit, self.version, size) for unit in units]
        pieces = self.store.write(self.arrays.integers(units), self.arrays.buffer(rows, size))
        self.held.update(zip(units, rows, strict=True))
        self._pieces(pieces, len(units))

    def read(self, picks: Sequence[int]) -> None:
        """Some units that were written, one of them twice."""
        written = [unit for unit in self.chosen(picks) if unit in self.held]
        units = written + written[:1]
        self.log.append(f"read({units})")
        self._pieces(self._compare(units), len(units))

    def outside(self, writes: bool) -> None:
        """A unit after the last and one before the first, each beside one that is there."""
        size = self.shape.unit_bytes
        for wrong in (self.shape.planes * self.shape.slots * self.shape.units, -1):
            units = [*list(self.held)[:1], wrong]
            verb = "write" if writes else "read"
            self.log.append(f"{verb}({units})")
            buffer = self.arrays.buffer([pattern(0, -1, size)] * len(units), size)
            with refuses(TransferError, BOUNDS, f"{verb} of unit {wrong}"):
                getattr(self.store, verb)(self.arrays.integers(units), buffer)
            self.log[-1] += " is refused"
            self.check_bytes(BOUNDS)

    def check_bytes(self, rule: Rule = BYTES) -> None:
        """Every unit that was written holds what it should."""
        self._compare(list(self.held), rule)

    def _compare(self, units: Sequence[int], rule: Rule = BYTES) -> int:
        size = self.shape.unit_bytes
        out = self.arrays.buffer([bytes(size)] * len(units), size)
        pieces: int = self.store.read(self.arrays.integers(units), out)
        for unit, row in zip(units, self.arrays.rows(out), strict=True):
            want = self.held[unit]
            seen = f"unit {unit} holds {row[:8].hex()}…, written was {want[:8].hex()}…"
            require(row == want, rule, seen)
        return pieces

    def _pieces(self, pieces: Any, units: int) -> None:
        good = min(1, units) <= pieces <= units
        require(isinstance(pieces, int) and good, PIECES, f"{pieces!r} for {units} units")

    def _units(self, slots: Sequence[int]) -> list[int]:
        shape = self.shape
        return [
            (plane * shape.slots + slot) * shape.units + part
            for plane in range(shape.planes)
            for slot in slots
            for part in range(shape.units)
        ]

    def _use(self, more: int) -> None:
        self.used += more
        self.peak = max(self.peak, self.used)


@contextmanager
def _given() -> Iterator[None]:
    """The body is something that fits, so StoreError breaks the rule `room`."""
    try:
        yield
    except StoreError as error:
        raise Broken(ROOM, told(error)) from error
