"""Arbiters of the compute lane: irq, lockstep."""

from __future__ import annotations

from collections.abc import Sequence

from pulse import Build, Plugin, hookimpl
from pulse.errors import ConfigError
from pulse.types import LaneName, Operation, Work

__all__ = ["IRQ", "Lockstep", "pulse_arbiters"]

_RANK = {Work.OFFLOAD: 0, Work.NORMAL: 1, Work.PREFILL: 2}


class IRQ:
    """Interruptible layer-wise scheduling (PulseInfer, section "IRQ").

    An offload cohort whose blocks have landed goes first, else the normal cohort's next layer,
    else a prefill chunk fills the gap. An operation that was passed over `patience` times goes
    next whatever it is, which bounds every wait (the paper has no such bound).
    """

    def __init__(self, patience: int = 64) -> None:
        self.patience = patience

    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Operation:
        """The oldest starved operation, else the best by rank, then by age."""
        starved = [operation for operation in waiting if operation.skipped >= self.patience]
        if starved:
            return min(starved, key=lambda operation: operation.id)
        return min(waiting, key=lambda operation: (_RANK[operation.work], operation.id))


class Lockstep:
    """The baseline: nobody computes while a recall is under way (ArkVale, PQCache)."""

    def choose(
        self, waiting: Sequence[Operation], in_flight: Sequence[Operation]
    ) -> Operation | None:
        """First come, first served, and nothing while blocks are on their way."""
        if any(operation.lane is LaneName.RECALL for operation in in_flight):
            return None
        return min(waiting, key=lambda operation: operation.id)


def _irq(build: Build) -> IRQ:
    if not build.argument:
        return IRQ()
    if not build.argument.isdecimal() or int(build.argument) < 1:
        raise ConfigError(f"irq:{build.argument} needs a patience of at least 1 grant, like irq:64")
    return IRQ(int(build.argument))


@hookimpl
def pulse_arbiters() -> list[Plugin]:
    """The arbiters of this package."""
    return [
        Plugin("irq", _irq, "landed offload cohorts first, then normal layers, then prefill"),
        Plugin("lockstep", lambda _: Lockstep(), "the baseline: recalls stop all computation"),
    ]
