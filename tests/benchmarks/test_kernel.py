"""The benchmark of the kernel runs and says what it promises; how fast things are is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("per_layer", "per_selection", "per_recall", "per_operation")


def report(*options: str) -> Any:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.kernel", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_kernel_benchmark_reports_all_it_promises() -> None:
    found = report(
        *("--layers", "3", "--steps", "4", "--rounds", "1"),
        *("--model", "tests/models/recall-tiny", "--seconds", "0.05"),
    )
    assert {"processor", "cores", "python"} <= found["machine"].keys()
    assert "asyncio" in found["loops"]
    for loop in found["loops"].values():
        assert loop["floor_us"] > 0
        for state in ("off", "on"):
            keys = {f"{part}_{what}" for part in PARTS for what in ("us", "ratio")}
            assert loop[state].keys() == keys | {"step_us", "step_operations"}
            assert loop[state]["step_operations"] == 4 * (3 + 1) + 3 * 3
    assert found["host_delay_ms"].keys() == found["loops"].keys()
    for arms in found["host_delay_ms"].values():
        assert arms.keys() - {"own cores"} == {"none", "opening", "decoding"}
        for row in arms.values():
            assert row.keys() == {"median", "p99", "max", "over_2_ms", "samples"}
