"""Runs a workload on the real engine in virtual time and notes all that happens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pulse.engine.engine import Engine
from pulse.errors import CapacityError, RequestFailed
from pulse.hookspecs import Build
from pulse.instruments.timeline import Timeline
from pulse.plugins import Plugins
from pulse.ports import Arbiter, Instrument
from pulse.testing.faults import FaultyTransfer
from pulse.testing.loop import Deadlock, InlineWorker, Livelock, VirtualLoop, run, who_waits
from pulse.testing.null import VOCAB, NullExecutor, NullPolicy, ScatteredPolicy, null_reference
from pulse.testing.subjects import resolve
from pulse.testing.witness import Witness
from pulse.testing.workload import Arrival, Workload
from pulse.types import LaneName, Operation, Placement, TransferReport

__all__ = ["Outcome", "Recorder", "Simulation", "prompt_of", "simulate"]

TIMEOUT_S = 1.0
"""A transfer is late after that; far longer than any drawn duration."""

QUIET_S = 200.0
OPERATIONS = 20_000
"""Virtual seconds without any event, and operations, after which nothing more is to be expected."""


@lru_cache(maxsize=1)
def _plugins() -> Plugins:
    return Plugins()


def prompt_of(length: int, salt: int) -> list[int]:
    """A prompt that is unlike those of other salts."""
    return [(salt * 7_919 + i * 104_729 + i * i) % (VOCAB - 1) for i in range(length)]


@dataclass
class Outcome:
    """How one request ended.

    end: ``done``, ``cancelled``, ``refused`` (it fits nowhere) or ``failed``. after_leaving:
    tokens that it was given after its owner had left. arrived_s, first_token_s, ended_s: virtual
    seconds; NaN for what did not happen.
    """

    request: str = ""
    placement: Placement | None = None
    tokens: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    end: str = ""
    error: BaseException | None = None
    after_leaving: int = 0
    arrived_s: float = math.nan
    first_token_s: float = math.nan
    ended_s: float = math.nan


class Recorder(Instrument):
    """Every operation, and every event as (time, name, subject).

    wrong: what may not be, as (rule, what was seen). first_token_s: by request.
    most_waiting: compute operations that waited at once.
    """

    def __init__(self) -> None:
        self.operations: dict[int, Operation] = {}
        self.ends: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.events: list[tuple[float, str, Any]] = []
        self.wrong: list[tuple[str, str]] = []
        self.left: dict[str, float] = {}
        self.after_leaving: dict[str, int] = {}
        self.first_token_s: dict[str, float] = {}
        self.most_waiting = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[int] = set()
        self._running: dict[LaneName, dict[int, Operation]] = {lane: {} for lane in LaneName}
        self._steps: dict[str, tuple[str, ...]] = {}

    @property
    def _now(self) -> float:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()  # also when a run is torn down, and no loop runs

    def _note(self, event: str, subject: Any) -> None:
        self.events.append((self._now, event, subject))

    def flag(self, rule: str, seen: str) -> None:
        """Note something that may not be."""
        if not getattr(self._loop, "stuck", False):  # tearing it down proves nothing
            self.wrong.append((rule, seen))

    def operation_submitted(self, operation: Operation) -> None:
        """It waits."""
        self._note("submitted", operation.id)
        self.operations[operation.id] = operation
        if operation.lane is LaneName.COMPUTE:
            self._waiting.add(operation.id)
            self.most_waiting = max(self.most_waiting, len(self._waiting))
        step = self._steps.get(operation.cohort)
        if operation.kind in ("layer", "recall", "prefetch") and step is not None:
            strange = set(operation.requests) - set(step)
            whole = operation.kind != "layer" or operation.requests == step
            if strange or not whole:
                self.flag(
                    "boundaries",
                    f"{operation.kind} of {operation.cohort} serves {operation.requests} in a "
                    f"step of {step}",
                )

    def operation_started(self, operation: Operation) -> None:
        """It has the lane."""
        self._note("started", operation.id)
        self.starts[operation.id] = self.starts.get(operation.id, 0) + 1
        self._waiting.discard(operation.id)
        running = self._running[operation.lane]
        running[operation.id] = operation
        if operation.lane is not LaneName.COMPUTE:
            return
        units = [one for one in running.values() if one.leader < 0]
        undecided = [one for one in units if not one.decided]
        if len(units) > 2 or len(undecided) > 1:
            self.flag(
                "lanes",
                f"{len(units)} operations in flight on the compute lane, {len(undecided)} of them "
                "before their milestone: " + ", ".join(f"{o.cohort} {o.kind}" for o in units),
            )

    def operation_milestone(self, operation: Operation) -> None:
        """The next may be chosen."""
        self._note("milestone", operation.id)

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        """It is over."""
        self._note(operation.status, operation.id)
        self.ends[operation.id] = self.ends.get(operation.id, 0) + 1
        self._waiting.discard(operation.id)
        self._running[operation.lane].pop(operation.id, None)

    def step_started(self, cohort: str, requests: tuple[str, ...]) -> None:
        """Its members stay the same from here ..."""
        self._note("step", (cohort, requests))
        for other, members in self._steps.items():
            twice = set(members) & set(requests)
            if twice:
                self.flag("boundaries", f"{sorted(twice)} are in steps of {cohort} and {other}")
        self._steps[cohort] = requests

    def step_ended(self, cohort: str, requests: tuple[str, ...]) -> None:
        """... to here."""
        self._note("step ended", cohort)
        if self._steps.pop(cohort, None) != requests:
            self.flag("boundaries", f"the members of {cohort} changed within a step")

    def request_admitted(self, request: str, placement: Placement) -> None:
        """It has slots."""
        self._note("admitted", (request, str(placement)))

    def request_preempted(self, request: str, reason: str) -> None:
        """It has none any more."""
        self._note("preempted", request)

    def token(self, request: str, index: int) -> None:
        """It goes on."""
        self._note("token", (request, index))
        self.first_token_s.setdefault(request, self.events[-1][0])
        # What is ready at the very time of the cancellation may still come before it.
        if self.left.get(request, math.inf) < self._now:
            self.after_leaving[request] = self.after_leaving.get(request, 0) + 1

    def quarantined(self, request: str, transfers: int) -> None:
        """Its slots may not be used yet."""
        self._note("quarantined", (request, transfers))

    def request_ended(self, request: str, reason: str) -> None:
        """It is over."""
        self._note("ended", (request, reason))
        members = [cohort for cohort, step in self._steps.items() if request in step]
        if members:
            self.flag("boundaries", f"request {request} ended within a step of {members[0]}")


@dataclass
class Simulation:
    """A run of a workload: how each request ended, and everything that was seen.

    stuck: who waits for what, if it did not come to an end. leaks: what was left when all was over.
    """

    workload: Workload
    recorder: Recorder
    outcomes: list[Outcome]
    stuck: str = ""
    leaks: list[str] = field(default_factory=list)
    struck: set[str] = field(default_factory=set)

    @property
    def timeline(self) -> str:
        """The lanes, as text."""
        return Timeline.of(self.recorder.operations.values()).text(96)

    @property
    def history(self) -> str:
        """Every event in its order: the same workload gives the same text, byte for byte."""
        return "\n".join(f"{at!r} {event} {what}" for at, event, what in self.recorder.events)


def simulate(
    workload: Workload, arbiter: Any, *, instruments: Iterable[Instrument] = ()
) -> Simulation:
    """Run `workload` on the null model under `arbiter`: an object, its class, or a name.

    instruments: listen, too. Raises PluginNotFound, PluginUnavailable, ConfigError.
    """
    recorder = Recorder()
    made = resolve(arbiter, "schedule", _plugins()).probe(Build())
    witness = Witness(made, recorder.flag)
    outcomes = [Outcome() for _ in workload.requests]
    result = Simulation(workload, recorder, outcomes)
    timings, seed = workload.timings, workload.seed
    faults: dict[tuple[str, int], str] = {}  # by request id, once it has one
    transfer = FaultyTransfer(
        faults,
        timings.draws(timings.transfer_s, seed + 1),
        late_s=3 * TIMEOUT_S,
        eager=workload.eager,
    )
    engine = _engine(workload, witness, transfer, [recorder, *instruments])
    try:
        run(_drive(engine, result, faults), seed=seed or None)
    except (Deadlock, Livelock) as stuck:
        result.stuck = str(stuck)
    result.struck = set(transfer.struck)
    return result


def _engine(
    workload: Workload,
    arbiter: Arbiter,
    transfer: FaultyTransfer,
    instruments: Sequence[Instrument],
) -> Engine:
    config, timings = workload.config, workload.timings
    slot = 8 * config.block
    compute = timings.draws(timings.compute_s, workload.seed)
    return Engine(
        "null",
        executor=NullExecutor(workload.layers),
        select=ScatteredPolicy(wrong=workload.wrong) if workload.sparse else NullPolicy(),
        transfer=transfer,
        admit=f"threshold:{workload.normal_tokens}",
        schedule=arbiter,
        fast_tier=workload.fast_slots * slot,
        slow_tier="null",
        slow_limit=1_000 * workload.layers * slot,
        block=config.block,
        budget=config.budget,
        sink=config.sink,
        local=config.local,
        chunk=config.chunk,
        transfer_timeout_s=TIMEOUT_S,
        instruments=instruments,
        plugins=_plugins(),
        worker=lambda name: InlineWorker(name, compute),
    )


async def _drive(engine: Engine, result: Simulation, faults: dict[tuple[str, int], str]) -> None:
    await engine.open()
    parts, loop = engine.parts, asyncio.get_running_loop()
    clients = [
        asyncio.create_task(_client(engine, result, index, faults), name=f"client-{index}")
        for index in range(len(result.outcomes))
    ]
    recorder = result.recorder
    late: set[asyncio.Task[None]] = set(clients)
    done: set[asyncio.Task[None]] = set()
    seen, quiet_from = 0, max(one.at + (one.leaves or 0.0) for one in result.workload.requests)
    while late and len(recorder.operations) < OPERATIONS and loop.time() < quiet_from + QUIET_S:
        done, late = await asyncio.wait(clients, timeout=TIMEOUT_S)
        if len(recorder.events) > seen:
            seen, quiet_from = len(recorder.events), max(quiet_from, loop.time())
    if late:
        count = len(recorder.operations)
        why = f"{len(late)} requests are not over after {loop.time():g} s and {count} operations"
        result.stuck = who_waits(loop, why)
        assert isinstance(loop, VirtualLoop)
        loop.stuck = True
        return  # closing would wait for them, too
    for task in done:
        task.result()
    await asyncio.sleep(10 * TIMEOUT_S)  # what was late has ended
    result.leaks += _left(parts)
    await engine.aclose()
    others = [task.get_name() for task in asyncio.all_tasks(loop) if task not in clients]
    own = asyncio.current_task()
    assert own is not None
    result.leaks += [f"task {name} is left" for name in others if name != own.get_name()]
    tiers: Any = (parts.fast, parts.slow)
    for tier in tiers:
        if tier.trespasses:
            result.leaks.append(
                f"slots {tier.trespasses} were written to when they were free, or had changed hands"
            )


def _left(parts: Any) -> list[str]:
    """What is not as it was before the first request."""
    left = [
        f"{tier.used_bytes} bytes of the {name} tier are in use"
        for name, tier in (("fast", parts.fast), ("slow", parts.slow))
        if tier.used_bytes
    ]
    left += [
        f"the {name} tier holds {len(tier.memory)} blocks that nobody owns"
        for name, tier in (("fast", parts.fast), ("slow", parts.slow))
        if tier.memory
    ]
    return left


async def _client(
    engine: Engine, result: Simulation, index: int, faults: dict[tuple[str, int], str]
) -> None:
    wanted: Arrival = result.workload.requests[index]
    outcome, recorder = result.outcomes[index], result.recorder
    loop = asyncio.get_running_loop()
    await asyncio.sleep(wanted.at)
    outcome.arrived_s = loop.time()
    prompt = prompt_of(wanted.prompt, index)
    stream = engine.generate(
        prompt,
        max_tokens=wanted.tokens,
        ignore_eos=True,
        priority=wanted.priority,
        deadline_s=wanted.deadline_s,
    )
    outcome.request = stream.id
    for fault in result.workload.faults:
        if fault.request == index:
            faults[stream.id, fault.at] = fault.how
    reader = asyncio.ensure_future(stream.result())

    def leave() -> None:
        if not reader.done():
            recorder.left[stream.id] = loop.time()
            reader.cancel()

    if wanted.leaves is not None:
        loop.call_later(wanted.leaves, leave)
    try:
        await reader
        outcome.end = "done"
    except asyncio.CancelledError:
        outcome.end = "cancelled"
    except RequestFailed as failed:
        refused = isinstance(failed.__cause__, CapacityError)
        outcome.end, outcome.error = "refused" if refused else "failed", failed.__cause__
    except Exception as error:
        outcome.end, outcome.error = "failed", error
    completion = stream.completion()
    outcome.placement, outcome.tokens = completion.placement, completion.token_ids
    outcome.expected = _expected(result.workload, prompt, wanted.tokens, completion.placement)
    outcome.first_token_s = recorder.first_token_s.get(stream.id, math.nan)
    outcome.ended_s = loop.time()
    outcome.after_leaving = recorder.after_leaving.get(stream.id, 0)


def _expected(
    workload: Workload, prompt: Sequence[int], count: int, placement: Placement
) -> tuple[int, ...]:
    sparse = workload.sparse and placement is Placement.OFFLOAD
    config = workload.config if sparse else None
    return tuple(null_reference(prompt, count, workload.layers, config))
