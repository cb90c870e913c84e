"""The terminal timeline: rows, gaps, overlap depth and stalls are those of the operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from instruments.recording import op, overlap

from pulse.instruments import Timeline
from pulse.types import LaneName, Operation, Work

COMPUTE, RECALL = LaneName.COMPUTE, LaneName.RECALL


def test_one_row_per_lane_with_its_gaps() -> None:
    timeline = Timeline.of(overlap())
    lines = timeline.text(11 + 6 + 14).split("\n")
    assert lines[1] == "compute    AABBNN..B.AAPP   79%"
    assert lines[2] == "recall     ..AAAAAAAA....   57%"
    assert lines[3] == "write_back ..............    0%"
    assert lines[4].strip() == (
        "N normal  A offload  B offload-2  P prefill  small: mostly idle  . idle"
    )


def test_a_column_that_is_mostly_idle_is_small() -> None:
    timeline = Timeline.of([op(0, "layer", "normal", 0, 0, 0.3), op(1, "layer", "normal", 3, 3, 4)])
    assert timeline.row(COMPUTE, 4) == "n..N"


def test_an_operation_without_length_shows() -> None:
    timeline = Timeline.of([op(0, "layer", "normal", 0, 0, 0), op(1, "layer", "offload", 0, 1, 2)])
    assert timeline.row(COMPUTE, 4) == "n.AA"


def test_overlap_depth_counts_other_cohorts_while_the_recall_ran() -> None:
    timeline = Timeline.of(overlap())
    # embed and layer of offload-2 and the normal layer; the normal layer alone.
    assert timeline.depths() == {2: 3, 4: 1}
    depth = timeline.depth()
    assert (depth.recalls, depth.mean, depth.median, depth.max) == (2, 2.0, 2.0, 3)
    assert depth.histogram == {1: 1, 3: 1}
    assert depth.in_flight == pytest.approx(6 / 4)


def test_what_was_merged_counts_once() -> None:
    recall = op(0, "recall", "offload", 0, 0, 2)
    merged = [op(1, "layer", "offload-2", 0, 0, 1), op(2, "layer", "normal", 0, 0, 1, leader=1)]
    assert Timeline.of([recall, *merged]).depths() == {0: 1}


def test_stalls_name_the_recall_that_was_waited_for() -> None:
    first, second = Timeline.of(overlap()).stalls()
    assert first.seconds == pytest.approx(1e-3)
    assert [o.id for o in first.waited_for] == [4, 2]
    assert [o.id for o in second.waited_for] == [2]


def test_a_stall_of_merged_operations_has_several_causes() -> None:
    operations = [
        op(0, "embed", "normal", 0, 0, 1),
        op(1, "write_back", "offload", 0, 0, 5.5),
        op(2, "recall", "offload", 0, 0, 3),
        op(3, "recall", "offload-2", 0, 2, 4),
        op(4, "layer", "offload", 3, 4, 5, cause=2),
        op(5, "layer", "offload-2", 4, 4, 5, cause=3, leader=4),
    ]
    (stall,) = Timeline.of(operations).stalls()[:1]
    assert [o.id for o in stall.waited_for] == [2, 3, 1]


def test_only_the_ten_longest_stalls() -> None:
    operations = [op(i, "layer", "normal", at, at, at + 1) for i, at in enumerate(_squares(14))]
    stalls = Timeline.of(operations).stalls()
    assert [stall.seconds for stall in stalls] == [float(i) for i in range(13, 3, -1)]
    assert all(stall.waited_for == () for stall in stalls)


def _squares(count: int) -> list[float]:
    # Starts with gaps of 1, 2, 3, … between operations one second long.
    starts = [0.0]
    for gap in range(1, count):
        starts.append(starts[-1] + 1 + gap)
    return starts


def test_waits_are_the_longest_first() -> None:
    timeline = Timeline.of(overlap())
    waits = [(o.id, pytest.approx(seconds)) for o, seconds in timeline.waits()]
    assert waits == [(1, 1e-3), (3, 1e-3), (7, 1e-3)]


def test_no_operations_at_all() -> None:
    timeline = Timeline.of([])
    assert timeline.stalls() == timeline.waits() == ()
    assert timeline.depth().recalls == 0
    assert timeline.text(40).split("\n")[1] == "compute    .......................    0%"


def test_what_never_started_and_what_never_ended() -> None:
    operations = [
        op(0, "layer", "normal", 0, 0, 4),
        op(1, "recall", "offload", 0, 1, layer=3, requests=("a", "b"), bytes=8),
        op(2, "layer", "offload", 2, layer=3, requests=("a", "b")),
    ]
    timeline = Timeline.of(operations)
    assert timeline.row(RECALL, 4) == ".AAA"
    assert timeline.unstarted == (operations[2],)
    assert timeline.waited_s(operations[2]) == 2
    assert timeline.text(60).endswith("never started: layer #2 of offload, layer 3, requests a, b")


def test_only_operations_that_never_started() -> None:
    timeline = Timeline.of([op(i, "layer", "normal", 0.5) for i in range(12)])
    assert timeline.text(40).count("never started") == 11
    assert timeline.text(40).endswith("never started: 2 more")


def test_the_order_of_operations_does_not_matter() -> None:
    assert Timeline.of(reversed(overlap())).text() == Timeline.of(overlap()).text()


@st.composite
def operations(draw: st.DrawFn) -> list[Operation]:
    times = st.integers(0, 20).map(float)
    found = []
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["layer", "recall", "write_back"]))
        cohort = draw(st.sampled_from(["normal", "offload", "offload-2", "r0"]))
        moments = sorted(draw(st.lists(times, min_size=1, max_size=3)))
        found.append(op(number, kind, cohort, *moments, cause=draw(st.integers(-1, 12))))
    return found


@given(operations(), st.integers(1, 120))
def test_any_operations_give_a_picture_of_that_width(found: list[Operation], width: int) -> None:
    timeline = Timeline.of(found)
    rows = timeline.text(width).split("\n")[1:4]
    assert {len(row) for row in rows} == {max(18, width)}
    for lane in LaneName:
        span = timeline.end - timeline.begin
        assert timeline.busy_s(lane) + timeline.idle_s(lane) == pytest.approx(span)
        assert (timeline.row(lane, 30).strip(".") == "") == (not timeline.on(lane))


@given(operations())
def test_overlap_depth_is_what_counting_says(found: list[Operation]) -> None:
    timeline = Timeline.of(found)

    def window(o: Operation) -> tuple[float, float]:
        return o.started, o.ended if o.ended == o.ended else timeline.end

    for recall in timeline.on(RECALL):
        low, high = window(recall)
        others = [o for o in timeline.on(COMPUTE) if o.cohort != recall.cohort]
        count = sum(window(o)[0] < high and window(o)[1] > low for o in others)
        assert timeline.depths()[recall.id] == (count if high > low else 0)


def test_symbols_tell_cohorts_apart() -> None:
    cohorts = ["offload", "normal", "offload-10", "offload-2"]
    found = [op(i, "layer", cohort, 0, i, i + 1) for i, cohort in enumerate(cohorts)]
    found.append(op(9, "layer", "r1", 0, 9, 10))
    timeline = Timeline.of(found)
    assert timeline.symbols == {
        "normal": "N",
        "offload": "A",
        "offload-2": "B",
        "offload-10": "C",
    }
    assert timeline.symbol(found[-1]) == "P"
    assert found[-1].work is Work.PREFILL


def test_a_write_back_of_one_request_is_of_no_cohort() -> None:
    found = [
        op(0, "layer", "offload", 0, 0, 1, requests=("a",)),
        op(1, "write_back", "a", 0, 0, 1, requests=("a",), work=Work.OFFLOAD),
    ]
    timeline = Timeline.of(found)
    assert timeline.symbols == {"offload": "A"}
    assert timeline.row(LaneName.WRITE_BACK, 3) == "RRR"
    assert "R of one request" in timeline.legend
