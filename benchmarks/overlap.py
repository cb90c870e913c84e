"""How well arbiters hide recalls: `python -m benchmarks.overlap [--json]`.

The real kernel on modelled times in virtual time. Recalls take 0.5 to 3 times a layer's compute,
1.85 times on average, with a long tail and layer medians that differ five-fold, as PulseInfer
measured them. Two tables: with short requests beside the long ones (how busy the compute lane is,
what the short ones pay), and with long ones alone (how much faster than `lockstep`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pulse import Engine, Instrument, Placement, Plugins, Stream
from pulse.ports import AdmissionView
from pulse.testing import NullPolicy, run
from pulse.testing.modelled import ModelledExecutor, ModelledTransfer, ModelledWorker, Timing
from pulse.types import LaneName, Operation, TransferReport

ARBITERS = ("lockstep", "prefetch-one", "irq")
LAYERS = 16
LONG_TOKENS = 1_000
"""Requests that generate fewer are the long ones: a run ends with them."""
SHORT_TOKENS = 1_000_000
MEAN = 1.85
SPREAD = 5.0
PLUGINS = Plugins()


@dataclass(frozen=True)
class Drawn:
    """One drawn timing.

    share: of a layer's compute that is the pass over the weights. ratio: mean recall over compute.
    tail: sigma of the log-normal factor per recall. hit: share of predictions that are right.
    """

    seed: int
    longs: int
    shorts: int
    share: float
    ratio: float
    tail: float
    hit: float

    def timing(self) -> Timing:
        """The times: a layer of the long requests computes for one second."""
        sequences = self.longs
        source = random.Random(self.seed)
        medians = [SPREAD ** (i / (LAYERS - 1)) for i in range(LAYERS)]
        source.shuffle(medians)
        mean = sum(medians) / LAYERS
        whole = 1.0 if not self.shorts else 1.0 + self.share + (1 - self.share) / 2

        def recall_s(request: str, position: int, layer: int) -> float:
            draw = random.Random(f"{self.seed} {request} {position} {layer}")
            factor = math.exp(draw.gauss(-(self.tail**2) / 2, self.tail))
            seconds = self.ratio * whole * medians[layer] / mean * factor / sequences
            return min(seconds, 12 * whole / sequences)

        return Timing(LAYERS, self.share, (1 - self.share) / sequences, recall_s, self.hit)


def drawn(seed: int, *, shorts: bool) -> Drawn:
    """A timing; with short requests the ratio is the paper's mean, else anywhere in its range."""
    source = random.Random(seed)
    longs = source.choice([4, 6, 8])
    return Drawn(
        seed,
        longs=longs,
        shorts=longs // 2 if shorts else 0,
        share=source.uniform(0.3, 0.5) if shorts else source.uniform(0.1, 0.7),
        ratio=MEAN if shorts else source.uniform(0.5, 3.0),
        tail=source.uniform(0.3, 0.6),
        hit=source.uniform(0.75, 0.85) if shorts else source.uniform(0.6, 0.95),
    )


class _Split:
    """The admission rule: those that generate few tokens are the long requests here."""

    def admit(self, waiting: Sequence[int], view: AdmissionView) -> list[Placement]:
        return [
            Placement.OFFLOAD if total < SHORT_TOKENS else Placement.NORMAL for total in waiting
        ]


class _Recalls(Instrument):
    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        if operation.lane is LaneName.RECALL:
            self.intervals.append((operation.started, operation.ended))


@dataclass(frozen=True)
class Result:
    """One run. Shares of the time between the first and the last step of the long requests."""

    busy: float
    stalled: float
    short_tpot_s: float
    step_s: float


def measure(case: Drawn, arbiter: Any, steps: int, *, alone: bool = False) -> Result:
    """Run `steps` steps of the long requests, or, with `alone`, of the short ones by themselves."""
    executor = ModelledExecutor(case.timing())
    workers: list[ModelledWorker] = []

    def worker(name: str) -> ModelledWorker:
        workers.append(ModelledWorker(name, executor))
        return workers[-1]

    recalls = _Recalls()
    engine = Engine(
        "modelled",
        executor=executor,
        select=NullPolicy(exhaustive=False),
        transfer=ModelledTransfer(),
        admit=_Split(),
        schedule=arbiter,
        fast_tier="64KiB",
        slow_tier="null",
        slow_limit="64KiB",
        block=1,
        sink=0,
        local=1,
        budget=2,
        instruments=[recalls],
        plugins=PLUGINS,
        worker=worker,
    )

    async def main() -> Result:
        async with engine:
            loop = asyncio.get_running_loop()
            shorts = [
                engine.generate([1, 1, 1], max_tokens=SHORT_TOKENS) for _ in range(case.shorts)
            ]
            longs = [
                engine.generate([1, 1, 1], max_tokens=steps)
                for _ in range(0 if alone else case.longs)
            ]
            for stream in (*shorts, *longs):
                await anext(stream)
            began, before, first = loop.time(), _counts(shorts), _counts(longs)
            if alone:
                await asyncio.sleep(steps * LAYERS)
            else:  # as long as all of them run
                ends = [asyncio.ensure_future(stream.result()) for stream in longs]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            ended = loop.time()
            tpot = _per_token(ended - began, before, _counts(shorts))
            step = _per_token(ended - began, first, _counts(longs))
            busy = _clipped(workers[0].intervals, began, ended)
            stalled = _length(_minus(_clipped(recalls.intervals, began, ended), busy))
            return Result(_length(busy) / (ended - began), stalled / (ended - began), tpot, step)

    return run(main())


def _counts(streams: Sequence[Stream]) -> list[int]:
    return [stream.completion().usage.completion_tokens for stream in streams]


def _per_token(seconds: float, before: Sequence[int], after: Sequence[int]) -> float:
    made = sum(after) - sum(before)
    return seconds * len(before) / made if made else math.nan


def _clipped(
    intervals: Sequence[tuple[float, float]], low: float, high: float
) -> list[tuple[float, float]]:
    """The union of `intervals` between two times."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        start, end = max(start, low), min(end, high)
        if start >= end:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _minus(
    those: Sequence[tuple[float, float]], busy: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    left, at = [], 0
    for start, end in those:  # both are sorted and do not overlap themselves
        while at < len(busy) and busy[at][1] <= start:
            at += 1
        here = at
        while here < len(busy) and busy[here][0] < end:
            if busy[here][0] > start:
                left.append((start, busy[here][0]))
            start = max(start, busy[here][1])
            here += 1
        if start < end:
            left.append((start, end))
    return left


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def mixed(seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Long requests beside short ones."""
    table: dict[str, Any] = {}
    cases = [drawn(seed, shorts=True) for seed in seeds]
    alone = [measure(case, "irq", 40, alone=True).short_tpot_s for case in cases]
    for arbiter in ARBITERS:
        results = [measure(case, arbiter, steps) for case in cases]
        ratios = [r.short_tpot_s / own for r, own in zip(results, alone, strict=True)]
        table[arbiter] = {
            "compute_busy": statistics.median(r.busy for r in results),
            "compute_busy_least": min(r.busy for r in results),
            "recall_stall": statistics.median(r.stalled for r in results),
            "short_tpot_ratio": statistics.median(ratios),
            "short_tpot_ratio_most": max(ratios),
        }
    return table


def all_long(seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Long requests alone: speed-ups of irq over the baselines, each on the same timing."""
    cases = [drawn(seed, shorts=False) for seed in seeds]
    times = {
        arbiter: [measure(case, arbiter, steps).step_s for case in cases] for arbiter in ARBITERS
    }
    return {
        f"irq_over_{other}": {
            "median": statistics.median(ratios),
            "least": min(ratios),
            "least_seed": seeds[ratios.index(min(ratios))],
            "most": max(ratios),
        }
        for other in ARBITERS[:2]
        for ratios in [[b / i for b, i in zip(times[other], times["irq"], strict=True)]]
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table(title="long beside short requests, modelled times (medians, worst in brackets)")
    for name in ("arbiter", "compute lane busy", "stalled on recall", "short TPOT, alone = 1"):
        table.add_column(name, justify="left" if name == "arbiter" else "right")
    for arbiter, row in report["mixed"].items():
        table.add_row(
            arbiter,
            f"{row['compute_busy']:.1%} ({row['compute_busy_least']:.1%})",
            f"{row['recall_stall']:.1%}",
            f"{row['short_tpot_ratio']:.2f} ({row['short_tpot_ratio_most']:.2f})",
        )
    console.print(table)
    table = Table(title="long requests alone, modelled times: how much faster irq is")
    for name in ("against", "median", "least (seed)", "most"):
        table.add_column(name, justify="left" if name == "against" else "right")
    for name, row in report["all_long"].items():
        table.add_row(
            name.removeprefix("irq_over_"),
            f"{row['median']:.2f}x",
            f"{row['least']:.3f}x ({row['least_seed']})",
            f"{row['most']:.2f}x",
        )
    console.print(table)
    console.print(
        f"seeds {report['seeds'][0]} to {report['seeds'][-1]}; virtual time, nothing is measured"
    )


def report(seeds: Sequence[int], mixed_steps: int = 40, long_steps: int = 320) -> dict[str, Any]:
    """Both tables."""
    return {
        "seeds": list(seeds),
        "layers": LAYERS,
        "mixed": mixed(seeds, mixed_steps),
        "all_long": all_long(seeds, long_steps),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--draws", type=int, default=24, help="drawn timings")
    parser.add_argument("--steps", type=int, default=320, help="steps of the long requests alone")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.draws)
    found = report(seeds, long_steps=options.steps)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)


if __name__ == "__main__":
    main()
