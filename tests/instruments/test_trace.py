"""Chrome traces: lanes are tracks, cohorts colours, causes arrows; and what is read back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instruments.recording import Hand, events, op, overlap, play, tell

from pulse.errors import ConfigError
from pulse.instruments import ChromeTrace, Timeline
from pulse.instruments import trace as module
from pulse.instruments.tracefile import read_operations
from pulse.types import Operation, Pace


def record(path: Path, operations: list[Operation]) -> list[dict[str, Any]]:
    clock = Hand()
    with ChromeTrace(path, clock=clock) as trace:
        play(trace, clock, operations)
    found = json.loads(path.read_text())["traceEvents"]
    assert isinstance(found, list)
    return found


def tracks(found: list[dict[str, Any]]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}


def slices(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {e["args"]["id"]: e for e in found if e["ph"] == "X"}


def test_lanes_are_tracks_and_what_overlaps_has_a_further_one(tmp_path: Path) -> None:
    found = record(tmp_path / "trace.json", overlap())
    names = tracks(found)
    assert set(names.values()) == {
        *("compute lane", "recall lane", "recall lane +1", "write_back lane", "events"),
    }
    where = {number: names[e["tid"]] for number, e in slices(found).items()}
    assert (where[0], where[2], where[4]) == ("compute lane", "recall lane", "recall lane +1")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=12))
def test_slices_of_a_track_never_overlap(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[int, int]]
) -> None:
    operations = [
        op(number, "recall", "offload", start, start, start + length)
        for number, (start, length) in enumerate(times)
    ]
    found = slices(record(tmp_path_factory.getbasetemp() / "many.json", operations))
    assert len(found) == len(times)
    ends: dict[int, float] = {}
    for event in sorted(found.values(), key=lambda e: e["ts"]):
        assert ends.get(event["tid"], 0) <= event["ts"]
        ends[event["tid"]] = event["ts"] + event["dur"]


def test_a_recall_that_the_kernel_learns_of_late_has_a_track(tmp_path: Path) -> None:
    clock = Hand()
    first, late = op(0, "recall", "offload", 0, 0, 3), op(1, "recall", "offload", 2, 2, 5)
    with ChromeTrace(tmp_path / "trace.json", clock=clock) as trace:
        tell(trace, clock, [(3.0, call) for _, call in events([first])])
        tell(trace, clock, [(4.0, call) for _, call in events([late])])
    found = slices(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert found[0]["tid"] != found[1]["tid"]


def test_cohorts_are_colours_in_both_viewers(tmp_path: Path) -> None:
    found = slices(record(tmp_path / "trace.json", overlap()))
    # Chrome goes by `cname`, Perfetto by the name without its digits.
    for colour in (
        {number: e["cname"] for number, e in found.items()},
        {
            number: "".join(c for c in e["name"] if not c.isdigit()).strip()
            for number, e in found.items()
        },
    ):
        assert colour[0] == colour[2] == colour[6]
        assert colour[1] == colour[4] == colour[5]
        assert len({colour[0], colour[1], colour[3], colour[7]}) == 4
    assert found[6]["name"] == "offload A 0" and found[6]["cat"] == "layer"


def test_many_cohorts_have_names_of_their_own(tmp_path: Path) -> None:
    operations = [op(i, "layer", f"offload-{i}", i, i, i + 1) for i in range(1, 801)]
    names = {e["name"] for e in slices(record(tmp_path / "trace.json", operations)).values()}
    assert len(names) == 800
    assert not any(c.isdigit() for name in names for c in name)


def test_arrows_lead_from_a_cause_to_what_it_caused(tmp_path: Path) -> None:
    found = record(tmp_path / "trace.json", overlap())
    boxes = slices(found)
    flows = {(e["id"], e["ph"]): e for e in found if e["ph"] in "sf"}
    assert {number for number, _ in flows} == {2, 4, 5, 6}
    for number, cause in {2: 0, 4: 1, 5: 4, 6: 2}.items():
        start, end, box = flows[number, "s"], flows[number, "f"], boxes[cause]
        assert start["tid"] == box["tid"]
        assert box["ts"] <= start["ts"] < box["ts"] + box["dur"]
        assert (end["tid"], end["ts"]) == (boxes[number]["tid"], boxes[number]["ts"])
        assert start["ts"] <= end["ts"]


def test_a_recall_that_is_submitted_before_its_cause_ended(tmp_path: Path) -> None:
    operations = [
        op(0, "layer", "offload", 0, 0, 3),
        op(1, "recall", "offload", 1, 1, 2, cause=0),
        op(2, "recall", "offload", 1, 1, 4, cause=77),  # of which nothing is known
    ]
    flows = [e for e in record(tmp_path / "trace.json", operations) if e["ph"] in "sf"]
    assert [(e["ph"], e["id"], e["ts"]) for e in flows] == [("s", 1, 1e6), ("f", 1, 1e6)]


def test_only_so_much_is_remembered(tmp_path: Path) -> None:
    clock = Hand()
    count = 2 * module._REMEMBERED
    with ChromeTrace(tmp_path / "trace.json", clock=clock) as trace:
        play(
            trace, clock, [op(i, "layer", "normal", i, i, i + 1, cause=i - 1) for i in range(count)]
        )
        assert len(trace._ended) == module._REMEMBERED
        assert not trace._running and not trace._causes
        assert math.inf not in [free for rows in trace._free_at.values() for free in rows]


def test_instants(tmp_path: Path) -> None:
    clock = Hand()
    with ChromeTrace(tmp_path / "trace.json", clock=clock) as trace:
        tell(
            trace,
            clock,
            [
                (1, lambda i: i.step_started("offload", ("a", "b"))),
                (2, lambda i: i.step_ended("offload", ("a", "b"))),
                (3, lambda i: i.pace_changed(Pace(2, True))),
                (4, lambda i: i.request_preempted("a", "priority")),
                (5, lambda i: i.quarantined("b", 3)),
            ],
        )
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    instants = [(e["ts"] / 1e6, e["cat"], e["args"]) for e in found if e["ph"] == "i"]
    assert instants == [
        (1, "step", {"cohort": "offload", "requests": ["a", "b"]}),
        (2, "step", {"cohort": "offload", "requests": ["a", "b"]}),
        (3, "pace", {"cohorts": 2, "predict": True}),
        (4, "preempted", {"request": "a", "reason": "priority"}),
        (5, "quarantined", {"request": "b", "transfers": 3}),
    ]


def test_a_milestone_is_on_the_track_of_its_operation(tmp_path: Path) -> None:
    clock = Hand()
    operation = op(0, "layer", "normal", 0, 0, 2)
    with ChromeTrace(tmp_path / "trace.json", clock=clock) as trace:
        calls = [*events([operation]), (1.0, lambda i: i.operation_milestone(operation))]
        tell(trace, clock, calls)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (milestone,) = [e for e in found if e["ph"] == "i"]
    assert (milestone["ts"], milestone["tid"]) == (1e6, slices(found)[0]["tid"])


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    operations = [
        *overlap(),
        op(20, "recall", "offload", 0.001, math.nan, 0.002, status="cancelled"),
        op(21, "recall", "offload", 0.001, 0.002, 0.003, status="late"),
    ]
    record(tmp_path / "trace.json", operations)
    again = {o.id: o for o in read_operations(tmp_path / "trace.json")}
    assert set(again) == {o.id for o in operations}
    for operation in operations:
        other = again[operation.id]
        for name in (
            *("kind", "lane", "work", "cohort", "layer", "requests", "shares", "bytes"),
            *("blocks", "cause", "leader", "status"),
        ):
            assert getattr(other, name) == getattr(operation, name), name
        for name in ("submitted", "started", "ended"):
            written = getattr(operation, name)
            assert getattr(other, name) == pytest.approx(written, abs=1e-9, nan_ok=True)
    timeline = Timeline.read(tmp_path / "trace.json")
    assert timeline.text() == Timeline.of(operations).text()


def test_closing_twice_and_telling_it_more(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "trace.json", clock=Hand())
    trace.close()
    trace.close()
    trace.step_started("normal", ())
    assert read_operations(tmp_path / "trace.json") == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/trace\.json.*No such file"):
        ChromeTrace(tmp_path / "absent" / "trace.json")


def test_a_full_disk_shows_when_the_file_is_closed() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    trace = ChromeTrace("/dev/full", clock=Hand())
    with pytest.raises(ConfigError, match="incomplete: No space left"):
        trace.close()
    trace.close()


ARGS: dict[str, Any] = {
    "id": 0,
    "kind": "layer",
    "lane": "compute",
    "work": "normal",
    "cohort": "normal",
    "layer": 0,
    "requests": ["a"],
    "shares": [],
    "bytes": 0,
    "blocks": 0,
    "submitted_us": None,
    "cause": -1,
    "leader": -1,
    "status": "done",
}
GOOD: dict[str, Any] = {"ph": "X", "ts": 1.0, "dur": 1.0, "args": ARGS}
HEAD = {"otherData": {"schema": module.SCHEMA}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("hello", "is damaged or was not closed"),
        ('{"traceEvents": [', "is damaged or was not closed"),
        ("[" * 100_000, "is damaged or was not closed"),
        ("[]", "is not a trace of pulse"),
        ('{"traceEvents": []}', "is not a trace of pulse"),
        ('{"otherData": {"schema": "pulse.trace/0"}, "traceEvents": []}', "is not a trace of"),
        (json.dumps(HEAD), "no list of events"),
        (json.dumps({**HEAD, "traceEvents": [1]}), "event 0"),
        (json.dumps({**HEAD, "traceEvents": [GOOD, {"ph": "X"}]}), "event 1"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ConfigError, match=f"trace\\.json.*{says}") as caught:
        read_operations(tmp_path / "trace.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        *({"ts": value} for value in ("1", None, True, math.inf, math.nan)),
        *({"dur": value} for value in (-1.0, [], 1e400)),
        *({"args": value} for value in (None, [], {})),
        *({"args": {**ARGS, key: None}} for key in ARGS if key != "submitted_us"),
        {"args": {**ARGS, "requests": "abc"}},
        {"args": {**ARGS, "lane": "fast"}},
        {"args": {**ARGS, "layer": 0.5}},
    ],
)
def test_events_that_are_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**HEAD, "traceEvents": [GOOD]}))
    assert len(read_operations(path)) == 1
    path.write_text(json.dumps({**HEAD, "traceEvents": [{**GOOD, **change}]}))
    with pytest.raises(ConfigError, match="event 0 is not as written"):
        read_operations(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_operations(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_operations(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a text file"):
        read_operations(tmp_path / "bytes")


@given(st.integers(0, 10_000))
def test_a_trace_cut_anywhere_is_an_error_or_whole(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.json"
    record(path, overlap())
    text = path.read_text()
    path.write_text(text[:length])
    if length >= len(text) - 1:
        assert len(read_operations(path)) == len(overlap())
    else:
        with pytest.raises(ConfigError):
            read_operations(path)
