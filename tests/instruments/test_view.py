"""``pulse trace view``: the picture, the JSON object, and one line for a file that is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from instruments.recording import Hand, op, overlap, play

from pulse.cli import main
from pulse.cli.trace import SCHEMA
from pulse.instruments import ChromeTrace
from pulse.types import Operation


class Terminal:
    """Runs the command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: Any, folder: Path) -> None:
        self.monkeypatch, self.capsys, self.file = monkeypatch, capsys, folder / "trace.json"
        monkeypatch.setenv("COLUMNS", "100")

    def record(self, operations: list[Operation]) -> None:
        clock = Hand()
        with ChromeTrace(self.file, clock=clock) as trace:
            play(trace, clock, operations)

    def view(self, *args: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["pulse", "trace", "view", str(self.file), *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self.capsys.readouterr()
        return int(ended.value.code or 0), out, err


@pytest.fixture
def terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Terminal:
    return Terminal(monkeypatch, capsys, tmp_path)


PICTURE = """\
           0                       7 ms
compute    AAAABBBBNNNN....BB..AAAAPPPP   79%
recall     ....AAAAAAAAAAAAAAAA........   57%
write_back ............................    0%
           N normal  A offload  B offload-2  P prefill  small: mostly idle  . idle

"""

STALLS = """\
longest stalls of the compute lane
 at        for     waited for
 3.000 ms  1 ms    recall #4 of offload-2, layer 0, requests b, c, 96 B
                   recall #2 of offload, layer 0, request a, 64 B
 4.500 ms  500 us  recall #2 of offload, layer 0, request a, 64 B
"""


def test_the_picture(terminal: Terminal) -> None:
    terminal.record(overlap())
    code, out, err = terminal.view("--width", "45")
    assert (code, err) == (0, "")
    assert out.startswith(PICTURE)


def test_overlap_and_stalls(terminal: Terminal) -> None:
    terminal.record(overlap())
    _, out, _ = terminal.view()
    lines = [line.rstrip() for line in out.split("\n")]
    assert lines[6] == (
        "overlap depth of 2 recalls (compute operations of other cohorts during one): "
        "mean 2.00, median 2, max 3"
    )
    assert lines[7] == "  1: 1  3: 1"
    assert lines[8] == "recalls in flight at once, while any is: 1.50"
    assert "\n".join(lines[10:]) == STALLS


def test_the_picture_is_as_wide_as_the_terminal(terminal: Terminal) -> None:
    terminal.record(overlap())
    _, out, _ = terminal.view()
    assert {len(line) for line in out.split("\n")[:4]} <= {100, 94}


def test_the_object(terminal: Terminal) -> None:
    terminal.record(overlap())
    code, out, err = terminal.view("--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["schema"] == SCHEMA
    assert data["operations"] == 8
    assert data["elapsed_s"] == pytest.approx(7e-3)
    assert data["lanes"]["compute"] == {
        "operations": 6,
        "busy_s": pytest.approx(5.5e-3),
        "idle_s": pytest.approx(1.5e-3),
        "gaps": 2,
        "mean_wait_s": pytest.approx(0.5e-3),
        "max_wait_s": pytest.approx(1e-3),
    }
    assert data["overlap_depth"] == {
        "recalls": 2,
        "mean": 2.0,
        "median": 2.0,
        "max": 3,
        "histogram": {"1": 1, "3": 1},
        "mean_in_flight": pytest.approx(1.5),
        "by_recall": {"2": 3, "4": 1},
    }
    stall = data["stalls"][0]
    assert (stall["at_s"], stall["seconds"]) == (pytest.approx(3e-3), pytest.approx(1e-3))
    assert stall["waited_for"][0] == {
        "id": 4,
        "kind": "recall",
        "lane": "recall",
        "cohort": "offload-2",
        "layer": 0,
        "requests": ["b", "c"],
        "bytes": 96,
        "status": "done",
    }
    assert [wait["id"] for wait in data["longest_waits"]] == [1, 3, 7]


def test_many_reasons_are_counted(terminal: Terminal) -> None:
    terminal.record(
        [
            op(0, "layer", "normal", 0, 0, 1),
            *(op(i, "recall", "offload", 0, 0, 2, bytes=i) for i in range(1, 6)),
            op(9, "layer", "normal", 2, 2, 3),
            op(10, "layer", "normal", 5, 5, 6),
        ]
    )
    _, out, _ = terminal.view()
    assert "recall #3 of offload, 3 B" in out
    assert "recall #4 of offload" not in out
    assert "and 2 more" in out
    assert "nothing was ready" in out


def test_a_trace_without_operations(terminal: Terminal) -> None:
    terminal.record([])
    code, out, _ = terminal.view()
    assert code == 0
    assert out.split("\n")[0] == "no operation ran"
    assert "overlap depth: no recalls" in out
    code, out, _ = terminal.view("--json")
    assert (code, json.loads(out)["operations"]) == (0, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("", "is empty"),
        ("one [bold]two", "is damaged or was not closed"),
        ('{"traceEvents": []}', "is not a trace of pulse"),
    ],
)
def test_a_file_that_is_none_is_one_line_and_2(
    terminal: Terminal, text: str | None, says: str
) -> None:
    if text is not None:
        terminal.file.write_text(text)
    code, out, err = terminal.view()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"error: ConfigError: trace file {str(terminal.file)!r}")
    assert says in err


def test_a_trace_that_was_cut_short(terminal: Terminal) -> None:
    terminal.record(overlap())
    terminal.file.write_text(terminal.file.read_text()[:-200])
    code, out, err = terminal.view("--json")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "is damaged or was not closed" in err


@pytest.mark.parametrize("width", ["0", "39", "wide", "20000"])
def test_a_width_that_is_none(terminal: Terminal, width: str) -> None:
    terminal.record(overlap())
    code, out, err = terminal.view("--width", width)
    assert (code, out) == (2, "")
    assert "--width" in err
