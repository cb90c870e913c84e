"""How fast scattered units move between two host arenas: `staged` and `torch-copy` to memcpy.

    python benchmarks/transfer.py [--mib 128] [--rounds 7]

Every round moves the same bytes once each way, so that a busy machine disturbs all alike; medians
of the rounds are compared. The memcpy copies them as one contiguous piece: no engine that stages
can reach it, since staging moves every byte twice.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pulse.ports import TransferEngine
from pulse.types import TransferPlan
from pulse_store.host import HostStore
from pulse_transfer.staged import StagedTransfer
from pulse_transfer.torch_copy import TorchCopyTransfer

UNIT_BYTES = (8 << 10, 64 << 10, 256 << 10)
Ways = dict[str, Callable[[], Awaitable[float]]]


async def measure(unit_bytes: int, total: int, rounds: int) -> dict[str, float]:
    """Median seconds of each way to move `total` bytes in units of `unit_bytes`."""
    units = total // unit_bytes
    arenas = [HostStore(2 * units, 1, 1, unit_bytes) for _ in range(2)]
    for number, arena in enumerate(arenas):
        arena.memory[:] = number  # fresh pages would cost more than the copy
    draw = np.random.default_rng(unit_bytes)
    ids = [draw.permutation(2 * units)[:units] for _ in range(2)]
    plan = TransferPlan(arenas[0], arenas[1], ids[0], ids[1], units, unit_bytes)
    engines: dict[str, TransferEngine] = {
        "staged": StagedTransfer(),
        "torch-copy": TorchCopyTransfer(),
    }

    async def memcpy() -> float:
        began = time.perf_counter()
        arenas[1].memory[:units] = arenas[0].memory[:units]
        return time.perf_counter() - began

    ways: Ways = {"memcpy": memcpy}
    for name, engine in engines.items():
        ways[name] = partial(recall, engine, plan)
    seconds = await alternate(ways, rounds)
    for engine in engines.values():
        await engine.close()
    return seconds


async def recall(engine: TransferEngine, plan: TransferPlan) -> float:
    """Seconds from asking for the plan to its report, the hop to the thread and back included."""
    began = time.perf_counter()
    await engine.recall(plan)
    return time.perf_counter() - began


async def alternate(ways: Ways, rounds: int) -> dict[str, float]:
    """Median seconds per way; the first round warms up and does not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            taken[name].append(await way())
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def machine() -> str:
    """What the numbers were measured on."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba", "torch"))
    return (
        f"{platform.machine()}, {torch.get_num_threads()} torch thread(s), "
        f"Python {platform.python_version()}, {libraries}"
    )


def table(results: dict[int, dict[str, float]], total: int) -> Table:
    """Throughput in GB/s, and the share of memcpy's that each engine reaches."""
    out = Table(title=f"host to host, {total >> 20} MiB in scattered units")
    for title in ("unit", "memcpy GB/s", "staged", "of memcpy", "torch-copy", "of memcpy",
                  "staged : torch-copy"):  # fmt: skip
        out.add_column(title, justify="right")
    for unit_bytes, seconds in results.items():
        plain, staged, torch_copy = (seconds[n] for n in ("memcpy", "staged", "torch-copy"))
        speeds = [f"{total / s / 1e9:.1f}" for s in (plain, staged, torch_copy)]
        out.add_row(
            f"{unit_bytes >> 10} KB", speeds[0], speeds[1], f"{plain / staged:.2f}", speeds[2],
            f"{plain / torch_copy:.2f}", f"{torch_copy / staged:.2f}",
        )  # fmt: skip
    return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="MiB that each round moves")
    parser.add_argument("--rounds", type=int, default=7, help="rounds whose median counts")
    options = parser.parse_args()
    torch.set_num_threads(1)  # one thread per engine, as for the others
    total = max(1, options.mib) << 20
    results = {
        size: asyncio.run(measure(size, total, max(1, options.rounds))) for size in UNIT_BYTES
    }
    console = Console()
    console.print(table(results, total))
    console.print(machine())


if __name__ == "__main__":
    main()
