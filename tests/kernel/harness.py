"""An engine on the null executor in virtual time, what it should produce, and what may be left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pulse import Completion, Engine, Instrument, KVConfig, Placement, Plugins, Stream
from pulse.engine.assembly import Parts
from pulse.errors import EngineClosed, TransferError
from pulse.testing.loop import InlineWorker
from pulse.testing.null import (
    VOCAB,
    NullExecutor,
    NullPolicy,
    ScatteredPolicy,
    _mix,
    null_reference,
)
from pulse.testing.nulltiers import NullTransfer
from pulse.types import (
    Operation,
    Pace,
    StepCosts,
    TransferPlan,
    TransferReport,
    Work,
)

PLUGINS = Plugins()
"""Discovered once: it costs more than a whole run."""


# -- what the null model should say --------------------------------------------------------------


Scattered = ScatteredPolicy
"""A sparse policy that makes the hot set churn."""


def reference(
    prompt: Sequence[int], count: int, layers: int, config: KVConfig, *, sparse: bool
) -> list[int]:
    """The null model's tokens; decode reads what `Scattered` selects if `sparse`, else all."""
    return null_reference(prompt, count, layers, config if sparse else None)


def until_stop(tokens: list[int]) -> list[int]:
    """Cut behind the token that ends a text."""
    stop = VOCAB - 1
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


# -- what goes wrong and how long things take ----------------------------------------------------


class Delays:
    """Virtual durations: none, even, or drawn anew each time."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.source = kind, random.Random(seed)

    def __call__(self, *_: Any) -> float:
        if self.kind == "none":
            return 0.0
        return 0.001 if self.kind == "even" else self.source.choice([0.0, 0.0001, 0.001, 0.02])


class FailingTransfer(NullTransfer):
    """Fails the plans that `fails` names, before or after the units have moved."""

    def __init__(
        self,
        fails: Callable[[str, TransferPlan], bool],
        *,
        error: Callable[[str], Exception] = TransferError,
        late: bool = False,
        delay: Callable[[TransferPlan], float] = lambda _: 0.001,
    ) -> None:
        super().__init__(delay)
        self.fails, self.error, self.late = fails, error, late
        self.failed = 0

    async def recall(self, plan: TransferPlan) -> TransferReport:
        return await self._try("recall", plan)

    async def write_back(self, plan: TransferPlan) -> TransferReport:
        return await self._try("write_back", plan)

    async def _try(self, kind: str, plan: TransferPlan) -> TransferReport:
        fails = self.fails(kind, plan)
        if not fails or self.late:
            report = await self._move(plan)
        if fails:
            self.failed += 1
            raise self.error(f"drawn failure of a {kind} of {plan.requests}")
        return report


# -- who is next -----------------------------------------------------------------------------------


class Erratic:
    """Chooses at random: no request may be harmed by whatever an arbiter does.

    It merges what may be merged, holds the lane, changes the pace all the time.
    """

    def __init__(self) -> None:
        self.random = random.Random(7)

    def choose(
        self, waiting: Sequence[Operation], in_flight: Sequence[Operation]
    ) -> Operation | Sequence[Operation] | None:
        if self.random.random() < 0.15:
            return None
        one = self.random.choice(waiting)
        like = [other for other in waiting if other is not one and mergeable(other, one)]
        return [one, *like] if self.random.random() < 0.7 else one

    def pace(self, costs: StepCosts) -> Pace:
        return Pace(self.random.choice([1, 1, 2, 3]), self.random.random() < 0.5)


def mergeable(one: Operation, other: Operation) -> bool:
    decode = Work.PREFILL not in (one.work, other.work)
    return decode and one.kind == other.kind == "layer" and one.layer == other.layer


# -- what is watched -----------------------------------------------------------------------------


class Watch(Instrument):
    """The life of every request and operation, as the invariants want it."""

    def __init__(self) -> None:
        self.requests: dict[str, list[str]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.operations: dict[int, tuple[Operation, list[str]]] = {}
        self.timeline: list[tuple[float, str, str]] = []
        self.wrong: list[str] = []
        self.missed = 0

    def _request(self, request: str, event: str) -> None:
        self.requests.setdefault(request, []).append(event)
        self.timeline.append((asyncio.get_running_loop().time(), request, event))

    def request_submitted(self, request: str, prompt_tokens: int) -> None:
        self._request(request, "submitted")

    def request_admitted(self, request: str, placement: Placement) -> None:
        self._request(request, "admitted")

    def prefill_progress(self, request: str, done: int, total: int) -> None:
        self._request(request, "prefilled" if done == total else "progress")

    def token(self, request: str, index: int) -> None:
        self.tokens.setdefault(request, []).append(index)

    def request_preempted(self, request: str, reason: str) -> None:
        self._request(request, "preempted")

    def request_ended(self, request: str, reason: str) -> None:
        self._request(request, "ended")

    def selection(self, layer: int, selected: int, missed: int) -> None:
        self.missed += missed
        if not 0 <= missed <= selected:
            self.wrong.append(f"{missed} of {selected} missed")

    def operation_submitted(self, operation: Operation) -> None:
        self.operations[operation.id] = (operation, [])
        self._operation(operation, "submitted")

    def operation_started(self, operation: Operation) -> None:
        self._operation(operation, "started")

    def operation_milestone(self, operation: Operation) -> None:
        self._operation(operation, "milestone")

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        self._operation(operation, operation.status)
        if operation.status == "done" and (report is None) == (operation.lane != "compute"):
            self.wrong.append(f"{operation} reported {report}")

    def _operation(self, operation: Operation, event: str) -> None:
        self.operations[operation.id][1].append(event)
        now = asyncio.get_running_loop().time()
        self.timeline.append((now, f"{operation.kind} of {operation.cohort}", event))

    def check(self) -> None:
        assert self.wrong == []
        for operation, events in self.operations.values():
            ends = [event for event in events if event in ("done", "failed", "cancelled", "late")]
            assert len(ends) == 1 and ends[0] == events[-1], (operation, events)
            assert events.count("started") <= 1
            if "started" in events:
                assert operation.submitted <= operation.started <= operation.ended
        for request, events in self.requests.items():
            order = {"submitted": 0, "admitted": 1, "progress": 2, "prefilled": 3, "preempted": 4}
            order["ended"] = 5
            places = [order[event] for event in events]
            for i in range(1, len(places)):
                again = (events[i - 1], events[i]) == ("preempted", "admitted")
                assert places[i - 1] <= places[i] or again, (request, events)
            assert events.count("ended") == 1, (request, events)
        for request, indices in self.tokens.items():
            assert indices == list(range(len(indices)))
            assert "prefilled" in self.requests[request]


@dataclass
class Setup:
    """An engine to be: small blocks, small windows, everything null."""

    block: int = 4
    sink: int = 4
    local: int = 8
    budget: int = 64
    chunk: int = 16
    layers: int = 2
    max_positions: int = 4096
    policy: Any = field(default_factory=NullPolicy)
    executor: Any = None
    transfer: Any = None
    admit: Any = "threshold:24"
    schedule: Any = "irq"
    compute: Callable[[], float] = lambda: 0.001
    fast_slots: int = 10_000
    slow_slots: int = 1_000
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> KVConfig:
        return KVConfig(self.block, self.budget, self.sink, self.local, self.chunk)

    def engine(self, *instruments: Instrument) -> Engine:
        return Engine(
            "null",
            select=self.policy,
            transfer=self.transfer or NullTransfer(lambda _: 0.001),
            admit=self.admit,
            schedule=self.schedule,
            executor=self.executor or NullExecutor(self.layers, self.max_positions),
            fast_tier=self.fast_slots * 8 * self.block,
            slow_tier="null",
            slow_limit=self.slow_slots * self.layers * 8 * self.block,
            block=self.block,
            budget=self.budget,
            sink=self.sink,
            local=self.local,
            chunk=self.chunk,
            instruments=instruments,
            plugins=PLUGINS,
            worker=lambda name: InlineWorker(name, self.compute),
            **self.options,
        )

    def expected(self, prompt: Sequence[int], count: int, placement: Placement) -> list[int]:
        sparse = placement is Placement.OFFLOAD and not self.policy.exhaustive
        return reference(prompt, count, self.layers, self.config, sparse=sparse)


class Rig:
    """An open engine under observation: ``async with Rig(setup) as rig``; checks when it ends."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.watch = Watch()
        self.engine = setup.engine(self.watch)
        self.parts: Parts
        self.running: Any

    async def __aenter__(self) -> Rig:
        await self.engine.open()
        self.parts = self.engine.parts
        self.running = self.engine._running
        return self

    async def __aexit__(self, kind: Any, *_: Any) -> None:
        if kind is None and self.engine._running is not None:
            await self.check_idle()
        await self.engine.aclose()
        if kind is None:
            self.check_nothing_left()
            self.watch.check()

    def check_stores_closed(self) -> None:
        """The engine is closed: its worker and its requests are gone."""
        assert self.running.worker._closed
        assert not self.running._tasks
        assert (self.parts.fast.used_bytes, self.parts.slow.used_bytes) == (0, 0)
        with pytest.raises(EngineClosed):
            self.running.worker.submit(lambda: None)

    def generate(self, prompt: Sequence[int], count: int, **options: Any) -> Stream:
        options = {"ignore_eos": True, "max_tokens": count, **options}
        return self.engine.generate(list(prompt), **options)

    async def check(self, prompt: Sequence[int], count: int, **options: Any) -> Completion:
        """Run a request to its end and compare it with the reference."""
        completion = await self.generate(prompt, count, **options).result()
        self.check_tokens(prompt, count, completion)
        return completion

    def check_tokens(self, prompt: Sequence[int], count: int, completion: Completion) -> None:
        expected = self.setup.expected(prompt, count, completion.placement)
        assert list(completion.token_ids) == expected, completion.placement
        assert completion.finish_reason == "length"
        assert completion.usage.prompt_tokens == len(prompt)

    async def check_idle(self) -> None:
        """Nothing is left of any request, though the engine is open."""
        await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        fast, slow, running = self.parts.fast, self.parts.slow, self.running
        assert (fast.used_bytes, slow.used_bytes) == (0, 0)
        assert (fast.memory, slow.memory) == ({}, {})  # nothing landed after its owner had gone
        assert fast.peak_bytes <= fast.limit_bytes and slow.peak_bytes <= slow.limit_bytes
        assert sorted(fast._free) == list(range(fast.slots))
        assert sorted(slow._free) == list(range(slow.slots))
        assert running.kernel.in_flight == {}
        for lane in running.kernel.lanes:
            assert (len(lane._units), lane._reserved, lane.contended) == (0, 0, False)
        outer = running.outer
        assert (outer.residents, outer.waiting, outer._growing) == ({}, 0, {})
        assert (outer._quarantined, running.kernel.stragglers, running._tasks) == ({}, {}, {})
        assert running.entrance.inside is None
        for cohorts in running.cohorts.values():
            assert cohorts.members == 0
            assert all(cohort._task is None for cohort in cohorts.cohorts)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert {task.get_name() for task in left if task.get_name().startswith("pulse")} == set()
        assert not left, left


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt that is unlike those of other salts."""
    return [_mix(salt, i) % (VOCAB - 1) for i in range(length)]
