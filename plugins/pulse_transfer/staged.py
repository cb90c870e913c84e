"""Transfers through a staging buffer: many units per call, whatever the stores are."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Collection
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from pulse.errors import ConfigError
from pulse.ports import BlockStore
from pulse.types import TransferPlan, TransferReport
from pulse_transfer.channel import Channel, close_all
from pulse_transfer.plan import Units, compatible

__all__ = ["StagedTransfer"]

HUGE_PAGE = 2 << 20


class StagedTransfer:
    """Reads units into a staging buffer and writes them from there, piece by piece.

    workers: threads per direction. One is enough between host memories; reading small units from
        a disk gains from two to four.
    staging_bytes: each thread's buffer, and so the bytes that one piece moves at most (at least
        one unit). It is allocated with the thread's first piece.
    cores: CPU cores that the threads keep to; None for any.

    Recall and write-back have threads and buffers of their own and overlap. The pieces of a
    report are those of the slow tier: read on recall, written on write-back. Raises ConfigError.
    """

    eager = True

    def __init__(
        self,
        workers: int = 1,
        staging_bytes: int = 8 << 20,
        cores: Collection[int] | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers={workers!r} must be at least 1 thread per direction")
        if staging_bytes < 1:
            raise ConfigError(f"staging_bytes={staging_bytes!r} must be at least 1 byte")
        self._recall = Channel(
            "staged-recall",
            [_Stage(staging_bytes, count_reads=True) for _ in range(workers)],
            cores,
        )
        self._write_back = Channel(
            "staged-write-back",
            [_Stage(staging_bytes, count_reads=False) for _ in range(workers)],
            cores,
        )

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


class _Stage:
    """The mover of one thread."""

    def __init__(self, staging_bytes: int, *, count_reads: bool) -> None:
        self._staging_bytes = staging_bytes
        self._count_reads = count_reads
        self._buffer: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def __call__(
        self, plan: TransferPlan, source: Units, target: Units, stopped: Callable[[], bool]
    ) -> int:
        unit_bytes = plan.unit_bytes
        most = max(1, self._staging_bytes // unit_bytes)
        # Small plans keep to the buffer's start, which stays in the caches.
        buffer = self._staging(most * unit_bytes)
        pieces = 0
        for low in range(0, source.size, most):
            if stopped():
                break
            high = min(low + most, source.size)
            staged = buffer[: (high - low) * unit_bytes].reshape(high - low, unit_bytes)
            read = plan.source.read(source[low:high], staged)
            written = plan.target.write(target[low:high], staged)
            pieces += read if self._count_reads else written
        return pieces

    def _staging(self, size: int) -> NDArray[np.uint8]:
        if self._buffer.size < size:
            self._buffer = _reserve(max(size, self._staging_bytes))
        return self._buffer


def _reserve(size: int) -> NDArray[np.uint8]:
    """Zeroed anonymous memory, aligned to a huge page and in huge pages where there are any."""
    area = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower, not wrong
            area.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(area, dtype=np.uint8)
    start = -int(memory.ctypes.data) % HUGE_PAGE
    return memory[start : start + size]
