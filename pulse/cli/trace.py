"""``pulse trace view``: what each lane did when, and what the compute lane waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pulse.instruments.timeline import Stall, Timeline, describe, duration
from pulse.memory.sizes import format_bytes
from pulse.types import LaneName, Operation

__all__ = ["SCHEMA", "trace", "view"]

SCHEMA = "pulse.trace.view/1"

_STYLES = ("cyan", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_yellow", "white")
_SHOWN = 3
"""Operations named per stall."""

trace = typer.Typer(
    help="Look at traces that `pulse generate --trace` wrote.", no_args_is_help=True
)


@trace.callback()
def _group() -> None:
    # With a single command, typer would drop its name without this.
    pass


@trace.command()
def view(
    file: Annotated[Path, typer.Argument(help="A trace, written with --trace.")],
    width: Annotated[
        int | None, typer.Option(min=40, max=10_000, help="Columns; the terminal's by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Draw a trace: one row per lane, how deep recalls overlap, the longest stalls."""
    timeline = Timeline.read(file)
    if as_json:
        print(json.dumps(summary(timeline)))
        return
    console = Console(width=width, highlight=False)
    console.print(_picture(timeline, console.width), soft_wrap=True)
    console.print(_overlap(timeline), soft_wrap=True)
    stalls = timeline.stalls()
    if stalls:
        console.print("\nlongest stalls of the compute lane")
        console.print(_stalls(timeline, stalls))


def summary(timeline: Timeline) -> dict[str, Any]:
    """The object that ``--json`` prints. Durations are seconds, times count from `begin_s`."""
    depth = timeline.depth()
    return {
        "schema": SCHEMA,
        "begin_s": timeline.begin,
        "elapsed_s": timeline.end - timeline.begin,
        "operations": len(timeline.operations),
        "never_started": [_operation(operation) for operation in timeline.unstarted],
        "lanes": {lane.value: _lane(timeline, lane) for lane in LaneName},
        "overlap_depth": {
            "recalls": depth.recalls,
            "mean": depth.mean,
            "median": depth.median,
            "max": depth.max,
            "histogram": {str(value): count for value, count in depth.histogram.items()},
            "mean_in_flight": depth.in_flight,
            "by_recall": {str(recall): value for recall, value in timeline.depths().items()},
        },
        "stalls": [
            {
                "at_s": stall.start - timeline.begin,
                "seconds": stall.seconds,
                "waited_for": [_operation(operation) for operation in stall.waited_for],
            }
            for stall in timeline.stalls()
        ],
        "longest_waits": [
            {"seconds": seconds, **_operation(operation)} for operation, seconds in timeline.waits()
        ],
    }


def _lane(timeline: Timeline, lane: LaneName) -> dict[str, Any]:
    waits = [timeline.waited_s(operation) for operation in timeline.on(lane)]
    return {
        "operations": len(waits),
        "busy_s": timeline.busy_s(lane),
        "idle_s": timeline.idle_s(lane),
        "gaps": len(timeline.gaps(lane)),
        "mean_wait_s": sum(waits) / len(waits) if waits else 0.0,
        "max_wait_s": max(waits, default=0.0),
    }


def _operation(operation: Operation) -> dict[str, Any]:
    return {
        "id": operation.id,
        "kind": operation.kind,
        "lane": operation.lane.value,
        "cohort": operation.cohort,
        "layer": operation.layer,
        "requests": list(operation.requests),
        "bytes": operation.bytes,
        "status": operation.status,
    }


def _picture(timeline: Timeline, width: int) -> Text:
    if not timeline.operations:
        return Text("no operation ran", style="yellow")
    letters = ["P", "R", *timeline.symbols.values()]
    styles = {letter: _STYLES[i % len(_STYLES)] for i, letter in enumerate(letters)}
    picture = Text()
    rows = timeline.text(width).split("\n")
    for number, line in enumerate(rows):
        if 1 <= number <= len(LaneName):
            head, row, tail = timeline.split(line)
            picture.append(head, style="bold")
            for cell in row:
                picture.append(cell, style=styles.get(cell.upper(), "dim"))
            picture.append(tail)
        else:
            picture.append(line, style="dim")
        picture.append("\n")
    return picture


def _overlap(timeline: Timeline) -> str:
    depth = timeline.depth()
    if not depth.recalls:
        return "overlap depth: no recalls"
    bars = "  ".join(f"{value}: {count:,}" for value, count in depth.histogram.items())
    return (
        f"overlap depth of {depth.recalls:,} recalls (compute operations of other cohorts during "
        f"one): mean {depth.mean:.2f}, median {depth.median:g}, max {depth.max}\n"
        f"  {bars}\n"
        f"recalls in flight at once, while any is: {depth.in_flight:.2f}"
    )


def _stalls(timeline: Timeline, stalls: tuple[Stall, ...]) -> Table:
    table = Table("at", "for", "waited for", box=None, header_style="bold")
    for stall in stalls:
        at = f"{(stall.start - timeline.begin) * 1e3:,.3f} ms"
        table.add_row(at, duration(stall.seconds), Text(_reasons(stall)))
    return table


def _reasons(stall: Stall) -> str:
    if not stall.waited_for:
        return "nothing was ready"
    lines = [
        f"{describe(operation)}, {format_bytes(operation.bytes)}"
        for operation in stall.waited_for[:_SHOWN]
    ]
    rest = len(stall.waited_for) - _SHOWN
    return "\n".join([*lines, f"and {rest:,} more"] if rest > 0 else lines)
