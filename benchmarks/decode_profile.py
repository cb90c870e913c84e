"""Where a decode step's time goes: torch and numba, Python on the worker, waiting for the lane.

    python benchmarks/decode_profile.py --model DIR_OR_GGUF [--tokens 4000] [--steps 48]

Decodes one offloaded request and prints shares of the wall time of its decode steps. Profiling
slows Python down, so the share outside compiled code is an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import Callable
from typing import Any

import numba
import torch
from rich.console import Console
from rich.table import Table

import pulse
from pulse.types import LaneName, Operation, TransferReport, Work
from pulse_torch import attention, kv


class Clock:
    """Seconds inside compiled functions of numba that are called from Python."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


class Steps(pulse.Instrument):
    """Busy time of the lanes while the request decodes."""

    def __init__(self) -> None:
        self.busy = dict.fromkeys(LaneName, 0.0)
        self.first = self.last = 0.0
        self.on_first: Callable[[], None] = lambda: None

    def token(self, request: str, index: int) -> None:
        """The first token ends prefill."""
        self.last = time.perf_counter()
        if index == 0:
            self.first = self.last
            self.on_first()

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        """Add the operation to its lane."""
        if operation.work is Work.OFFLOAD:
            self.busy[operation.lane] += operation.ended - operation.started


async def measure(model: str, tokens: int, steps: int) -> dict[str, float]:
    clock, watch = Clock(), Steps()
    attention._decode = clock.wrap(attention._decode)
    kv.plan_hot = clock.wrap(kv.plan_hot)
    kv.ring_table = clock.wrap(kv.ring_table)
    options: dict[str, Any] = {"budget": 512, "fast_tier": "256MiB", "admit": "threshold:0"}
    prompt = [7 + n % 90 for n in range(tokens)]
    async with pulse.Engine(model, instruments=[watch], **options) as engine:
        await engine.generate(prompt, max_tokens=4, ignore_eos=True).result()  # warm
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

        def begin() -> None:
            clock.seconds = 0.0
            watch.busy = dict.fromkeys(LaneName, 0.0)
            executor = engine.parts.executor
            executor.embed = started(executor.embed, profiler)  # type: ignore[method-assign]

        watch.on_first = begin
        await engine.generate(prompt, max_tokens=steps + 1, ignore_eos=True).result()
        assert engine._running is not None
        await engine._running.worker.run(profiler.stop)  # on the thread that it was started on
    compiled = sum(event.self_cpu_time_total for event in profiler.key_averages()) / 1e6
    wall = watch.last - watch.first
    compute = watch.busy[LaneName.COMPUTE]
    return {
        "torch": compiled / wall,
        "numba": clock.seconds / wall,
        "Python on the compute worker": (compute - compiled - clock.seconds) / wall,
        "compute lane idle (recalls, hand-over, event loop)": (wall - compute) / wall,
    }


def started(embed: Callable[..., Any], profiler: Any) -> Callable[..., Any]:
    """`embed` that starts the profiler on the worker's own thread, once."""
    pending = [profiler]

    def first(batch: Any) -> Any:
        if pending:
            pending.pop().start()
        return embed(batch)

    return first


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=48)
    args = parser.parse_args()
    shares = asyncio.run(measure(args.model, args.tokens, args.steps))
    table = Table("share of a decode step", "", box=None)
    for name, share in shares.items():
        table.add_row(name, f"{share:.0%}")
    console = Console()
    console.print(table)
    console.print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, Python "
        f"{platform.python_version()}, torch {torch.__version__}, numba {numba.__version__}"
    )


if __name__ == "__main__":
    main()
