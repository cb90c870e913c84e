"""Operations made by hand, and their events in the order in which a kernel would tell them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from pulse.ports import Instrument
from pulse.types import LaneName, Operation, TransferReport, Work

LANES = {"recall": LaneName.RECALL, "write_back": LaneName.WRITE_BACK}
Call = Callable[[Instrument], None]


class Hand:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def op(id: int, kind: str, cohort: str, *times: float, **fields: Any) -> Operation:
    """An operation that was submitted, started and ended at `times`; fewer of them: not yet."""
    submitted, started, ended = (*times, math.nan, math.nan, math.nan)[:3]
    work = fields.pop("work", None)
    if work is None:
        work = Work.PREFILL if cohort.startswith("r") else Work(cohort.split("-")[0])
    running = "running" if math.isfinite(started) else "waiting"
    fields.setdefault("status", "done" if math.isfinite(ended) else running)
    return Operation(
        id,
        kind,
        LANES.get(kind, LaneName.COMPUTE),
        work,
        cohort,
        submitted=submitted,
        started=started,
        ended=ended,
        **fields,
    )


def play(instrument: Instrument, clock: Hand, operations: Iterable[Operation]) -> None:
    """Tell `instrument` all that happened to `operations`."""
    tell(instrument, clock, events(operations))


def events(operations: Iterable[Operation]) -> list[tuple[float, Call]]:
    """When to tell what of `operations`; an end comes before what begins at the same time."""
    found: list[tuple[float, int, int, Call]] = []
    for operation in operations:
        for rank, (at, call) in enumerate(_life(operation)):
            # Its own end comes last though; only others' ends come before its submission.
            ends = rank == 2 and at > operation.started
            found.append((at, 0 if ends else 1 + rank, operation.id, call))
    return [(at, call) for at, _, _, call in sorted(found, key=lambda item: item[:3])]


def tell(instrument: Instrument, clock: Hand, calls: Iterable[tuple[float, Call]]) -> None:
    """Make calls at their times; those of one time in the order given."""
    for at, call in sorted(calls, key=lambda pair: pair[0]):
        clock.now = at
        call(instrument)


def _life(operation: Operation) -> Iterable[tuple[float, Call]]:
    def end(instrument: Instrument) -> None:
        instrument.operation_ended(operation, report_of(operation))

    yield operation.submitted, lambda instrument: instrument.operation_submitted(operation)
    if math.isfinite(operation.started):
        yield operation.started, lambda instrument: instrument.operation_started(operation)
    if math.isfinite(operation.ended):
        yield operation.ended, end


def report_of(operation: Operation) -> TransferReport | None:
    if operation.lane is LaneName.COMPUTE or operation.status != "done":
        return None
    return TransferReport(operation.bytes, 1, operation.ended - operation.started)


def overlap() -> list[Operation]:
    """Two offload cohorts and a normal one, one recall each of the former, a prefill.

    Milliseconds: 0-1 offload selects, 1-5 its recall; 1-2 offload-2 selects, 2-4 its recall;
    2-3 normal; 3-4 nothing (a stall that ends with the recall of offload-2); 4-4.5 offload-2;
    4.5-5 nothing; 5-6 offload; 6-7 a prefill.
    """
    ms = 1e-3
    one = {"requests": ("a",), "layer": 0}
    two = {"requests": ("b", "c"), "layer": 0}
    return [
        op(0, "embed", "offload", 0.0, 0.0, 1 * ms, requests=("a",)),
        op(1, "embed", "offload-2", 0.0, 1 * ms, 2 * ms, requests=("b", "c")),
        op(2, "recall", "offload", ms, ms, 5 * ms, bytes=64, shares=(64,), cause=0, **one),
        op(3, "layer", "normal", ms, 2 * ms, 3 * ms, requests=("d",), layer=0),
        op(
            4,
            "recall",
            "offload-2",
            2 * ms,
            2 * ms,
            4 * ms,
            bytes=96,
            shares=(32, 64),
            cause=1,
            **two,
        ),
        op(5, "layer", "offload-2", 4 * ms, 4 * ms, 4.5 * ms, cause=4, **two),
        op(6, "layer", "offload", 5 * ms, 5 * ms, 6 * ms, cause=2, **one),
        op(7, "embed", "r9", 5 * ms, 6 * ms, 7 * ms, requests=("r9",)),
    ]
