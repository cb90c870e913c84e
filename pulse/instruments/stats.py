"""Counters of an engine's work: lanes, recalls, write-backs."""

from __future__ import annotations

from dataclasses import dataclass, field

from pulse.ports import Instrument
from pulse.types import LaneName, Operation, TransferReport

__all__ = ["LaneStats", "Stats"]


@dataclass(slots=True)
class LaneStats:
    """Seconds that at least one operation ran, and operations that ended."""

    busy_s: float = 0.0
    operations: int = 0


@dataclass
class Stats(Instrument):
    """Adds up what the kernel reports. A block counts per KV head where heads select alone.

    selected: blocks that attention read; missed: those among them that had to be recalled.
    first, last: seconds of the engine's clock when work began and ended.
    """

    lanes: dict[str, LaneStats] = field(
        default_factory=lambda: {lane.value: LaneStats() for lane in LaneName}
    )
    recall_bytes: int = 0
    recall_blocks: int = 0
    selected: int = 0
    missed: int = 0
    write_back_bytes: int = 0
    write_back_blocks: int = 0
    first: float | None = None
    last: float = 0.0
    _running: dict[str, int] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def operation_started(self, operation: Operation) -> None:
        """The lane is busy from here on, if it was not."""
        lane = operation.lane.value
        running = self._running.get(lane, 0)
        self._running[lane] = running + 1
        if not running:
            # What a worker started is told of later; the lane's last busy time may reach into it.
            self._since[lane] = max(operation.started, self._until.get(lane, operation.started))
        if self.first is None:
            self.first = operation.started

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        """Add the operation up; one that never started does not count."""
        if operation.started != operation.started:  # NaN: cancelled while it waited
            return
        lane = operation.lane.value
        stats = self.lanes[lane]
        stats.operations += 1
        self._running[lane] -= 1
        self.last = operation.ended
        if not self._running[lane]:
            stats.busy_s += operation.ended - self._since[lane]
            self._until[lane] = operation.ended
        if report is None or operation.status != "done":
            return
        if operation.lane is LaneName.RECALL:
            self.recall_bytes += report.bytes
            self.recall_blocks += operation.blocks
        else:
            self.write_back_bytes += report.bytes
            self.write_back_blocks += operation.blocks

    def selection(self, layer: int, selected: int, missed: int) -> None:
        """One layer of one decode step of an offload cohort."""
        self.selected += selected
        self.missed += missed

    @property
    def elapsed_s(self) -> float:
        """From the first operation's start to the last one's end."""
        return 0.0 if self.first is None else self.last - self.first

    def idle_s(self, lane: str) -> float:
        """Seconds in which a lane ran nothing while the engine was at work."""
        return max(0.0, self.elapsed_s - self.lanes[lane].busy_s)
