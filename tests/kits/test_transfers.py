"""The kit of transfer engines: first-party ones pass, broken ones are told what they break."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from pulse import Build, Plugins, Worker
from pulse.errors import ConfigError, EngineClosed, PulseError, TransferError
from pulse.testing import Violation, check_transfer_engine
from pulse.testing.transfers import RULES
from pulse.types import TransferPlan, TransferReport

STAGED = [
    item.plugin.name
    for item in Plugins().all()
    if item.kind == "transfer" and item.problem is None and item.plugin.name != "null"
]
OVER = threading.Event()
"""Lets the threads of a test go that its engine left behind."""


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Only a broken engine leaves threads, and those it leaves are named."""
    before = set(threading.enumerate())
    OVER.clear()
    yield
    OVER.set()
    left = [t for t in threading.enumerate() if t not in before and t.name != "left behind"]
    assert not left


@pytest.mark.parametrize("name", [*STAGED, "null"])
def test_first_party_engines_conform(name: str) -> None:
    checked = {one.rule.name: one.remark for one in check_transfer_engine(name, examples=15)}
    assert set(checked) == {rule.name for rule in RULES}
    engine = Plugins().resolve("transfer", name, Build())
    told = {"eager": "" if engine.eager else "eager is False"}
    if name == "null":
        told["off-the-loop"] = "null stores hold no bytes"
    assert {rule: remark for rule, remark in checked.items() if remark or rule == "eager"} == told


class Plain:
    """An engine in a few lines, which conforms; the broken ones differ in one place."""

    eager = False

    def __init__(self) -> None:
        self.worker = Worker("kit-engine")

    def supports(self, source: Any, target: Any) -> bool:
        return source is not target and source.unit_bytes == target.unit_bytes

    async def recall(self, plan: TransferPlan) -> TransferReport:
        return await self.run(plan)

    async def write_back(self, plan: TransferPlan) -> TransferReport:
        return await self.run(plan)

    async def close(self) -> None:
        await self.worker.close()

    async def run(self, plan: TransferPlan) -> TransferReport:
        return await self.worker.run(lambda: self.move(plan))

    def move(self, plan: TransferPlan) -> TransferReport:
        began = time.perf_counter()
        try:
            pieces = self.copy(plan)
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"the move failed: {error}") from error
        return TransferReport(plan.bytes, pieces, time.perf_counter() - began)

    def copy(self, plan: TransferPlan) -> int:
        for i in range(plan.units):
            row = bytearray(plan.unit_bytes)
            plan.source.read(plan.source_units[i : i + 1], row)
            plan.target.write(plan.target_units[i : i + 1], row)
        return plan.units


class Eager(Plain):
    """Recalls start when they are called."""

    eager = True

    def recall(self, plan: TransferPlan) -> Awaitable[TransferReport]:  # type: ignore[override]
        return self.worker.submit(lambda: self.move(plan))


@pytest.mark.parametrize("engine", [Plain, Eager])
def test_an_engine_of_a_few_lines_conforms(engine: type) -> None:
    checked = check_transfer_engine(engine, examples=12)
    remarks = {one.rule.name: one.remark for one in checked if one.remark}
    assert remarks == ({} if engine is Eager else {"eager": "eager is False"})


# -- broken ones ---------------------------------------------------------------------------------


class Unsaid(Plain):
    eager = None  # type: ignore[assignment]


class SkipsLast(Plain):
    def copy(self, plan: TransferPlan) -> int:
        for i in range(plan.units - 1):
            row = bytearray(plan.unit_bytes)
            plan.source.read(plan.source_units[i : i + 1], row)
            plan.target.write(plan.target_units[i : i + 1], row)
        return plan.units


class Swaps(Plain):
    def copy(self, plan: TransferPlan) -> int:
        for i in range(plan.units):
            here, there = bytearray(plan.unit_bytes), bytearray(plan.unit_bytes)
            plan.source.read(plan.source_units[i : i + 1], here)
            plan.target.read(plan.target_units[i : i + 1], there)
            plan.target.write(plan.target_units[i : i + 1], here)
            plan.source.write(plan.source_units[i : i + 1], there)
        return plan.units


class CountsBlocks(Plain):
    async def run(self, plan: TransferPlan) -> TransferReport:
        report = await super().run(plan)
        return TransferReport(plan.units, report.pieces, report.seconds)


class OnePlan(Plain):
    plan: Any = None

    async def run(self, plan: TransferPlan) -> TransferReport:
        self.plan = plan
        await asyncio.sleep(0)
        return await super().run(self.plan)


class OnTheLoop(Plain):
    async def run(self, plan: TransferPlan) -> TransferReport:
        return self.move(plan)


class GoesOn(Plain):
    """A cancelled `asyncio.to_thread` returns at once, and its thread goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Any] = []

    async def run(self, plan: TransferPlan) -> TransferReport:
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(None, self.move, plan)
        self.running.append(future)
        return await future


class Swallows(Plain):
    async def run(self, plan: TransferPlan) -> TransferReport:
        landing = self.worker.submit(lambda: self.move(plan))
        while not landing.done():
            try:
                await asyncio.wait([landing])
            except asyncio.CancelledError:
                continue
        return landing.result()


class Untyped(Plain):
    def move(self, plan: TransferPlan) -> TransferReport:
        return TransferReport(plan.bytes, self.copy(plan), 0.0)


class Hides(Plain):
    def move(self, plan: TransferPlan) -> TransferReport:
        try:
            return super().move(plan)
        except TransferError:
            return TransferReport(plan.bytes, plan.units, 0.0)


class Sulks(Plain):
    failed = False

    def move(self, plan: TransferPlan) -> TransferReport:
        if self.failed:
            raise TransferError("an earlier plan failed")
        try:
            return super().move(plan)
        except TransferError:
            self.failed = True
            raise


class ClosesAtOnce(Plain):
    async def close(self) -> None:
        self.closing = asyncio.ensure_future(self.worker.close())


class ClosesOnce(Plain):
    async def close(self) -> None:
        if self.worker._closed:
            raise EngineClosed("closed already")
        await self.worker.close()


class LeavesThread(Plain):
    async def run(self, plan: TransferPlan) -> TransferReport:
        threading.Thread(target=OVER.wait, name="left behind", daemon=True).start()
        return await super().run(plan)


class NeverClosed(Plain):
    async def close(self) -> None:
        await self.worker.close()
        self.worker = Worker("left behind")


class LazyEager(Plain):
    eager = True


class BlockingEager(Eager):
    def recall(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        moved = threading.Event()

        def move() -> TransferReport:
            try:
                return self.move(plan)
            finally:
                moved.set()

        landing = self.worker.submit(move)
        if threading.current_thread() is not threading.main_thread():
            moved.wait()
        return landing


class Deaf(Plain):
    async def run(self, plan: TransferPlan) -> TransferReport:
        await super().run(plan)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


class NoEmptyPlans(Plain):
    async def run(self, plan: TransferPlan) -> TransferReport:
        _ = plan.requests[0]
        return await super().run(plan)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Unsaid, "complete"),
        (SkipsLast, "arrives"),
        (Swaps, "arrives"),
        (CountsBlocks, "report"),
        (OnePlan, "concurrent"),
        (OnTheLoop, "off-the-loop"),
        (GoesOn, "cancel"),
        (Swallows, "cancellation-goes-on"),
        (Untyped, "fails"),
        (Hides, "fails"),
        (Sulks, "neighbours"),
        (ClosesAtOnce, "closes"),
        (ClosesOnce, "closes"),
        (LeavesThread, "closes"),
        (NeverClosed, "closed"),
        (LazyEager, "eager"),
        (BlockingEager, "eager"),
        (Deaf, "ends"),
        (NoEmptyPlans, "raises-nothing"),
    ],
)
def test_a_broken_engine_is_told_its_rule(broken: Callable[[], Any], rule: str) -> None:
    patience = 0.2 if broken in (Deaf, BlockingEager) else 10.0
    with pytest.raises(Violation) as caught:
        check_transfer_engine(broken, examples=15, stores=[("host", "host")], patience_s=patience)
    violation = caught.value
    assert violation.rule.name == rule, str(violation)
    assert violation.rule in RULES
    assert "stores='host-host', slots=" in violation.example
    if broken not in (Deaf, BlockingEager, OnePlan):  # what is stuck is not made smaller
        units = violation.example.count("Move(slow=(")
        assert units <= 2, violation.example


class Unsure(Plain):
    def supports(self, source: Any, target: Any) -> bool:
        raise KeyError(source.kind)


class ClosesNever(Plain):
    async def close(self) -> None:
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("broken", "rule", "seen"),
    [
        (Unsure, "raises-nothing", "supports: KeyError: 'host'"),
        (ClosesNever, "closes", "an await did not end in 0.2 s"),
    ],
)
def test_a_new_engine_is_looked_at_first(broken: type, rule: str, seen: str) -> None:
    with pytest.raises(Violation) as caught:
        check_transfer_engine(broken, patience_s=0.2)
    assert (caught.value.rule.name, caught.value.seen) == (rule, seen)
    assert caught.value.example == "a new engine, asked what it supports and closed"


def test_a_skipped_unit_is_shrunk_to_one() -> None:
    with pytest.raises(Violation) as caught:
        check_transfer_engine(SkipsLast, stores=[("host", "host")])
    move = "Move(slow=(0,), fast=(0,), back=False)"
    case = f"Case(stores='host-host', slots=1, unit_bytes=8, moves=({move},))"
    assert caught.value.example == case
    assert caught.value.seen.startswith("fast unit 0 holds ")


def test_what_cannot_be_checked_is_told() -> None:
    class Picky(Plain):
        def supports(self, source: Any, target: Any) -> bool:
            return False

    with pytest.raises(ConfigError, match="supports none of the pairs of stores"):
        check_transfer_engine(Picky)
    with pytest.raises(ConfigError, match="'Plain' is one object"):
        check_transfer_engine(Plain())

    async def inside() -> None:
        check_transfer_engine(Plain)

    with pytest.raises(PulseError, match="call it from a plain function"):
        asyncio.run(inside())
