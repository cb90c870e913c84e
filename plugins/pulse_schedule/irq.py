"""Interruptible layer-wise scheduling, and its variant for mixed urgencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pulse.types import LaneName, Operation, Pace, StepCosts, Work
from pulse_schedule.pace import Pacer

__all__ = ["IRQ", "Fair"]

_RANK = {Work.OFFLOAD: 0, Work.NORMAL: 1, Work.PREFILL: 2}


class IRQ:
    """Interruptible layer-wise scheduling (PulseInfer, section "IRQ").

    An offload cohort whose blocks have landed goes first, else the normal cohort's next layer,
    else a prefill chunk fills the gap. Decode layers of other cohorts that happen to wait for the
    same layer are computed with the first one, in a single pass over its weights.

    An operation that was passed over `patience` times goes next whatever it is, which bounds every
    wait (the paper has no such bound). A landed cohort waits for at most one operation of a
    prefill: while a recall is under way, none is committed behind a running operation.
    """

    def __init__(self, patience: int = 64) -> None:
        self.patience = patience
        self._pacer = Pacer()

    def choose(
        self, waiting: Sequence[Operation], in_flight: Sequence[Operation]
    ) -> Operation | Sequence[Operation] | None:
        """The oldest starved operation, else the best by rank, then by age, and its like."""
        if len(waiting) == 1 and waiting[0].work is not Work.PREFILL:
            return waiting[0]
        starved = [operation for operation in waiting if operation.skipped >= self.patience]
        if starved:
            first = min(starved, key=lambda operation: operation.id)
        else:
            first = min(waiting, key=self._key)
            if first.work is Work.PREFILL and _would_be_committed(in_flight):
                return None
        if first.kind != "layer" or first.work is Work.PREFILL:
            return first
        return [first, *(other for other in waiting if other is not first and _like(other, first))]

    def pace(self, costs: StepCosts) -> Pace:
        """One cohort while others can fill its gaps; else what the pacer finds fastest."""
        return self._pacer.pace(costs)

    def _key(self, operation: Operation) -> Any:
        return _RANK[operation.work], operation.id


class Fair(IRQ):
    """As `IRQ`, but a higher priority goes first, then the earlier deadline.

    With a patience of 16 grants by default, so that the low priorities keep moving.
    """

    def __init__(self, patience: int = 16) -> None:
        super().__init__(patience)

    def _key(self, operation: Operation) -> Any:
        rank = _RANK[operation.work]
        return -operation.priority, operation.deadline, rank, operation.id


def _like(other: Operation, first: Operation) -> bool:
    return other.kind == "layer" and other.work is not Work.PREFILL and other.layer == first.layer


def _would_be_committed(in_flight: Sequence[Operation]) -> bool:
    """Whether a grant now would be behind a running operation, with blocks on their way."""
    lanes = {operation.lane for operation in in_flight if operation.work is not Work.PREFILL}
    running = any(operation.lane is LaneName.COMPUTE for operation in in_flight)
    return running and LaneName.RECALL in lanes
