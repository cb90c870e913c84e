"""The conformance kit of block stores."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pulse.errors import ChecksumError, ConfigError
from pulse.hookspecs import Build, StoreShape
from pulse.ports import BlockStore
from pulse.testing.arrays import Arrays, find_arrays
from pulse.testing.checking import (
    COMPLETE,
    RAISES_NOTHING,
    Broken,
    Checked,
    Property,
    Rule,
    attributes,
    refuses,
    require,
    search,
    told,
)
from pulse.testing.storerun import (
    ASCENDING,
    BOUNDS,
    BYTES,
    CAPACITY,
    COUNTS,
    FREES,
    PIECES,
    ROOM,
    SLOTS,
    StoreRun,
    pattern,
)
from pulse.testing.subjects import Subject, resolve

__all__ = ["RULES", "StoreMaker", "check_block_store"]

SHAPE = Rule(
    "shape",
    "a new store has the shape and the limit that it was built with, and nothing is used",
    "take slots, planes, units, unit_bytes and limit_bytes from Build.shape; start counting at 0",
)
THREADS = Rule(
    "threads",
    "several threads read and write disjoint units at once",
    "keep no shared cursor or buffer between calls of read and write, or guard it",
)
CLOSES = Rule(
    "closes",
    "close may be called twice, and another store can be made afterwards",
    "let the second close do nothing; remove files and let go of memory in the first",
)
CHECKSUM = Rule(
    "checksum",
    "a unit whose bytes are not those written raises ChecksumError when read, others do not",
    "keep a checksum per unit in write and compare it in read",
)

RULES = (
    *(COMPLETE, SHAPE, SLOTS, ASCENDING, CAPACITY, ROOM, COUNTS, FREES, BYTES, PIECES, BOUNDS),
    *(THREADS, CLOSES, CHECKSUM, RAISES_NOTHING),
)
"""The rules of this kit."""

_UNIT_BYTES = st.sampled_from([1, 8, 7, 24, 100, 512, 1000, 4096])
_PICKS = st.lists(st.integers(0, 63), min_size=1, max_size=5).map(tuple)
_COUNTING = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, 7)),
    st.tuples(st.just("free"), _PICKS),
    st.tuples(st.just("free_wrongly"), st.sampled_from(["free", "beyond", "negative", "twice"])),
    st.tuples(st.just("reserve"), st.integers(0, 200)),
    st.tuples(st.just("release"), st.integers(0, 200)),
)
_MOVING = st.one_of(
    st.tuples(st.just("write"), _PICKS),
    st.tuples(st.just("read"), _PICKS),
    st.tuples(st.just("outside"), st.booleans()),
)
_COUNTS = st.lists(_COUNTING, max_size=12)
_EVERYTHING = ("write", tuple(range(6 * 3 * 3)))
_MOVES = st.tuples(
    st.integers(1, 6).map(lambda count: ("allocate", count)),
    st.sampled_from([(), (_EVERYTHING,)]),
    st.lists(st.one_of(_MOVING, _MOVING, _COUNTING), max_size=8),
).map(lambda parts: [parts[0], *parts[1], *parts[2]])


@st.composite
def _shapes(draw: Any, *, whole: bool = False) -> StoreShape:
    slots, planes, units = (draw(st.integers(1, most)) for most in (6, 3, 3))
    unit_bytes = draw(_UNIT_BYTES)
    size = slots * planes * units * unit_bytes
    limit = draw(st.one_of(st.just(size), st.integers(0, size + 200))) if not whole else size
    return StoreShape(slots, planes, units, unit_bytes, limit)


_SMALL = StoreShape(1, 1, 1, 8, 8)


class StoreMaker:
    """Makes stores of one subject; those that need a file get one in `folder`."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        subject.need_fresh()
        self.subject = subject
        self._path = ""
        try:
            _close(self(_SMALL, probe=True))
        except ConfigError:
            self._path = str(folder / "arena")
            _close(self(_SMALL, probe=True))

    def __call__(self, shape: StoreShape, *, probe: bool = False) -> Any:
        """A store of that shape. Two at a time need two makers."""
        build = Build(shape=shape)
        if self._path:
            build = replace(build, argument=self._path)
        return self.subject.probe(build) if probe else self.subject.factory(build)


def check_block_store(
    store: Any,
    *,
    examples: int = 100,
    seed: int | None = None,
    arrays: Arrays | str | None = None,
    damage: Callable[[Any, int], None] | None = None,
) -> list[Checked]:
    """Check that a block store keeps the contract of `pulse.ports.BlockStore`.

    store: a registered name (``"host"``, ``"disk:PATH"``), ``"module:attribute"``, a
        `pulse.Plugin`, a class or a function; a callable gets a `Build` whose `shape` is set (or
        the shape itself, if its one parameter is called `shape`). A plugin that needs a file gets
        one in a temporary directory, as its argument.
    examples: examples per property, at most. seed: draws others; the same each time by default.
    arrays: how unit ids and byte buffers are made: ``"torch"`` (numpy arrays; the default where
        torch is installed), ``"null"`` (lists), or an object like
        `pulse.testing.arrays.Arrays`.
    damage: ``damage(store, unit)`` changes a byte of a written unit behind the store's back; with
        it the rule ``checksum`` is checked.

    Returns the rules that hold. Raises `Violation` with the smallest example that breaks one, and
    ConfigError for what cannot be checked at all.
    """
    subject = resolve(store, "store")
    if arrays is None and subject.name == "null":
        arrays = "null"
    with tempfile.TemporaryDirectory(prefix="pulse-check-") as folder:
        maker = StoreMaker(subject, Path(folder))
        kit = _Kit(maker, find_arrays(arrays), damage)
        return search(subject.label, kit.properties(), examples=examples, seed=seed)


class _Kit:
    def __init__(
        self, make: StoreMaker, arrays: Arrays, damage: Callable[[Any, int], None] | None
    ) -> None:
        self.make, self.arrays, self.damage = make, arrays, damage

    def properties(self) -> list[Property]:
        """In the order in which a store is mended."""
        counts = (SLOTS, ASCENDING, CAPACITY, ROOM, COUNTS, FREES, RAISES_NOTHING)
        moves = (BYTES, PIECES, BOUNDS)
        found = [
            Property((COMPLETE, SHAPE), _shapes(), self.new, 0.2),
            Property(counts, st.tuples(_shapes(), _COUNTS), self.steps),
            Property(moves, st.tuples(_shapes(whole=True), _MOVES), self.steps),
            Property((CLOSES,), _shapes(), self.close, 0.2),
            Property((THREADS,), st.tuples(st.integers(2, 4), _UNIT_BYTES), self.threads, 0.1),
        ]
        if self.damage is not None:
            found.append(Property((CHECKSUM,), st.tuples(_shapes(), _PICKS), self.damaged, 0.3))
        return found

    def new(self, shape: StoreShape) -> None:
        """What a store says of itself."""
        store = self.make(shape)
        try:
            numbers = ("limit_bytes", "slots", "planes", "units", "unit_bytes")
            zeros = ("used_bytes", "peak_bytes")
            types = dict.fromkeys((*numbers, *zeros), int)
            attributes(store, BlockStore, **types, kind=str, description=str)
            require(store.kind and store.description, SHAPE, "kind or description is empty")
            for name in numbers:
                want, got = getattr(shape, name), getattr(store, name)
                require(got == want, SHAPE, f"{name} is {got}, built with {want}")
            for name in zeros:
                require(getattr(store, name) == 0, SHAPE, f"{name} is {getattr(store, name)}")
        finally:
            _close(store)

    def steps(self, example: tuple[StoreShape, list[tuple[str, Any]]]) -> None:
        """Calls in any order, compared with a model."""
        shape, steps = example
        store = self.make(shape)
        try:
            run = StoreRun(store, shape, self.arrays)
            try:
                for verb, argument in steps:
                    getattr(run, verb)(argument)
                    run.check_counts()
                run.check_bytes()
            except Exception as error:
                error.story = run.story()  # type: ignore[attr-defined]
                raise
        finally:
            _close(store)

    def close(self, shape: StoreShape) -> None:
        """Twice, and then a new store in the same place."""
        for _ in range(2):
            try:
                store = self.make(shape)
            except Exception as error:
                raise Broken(CLOSES, f"after close, making another: {told(error)}") from error
            for _ in range(2):
                try:
                    store.close()
                except Exception as error:
                    raise Broken(CLOSES, told(error)) from error

    def threads(self, example: tuple[int, int]) -> None:
        """Each thread has slots of its own."""
        count, unit_bytes = example
        shape = StoreShape(count * 2, 2, 2, unit_bytes, count * 8 * unit_bytes)
        store = self.make(shape)
        failures: list[str] = []
        start = threading.Barrier(count)

        def work(first: int) -> None:
            units = [(p * shape.slots + first + s) * 2 + u
                     for p in (0, 1) for s in (0, 1) for u in (0, 1)]  # fmt: skip
            ids = self.arrays.integers(units)
            start.wait()
            try:
                for version in range(4):
                    rows = [pattern(unit, version, unit_bytes) for unit in units]
                    store.write(ids, self.arrays.buffer(rows, unit_bytes))
                    out = self.arrays.buffer([bytes(unit_bytes)] * len(units), unit_bytes)
                    store.read(ids, out)
                    if self.arrays.rows(out) != rows:
                        failures.append("a thread read other bytes than it had written")
            except Exception as error:
                failures.append(told(error))

        try:
            store.allocate(shape.slots)
            workers = [threading.Thread(target=work, args=(i * 2,)) for i in range(count)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            require(not failures, THREADS, failures[0] if failures else "")
        finally:
            _close(store)

    def damaged(self, example: tuple[StoreShape, tuple[int, ...]]) -> str | None:
        """One unit is damaged; it alone is refused."""
        assert self.damage is not None
        shape, picks = replace(example[0], limit_bytes=1 << 30), example[1]
        store = self.make(shape)
        try:
            run = StoreRun(store, shape, self.arrays)
            run.allocate(shape.slots)
            run.write(tuple(range(shape.planes * shape.slots * shape.units)))
            bad = run.chosen(picks)[0]
            self.damage(store, bad)
            out = self.arrays.buffer([bytes(shape.unit_bytes)], shape.unit_bytes)
            with refuses(ChecksumError, CHECKSUM, f"reading damaged unit {bad}"):
                store.read(self.arrays.integers([bad]), out)
            del run.held[bad]
            run.check_bytes()
        finally:
            _close(store)
        return None


def _close(store: Any) -> None:
    # One property is about closing; in the others it must not hide what was found.
    close = getattr(store, "close", None)
    if callable(close):
        try:
            close()
        except Exception:
            return
