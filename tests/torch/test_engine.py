"""The engine with real tensors: it gives everything back, and stays within its limits."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from train_recall_model import make_prompt

import pulse
from pulse.errors import (
    CapacityError,
    ConfigError,
    EngineClosed,
    PromptError,
    RequestFailed,
    SamplingError,
)
from pulse_torch.threads import default_threads

MODEL = Path(__file__).parents[1] / "models" / "recall-tiny"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "budget": 256,
    "fast_tier": "4MiB",
    "slow_limit": "32MiB",
    "threads": 1,
}


def loops() -> list[Any]:
    factories: list[Any] = [pytest.param(asyncio.new_event_loop, id="asyncio")]
    try:
        import uvloop
    except ImportError:
        return factories
    return [*factories, pytest.param(uvloop.new_event_loop, id="uvloop")]


def run_on(loop: Callable[[], Any], main: Coroutine[Any, Any, Any]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)
        left = asyncio.all_tasks(runner.get_loop())
    assert not left
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pulse")]


def assert_empty(engine: pulse.Engine) -> None:
    assert engine.parts.fast.used_bytes == 0
    assert engine.parts.slow.used_bytes == 0


@pytest.mark.parametrize("loop", loops())
@pytest.mark.parametrize("slow", ["host", "disk"])
def test_cancelling_at_any_event_gives_everything_back(
    loop: Callable[[], Any], slow: str, tmp_path: Path
) -> None:
    prompt = make_prompt(700, 4, 1)[0]

    class At(pulse.Instrument):
        """Closes a stream at the n-th operation that starts."""

        def __init__(self) -> None:
            self.left, self.close = 0, lambda: None

        def operation_started(self, operation: Any) -> None:
            self.left -= 1
            if self.left == 0:
                self.close()

    async def main() -> None:
        at = At()
        tier = "host" if slow == "host" else f"disk:{tmp_path / 'kv'}"
        options = {**OPTIONS, "slow_tier": tier, "admit": "threshold:0", "instruments": [at]}
        async with pulse.Engine(MODEL, **options) as engine:
            whole = await engine.generate(prompt, max_tokens=24).result()
            for moment in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
                neighbour = engine.generate(prompt, max_tokens=24)
                stream = engine.generate(prompt, max_tokens=24)
                reader = asyncio.create_task(stream.result())
                at.left, at.close = moment, reader.cancel
                with pytest.raises(asyncio.CancelledError):
                    await reader
                assert (await neighbour.result()).token_ids == whole.token_ids
                await stream.aclose()
                assert_empty(engine)

    run_on(loop, main())


@pytest.mark.parametrize("loop", loops())
def test_closing_the_engine_in_the_middle_ends_every_stream(loop: Callable[[], Any]) -> None:
    async def main() -> None:
        engine = pulse.Engine(MODEL, **OPTIONS)
        await engine.open()
        streams = [engine.generate("f1 f2 f3", max_tokens=4000, ignore_eos=True) for _ in range(3)]
        async for _ in streams[0]:
            break
        await engine.aclose()
        for stream in streams:
            completion = await stream.result()
            assert completion.finish_reason == "cancelled"
        with pytest.raises(EngineClosed):
            engine.generate("f1")

    run_on(loop, main())


def test_bad_requests_fail_alone() -> None:
    async def main() -> None:
        async with pulse.Engine(MODEL, **{**OPTIONS, "slow_limit": "8MiB"}) as engine:
            good = engine.generate("n1:2 f1 f2 q1", max_tokens=1)
            with pytest.raises(SamplingError, match="nan"):
                engine.generate("f1", temperature=float("nan"))
            for prompt, error in (
                ("", PromptError),
                ([], PromptError),
                ([99_999], PromptError),
                ("f1 " * 16_384, PromptError),
                ([{"role": "user", "content": "f1"}], PromptError),
                ("f1 " * 16_000, RequestFailed),  # its slow tier is too small
            ):
                with pytest.raises(error) as raised:
                    await engine.generate(prompt).result()
                if error is RequestFailed:
                    assert isinstance(raised.value.__cause__, CapacityError)
            assert (await good.result()).text == "v2"
            assert_empty(engine)

    asyncio.run(main())


AFFINITY = hasattr(os, "sched_getaffinity")


@pytest.mark.skipif(not AFFINITY, reason="this system cannot keep threads to cores")
@pytest.mark.parametrize("transfer", ["staged", "torch-copy"])
def test_the_threads_of_an_engine_keep_to_its_cores(transfer: str) -> None:
    cores, seen = {min(os.sched_getaffinity(0))}, {}

    class Watch(pulse.Instrument):
        def operation_ended(self, operation: Any, report: Any) -> None:
            for thread in threading.enumerate():
                if thread.name.startswith("pulse") and thread.native_id:
                    seen[thread.name] = os.sched_getaffinity(thread.native_id)

    async def main() -> None:
        options = {**OPTIONS, "admit": "threshold:0", "transfer": transfer, "cores": cores}
        async with pulse.Engine(MODEL, **options, instruments=[Watch()]) as engine:
            await engine.generate(make_prompt(700, 4, 1)[0], max_tokens=4).result()

    before = os.sched_getaffinity(0)
    run_on(asyncio.new_event_loop, main())
    assert len(seen) >= 3  # compute, recall, write-back
    assert all(kept == cores for kept in seen.values()), seen
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not AFFINITY, reason="this system cannot keep threads to cores")
@pytest.mark.parametrize("cores", [[], [10**6], [-1], ["a"]])
def test_cores_that_the_process_may_not_use_are_refused(cores: list[Any]) -> None:
    with pytest.raises(ConfigError, match="cores"):
        pulse.Engine(MODEL, cores=cores)


@pytest.mark.skipif(not AFFINITY, reason="this system cannot keep threads to cores")
def test_a_core_is_left_to_the_loop_unless_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulse_torch.threads._TORCH", 4)
    for usable, wanted in (1, 1), (2, 1), (4, 3), (64, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=usable: set(range(count)))
        assert default_threads() == wanted
        assert default_threads(set(range(usable))) == min(4, usable)


MEMORY = """
import asyncio, json, resource, sys
import pulse

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

class Peak(pulse.Instrument):
    base = peak = 0
    def operation_ended(self, operation, report):
        self.peak = max(self.peak, resident())

async def main(model, path):
    peak = Peak()
    async with pulse.Engine(
        model, dtype="float32", budget=256, chunk=128, fast_tier="4MiB", slow_tier=f"disk:{path}",
        slow_limit="96MiB", admit="threshold:0", threads=1, instruments=[peak],
    ) as engine:
        await engine.generate([n % 256 for n in range(1000)], max_tokens=8).result()
        peak.base = peak.peak = resident()
        await engine.generate([n % 256 for n in range(9000)], max_tokens=8).result()
        fast, slow = engine.parts.fast, engine.parts.slow
        print(json.dumps({
            "grown": peak.peak - peak.base, "fast": [fast.peak_bytes, fast.limit_bytes],
            "slow": [slow.peak_bytes, slow.limit_bytes],
        }))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def wide_model(tmp_path: Path) -> Path:
    """A random model with much KV: 8 KB per token, 72 MB for the prompt of the test."""
    from reference import word_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=256,
        max_position_embeddings=16_384,
    )
    folder = tmp_path / "wide"
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read there")
def test_resident_memory_stays_within_the_fast_tier_when_kv_goes_to_disk(
    wide_model: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(wide_model), str(tmp_path / "kv")],
        # What glibc keeps for itself varies by 8 MB from run to run; told so, it gives it back.
        env={**os.environ, "MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    kv = 9000 * 4 * 2 * 4 * 64 * 4
    assert data["slow"][0] >= kv > 16 * data["fast"][1]
    for tier in ("fast", "slow"):
        assert 0 < data[tier][0] <= data[tier][1]
    # Nine times the prompt, its KV on disk, takes hardly more memory: tables and the allocator's
    # slack grow beside the fast tier.
    assert data["grown"] < data["fast"][1] + 16 * (1 << 20) < kv / 3


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_a_full_disk_is_a_typed_error(tmp_path: Path) -> None:
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "from pulse.cli import main; main()"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", code, "generate", "--model", str(MODEL), "--prompt", "f1"),
            *("--slow-tier", f"disk:{tmp_path / 'kv'}", "--fast-tier", "4MiB"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "StoreError" in done.stderr
    assert str(tmp_path) in done.stderr
    assert list(tmp_path.iterdir()) == []


def python_calls(context: int, select: str) -> list[int]:
    """Python functions that the compute worker enters in each decode step."""
    calls = 0
    marks: list[int] = []

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    class Mark(pulse.Instrument):
        def token(self, request: str, index: int) -> None:
            marks.append(calls)

    async def main() -> None:
        options = {**OPTIONS, "select": select, "admit": "threshold:0", "instruments": [Mark()]}
        async with pulse.Engine(MODEL, **options) as engine:
            prompt = make_prompt(context, 4, 1)[0]
            await engine.generate(prompt, max_tokens=16, ignore_eos=True).result()

    threading.setprofile(count)  # for threads that start from now on
    try:
        asyncio.run(main())
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(after - before for before, after in pairwise(marks))


@pytest.mark.parametrize("select", ["solohead", "headwise", "sink-window"])
def test_a_decode_step_does_no_python_work_in_proportion_to_the_context(select: str) -> None:
    short, long = python_calls(1000, select), python_calls(8000, select)
    # A step with a recall builds one plan more than a step without; nothing grows with the context.
    assert short[0] * 0.9 < long[len(long) // 2] < short[-1] * 1.1
