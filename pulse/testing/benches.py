"""Where a transfer engine is put to the test: two stores, plans between them, and gates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pulse.errors import ConfigError
from pulse.hookspecs import Build, StoreShape
from pulse.plugins import Plugins
from pulse.ports import TransferEngine
from pulse.testing.arrays import Arrays, find_arrays
from pulse.testing.checking import (
    RAISES_NOTHING,
    Broken,
    Rule,
    Stuck,
    attributes,
    require,
    told,
)
from pulse.testing.storerun import pattern
from pulse.testing.stores import StoreMaker
from pulse.testing.subjects import Subject, resolve
from pulse.testing.transferrules import CLOSES
from pulse.types import Geometry, TransferPlan, TransferReport

__all__ = ["BUILD", "Bench", "Case", "Move", "Pair", "Watch", "cases", "pairs_for", "run", "turns"]

GEOMETRY = Geometry(2, 2, 1, 8, 4096, 256, "float32", 4, (None, None), "kit")
BUILD = Build(geometry=GEOMETRY, device="cpu")
"""What factories of transfer engines are given."""

UNIT_BYTES = (8, 1, 7, 24, 1000, 4096)
PARTS = 2


@dataclass(frozen=True)
class Move:
    """One plan: slow and fast unit ids, and whether it goes back from fast to slow."""

    slow: tuple[int, ...]
    fast: tuple[int, ...]
    back: bool


@dataclass(frozen=True)
class Case:
    """Two stores of `slots` slots and plans between them, none of which touches another's units."""

    stores: str
    slots: int
    unit_bytes: int
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Pair:
    """Makers of a slow and a fast store, and the arrays that both take."""

    name: str
    slow: StoreMaker
    fast: StoreMaker
    arrays: Arrays


@st.composite
def cases(draw: Any, names: Sequence[str], *, most: int = 1, least: int = 0) -> Case:
    """Cases with up to `most` plans of at least `least` units.

    Units of one plan's target are distinct; where it recalls, a source unit may occur twice.
    """
    name = draw(st.sampled_from(list(names)))
    slots = draw(st.integers(max(1, least * most), 12))
    fast = draw(st.permutations(range(slots * PARTS)))
    slow = draw(st.permutations(range(2 * slots * PARTS)))
    moves = []
    at = 0
    for _ in range(draw(st.integers(1, most)) if most > 1 else 1):
        size = draw(st.integers(least, max(least, len(fast) // most)))
        back = draw(st.booleans())
        mine = list(slow[at : at + size])
        if size > 1 and not back and draw(st.booleans()):
            mine[-1] = mine[0]
        moves.append(Move(tuple(mine), tuple(fast[at : at + size]), back))
        at += size
    return Case(name, slots, draw(st.sampled_from(UNIT_BYTES)), tuple(moves))


class Bench:
    """Two filled stores and what they should hold. One event loop's, one example's."""

    def __init__(self, pair: Pair, case: Case, engine: Any) -> None:
        self.case, self.engine, self.arrays = case, engine, pair.arrays
        size = case.slots * PARTS * case.unit_bytes
        self.slow = pair.slow(StoreShape(case.slots, 2, PARTS, case.unit_bytes, 2 * size))
        self.fast = pair.fast(StoreShape(case.slots, 1, PARTS, case.unit_bytes, size))
        self.held: list[tuple[Any, list[bytes]]] = []
        for store in (self.slow, self.fast):
            store.allocate(case.slots)
            rows = [
                pattern(unit, store.planes, case.unit_bytes)
                for unit in range(store.planes * case.slots * PARTS)
            ]
            self.write(store, range(len(rows)), rows)
            self.held.append((store, rows))

    def plan(self, move: Move) -> TransferPlan:
        """The plan of a move."""
        slow, fast = self.arrays.integers(move.slow), self.arrays.integers(move.fast)
        count = len(move.slow)
        names = ("request",) if count else ()
        ends = (
            (self.fast, self.slow, fast, slow) if move.back else (self.slow, self.fast, slow, fast)
        )
        bounds = (0, count) if count else (0,)
        return TransferPlan(*ends, count, self.case.unit_bytes, 0, names, bounds)

    def call(self, move: Move) -> Awaitable[TransferReport]:
        """Call the engine; what it returned."""
        plan = self.plan(move)
        awaitable: Awaitable[TransferReport]
        awaitable = self.engine.write_back(plan) if move.back else self.engine.recall(plan)
        return awaitable

    def start(self, move: Move) -> asyncio.Task[TransferReport]:
        """A task that calls and awaits."""

        async def moving() -> TransferReport:
            return await self.call(move)

        return asyncio.create_task(moving())

    def moved(self, move: Move) -> None:
        """From now on the target should hold the source's bytes."""
        (_, slow), (_, fast) = self.held
        for s, f in zip(move.slow, move.fast, strict=True):
            if move.back:
                slow[s] = fast[f]
            else:
                fast[f] = slow[s]

    def mark(self, move: Move) -> None:
        """Write other bytes into the move's target, as its next owner would."""
        store, units = (self.slow, move.slow) if move.back else (self.fast, move.fast)
        rows = [pattern(unit, 99, self.case.unit_bytes) for unit in units]
        self.write(store, units, rows)
        held = next(rows for at, rows in self.held if at is store)
        for unit, row in zip(units, rows, strict=True):
            held[unit] = row

    def write(self, store: Any, units: Sequence[int], rows: Sequence[bytes]) -> None:
        """Put bytes into a store past the engine."""
        if units:
            buffer = self.arrays.buffer(rows, self.case.unit_bytes)
            store.write(self.arrays.integers(units), buffer)

    def verify(self, rule: Rule, *, but: Sequence[Move] = ()) -> None:
        """Both stores hold what they should, apart from the targets of some moves."""
        for store, rows in self.held:
            tier = "slow" if store is self.slow else "fast"
            free = {
                unit
                for move in but
                if move.back == (tier == "slow")
                for unit in (move.slow if move.back else move.fast)
            }
            size = self.case.unit_bytes
            out = self.arrays.buffer([bytes(size)] * len(rows), size)
            store.read(self.arrays.integers(range(len(rows))), out)
            for unit, (got, want) in enumerate(zip(self.arrays.rows(out), rows, strict=True)):
                seen = f"{tier} unit {unit} holds {got[:8].hex()}… instead of {want[:8].hex()}…"
                require(got == want or unit in free, rule, seen)

    def close(self) -> None:
        """Close the stores."""
        self.slow.close()
        self.fast.close()


class Watch:
    """Watches `read` and `write` of two stores: counts, blocks and fails calls.

    block_at: the number of the call that waits until `gate` opens. fail_unit: a call that touches
    this unit of `fail_store` raises `error`. on_loop: whether a call came from the loop's thread.
    """

    def __init__(self, bench: Bench, patience_s: float) -> None:
        self.calls = self.inside = 0
        self.on_loop = False
        self.block_at = -1
        self.fail_store: Any = None
        self.fail_unit = -1
        self.error: Exception = OSError()
        self.gate = threading.Event()
        self.entered = asyncio.Event()
        self.patchable = True
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._patience_s = patience_s
        self._tolist = bench.arrays.tolist
        for store in (bench.slow, bench.fast):
            for verb in ("read", "write"):
                self._patch(store, verb)

    def _patch(self, store: Any, verb: str) -> None:
        function = getattr(store, verb)

        def watched(units: Any, rows: Any) -> Any:
            with self._lock:
                number = self.calls
                self.calls += 1
                self.inside += 1
            try:
                self._happen(store, number, units)
                return function(units, rows)
            finally:
                with self._lock:
                    self.inside -= 1

        try:
            setattr(store, verb, watched)
        except AttributeError:  # slots
            self.patchable = False

    def _happen(self, store: Any, number: int, units: Any) -> None:
        if threading.get_ident() == self._thread:
            self.on_loop = True
        elif number == self.block_at:
            self._loop.call_soon_threadsafe(self.entered.set)
            self.gate.wait(5 * self._patience_s)  # whoever blocks opens it, sooner or later
        if store is self.fail_store and self.fail_unit in self._tolist(units):
            raise self.error

    async def blocked(self, task: asyncio.Future[Any], stuck: Rule) -> bool:
        """Wait until a call is blocked (True) or `task` is done without (False)."""
        waiting = asyncio.ensure_future(self.entered.wait())
        done, _ = await asyncio.wait(
            {task, waiting}, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED
        )
        entered = waiting in done
        waiting.cancel()
        if not done:
            raise Stuck(stuck, f"nothing happened for {self._patience_s:g} s")
        return entered


async def turns(count: int = 8) -> None:
    """Let the loop run everything that is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


def run(main: Callable[[], Coroutine[Any, Any, Any]], patience_s: float, stuck: Rule) -> Any:
    """Run on a fresh loop; what has not ended in time is left behind and is `Stuck`."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    try:
        task = loop.create_task(main())
        done, _ = loop.run_until_complete(asyncio.wait({task}, timeout=patience_s))
        if not done:
            raise Stuck(stuck, f"an await did not end in {patience_s:g} s")
        loop.run_until_complete(loop.shutdown_default_executor())
        return task.result()
    finally:
        left = asyncio.all_tasks(loop)
        for one in left:
            one.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=0.1))
        loop.close()


def pairs_for(
    subject: Subject,
    stores: Sequence[tuple[Any, Any]] | None,
    arrays: Arrays | str | None,
    folder: Path,
    patience_s: float,
) -> dict[str, Pair]:
    """By name the pairs of stores that an engine is tried on; see `check_transfer_engine`.

    Raises ConfigError where the engine supports none, Broken where it does not say.
    """

    async def supported() -> list[Pair]:
        engine = subject.probe(BUILD)
        try:
            attributes(engine, TransferEngine)
        except Broken:
            return made  # the first property says what is missing
        found = [pair for pair in made if _supports(engine, pair)]
        await engine.close()
        return found

    wanted = [("host", "host"), ("disk", "host")] if stores is None else list(stores)
    made = _made(wanted, arrays, folder) if stores is not None or _installed("host") else []
    found = run(supported, patience_s, CLOSES)
    if not found and stores is None:
        made = _made([("null", "null")], "null", folder)
        found = run(supported, patience_s, CLOSES)
    if not found:
        raise ConfigError(
            f"{subject.label} supports none of the pairs of stores; give it one with "
            "stores=[(slow, fast)]"
        )
    return {pair.name: pair for pair in found}


def _installed(name: str) -> bool:
    return any(
        item.kind == "store" and item.plugin.name == name and item.problem is None
        for item in Plugins().all()
    )


def _made(
    wanted: Sequence[tuple[Any, Any]], arrays: Arrays | str | None, folder: Path
) -> list[Pair]:
    made = []
    for number, (slow, fast) in enumerate(wanted):
        makers = []
        for tier, choice in (("slow", slow), ("fast", fast)):
            place = folder / f"{number}-{tier}"
            place.mkdir(exist_ok=True)
            makers.append(StoreMaker(resolve(choice, "store"), place))
        name = "-".join(maker.subject.name for maker in makers)
        made.append(Pair(name, makers[0], makers[1], find_arrays(arrays)))
    return made


def _supports(engine: Any, pair: Pair) -> bool:
    shape = StoreShape(2, 1, 1, 8, 16)
    slow, fast = pair.slow(shape), pair.fast(shape)
    try:
        return bool(engine.supports(slow, fast) and engine.supports(fast, slow))
    except Exception as error:
        raise Broken(RAISES_NOTHING, f"supports: {told(error)}") from error
    finally:
        slow.close()
        fast.close()
