"""Chrome trace format: open the file in Perfetto or chrome://tracing. Lanes are tracks."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pulse.errors import ConfigError
from pulse.instruments.clock import Clock, engine_clock
from pulse.instruments.colours import colour, label
from pulse.ports import Instrument
from pulse.types import LaneName, Operation, Pace, TransferReport

__all__ = ["SCHEMA", "ChromeTrace"]

SCHEMA = "pulse.trace/1"

_EVENTS = 1
"""The track of what belongs to no lane; 0 is the idle task of Perfetto."""
_LANES = {lane: number for number, lane in enumerate(LaneName)}
_REMEMBERED = 1024
"""Operations that ended and may still turn out to have caused another. The kernel submits what an
operation leads to before other cohorts can have gone on by more than a few."""

_PALETTE = (
    "thread_state_unknown",
    "thread_state_running",
    "rail_response",
    "rail_animation",
    "rail_load",
    "thread_state_iowait",
    "cq_build_attempt_failed",
    "olive",
    "startup",
    "vsync_highlight_color",
)
"""Names of Chrome's reserved colours, by the number of the cohort's colour."""


@dataclass(slots=True)
class _Slice:
    """Where an operation is drawn. `end` is infinite while it runs."""

    row: int
    tid: int
    start: float
    end: float = math.inf


class ChromeTrace(Instrument):
    """Writes every operation as it ends. Call `close` (or use ``with``) to end the file.

    A lane is a track, and has a further one while several of its operations run at once. A cohort
    is a colour; a slice bears the names of its cohort and layer, the category is the operation's
    kind. An arrow leads from an operation to the one that it caused. Steps, preemptions,
    quarantines and changes of pace are instants. What is kept in memory does not grow with the
    trace.

    clock: gives seconds on the scale of the operations' times.

    Raises ConfigError when the file cannot be written.
    """

    def __init__(self, path: str | Path, *, clock: Clock = engine_clock) -> None:
        self.path = Path(path)
        self._clock = clock
        self._running: dict[int, _Slice] = {}
        self._ended: OrderedDict[int, _Slice] = OrderedDict()
        self._causes: dict[int, _Slice] = {}
        self._free_at: dict[LaneName, list[float]] = {lane: [] for lane in LaneName}
        """When each track of a lane became free; infinite while it is not."""
        self._named: set[int] = set()
        try:
            self._file: IO[str] = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"trace file {str(path)!r} cannot be written: {error.strerror}"
            ) from error
        header = {"displayTimeUnit": "ms", "otherData": {"schema": SCHEMA}}
        self._file.write(json.dumps(header)[:-1] + ', "traceEvents": [')
        self._first = True
        for lane in LaneName:
            self._track(lane, 0)
        self._name_track(_EVENTS, "events", 0)

    # -- operations --------------------------------------------------------------------------

    def operation_submitted(self, operation: Operation) -> None:
        """Remember what caused it, before that is forgotten."""
        self._find_cause(operation)

    def operation_started(self, operation: Operation) -> None:
        """Take a track of the lane that is free."""
        self._find_cause(operation)
        # What a worker started is told of later, when another may have ended on a track meanwhile.
        rows = self._free_at[operation.lane]
        row = next((i for i, free in enumerate(rows) if free <= operation.started), len(rows))
        rows[row:] = [math.inf, *rows[row + 1 :]]
        self._running[operation.id] = _Slice(
            row, self._track(operation.lane, row), operation.started
        )

    def operation_milestone(self, operation: Operation) -> None:
        """An instant on the operation's track."""
        where = self._running.get(operation.id)
        if where is not None:
            self._instant("milestone", "milestone", where.tid, {"id": operation.id})

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        """A complete event and an arrow if it ran, else an instant that says it never did."""
        if operation.id not in self._running and math.isfinite(operation.started):
            self.operation_started(operation)  # it ran before this instrument was there
        where = self._running.pop(operation.id, None)
        cause = self._causes.pop(operation.id, None)
        args = _arguments(operation, report)
        if where is None:
            name = f"never ran: {operation.kind} of {_name(operation)}"
            self._instant(name, "never_ran", _EVENTS, args, operation.ended)
            return
        where.end = operation.ended
        self._free_at[operation.lane][where.row] = where.end
        self._ended[operation.id] = where
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self._write(
            {
                "ph": "X",
                "name": _name(operation),
                "cat": operation.kind,
                "cname": _PALETTE[_index(operation)],
                "pid": 1,
                "tid": where.tid,
                "ts": _us(where.start),
                # Of the rounded times, or what began as this ended would seem to overlap with it.
                "dur": max(0.0, round(_us(where.end) - _us(where.start), 3)),
                "args": args,
            }
        )
        if cause is not None:
            self._flow(operation, cause, where)

    # -- everything else ---------------------------------------------------------------------

    def step_started(self, cohort: str, requests: tuple[str, ...]) -> None:
        """An instant with the cohort's members."""
        args = {"cohort": cohort, "requests": list(requests)}
        self._instant(f"step begins ({cohort})", "step", _EVENTS, args)

    def step_ended(self, cohort: str, requests: tuple[str, ...]) -> None:
        """An instant with the cohort's members."""
        args = {"cohort": cohort, "requests": list(requests)}
        self._instant(f"step ends ({cohort})", "step", _EVENTS, args)

    def pace_changed(self, pace: Pace) -> None:
        """An instant with the new pace."""
        args = {"cohorts": pace.cohorts, "predict": pace.predict}
        self._instant("pace", "pace", _EVENTS, args)

    def request_preempted(self, request: str, reason: str) -> None:
        """An instant with the reason."""
        args = {"request": request, "reason": reason}
        self._instant(f"preempted ({request})", "preempted", _EVENTS, args)

    def quarantined(self, request: str, transfers: int) -> None:
        """An instant with the number of transfers that are late."""
        args = {"request": request, "transfers": transfers}
        self._instant(f"quarantined ({request})", "quarantined", _EVENTS, args)

    def close(self) -> None:
        """End the file; what happens later is not written. Idempotent.

        Raises ConfigError when the file's end cannot be written.
        """
        if self._file.closed:
            return
        try:
            with self._file:
                self._file.write("\n]}\n")
        except OSError as error:
            raise ConfigError(
                f"trace file {str(self.path)!r} is incomplete: {error.strerror}"
            ) from error

    def __enter__(self) -> ChromeTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing -----------------------------------------------------------------------------

    def _find_cause(self, operation: Operation) -> None:
        if operation.cause < 0 or operation.id in self._causes:
            return
        cause = self._running.get(operation.cause) or self._ended.get(operation.cause)
        if cause is not None:
            self._causes[operation.id] = cause

    def _flow(self, operation: Operation, cause: _Slice, where: _Slice) -> None:
        # An arrow hangs on the slice around its time, and a slice's end is no longer part of it.
        inside = cause.end - (cause.end - cause.start) * 1e-3 if cause.end < math.inf else math.inf
        asked = operation.submitted if math.isfinite(operation.submitted) else where.start
        leaves = max(cause.start, min(asked, inside))
        for phase, tid, time in (("s", cause.tid, leaves), ("f", where.tid, where.start)):
            self._write(
                {
                    "ph": phase,
                    "bp": "e",
                    "name": "caused",
                    "cat": "cause",
                    "id": operation.id,
                    "pid": 1,
                    "tid": tid,
                    "ts": _us(time),
                    "args": {},
                }
            )

    def _track(self, lane: LaneName, row: int) -> int:
        tid = _EVENTS + 1 + _LANES[lane] + row * len(_LANES)
        if tid not in self._named:
            name = f"{lane} lane" + (f" +{row}" if row else "")
            self._name_track(tid, name, (1 + _LANES[lane]) * 1000 + row)
        return tid

    def _name_track(self, tid: int, name: str, position: int) -> None:
        self._named.add(tid)
        for key, args in (
            ("thread_name", {"name": name}),
            ("thread_sort_index", {"sort_index": position}),
        ):
            self._write({"ph": "M", "name": key, "pid": 1, "tid": tid, "args": args})

    def _instant(
        self, name: str, category: str, tid: int, args: dict[str, Any], time: float | None = None
    ) -> None:
        self._write(
            {
                "ph": "i",
                "s": "t",
                "name": name,
                "cat": category,
                "pid": 1,
                "tid": tid,
                "ts": _us(self._clock() if time is None else time),
                "args": args,
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        if self._file.closed:
            return
        self._file.write(("\n" if self._first else ",\n") + json.dumps(event))
        self._first = False


def _index(operation: Operation) -> int:
    number = colour(operation)
    return number if number < 3 else 3 + (number - 3) % (len(_PALETTE) - 3)


def _arguments(operation: Operation, report: TransferReport | None) -> dict[str, Any]:
    submitted, waited = operation.submitted, operation.started - operation.submitted
    return {
        "id": operation.id,
        "kind": operation.kind,
        "lane": operation.lane,
        "work": operation.work,
        "cohort": operation.cohort,
        "layer": operation.layer,
        "requests": list(operation.requests),
        "shares": list(operation.shares),
        "bytes": operation.bytes,
        "blocks": operation.blocks,
        "pieces": report.pieces if report else 0,
        # JSON has no NaN.
        "submitted_us": _us(submitted) if math.isfinite(submitted) else None,
        "waited_us": _us(waited) if math.isfinite(waited) else None,
        "cause": operation.cause,
        "leader": operation.leader,
        "status": operation.status,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _name(operation: Operation) -> str:
    # Perfetto colours by the name without its digits, so it may hold no other letters than the
    # cohort's: not the kind, not the request.
    return label(operation) + (f" {operation.layer}" if operation.layer >= 0 else "")
