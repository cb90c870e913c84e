"""The command line as a stranger meets it: one process per test, exit codes, one JSON object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_recall_model import make_prompt

MODEL = str(Path(__file__).parent / "models" / "recall-tiny")


def pulse(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pulse", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "200", **env},
        check=False,
    )


def generate(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return pulse("generate", "--model", MODEL, "--dtype", "float32", *args, stdin=stdin)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    text, answer = make_prompt(2048, 16, 3)
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text(text)
    return path, answer


def test_the_command_of_the_readme(prompt_file: tuple[Path, str], tmp_path: Path) -> None:
    path, answer = prompt_file
    trace = tmp_path / "trace.json"
    done = generate(
        *("--prompt-file", str(path), "--max-tokens", "32", "--select", "solohead"),
        *("--budget", "512", "--fast-tier", "1MiB", "--slow-tier", f"disk:{tmp_path / 'kv'}"),
        *("--admit", "threshold:0", "--seed", "1", "--json", "--trace", str(trace)),
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["text"].split()[0] == answer
    assert data["schema"] == "pulse.generate/1"
    assert data["usage"] == {"prompt_tokens": 2048, "completion_tokens": 32, "cached_tokens": 0}
    assert data["finish_reason"] == "length"
    assert len(data["token_ids"]) == 32
    _check_numbers(data)
    _check_trace(json.loads(trace.read_text()), data)
    assert list(tmp_path.iterdir()) == [trace], "the disk tier leaves no file behind"


def _check_numbers(data: dict[str, Any]) -> None:
    slot = 2 * 2 * 16 * 32 * 4
    written = 2 * (2048 + 31) // 16
    assert data["write_back"]["blocks"] == written - written % 2
    assert data["write_back"]["bytes"] == data["write_back"]["blocks"] * slot
    recall = data["recall"]
    assert 0 < recall["missed_blocks"] <= recall["selected_blocks"] == 31 * 2 * 32
    assert recall["bytes"] == recall["blocks"] * slot
    for tier in data["tiers"].values():
        assert 0 < tier["peak_bytes"] <= tier["limit_bytes"]
    assert data["tiers"]["fast"]["limit_bytes"] == 1 << 20
    assert data["tiers"]["slow"]["kind"] == "disk"
    for lane in data["lanes"].values():
        assert lane["operations"] > 0
        assert lane["busy_s"] > 0
        assert lane["idle_s"] >= 0
    for name in ("ttft_s", "tpot_s", "decode_tok_s", "prefill_tok_s"):
        assert data["timing"][name] > 0


def _check_trace(trace: dict[str, Any], data: dict[str, Any]) -> None:
    ran = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(ran) == sum(lane["operations"] for lane in data["lanes"].values())
    assert all(event["dur"] >= 0 and event["args"]["status"] == "done" for event in ran)


def test_text_streams_to_standard_output(prompt_file: tuple[Path, str]) -> None:
    done = generate("--max-tokens", "1", stdin=prompt_file[0].read_text())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == prompt_file[1]
    assert "where" in done.stderr


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (["--prompt", ""], "PromptError", "empty"),
        (["--prompt", "f1 " * 17_000], "PromptError", "17,000"),
        (["--prompt", "f1", "--budget", "159"], "BudgetError", "160"),
        (["--prompt", "f1", "--fast-tier", "1KiB"], "CapacityError", "fast_tier"),
        (["--prompt", "f1 " * 900, "--fast-tier", "40KiB"], "CapacityError", "does not fit"),
        (["--prompt", "f1", "--fast-tier", "lots"], "ConfigError", "64MiB"),
        (["--prompt", "f1", "--select", "solohed"], "PluginNotFound", "solohead"),
        (["--prompt", "f1", "--transfer", "stage"], "PluginNotFound", "staged"),
        (["--prompt", "f1", "--temperature", "nan"], "SamplingError", "nan"),
        (["--prompt", "f1", "--slow-tier", "disk:/no/such/folder/kv"], "StoreError", "/no/such"),
        (["--prompt", "f1", "--slow-tier", "disk:/dev"], "StoreError", "/dev"),
        (["--prompt", "f1", "--chat"], "PromptError", "chat"),
        (["--prompt-file", "/no/such/file"], "ConfigError", "/no/such/file"),
        (["--prompt", "a", "--prompt-file", "b"], "ConfigError", "not both"),
        (["--prompt", "f1", "--trace", "/no/such/folder/t"], "ConfigError", "/no/such"),
    ],
)
def test_bad_input_names_the_value_and_ends_with_2(args: list[str], error: str, words: str) -> None:
    done = generate(*args)
    assert done.returncode == 2, done.stderr
    assert error in done.stderr
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_an_unknown_model_names_it() -> None:
    done = pulse("generate", "--model", "/no/such/model", "--prompt", "x")
    assert done.returncode == 2
    assert "/no/such/model" in done.stderr


def test_plugins_and_doctor_describe_what_is_there() -> None:
    listed = pulse("plugins")
    assert listed.returncode == 0
    for name in ("solohead", "staged", "torch-copy", "irq", "lockstep", "threshold", "disk"):
        assert name in listed.stdout
    doctor = pulse("doctor")
    assert doctor.returncode == 0, doctor.stderr
    for name in ("torch", "numba", "event loop", "CUDA", "disk tier"):
        assert name in doctor.stdout


def test_interrupt_ends_cleanly(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-u", "-m", "pulse", "generate", "--model", MODEL),
            *("--dtype", "float32", "--prompt", "f1 f2 f3", "--max-tokens", "16000"),
            *("--ignore-eos", "--budget", "512", "--fast-tier", "2MiB"),
            *("--admit", "threshold:0", "--trace", str(trace)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it decodes
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    statuses = {
        event["args"].get("status") for event in json.loads(trace.read_text())["traceEvents"]
    }
    assert statuses <= {None, "done", "cancelled"}
