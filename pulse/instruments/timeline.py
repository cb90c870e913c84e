"""A timeline of operations: what each lane did when, and what it waited for."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from pulse.instruments.colours import alone, colour
from pulse.instruments.tracefile import read_operations
from pulse.types import LaneName, Operation, Work

__all__ = ["Depth", "Interval", "Stall", "Timeline", "describe", "duration"]

Interval = tuple[float, float]
"""Start and end, in seconds of the engine's clock."""

_LETTERS = "ABCDEFGHIJKLMOQSTUVXYZ"
"""Symbols of cohorts; P is prefill, N is normal, R is a request's own."""
_IDLE = "."
_LABEL = 11
"""Characters of a lane's name."""
_SHARE = 6
"""Characters of a lane's busy share."""
_LISTED = 10
_NAMED = 4
"""Requests named per operation."""
_EDGE = 1e-6
"""Of a column: rounding may not draw an operation in the idle column next to its own."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How many compute operations of other cohorts ran while a recall was under way.

    recalls: recalls that ran. histogram: recalls by that number. in_flight: how many were under
        way at once, on the mean over the time in which any was. All but `histogram` are 0 without
        recalls.
    """

    recalls: int
    mean: float
    median: float
    max: int
    histogram: dict[int, int]
    in_flight: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap of the compute lane, in seconds of the engine's clock.

    waited_for: the operations that were under way on other lanes: first the one that caused what
        ran next, then by how much of the gap they cover. Empty when nothing was ready.
    """

    start: float
    seconds: float
    waited_for: tuple[Operation, ...]


class Timeline:
    """Operations as intervals on lanes. Times are seconds of the engine's clock.

    An operation that has not ended counts as under way up to `end`.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        everything = sorted(operations, key=lambda o: (_known(o.started, o.submitted, 0.0), o.id))
        self.operations = tuple(o for o in everything if math.isfinite(o.started))
        """Those that ran, by start."""
        self.unstarted = tuple(o for o in everything if not math.isfinite(o.started))
        """Those that never got their lane, in the order in which they were submitted."""
        times = [t for o in everything for t in (o.started, o.ended) if math.isfinite(t)]
        self.begin = min(times, default=0.0)
        self.end = max(times, default=0.0)
        self._lanes: dict[LaneName, list[Operation]] = {lane: [] for lane in LaneName}
        for operation in self.operations:
            self._lanes[operation.lane].append(operation)
        self._busy = {lane: self._union(lane) for lane in LaneName}

    @classmethod
    def of(cls, operations: Iterable[Operation]) -> Timeline:
        """The timeline of operations at hand."""
        return cls(operations)

    @classmethod
    def read(cls, path: str | Path) -> Timeline:
        """The timeline of a file that `ChromeTrace` wrote. Raises ConfigError that names it."""
        return cls(read_operations(path))

    # -- lanes -------------------------------------------------------------------------------

    def on(self, lane: LaneName) -> tuple[Operation, ...]:
        """The operations that ran on a lane, by start."""
        return tuple(self._lanes[lane])

    def busy(self, lane: LaneName) -> tuple[Interval, ...]:
        """When at least one operation ran on a lane."""
        return tuple(self._busy[lane])

    def gaps(self, lane: LaneName) -> tuple[Interval, ...]:
        """When no operation ran on a lane, from the timeline's begin to its end."""
        edges = [self.begin, *(t for pair in self._busy[lane] for t in pair), self.end]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a)

    def busy_s(self, lane: LaneName) -> float:
        """Seconds in which at least one operation ran on a lane."""
        return math.fsum(b - a for a, b in self._busy[lane])

    def idle_s(self, lane: LaneName) -> float:
        """Seconds in which none did."""
        return math.fsum(b - a for a, b in self.gaps(lane))

    def waited_s(self, operation: Operation) -> float:
        """Seconds that an operation waited for its lane; 0 if it is not known when it began to.

        One that never started waited until it was given up, or to the timeline's end.
        """
        until = _known(operation.started, operation.ended, self.end)
        return max(0.0, until - _known(operation.submitted, until))

    def waits(self, count: int = _LISTED) -> tuple[tuple[Operation, float], ...]:
        """The `count` longest waits for a lane, in seconds, longest first."""
        waits = [(o, self.waited_s(o)) for o in (*self.operations, *self.unstarted)]
        waits = [(operation, wait) for operation, wait in waits if wait > 0]
        return tuple(sorted(waits, key=lambda pair: (-pair[1], pair[0].id))[:count])

    # -- overlap and stalls ------------------------------------------------------------------

    def depths(self) -> dict[int, int]:
        """Overlap depth of each recall, by its id. Merged operations count as one."""
        everyone, own = _Overlaps(), defaultdict[str, _Overlaps](_Overlaps)
        for operation in self._lanes[LaneName.COMPUTE]:
            if operation.leader < 0:
                everyone.add(operation.started, self._ended(operation))
                own[operation.cohort].add(operation.started, self._ended(operation))
        depths = {}
        for recall in self._lanes[LaneName.RECALL]:
            window = recall.started, self._ended(recall)
            depths[recall.id] = everyone.count(*window) - own[recall.cohort].count(*window)
        return depths

    def depth(self) -> Depth:
        """Overlap depth over all recalls."""
        depths = list(self.depths().values())
        if not depths:
            return Depth(0, 0.0, 0.0, 0, {}, 0.0)
        histogram = dict(sorted(Counter(depths).items()))
        mean = sum(depths) / len(depths)
        recalls = self._lanes[LaneName.RECALL]
        total = math.fsum(self._ended(recall) - recall.started for recall in recalls)
        busy = self.busy_s(LaneName.RECALL)
        in_flight = total / busy if busy > 0 else 0.0
        return Depth(len(depths), mean, float(median(depths)), max(depths), histogram, in_flight)

    def stalls(self, count: int = _LISTED) -> tuple[Stall, ...]:
        """The `count` longest gaps of the compute lane, longest first."""
        # To the nanosecond: rounding may not put equally long gaps out of order.
        gaps = sorted(
            self.gaps(LaneName.COMPUTE), key=lambda gap: (round(gap[0] - gap[1], 9), gap[0])
        )
        return tuple(
            Stall(start, end - start, self._waited_for(start, end)) for start, end in gaps[:count]
        )

    def _waited_for(self, start: float, end: float) -> tuple[Operation, ...]:
        compute = self._lanes[LaneName.COMPUTE]
        begin = bisect_left(compute, end, key=lambda o: o.started)
        # Merged operations begin together, each with a cause of its own.
        merged = bisect_right(compute, end, key=lambda o: o.started)
        causes = {operation.cause for operation in compute[begin:merged]}
        found = []
        others = (o for lane in LaneName if lane is not LaneName.COMPUTE for o in self._lanes[lane])
        for operation in others:
            covers = min(end, self._ended(operation)) - max(start, operation.started)
            if covers > 0:
                found.append((operation.id not in causes, -covers, operation.id, operation))
        return tuple(operation for *_, operation in sorted(found, key=lambda item: item[:3]))

    def _ended(self, operation: Operation) -> float:
        return _known(operation.ended, self.end)

    def _union(self, lane: LaneName) -> list[Interval]:
        merged: list[Interval] = []
        for operation in self._lanes[lane]:
            start, end = operation.started, max(operation.started, self._ended(operation))
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        return merged

    # -- pictures ----------------------------------------------------------------------------

    @cached_property
    def symbols(self) -> dict[str, str]:
        """The letter of each cohort in `row`; P and R stand for what belongs to no cohort."""
        found: dict[str, Operation] = {}
        for operation in self.operations:
            if operation.work is not Work.PREFILL and not alone(operation):
                found.setdefault(operation.cohort, operation)
        symbols: dict[str, str] = {}
        for cohort in sorted(found, key=lambda name: (colour(found[name]), len(name), name)):
            normal = found[cohort].work is Work.NORMAL and "N" not in symbols.values()
            letter = _LETTERS[(len(symbols) - ("N" in symbols.values())) % len(_LETTERS)]
            symbols[cohort] = "N" if normal else letter
        return symbols

    def symbol(self, operation: Operation) -> str:
        """The letter that stands for an operation's cohort."""
        if operation.work is Work.PREFILL:
            return "P"
        return "R" if alone(operation) else self.symbols[operation.cohort]

    def row(self, lane: LaneName, columns: int) -> str:
        """A lane in `columns` characters: the cohort that ran longest, a dot where none did.

        A small letter stands for a column in which the lane was idle for most of the time.
        """
        busy = self._spread(self._busy[lane], columns)
        shares: list[dict[str, float]] = [{} for _ in range(columns)]
        for operation in self._lanes[lane]:
            symbol = self.symbol(operation)
            pair = operation.started, max(operation.started, self._ended(operation))
            for column, share in self._columns(pair, columns):
                shares[column][symbol] = shares[column].get(symbol, 0.0) + share
        cells = []
        for column, mine in enumerate(shares):
            # Rounding may not say who comes first of those that ran equally long.
            best = min(mine, key=lambda symbol: (-round(mine[symbol], 4), symbol), default=_IDLE)
            cells.append(best if busy[column] >= 0.5 - _EDGE else best.lower())
        return "".join(cells)

    def text(self, width: int = 100) -> str:
        """One row per lane in `width` characters, a legend, and what never started."""
        columns = max(1, width - _LABEL - _SHARE)
        span = self.end - self.begin
        lines = [f"{'':{_LABEL}}0{duration(span):>{max(1, columns - 1)}}"]
        for lane in LaneName:
            share = self.busy_s(lane) / span if span > 0 else 0.0
            lines.append(f"{lane:<{_LABEL}}{self.row(lane, columns)}{share:>{_SHARE}.0%}")
        lines.append(f"{'':{_LABEL}}{self.legend}")
        lines.extend(f"never started: {describe(o)}" for o in self.unstarted[:_LISTED])
        if len(self.unstarted) > _LISTED:
            lines.append(f"never started: {len(self.unstarted) - _LISTED} more")
        return "\n".join(lines)

    @staticmethod
    def split(line: str) -> tuple[str, str, str]:
        """A lane's line of `text` as its name, its row and its busy share."""
        return line[:_LABEL], line[_LABEL:-_SHARE], line[-_SHARE:]

    @property
    def legend(self) -> str:
        """What the letters of `row` stand for."""
        names = [f"{symbol} {cohort}" for cohort, symbol in self.symbols.items()]
        if any(o.work is Work.PREFILL for o in self.operations):
            names.append("P prefill")
        if any(map(alone, self.operations)):
            names.append("R of one request")
        return "  ".join([*names, "small: mostly idle", f"{_IDLE} idle"])

    def _spread(self, intervals: Sequence[Interval], columns: int) -> list[float]:
        shares = [0.0] * columns
        for interval in intervals:
            for column, share in self._columns(interval, columns):
                shares[column] += share
        return shares

    def _columns(self, interval: Interval, columns: int) -> Iterable[tuple[int, float]]:
        # How much of which columns an interval covers; one without length still shows.
        span = self.end - self.begin
        scale = columns / span if span > 0 else 0.0
        low = (interval[0] - self.begin) * scale
        high = (interval[1] - self.begin) * scale
        first = min(int(low + _EDGE), columns - 1)
        for column in range(first, max(first + 1, min(columns, math.ceil(high - _EDGE)))):
            yield column, max(0.0, min(high, column + 1) - max(low, column))


def describe(operation: Operation) -> str:
    """An operation in a few words: ``recall #12 of offload, layer 3, requests a, b``."""
    layer = f", layer {operation.layer}" if operation.layer >= 0 else ""
    return f"{operation.kind} #{operation.id} of {operation.cohort}{layer}{_who(operation)}"


def _who(operation: Operation) -> str:
    who = operation.requests
    if not who or who == (operation.cohort,):
        return ""
    rest = f" and {len(who) - _NAMED} more" if len(who) > _NAMED else ""
    return f", request{'s' if len(who) > 1 else ''} {', '.join(who[:_NAMED])}{rest}"


def duration(seconds: float) -> str:
    """Seconds as people write them: ``1.5 s``, ``20 ms``, ``3.25 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-9:.3g} ns" if seconds > 0 else "0 s"


def _known(*times: float) -> float:
    return next(time for time in times if math.isfinite(time))


class _Overlaps:
    """Counts which of many intervals, added by start, share time with another."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._sorted = True

    def add(self, start: float, end: float) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._sorted = False

    def count(self, start: float, end: float) -> int:
        if end <= start:
            return 0
        if not self._sorted:
            self._ends.sort()
            self._sorted = True
        return bisect_left(self._starts, end) - bisect_right(self._ends, start)
