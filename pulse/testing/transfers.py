"""The conformance kit of transfer engines."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from pulse.errors import ChecksumError, ConfigError, PulseError, TransferError
from pulse.ports import TransferEngine
from pulse.testing.arrays import Arrays
from pulse.testing.benches import (
    BUILD,
    Bench,
    Case,
    Move,
    Pair,
    Watch,
    cases,
    pairs_for,
    run,
    turns,
)
from pulse.testing.checking import (
    COMPLETE,
    RAISES_NOTHING,
    Broken,
    Checked,
    Property,
    Rule,
    Stuck,
    Violation,
    attributes,
    refuses,
    require,
    search,
    told,
)
from pulse.testing.subjects import Subject, resolve
from pulse.testing.transferrules import (
    ARRIVES,
    CANCEL,
    CLOSED,
    CLOSES,
    CONCURRENT,
    EAGER,
    ENDS,
    FAILS,
    NEIGHBOURS,
    OFF_LOOP,
    REPORT,
    RULES,
    SWALLOW,
)
from pulse.types import TransferReport

__all__ = ["RULES", "check_transfer_engine"]

_DIRECT = "the engine does not call read and write of the stores"


@dataclass(frozen=True)
class _Blocked:
    """A case whose `call`-th call of a store waits while the task is cancelled `cancels` times."""

    case: Case
    call: int
    cancels: int


@dataclass(frozen=True)
class _Failing:
    """A case in which the first plan's unit number `unit` cannot be read, or be written."""

    case: Case
    unit: int
    reads: bool
    error: str


_ERRORS = {
    "OSError": OSError("the cable was pulled"),
    "TransferError": TransferError("the disk is broken"),
    "ChecksumError": ChecksumError("unit is not what was written"),
}


def check_transfer_engine(
    engine: Any,
    *,
    examples: int = 50,
    seed: int | None = None,
    stores: Sequence[tuple[Any, Any]] | None = None,
    arrays: Arrays | str | None = None,
    patience_s: float = 10.0,
) -> list[Checked]:
    """Check that a transfer engine keeps the contract of `pulse.ports.TransferEngine`.

    engine: a registered name, ``"module:attribute"``, a `pulse.Plugin`, a class or a function
        that makes one (given a `Build` if it asks for one).
    examples: examples per property, at most. seed: draws others; the same each time by default.
    stores: pairs of a slow and a fast store, as `check_block_store` takes them; by default those
        of host-host, disk-host and null-null that the engine supports, null only as a last resort.
    arrays: how unit ids and buffers are made, see `check_block_store`.
    patience_s: seconds after which an await that does not end counts as one that never does.

    Runs event loops of its own, so it must be called outside of one. Returns the rules that hold.
    Raises `Violation` with the smallest example that breaks one, and ConfigError for what cannot
    be checked at all.
    """
    _outside_of_loops()
    subject = resolve(engine, "transfer")
    subject.need_fresh()
    with tempfile.TemporaryDirectory(prefix="pulse-check-") as folder:
        try:
            pairs = pairs_for(subject, stores, arrays, Path(folder), patience_s)
        except Broken as broken:
            example = "a new engine, asked what it supports and closed"
            raise Violation(subject.label, broken.rule, example, broken.seen) from broken.__cause__
        kit = _Kit(subject, pairs, patience_s)
        return search(subject.label, kit.properties(), examples=examples, seed=seed)


def _outside_of_loops() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError("check_transfer_engine runs event loops; call it from a plain function")


class _Kit:
    def __init__(self, subject: Subject, pairs: dict[str, Pair], patience_s: float) -> None:
        self.subject, self.pairs, self.patience_s = subject, pairs, patience_s

    def properties(self) -> list[Property]:
        """In the order in which an engine is mended."""
        names = list(self.pairs)
        one, some = cases(names, least=1), cases(names, most=4)
        two = cases(names, most=2, least=1)
        blocked = st.builds(_Blocked, one, st.integers(0, 3), st.integers(1, 2))
        closing = st.builds(_Blocked, one, st.integers(0, 1), st.just(0))
        waits = st.lists(st.integers(0, 12), min_size=4, max_size=4).map(tuple)
        failing = st.builds(
            _Failing, two, st.integers(0, 40), st.booleans(), st.sampled_from(sorted(_ERRORS))
        )
        return [
            Property((COMPLETE,), cases(names), self._on(self.new), 0.1),
            Property((ARRIVES, REPORT, ENDS, RAISES_NOTHING), cases(names), self._on(self.move)),
            Property((OFF_LOOP,), one, self._on(self.elsewhere), 0.2),
            Property((CONCURRENT,), some, self._on(self.many)),
            Property((CANCEL, SWALLOW), blocked, self._on(self.blocked), 0.6),
            Property((NEIGHBOURS,), st.tuples(some, waits), self._on(self.cancelled)),
            Property((FAILS,), failing, self._on(self.failing), 0.6),
            Property((CLOSES,), closing, self._on(self.closing), 0.4),
            Property((CLOSED,), one, self._on(self.closed), 0.2),
            Property((EAGER,), two, self._on(self.eager), 0.4),
        ]

    def _on(self, check: Any) -> Any:
        """The check on a loop of its own, with a limit on its time."""

        def on_loop(example: Any) -> str | None:
            said: str | None = run(lambda: check(example), 3 * self.patience_s, ENDS)
            return said

        return on_loop

    @asynccontextmanager
    async def _bench(self, case: Case) -> AsyncIterator[Bench]:
        engine = self.subject.factory(BUILD)
        bench = Bench(self.pairs[case.stores], case, engine)
        try:
            yield bench
            await self._close(engine, "close")
        except BaseException:
            # Whatever is wrong with it, its threads should not outlive the example.
            with suppress(Exception):
                await asyncio.wait({asyncio.ensure_future(engine.close())}, timeout=1.0)
            raise
        finally:
            bench.close()

    async def _close(self, engine: Any, what: str) -> None:
        try:
            await self._ended(asyncio.ensure_future(engine.close()), CLOSES, what)
        except Broken:
            raise
        except Exception as error:
            raise Broken(CLOSES, f"{what} raised {told(error)}") from error

    async def _ended(self, task: asyncio.Future[Any], rule: Rule, what: str) -> Any:
        """The result of a task, which has to end."""
        done, _ = await asyncio.wait({task}, timeout=self.patience_s)
        if not done:
            raise Stuck(rule, f"{what} did not end in {self.patience_s:g} s")
        return task.result()

    async def new(self, case: Case) -> None:
        """What an engine says of itself."""
        engine = self.subject.factory(BUILD)
        attributes(engine, TransferEngine, eager=bool)
        await engine.close()

    async def move(self, case: Case) -> None:
        """One plan."""
        (move,) = case.moves
        async with self._bench(case) as bench:
            report = await self._ended(bench.start(move), ENDS, "the transfer")
            bench.moved(move)
            bench.verify(ARRIVES)
            _check_report(report, case, move)

    async def elsewhere(self, case: Case) -> str | None:
        """The thread that calls the stores."""
        async with self._bench(case) as bench:
            watch = Watch(bench, self.patience_s)
            await self._ended(bench.start(case.moves[0]), ENDS, "the transfer")
            if bench.slow.kind == "null":
                return "null stores hold no bytes"
            require(not watch.on_loop, OFF_LOOP, "the loop's thread read or wrote a store")
            return None if watch.calls else _DIRECT

    async def many(self, case: Case) -> None:
        """All plans at once."""
        async with self._bench(case) as bench:
            tasks = [bench.start(move) for move in case.moves]
            reports = [await self._ended(task, ENDS, "a transfer") for task in tasks]
            for move in case.moves:
                bench.moved(move)
            bench.verify(CONCURRENT)
            for report, move in zip(reports, case.moves, strict=True):
                _check_report(report, case, move)

    async def blocked(self, example: _Blocked) -> str | None:
        """Cancelled while a call of a store is running."""
        move = example.case.moves[0]
        async with self._bench(example.case) as bench:
            watch = Watch(bench, self.patience_s)
            watch.block_at = example.call
            try:
                task = bench.start(move)
                if not await watch.blocked(task, ENDS):
                    task.result()
                    return None if watch.calls else _DIRECT
                for _ in range(example.cancels):
                    task.cancel()
                    await turns()
                    require(not task.done(), CANCEL, "it ended while a store was being called")
            finally:
                watch.gate.set()
            await asyncio.wait({task}, timeout=self.patience_s)
            if not task.done():
                raise Stuck(ENDS, "the cancelled transfer did not end")
            calls = watch.calls
            require(not watch.inside, CANCEL, "it ended while a store was being called")
            require(task.cancelled(), SWALLOW, f"it ended with {_outcome(task)}")
            await bench.engine.close()
            require(watch.calls == calls, CANCEL, "stores were called after it had ended")
        return None

    async def cancelled(self, example: tuple[Case, tuple[int, ...]]) -> None:
        """Cancelled after some turns of the loop; targets get new owners at once."""
        case, waits = example
        async with self._bench(case) as bench:
            tasks = [bench.start(move) for move in case.moves]
            # Of every four plans one is left alone.
            doomed = [task for number, task in enumerate(tasks) if number % 4 != 1]
            for turn in range(max(waits) + 1):
                for task, wait in zip(tasks, waits, strict=False):
                    if wait == turn and task in doomed:
                        task.cancel()
                await asyncio.sleep(0)
            for task, move in zip(tasks, case.moves, strict=True):
                done, _ = await asyncio.wait({task}, timeout=self.patience_s)
                if not done:
                    raise Stuck(ENDS, "a cancelled transfer did not end")
                if task.cancelled():
                    bench.mark(move)
                else:
                    task.result()
                    bench.moved(move)
            again = await self._ended(bench.start(case.moves[0]), NEIGHBOURS, "a later plan")
            bench.moved(case.moves[0])
            _check_report(again, case, case.moves[0])
            await bench.engine.close()
            bench.verify(NEIGHBOURS)

    async def failing(self, example: _Failing) -> str | None:
        """A unit that cannot be moved, in one of the plans that are under way."""
        case, move = example.case, example.case.moves[0]
        async with self._bench(case) as bench:
            watch = Watch(bench, self.patience_s)
            slow = example.reads != move.back
            units = move.slow if slow else move.fast
            watch.fail_store = bench.slow if slow else bench.fast
            watch.fail_unit = units[example.unit % len(units)]
            # Null stores hold no bytes and touch no device: they raise what the port says.
            kind = "TransferError" if bench.slow.kind == "null" else example.error
            watch.error = _ERRORS[kind]
            tasks = [bench.start(one) for one in case.moves]
            await asyncio.wait(tasks, timeout=self.patience_s)
            if not watch.calls:
                return _DIRECT
            with refuses(TransferError, FAILS, f"the transfer, when a store raised {kind},"):
                await self._ended(tasks[0], ENDS, "the failed transfer")
            if len(tasks) == 1:  # another plan may be inside
                require(not watch.inside, FAILS, "it ended while a store was being called")
            watch.fail_unit = -1
            bench.mark(move)
            for task, one in zip(tasks[1:], case.moves[1:], strict=True):
                await self._neighbour(task)
                bench.moved(one)
            await self._neighbour(bench.start(move))
            bench.moved(move)
            bench.verify(NEIGHBOURS)
        return None

    async def _neighbour(self, task: asyncio.Task[TransferReport]) -> None:
        try:
            await self._ended(task, ENDS, "a transfer beside or after a failed one")
        except PulseError as error:
            raise Broken(NEIGHBOURS, f"beside or after a failed one: {told(error)}") from error

    async def closing(self, example: _Blocked) -> str | None:
        """Closed while a call of a store is running."""
        case, move = example.case, example.case.moves[0]
        async with self._bench(case) as bench:
            watch = Watch(bench, self.patience_s)
            watch.block_at = example.call
            try:
                task = bench.start(move)
                entered = await watch.blocked(task, ENDS)
                closing = asyncio.ensure_future(bench.engine.close())
                await turns()
                if entered:
                    require(not closing.done(), CLOSES, "close ended while a transfer ran")
            finally:
                watch.gate.set()
            await self._ended(closing, CLOSES, "close")
            report = await self._ended(task, CLOSES, "the transfer that was under way")
            bench.moved(move)
            bench.verify(CLOSES)
            _check_report(report, case, move)
        return None if watch.calls else _DIRECT

    async def closed(self, case: Case) -> None:
        """Threads, a second close, and transfers after it."""
        before = set(threading.enumerate())
        async with self._bench(case) as bench:
            await self._ended(bench.start(case.moves[0]), ENDS, "the transfer")
            bench.moved(case.moves[0])
            for what in ("close", "the second close"):
                await self._close(bench.engine, what)
            left = [
                thread.name
                for thread in threading.enumerate()
                if thread not in before and not thread.name.startswith("asyncio_")
            ]
            require(not left, CLOSES, f"threads are left: {', '.join(left)}")
            for verb, back in (("recall", False), ("write_back", True)):
                move = Move(case.moves[0].slow, case.moves[0].fast, back)
                with refuses(PulseError, CLOSED, f"{verb} after close"):
                    await self._ended(bench.start(move), CLOSED, f"{verb} after close")
            bench.verify(CLOSED)

    async def eager(self, case: Case) -> str | None:
        """Called from another thread, and not awaited until it has begun."""
        first, last = case.moves[0], case.moves[-1]
        move = Move(last.slow, last.fast, back=False)
        async with self._bench(case) as bench:
            if not bench.engine.eager:
                return "eager is False"
            await self._ended(bench.start(Move(first.slow, first.fast, False)), ENDS, "a recall")
            bench.moved(Move(first.slow, first.fast, False))
            watch = Watch(bench, self.patience_s)
            watch.block_at = 0
            calling = asyncio.create_task(asyncio.to_thread(bench.call, move))
            try:
                future = await self._ended(calling, EAGER, "recall, called from another thread,")
                if asyncio.iscoroutine(future):
                    future.close()  # else it complains of never having been awaited
                good = asyncio.isfuture(future) and future.get_loop() is asyncio.get_running_loop()
                require(good, EAGER, f"recall returned {type(future).__name__}")
                await watch.blocked(future, EAGER)
            except PulseError as error:
                raise Broken(EAGER, told(error)) from error
            finally:
                watch.gate.set()
            _check_report(await self._ended(future, EAGER, "the recall"), case, move)
            bench.moved(move)
            bench.verify(EAGER)
        return None


def _check_report(report: Any, case: Case, move: Move) -> None:
    units = len(move.fast)
    require(isinstance(report, TransferReport), REPORT, f"a {type(report).__name__} was returned")
    require(report.bytes == units * case.unit_bytes, REPORT, f"{report} for {units} units")
    require(min(1, units) <= report.pieces <= units, REPORT, f"{report} for {units} units")
    require(0 <= report.seconds < float("inf"), REPORT, f"{report}")


def _outcome(task: asyncio.Task[Any]) -> str:
    if task.cancelled():
        return "CancelledError"
    error = task.exception()
    return repr(task.result()) if error is None else told(error)
