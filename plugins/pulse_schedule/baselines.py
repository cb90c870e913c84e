"""What others do, to measure against: one batch that waits for its own recalls."""

from __future__ import annotations

from collections.abc import Sequence

from pulse.types import LaneName, Operation, Pace, StepCosts, Work

__all__ = ["Lockstep", "PrefetchOne"]


class Lockstep:
    """Nobody computes while a recall is under way (ArkVale, PQCache).

    Nothing is committed behind a running operation either: a recall may follow from it.
    """

    def choose(
        self, waiting: Sequence[Operation], in_flight: Sequence[Operation]
    ) -> Operation | None:
        """First come, first served, and nothing while blocks are on their way."""
        if any(operation.lane is not LaneName.WRITE_BACK for operation in in_flight):
            return None
        return min(waiting, key=lambda operation: operation.id)

    def pace(self, costs: StepCosts) -> Pace:
        """One cohort, no prediction."""
        return Pace()


class PrefetchOne:
    """Recalls run one layer ahead, on a predicted selection; what else there is waits with them.

    InfiniGen. Of the batch, the offloaded sequences compute a layer, then the normal ones theirs,
    while the next layer's blocks come in; then all wait for these, and for what the prediction
    missed.
    """

    def __init__(self) -> None:
        self._others_may = False

    def choose(
        self, waiting: Sequence[Operation], in_flight: Sequence[Operation]
    ) -> Operation | None:
        """A landed offload cohort, then one of the others; more only if nothing is on its way."""
        landed = [operation for operation in waiting if operation.work is Work.OFFLOAD]
        if landed:
            self._others_may = True
            return min(landed, key=lambda operation: operation.id)
        on_its_way = any(operation.lane is LaneName.RECALL for operation in in_flight)
        if on_its_way and not self._others_may:
            return None
        self._others_may = False
        return min(waiting, key=lambda operation: operation.id)

    def pace(self, costs: StepCosts) -> Pace:
        """One cohort, predicted."""
        return Pace(1, predict=True)
