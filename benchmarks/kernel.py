"""What the kernel itself costs, against a floor: `python -m benchmarks.kernel [--json]`.

Real threads and real event loops, asyncio's and uvloop's; a model, a cache and a transfer engine
that do nothing. Everything is compared with a floor that was measured beside it: a thread runs an
empty function and a coroutine resumes. With a model, also how late a coroutine of the host
application runs while the engine is at work.

The arms alternate in short rounds, steps within a round count by their median and rounds by the
median of their ratios, so that a busy machine disturbs all alike. Read the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.table import Table

from pulse import Engine, Instrument, Placement, Plugins, Worker
from pulse.instruments.stats import Stats
from pulse.ports import AdmissionView
from pulse.testing import ModelledExecutor, NullPolicy, Timing
from pulse.types import (
    Batch,
    Demand,
    Operation,
    Pace,
    Placed,
    StepCosts,
    TransferPlan,
    TransferReport,
    Work,
)
from pulse_schedule import IRQ

PROMPT = [1] * 40
"""Two whole blocks, so that there is something to select from the first step on."""
UNITS = 64
"""Units that a layer selects; all of them are missing where it recalls."""
ENDLESS = 1_000_000
"""Tokens of a normal request. Offloaded ones ask for fewer: the admission rule tells by that."""
TARGET = 3.0
PLUGINS = Plugins()


# -- a model that does nothing ---------------------------------------------------------------------


@dataclass(eq=False)
class _State:
    placed: list[Placed]
    tokens: list[tuple[int, float]]
    operations: int


@dataclass(eq=False)
class _Sequence:
    request: str
    chunk: int = 1 << 20


class _Cache:
    """A `KVCache` that answers from a table: it takes no room, and no time."""

    def __init__(self, layers: int, recalls: bool, fast: Any, slow: Any) -> None:
        self.layers, self.recalls, self.fast, self.slow = layers, recalls, fast, slow
        self._made: dict[tuple[str, ...], list[Placed]] = {}

    def demand(self, tokens: int, placement: Placement) -> Demand:
        return Demand(0, 0)

    def open(self, request: str, tokens: int, placement: Placement) -> _Sequence:
        return _Sequence(request)

    def grow(self, sequence: _Sequence, tokens: int) -> None:
        pass

    def close(self, sequence: _Sequence) -> None:
        pass

    def answers(self, batch: Batch) -> list[Placed]:
        """What `place` answers in each layer, made once for each cohort."""
        if batch.work is not Work.OFFLOAD:
            return [Placed(0, None)] * self.layers
        names = tuple(sequence.request for sequence in batch.sequences)
        if names not in self._made:
            selected = UNITS * len(names)
            self._made[names] = [
                Placed(selected, self._plan(names, layer) if self.recalls else None)
                for layer in range(self.layers)
            ]
        return self._made[names]

    def _plan(self, names: tuple[str, ...], layer: int) -> TransferPlan:
        units = UNITS * len(names)
        ids, bounds = list(range(units)), tuple(range(0, units + 1, UNITS))
        return TransferPlan(self.slow, self.fast, ids, ids, units, 8, layer, names, bounds)

    def place(self, state: _State, layer: int, selection: Any) -> Placed:
        return state.placed[layer]

    def prefix(self, state: _State, layer: int) -> Sequence[Any]:
        return ()

    def seal(self, state: _State, layer: int) -> None:
        return None


class _Executor(ModelledExecutor):
    """Computes nothing, and notes when each step of a cohort has ended and what it consisted of.

    `attend` passes the decision milestone, as a real one does.
    """

    def __init__(self, layers: int, recalls: bool) -> None:
        super().__init__(Timing(layers, 0.0, 0.0, lambda *_: 0.0))
        self.recalls = recalls
        self.ends: list[tuple[float, int]] = []
        """Of each step since `watch`: when it ended, its operations."""
        self._wanted = math.inf
        self._enough: Callable[[], object] = lambda: None

    def watch(self, steps: int, enough: Callable[[], object]) -> None:
        """Note so many steps from now on, and call `enough` (on the worker) then."""
        self._wanted, self._enough = math.inf, enough
        self.ends.clear()
        self._wanted = steps

    def cache(self, **options: Any) -> Any:
        self.answers = _Cache(self.timing.layers, self.recalls, options["fast"], options["slow"])
        return self.answers

    def embed(self, batch: Batch) -> Any:
        recalls = self.recalls and batch.work is Work.OFFLOAD
        operations = self.timing.layers * (2 if recalls else 1) + 1
        tokens = [(0, 0.0)] * len(batch.sequences)
        return _State(self.answers.answers(batch), tokens, operations)

    def attend(self, states: Sequence[Any], layer: int, milestone: Callable[[], None]) -> None:
        milestone()

    def sample(self, state: Any, samplers: Sequence[Any]) -> list[tuple[int, float]]:
        self.ends.append((time.perf_counter(), state.operations))
        if len(self.ends) == self._wanted:
            self._enough()
        return state.tokens  # type: ignore[no-any-return]


class _Transfer:
    """An eager `TransferEngine` with a thread of its own, which moves nothing."""

    eager = True

    def __init__(self) -> None:
        self._worker = Worker("idle-recall")
        self._report = TransferReport(8 * UNITS, 1, 0.0)

    def supports(self, source: Any, target: Any) -> bool:
        return True

    def recall(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        return self._worker.submit(self._move)

    write_back = recall

    def _move(self) -> TransferReport:
        return self._report

    async def close(self) -> None:
        await self._worker.close()


class _Paced(IRQ):
    """The default arbiter with a fixed number of offload cohorts."""

    def __init__(self, cohorts: int) -> None:
        super().__init__()
        self._fixed = Pace(cohorts)

    def pace(self, costs: StepCosts) -> Pace:
        return self._fixed


class _Split:
    """The admission rule: who asks for fewer tokens is offloaded."""

    def admit(self, waiting: Sequence[int], view: AdmissionView) -> list[Placement]:
        return [Placement.OFFLOAD if n < ENDLESS else Placement.NORMAL for n in waiting]


class _Watcher(Instrument):
    """Overrides every event of operations, and does nothing."""

    def operation_submitted(self, operation: Operation) -> None:
        pass

    def operation_started(self, operation: Operation) -> None:
        pass

    def operation_milestone(self, operation: Operation) -> None:
        pass

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        pass

    def selection(self, layer: int, selected: int, missed: int) -> None:
        pass


# -- arms ------------------------------------------------------------------------------------------


class Floor:
    """A thread with a queue; its results cross with one `call_soon_threadsafe` each."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        get, hand_over = self._queue.get, self._loop.call_soon_threadsafe
        while (job := get()) is not None:
            function, future = job
            hand_over(future.set_result, function())

    async def round(self, steps: int, times: int) -> float:
        """Seconds of one hand-over: the median of `steps` runs of `times` each."""
        put, create = self._queue.put, self._loop.create_future
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            for _ in range(times):
                future = create()
                put((_nothing, future))
                await future
            taken.append((time.perf_counter() - began) / times)
        return statistics.median(taken)

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Arm:
    """What an engine does in a round: so many requests, each in a cohort of its own."""

    normal: int
    offload: int
    recalls: bool
    watched: bool

    @property
    def cohorts(self) -> int:
        """How many step beside each other."""
        return self.normal + self.offload

    def operations(self, layers: int) -> int:
        """Operations of one step of each cohort: a computation per layer, one more, recalls."""
        recalls = layers * self.offload if self.recalls else 0
        return (layers + 1) * self.cohorts + recalls


ARMS = {
    f"{name}.{'on' if watched else 'off'}": Arm(normal, offload, recalls, watched)
    for watched in (False, True)
    for name, normal, offload, recalls in (
        ("layer", 1, 0, False),
        ("selection", 0, 1, False),
        ("recall", 0, 1, True),
        ("step", 1, 3, True),
    )
}


class Bench:
    """An engine on the idle model."""

    def __init__(self, arm: Arm, layers: int) -> None:
        self.arm = arm
        self.executor = _Executor(layers, arm.recalls)
        self.engine = Engine(
            "idle",
            executor=self.executor,
            select=NullPolicy(exhaustive=False),
            transfer=_Transfer(),
            admit=_Split(),
            schedule=_Paced(max(1, arm.offload)),
            fast_tier="64KiB",
            slow_tier="null",
            slow_limit="64KiB",
            block=16,
            sink=0,
            local=1,
            budget=32,
            instruments=[Stats(), _Watcher()] if arm.watched else [],
            plugins=PLUGINS,
        )

    async def round(self, steps: int) -> float:
        """Seconds of an operation: the median over the steps of a round."""
        arm, loop = self.arm, asyncio.get_running_loop()
        tokens = [ENDLESS] * arm.normal + [ENDLESS // 2] * arm.offload
        streams = [self.engine.generate(PROMPT, max_tokens=count) for count in tokens]
        for stream in streams:
            await anext(stream)  # prefill is over
        readers = [asyncio.create_task(_read(stream)) for stream in streams]
        enough = asyncio.Event()
        warm = 2 * arm.cohorts  # the first steps spread the sequences over the cohorts
        self.executor.watch(
            warm + steps * arm.cohorts + 1, lambda: loop.call_soon_threadsafe(enough.set)
        )
        await enough.wait()
        ends = self.executor.ends[warm : warm + steps * arm.cohorts + 1]
        for stream in streams:
            await stream.aclose()
        await asyncio.gather(*readers)
        # Cohorts do not take turns step by step: several steps of each are one sample then.
        width = arm.cohorts * (4 if arm.cohorts > 1 else 1)
        return statistics.median(
            (ends[at + width][0] - ends[at][0]) / sum(n for _, n in ends[at + 1 : at + width + 1])
            for at in range(0, len(ends) - width, width)
        )


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


# -- measuring -------------------------------------------------------------------------------------


async def measure(layers: int, steps: int, rounds: int) -> dict[str, Any]:
    """All arms on the running loop; the first round warms up and does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ("floor", *ARMS)}
    async with AsyncExitStack() as stack:
        floor = Floor()
        stack.callback(floor.close)
        benches = {name: Bench(arm, layers) for name, arm in ARMS.items()}
        for bench in benches.values():
            await stack.enter_async_context(bench.engine)
        for _ in range(rounds + 1):
            taken["floor"].append(await floor.round(steps, layers + 1))
            for name, bench in benches.items():
                taken[name].append(await bench.round(steps))
    return summary({name: seconds[1:] for name, seconds in taken.items()}, layers)


def summary(taken: dict[str, list[float]], layers: int) -> dict[str, Any]:
    """Medians of the rounds, and of the rounds' ratios to the floor."""
    floors = taken["floor"]
    both = ARMS["recall.off"].operations(layers) / (layers + 1)
    found: dict[str, Any] = {"floor_us": _micro(floors)}
    for state in ("off", "on"):
        layer, selection, recall, step = (
            taken[f"{name}.{state}"] for name in ("layer", "selection", "recall", "step")
        )
        operations = ARMS[f"step.{state}"].operations(layers)
        parts = {
            "per_layer": layer,
            # What a layer of an offload cohort costs more than one of a normal cohort: selection
            # where nothing is missing, selection and recall where something is.
            "per_selection": [s - n for s, n in zip(selection, layer, strict=True)],
            "per_recall": [r * both - n for r, n in zip(recall, layer, strict=True)],
            "per_operation": step,
        }
        found[state] = {
            "step_us": _micro([each * operations for each in step]),
            "step_operations": operations,
        }
        for name, seconds in parts.items():
            ratios = [s / f for s, f in zip(seconds, floors, strict=True)]
            found[state][f"{name}_us"] = _micro(seconds)
            found[state][f"{name}_ratio"] = round(statistics.median(ratios), 2)
    return found


def _micro(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 2)


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loops that are installed."""
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    with suppress(ImportError):
        found["uvloop"] = importlib.import_module("uvloop").new_event_loop
    return found


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    libraries: dict[str, str] = {}
    for name in ("uvloop", "torch"):
        with suppress(PackageNotFoundError):
            libraries[name] = version(name)
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        **libraries,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def report(
    layers: int,
    steps: int,
    rounds: int,
    model: str | None = None,
    seconds: float = 10.0,
    threads: int | None = None,
) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {
        "machine": machine(),
        "layers": layers,
        "steps": steps,
        "rounds": rounds,
        "threads": threads,
        "loops": {},
        "host_delay_ms": {},
    }
    for name, make in loops().items():
        with asyncio.Runner(loop_factory=make) as runner:
            found["loops"][name] = runner.run(measure(layers, steps, rounds))
    if model is not None:
        from benchmarks.host_delay import host_delay

        for name, make in loops().items():
            found["host_delay_ms"][name] = host_delay(model, make, seconds, threads)
    return found


# -- printing --------------------------------------------------------------------------------------


def _print(found: dict[str, Any]) -> None:
    console = Console()
    table = Table(
        title=f"microseconds of the kernel, in brackets times the floor ({TARGET:g} at most)"
    )
    for title in ("loop", "instruments", "floor", "layer", "selection", "recall", "operation",
                  "step of 4 cohorts"):  # fmt: skip
        table.add_column(title, justify="right")
    for name, loop in found["loops"].items():
        for state in ("off", "on"):
            row = loop[state]
            cells = [
                f"{row[f'per_{part}_us']:.1f} ({row[f'per_{part}_ratio']:.2f})"
                for part in ("layer", "selection", "recall", "operation")
            ]
            table.add_row(name, state, f"{loop['floor_us']:.1f}", *cells, f"{row['step_us']:,.0f}")
    console.print(table)
    if found["host_delay_ms"]:
        table = Table(title="how late the loop comes to what is ready, in ms")
        for title in ("loop", "engine", "median", "99 %", "most", "over 2 ms"):
            table.add_column(title, justify="right")
        for name, arms in found["host_delay_ms"].items():
            for arm, row in arms.items():
                numbers = [f"{row[key]:.2f}" for key in ("median", "p99", "max")]
                table.add_row(name, arm, *numbers, f"{row['over_2_ms']:.2%}")
        console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in found["machine"].items()))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12, help="steps of each cohort in a round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds whose median counts")
    parser.add_argument("--model", help="also measure how late a host's coroutine runs beside it")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each arm with a model")
    parser.add_argument("--threads", type=int, help="of the model's compute lane")
    options = parser.parse_args()
    found = report(
        options.layers,
        options.steps,
        options.rounds,
        options.model,
        options.seconds,
        options.threads,
    )
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)


if __name__ == "__main__":
    main()
