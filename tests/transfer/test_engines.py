"""Transfer engines: the right bytes, and nothing in motion once an await is over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse.errors import ChecksumError, ConfigError, EngineClosed, TransferError
from pulse.ports import TransferEngine
from pulse.types import TransferPlan, TransferReport
from pulse_store.disk import DiskStore
from pulse_store.host import HostStore
from pulse_transfer.staged import StagedTransfer
from pulse_transfer.torch_copy import TorchCopyTransfer

ENGINES: dict[str, Callable[[], Any]] = {
    "staged": StagedTransfer,
    "staged-small": lambda: StagedTransfer(staging_bytes=5000),
    "staged-threads": lambda: StagedTransfer(workers=3, staging_bytes=1 << 16),
    "torch": TorchCopyTransfer,
}
PAIRS = ["host-host", "host-disk", "disk-host"]
UNIT_BYTES = st.sampled_from([1, 24, 1000, 1001, 4096, 12288])


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Every test closes its engines, and closing leaves no thread."""
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("pulse-")] == []


@pytest.fixture(params=sorted(ENGINES))
def engine_name(request: pytest.FixtureRequest) -> str:
    """Each engine in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a Hypothesis test: the stores leave nothing in it."""
    return tmp_path_factory.mktemp("transfer")


@asynccontextmanager
async def opened(name: str) -> Any:
    """An engine that is closed at the end."""
    engine = ENGINES[name]()
    try:
        yield engine
    finally:
        await engine.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` that does not hang when a test is wrong."""
    asyncio.run(asyncio.wait_for(main, 60))


def random_rows(count: int, unit_bytes: int, seed: int = 0) -> np.ndarray:
    """Bytes ``[count, unit_bytes]`` that hardly repeat."""
    return np.random.default_rng(seed).integers(0, 256, (count, unit_bytes), dtype=np.uint8)


def filled(kind: str, folder: Path, count: int, unit_bytes: int, seed: int) -> tuple[Any, Any]:
    """A store of `count` units that are all written, and what they hold."""
    store: Any
    if kind == "host":
        store = HostStore(count, 1, 1, unit_bytes)
    else:
        store = DiskStore(folder / f"{seed}.kv", count, 1, 1, unit_bytes)
    rows = random_rows(count, unit_bytes, seed)
    store.write(range(count), rows)
    return store, rows


def contents(store: Any) -> np.ndarray:
    """All units of a store."""
    out = np.empty((store.slots, store.unit_bytes), dtype=np.uint8)
    store.read(range(store.slots), out)
    return out


def make_plan(source: Any, target: Any, source_units: Any, target_units: Any) -> TransferPlan:
    """A plan with the units of both lists."""
    return TransferPlan(
        source,
        target,
        np.asarray(source_units, dtype=np.int64),
        np.asarray(target_units, dtype=np.int64),
        len(source_units),
        source.unit_bytes,
    )


def damage(store: DiskStore, unit: int) -> None:
    """Overwrite the start of a unit behind the store's back."""
    with Path(f"/proc/self/fd/{store._file.fd}").open("r+b", buffering=0) as handle:
        handle.seek(unit * store._file.stride)
        handle.write(bytes(16))


class Gated:
    """A store in memory that counts its calls and can be told to block or to fail in them.

    `entered` is set when a blocked call begins; it goes on when `gate` opens. `memory` is hidden,
    so that every engine goes through `read` and `write`.
    """

    memory = None

    def __init__(self, store: HostStore) -> None:
        self.store = store
        self.gate = threading.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.failures: list[BaseException] = []
        self.calls = 0
        self.inside = 0
        self.rows = 0
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def read(self, units: Any, out: Any) -> int:
        """As the store's, counted."""
        return self._call(self.store.read, units, out)

    def write(self, units: Any, data: Any) -> int:
        """As the store's, counted."""
        return self._call(self.store.write, units, data)

    def _call(self, function: Callable[[Any, Any], int], units: Any, rows: Any) -> int:
        with self.lock:
            self.calls += 1
            self.inside += 1
            self.rows = max(self.rows, len(units))
        try:
            self.loop.call_soon_threadsafe(self.entered.set)
            assert self.gate.wait(60)
            if self.failures:
                raise self.failures.pop()
            return function(units, rows)
        finally:
            with self.lock:
                self.inside -= 1


async def turns(count: int = 20) -> None:
    """Let the loop run everything that is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=12, deadline=None)
@given(data=st.data(), unit_bytes=UNIT_BYTES)
def test_units_arrive_byte_for_byte(
    name: str, pair: str, folder: Path, data: st.DataObject, unit_bytes: int
) -> None:
    from_kind, to_kind = pair.split("-")
    sizes = data.draw(st.tuples(st.integers(1, 80), st.integers(1, 80)))
    to = data.draw(st.lists(st.integers(0, sizes[1] - 1), unique=True))
    whole = st.just(list(range(min(sizes))))
    drawn = st.lists(st.integers(0, sizes[0] - 1), min_size=len(to), max_size=len(to))
    units = data.draw(drawn) if data.draw(st.booleans()) or not to else data.draw(whole)
    to = to if len(units) == len(to) else list(range(len(units)))
    back = data.draw(st.booleans())

    async def main() -> None:
        source, rows = filled(from_kind, folder, sizes[0], unit_bytes, 1)
        target, expected = filled(to_kind, folder, sizes[1], unit_bytes, 2)
        async with opened(name) as engine:
            move = engine.write_back if back else engine.recall
            report = await move(make_plan(source, target, units, to))
        expected[to] = rows[units]
        assert (contents(target) == expected).all()
        assert (contents(source) == rows).all()
        assert report.bytes == len(units) * unit_bytes
        assert (report.pieces > 0) == bool(units) and report.pieces <= len(units)
        assert report.seconds >= 0
        source.close()
        target.close()

    run(main())


def test_many_transfers_at_once(engine_name: str, tmp_path: Path) -> None:
    async def main() -> None:
        slow, slow_rows = filled("disk", tmp_path, 400, 1000, 1)
        fast, fast_rows = filled("host", tmp_path, 400, 1000, 2)
        order = np.random.default_rng(3).permutation(400)
        async with opened(engine_name) as engine:
            # Recalls fill the fast tier's first half, write-backs come from its second.
            jobs: list[Awaitable[TransferReport]] = [
                engine.recall(make_plan(slow, fast, order[i : i + 4], range(i, i + 4)))
                if i < 200
                else engine.write_back(make_plan(fast, slow, range(i, i + 4), order[i : i + 4]))
                for i in range(0, 400, 4)
            ]
            reports = await asyncio.gather(*jobs)
        assert sum(report.bytes for report in reports) == 400 * 1000
        assert (contents(fast)[:200] == slow_rows[order[:200]]).all()
        assert (contents(slow)[order[200:]] == fast_rows[200:]).all()
        slow.close()

    run(main())


def test_pieces_are_the_slow_tiers_runs(tmp_path: Path) -> None:
    async def main() -> None:
        slow, _ = filled("disk", tmp_path, 16, 1000, 1)
        fast, _ = filled("host", tmp_path, 16, 1000, 2)
        async with opened("staged") as engine:
            scattered = np.random.default_rng(0).permutation(16)
            assert (await engine.recall(make_plan(slow, fast, range(16), scattered))).pieces == 1
            back = make_plan(fast, slow, range(0, 16, 2), [0, 1, 2, 3, 8, 9, 12, 14])
            assert (await engine.write_back(back)).pieces == 4
        async with opened("torch") as engine:
            assert (await engine.recall(make_plan(slow, fast, range(16), range(16)))).pieces == 16
        slow.close()

    run(main())


@pytest.mark.parametrize(("staging", "rows"), [(1, 1), (3999, 3), (1 << 20, 40)])
def test_pieces_fit_the_staging_buffer(staging: int, rows: int) -> None:
    async def main() -> None:
        source = Gated(HostStore(40, 1, 1, 1000))
        engine = StagedTransfer(staging_bytes=staging)
        target = HostStore(40, 1, 1, 1000)
        await engine.recall(make_plan(source, target, range(40), range(40)))
        assert source.rows == rows and source.calls == -(-40 // rows)
        await engine.close()

    run(main())


# --- plans ---------------------------------------------------------------------------------------


def test_engines_satisfy_the_contract(engine_name: str) -> None:
    async def main() -> None:
        async with opened(engine_name) as engine:
            assert isinstance(engine, TransferEngine)
            store, other, narrow = (HostStore(4, 1, 1, size) for size in (8, 8, 16))
            assert engine.supports(store, other)
            assert not engine.supports(store, store)
            assert not engine.supports(store, narrow)

    run(main())


def test_wrong_plans_move_nothing(engine_name: str, tmp_path: Path) -> None:
    async def main() -> None:
        source, _ = filled("host", tmp_path, 8, 16, 1)
        target, rows = filled("host", tmp_path, 8, 16, 2)
        good = np.arange(3)
        refused: list[tuple[TransferPlan, str]] = [
            (make_plan(source, target, [0, 1, 8], good), "unit 8 is not one of the 8 units"),
            (make_plan(source, target, [0, -1, 2], good), "unit -1 is not one of"),
            (make_plan(source, target, good, [1, 2, 8]), "unit 8 is not one of"),
            (make_plan(source, target, good, [2, 5, 2]), "unit 2 occurs twice in the target"),
            (make_plan(source, source, good, good), "two different stores"),
            (make_plan(source, HostStore(8, 1, 1, 8), good, good), "units of the same size"),
            (TransferPlan(source, target, good, good[:2], 3, 16), "has 3 units but names 2"),
            (TransferPlan(source, target, good, good, 2, 16), "has 2 units but names 3"),
            (TransferPlan(source, target, good, good, 3, 8), "units have 8 bytes, the stores' 16"),
            (TransferPlan(source, target, good / 2, good, 3, 16), "list of integers"),
            (TransferPlan(source, target, good[None], good, 3, 16), "list of integers"),
        ]
        async with opened(engine_name) as engine:
            for plan, message in refused:
                for move in (engine.recall, engine.write_back):
                    with pytest.raises(TransferError, match=message):
                        await move(plan)
            assert (contents(target) == rows).all()
            nothing = TransferPlan(source, target, [], [], 0, 16)
            assert await engine.recall(nothing) == TransferReport(0, 0, 0.0)

    run(main())


def test_stores_that_hide_their_size_check_units_themselves(engine_name: str) -> None:
    async def main() -> None:
        source, target = HostStore(4, 1, 1, 8), HostStore(4, 1, 1, 8)
        del source.units, target.units
        async with opened(engine_name) as engine:
            for units in ([9], [0]), ([0], [9]):
                with pytest.raises(TransferError):
                    await engine.recall(make_plan(source, target, *units))

    run(main())


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="workers=0"):
        StagedTransfer(workers=0)
    with pytest.raises(ConfigError, match="staging_bytes=0"):
        StagedTransfer(staging_bytes=0)


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_failing_store_fails_its_plan_alone(engine_name: str, side: str) -> None:
    async def main() -> None:
        source, target = Gated(HostStore(9, 1, 1, 4096)), Gated(HostStore(9, 1, 1, 4096))
        broken = source if side == "source" else target
        async with opened(engine_name) as engine:
            plan = make_plan(source, target, range(9), range(9))
            for error in (OSError("cable pulled"), KeyError("x"), SystemExit(3)):
                broken.failures.append(error)
                with pytest.raises(TransferError, match=type(error).__name__) as caught:
                    await engine.recall(plan)
                assert caught.value.__cause__ is error
            mismatch = ChecksumError("unit 3 is not what was written")
            broken.failures.append(mismatch)
            with pytest.raises(ChecksumError) as caught:
                await engine.recall(plan)
            assert caught.value is mismatch
            assert (await engine.recall(plan)).bytes == 9 * 4096

    run(main())


def test_failures_on_all_threads_end_all_of_them() -> None:
    async def main() -> None:
        source, target = Gated(HostStore(300, 1, 1, 4096)), HostStore(300, 1, 1, 4096)
        source.failures = [OSError("one"), OSError("two"), OSError("three")]
        engine = StagedTransfer(workers=3, staging_bytes=1 << 14)
        with pytest.raises(TransferError, match="OSError"):
            await engine.recall(make_plan(source, target, range(300), range(300)))
        assert source.inside == 0
        calls = source.calls
        await engine.close()
        assert source.calls == calls  # nothing went on after the failure was told

    run(main())


def test_a_damaged_disk_is_told_by_unit(engine_name: str, tmp_path: Path) -> None:
    async def main() -> None:
        slow, rows = filled("disk", tmp_path, 8, 1000, 1)
        fast, _ = filled("host", tmp_path, 8, 1000, 2)
        damage(slow, 6)
        async with opened(engine_name) as engine:
            with pytest.raises(ChecksumError, match="unit 6 of disk"):
                await engine.recall(make_plan(slow, fast, range(8), range(8)))
            slow._slots.allocate(1)
            slow.free([0])
            with pytest.raises(TransferError, match=r"unit 0 of disk .* never written"):
                await engine.recall(make_plan(slow, fast, [0], [0]))
            await engine.recall(make_plan(slow, fast, [1, 2], [3, 4]))
        assert (fast.memory[3:5] == rows[1:3]).all()
        slow.close()

    run(main())


# --- cancelling and closing ----------------------------------------------------------------------


@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_cancelling_waits_until_nothing_moves(engine_name: str, cancels: int, fails: bool) -> None:
    async def main() -> None:
        source, target = Gated(HostStore(600, 1, 1, 4096)), Gated(HostStore(600, 1, 1, 4096))
        async with opened(engine_name) as engine:
            source.gate.clear()
            plan = make_plan(source, target, range(600), range(600))
            task = asyncio.ensure_future(engine.recall(plan))
            await source.entered.wait()
            for _ in range(cancels):
                task.cancel()
                await turns()
                assert not task.done()
            if fails:
                source.failures.append(OSError("cable pulled"))
            source.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert source.inside == target.inside == 0
            calls = source.calls, target.calls
            if engine_name != "staged":  # whose one piece holds the whole plan
                assert calls[0] <= 3  # what was not moving did not start
            await engine.recall(make_plan(source, target, [1], [1]))
            assert (source.calls, target.calls) == (calls[0] + 1, calls[1] + 1)

    run(main())


def test_a_queued_transfer_can_be_cancelled(engine_name: str) -> None:
    async def main() -> None:
        source, target = Gated(HostStore(4, 1, 1, 64)), Gated(HostStore(4, 1, 1, 64))
        async with opened(engine_name) as engine:
            source.gate.clear()
            first = asyncio.ensure_future(engine.recall(make_plan(source, target, [0], [0])))
            second = asyncio.ensure_future(engine.recall(make_plan(source, target, [1], [1])))
            await source.entered.wait()
            await turns()
            second.cancel()
            await turns()
            source.gate.set()
            assert (await first).bytes == 64
            with pytest.raises(asyncio.CancelledError):
                await second
            assert (source.calls, target.calls) == (1, 1)

    run(main())


def test_recall_and_write_back_overlap(engine_name: str) -> None:
    async def main() -> None:
        slow, fast = Gated(HostStore(4, 1, 1, 64)), HostStore(4, 1, 1, 64)
        other = HostStore(4, 1, 1, 64)
        async with opened(engine_name) as engine:
            slow.gate.clear()
            recall = asyncio.ensure_future(engine.recall(make_plan(slow, fast, [0], [0])))
            await slow.entered.wait()
            assert (await engine.write_back(make_plan(fast, other, [1], [1]))).bytes == 64
            assert not recall.done()
            slow.gate.set()
            await recall

    run(main())


def test_closing_waits_for_what_is_under_way(engine_name: str) -> None:
    async def main() -> None:
        source, target = Gated(HostStore(4, 1, 1, 64)), HostStore(4, 1, 1, 64)
        source.store.memory[:] = 9
        engine = ENGINES[engine_name]()
        source.gate.clear()
        plan = make_plan(source, target, [2], [3])
        moving = [asyncio.ensure_future(engine.recall(plan)) for _ in range(3)]
        await source.entered.wait()
        closing = asyncio.ensure_future(engine.close())
        await turns()
        assert not closing.done()
        source.gate.set()
        await closing
        assert source.calls == 3 and source.inside == 0
        assert [report.bytes for report in await asyncio.gather(*moving)] == [64] * 3
        assert (target.memory[3] == 9).all()
        for move in (engine.recall, engine.write_back):
            with pytest.raises(EngineClosed, match="closed; build a new one"):
                await move(plan)
        await engine.close()

    run(main())


def test_closing_that_is_cancelled_still_closes(engine_name: str) -> None:
    async def main() -> None:
        source, target = Gated(HostStore(4, 1, 1, 64)), HostStore(4, 1, 1, 64)
        engine = ENGINES[engine_name]()
        await engine.write_back(make_plan(target, source, [0], [0]))  # its thread runs too
        source.entered.clear()
        source.gate.clear()
        moving = asyncio.ensure_future(engine.recall(make_plan(source, target, [2], [3])))
        await source.entered.wait()
        closing = asyncio.ensure_future(engine.close())
        await turns()
        closing.cancel()
        await turns()
        assert not closing.done()
        source.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (await moving).bytes == 64

    run(main())


def test_an_unused_engine_has_no_threads(engine_name: str) -> None:
    async def main() -> None:
        engine = ENGINES[engine_name]()
        assert not [t for t in threading.enumerate() if t.name.startswith("pulse-")]
        await asyncio.gather(engine.close(), engine.close())
        await engine.close()

    run(main())
