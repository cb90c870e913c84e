"""One torch copy per unit: what block-wise offloading does without a gather.

The baseline that `staged` and the gather kernels are measured against.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import numpy as np
import torch

from pulse.ports import BlockStore
from pulse.types import TransferPlan, TransferReport
from pulse_transfer.channel import Channel, close_all
from pulse_transfer.plan import Units, compatible

__all__ = ["TorchCopyTransfer"]


class TorchCopyTransfer:
    """Copies unit by unit: `Tensor.copy_` between arenas in memory, else read and write.

    One thread per direction, on `cores`; a report counts each unit as a piece.
    """

    eager = True

    def __init__(self, cores: Collection[int] | None = None) -> None:
        self._recall = Channel("torch-recall", [_copy_each], cores)
        self._write_back = Channel("torch-write-back", [_copy_each], cores)

    def supports(self, source: BlockStore, target: BlockStore) -> bool:
        """Any two different stores with units of the same size."""
        return compatible(source, target)

    def recall(self, plan: TransferPlan) -> asyncio.Future[TransferReport]:
        """Slow tier to fast tier. The future raises TransferError, EngineClosed."""
        return self._recall.run(plan)

    def write_back(self, plan: TransferPlan) -> asyncio.Future[TransferReport]:
        """Fast tier to slow tier. The future raises TransferError, EngineClosed."""
        return self._write_back.run(plan)

    async def close(self) -> None:
        """Wait for what is under way and end the threads. Idempotent."""
        await close_all(self._recall, self._write_back)


def _copy_each(
    plan: TransferPlan, source: Units, target: Units, stopped: Callable[[], bool]
) -> int:
    arenas = _tensor(plan.source), _tensor(plan.target)
    if arenas[0] is not None and arenas[1] is not None:
        return _copy_tensors(arenas[0], arenas[1], source, target, stopped)
    return _copy_through_buffer(plan, source, target, stopped)


def _copy_tensors(
    source: torch.Tensor,
    target: torch.Tensor,
    source_units: Units,
    target_units: Units,
    stopped: Callable[[], bool],
) -> int:
    copied = 0
    for here, there in zip(source_units.tolist(), target_units.tolist(), strict=True):
        if stopped():
            break
        target[there].copy_(source[here])
        copied += 1
    return copied


def _copy_through_buffer(
    plan: TransferPlan, source: Units, target: Units, stopped: Callable[[], bool]
) -> int:
    unit = np.empty((1, plan.unit_bytes), dtype=np.uint8)
    for i in range(source.size):
        if stopped():
            return i
        plan.source.read(source[i : i + 1], unit)
        plan.target.write(target[i : i + 1], unit)
    return int(source.size)


def _tensor(store: BlockStore) -> torch.Tensor | None:
    """The store's arena as a tensor that shares its memory, ``[units, _]``, or None."""
    memory = getattr(store, "memory", None)
    if not isinstance(memory, np.ndarray):
        return None
    tensor = torch.from_numpy(memory)
    # Few wide elements: torch starts its OpenMP threads by the number of elements, and these
    # threads would fight with the compute lane's.
    return tensor.view(torch.int64) if memory.shape[1] % 8 == 0 else tensor
