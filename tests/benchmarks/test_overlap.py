"""What the arbiters make of recalls: virtual time, so these are properties and not measurements."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overlap import ARBITERS, drawn, measure, mixed

ROOT = Path(__file__).parents[2]


def test_irq_hides_recalls_behind_short_requests_where_the_baselines_wait() -> None:
    table = mixed(range(100, 104), 40)
    assert table["irq"]["compute_busy_least"] >= 0.95
    assert table["lockstep"]["compute_busy"] == pytest.approx(0.35, abs=0.04)
    assert table["prefetch-one"]["compute_busy"] == pytest.approx(0.45, abs=0.04)
    assert table["irq"]["short_tpot_ratio_most"] <= 1.6
    assert table["lockstep"]["short_tpot_ratio"] > 4
    for arbiter in ARBITERS:
        row = table[arbiter]
        assert row["compute_busy"] + row["recall_stall"] == pytest.approx(1, abs=0.02)


def test_with_long_requests_alone_irq_loses_to_none_and_beats_lockstep() -> None:
    over_lockstep = []
    for seed in range(200, 208):
        case = drawn(seed, shorts=False)
        lockstep, ahead, irq = (measure(case, one, 320).step_s for one in ARBITERS)
        assert irq <= 1.02 * min(lockstep, ahead), seed
        over_lockstep.append(lockstep / irq)
    assert statistics.median(over_lockstep) >= 1.2


def test_a_run_is_the_same_each_time() -> None:
    case = drawn(1, shorts=True)
    assert measure(case, "irq", 20) == measure(case, "irq", 20)


def test_the_command_prints_its_table_as_json() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.overlap",
        "--json",
        "--draws",
        "1",
        "--steps",
        "40",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["seeds"] == [0]
    assert set(report["mixed"]) == set(ARBITERS)
    assert set(report["all_long"]) == {"irq_over_lockstep", "irq_over_prefetch-one"}
