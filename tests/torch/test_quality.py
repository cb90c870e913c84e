"""What a budget costs in quality: a needle in a haystack is still found."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reference import run
from train_recall_model import make_prompt

import pulse
from pulse.cli.demo import QUESTION
from pulse.ports import Instrument
from pulse.types import LaneName, Operation, Placement, TransferReport

ROOT = Path(__file__).parents[2]
RECALL = ROOT / "tests/models/recall-tiny"
PROSE = ROOT / "pulse/cli/texts/genesis-exodus.txt"
SMOLLM2 = Path(
    os.environ.get("PULSE_SMOLLM2", "~/.cache/pulse/SmolLM2-135M-Instruct.Q4_1.gguf")
).expanduser()

# -- recall-tiny -----------------------------------------------------------------------------------

TOKENS, BUDGET, SINK, LOCAL = 4096, 512, 16, 128
PROMPTS, NEEDLES = 40, 16
KV_BYTES = TOKENS * 2 * 2 * 2 * 32 * 4  # layers, KV heads, keys and values, dimensions, float32


class Traffic(Instrument):
    """Counts the bytes that decode steps recall."""

    def __init__(self) -> None:
        self.bytes = 0

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        if operation.lane is LaneName.RECALL and operation.work == "offload" and report is not None:
            self.bytes += report.bytes


@dataclass(frozen=True)
class Answers:
    """How a policy did."""

    right: int
    recalled: int
    peak: int
    limit: int


def questions() -> list[tuple[list[str], str]]:
    """Prompts whose needle lies in the middle, out of reach of the sink and the local window."""
    found = []
    for seed in range(10 * PROMPTS):
        text, answer = make_prompt(TOKENS, NEEDLES, seed)
        words = text.split()
        needle = words.index(f"n{words[-1][1:]}:{answer[1:]}")
        if SINK + 16 <= needle < TOKENS - LOCAL - 16:
            found.append((words, answer))
    return found[:PROMPTS]


async def answer(policy: str) -> Answers:
    """Ask everything; the query goes through a decode step, as only those attend sparsely."""
    traffic = Traffic()
    async with pulse.Engine(
        RECALL,
        select=policy,
        admit="threshold:0",
        dtype="float32",
        device="cpu",
        fast_tier=KV_BYTES if policy == "full" else KV_BYTES // 4,
        slow_limit=PROMPTS * 2 * KV_BYTES,
        budget=BUDGET,
        sink=SINK,
        local=LOCAL,
        threads=1,
        instruments=[traffic],
    ) as engine:
        encode = engine.parts.executor.tokenizer.encode
        asked = questions()
        streams = []
        for words, _ in asked:
            [query] = encode(words[-1], chat=False)
            haystack = " ".join(words[:-1])
            streams.append(
                engine.generate(haystack, forced=(query,), max_tokens=2, ignore_eos=True)
            )
        done = [await stream.result() for stream in streams]
        fast = engine.parts.fast
        peak, limit = fast.peak_bytes, fast.limit_bytes
    assert all(completion.placement is Placement.OFFLOAD for completion in done)
    right = sum(
        completion.text.split()[-1] == wanted
        for completion, (_, wanted) in zip(done, asked, strict=True)
    )
    return Answers(right, traffic.bytes, peak, limit)


@pytest.fixture(scope="module")
def answers() -> dict[str, Answers]:
    policies = ("full", "solohead", "headwise", "sink-window")
    return {policy: run(answer(policy)) for policy in policies}


def test_full_attention_finds_the_needles(answers: dict[str, Answers]) -> None:
    assert answers["full"].right >= 0.95 * PROMPTS


@pytest.mark.parametrize("policy", ["solohead", "headwise"])
def test_a_budget_of_an_eighth_finds_them_too(answers: dict[str, Answers], policy: str) -> None:
    assert answers[policy].right >= 0.95 * answers["full"].right


def test_without_the_middle_they_are_lost(answers: dict[str, Answers]) -> None:
    assert answers["sink-window"].right < 0.25 * PROMPTS  # chance is 1 in 16
    assert answers["sink-window"].recalled == 0


@pytest.mark.parametrize("policy", ["solohead", "headwise"])
def test_they_came_from_the_slow_tier(answers: dict[str, Answers], policy: str) -> None:
    result = answers[policy]
    assert result.recalled > 0
    assert result.peak <= result.limit <= KV_BYTES / 4


# -- SmolLM2 ---------------------------------------------------------------------------------------

DEPTHS = 10
CHARACTERS = 8000  # some 2,000 tokens


NUMBER = "48213"


def story(depth: int) -> str:
    """Prose that hides the number at one of `DEPTHS` depths, then the question."""
    prose = PROSE.read_text(encoding="utf-8")[:CHARACTERS]
    cut = prose.find(". ", int(len(prose) * (depth + 0.5) / DEPTHS * 0.97)) + 1
    return f"{prose[:cut]} The special magic number is {NUMBER}.{prose[cut:]}\n\n{QUESTION}"


async def found(**options: Any) -> list[bool]:
    """Whether it is told at each depth; the first token alone comes from the dense prefill."""
    stories = [story(depth) for depth in range(DEPTHS)]
    async with pulse.Engine(SMOLLM2, fast_tier="256MiB", **options) as engine:
        streams = [engine.generate(text, chat=True, max_tokens=20) for text in stories]
        done = [await stream.result() for stream in streams]
    assert all(1500 < completion.usage.prompt_tokens < 3000 for completion in done)
    return [NUMBER in completion.text for completion in done]


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is absent; set PULSE_SMOLLM2")
def test_a_real_model_finds_a_number_in_prose() -> None:
    full = run(found(admit="threshold:100000"))
    sparse = run(found(admit="threshold:0", select="solohead", budget=512))
    assert sum(full) >= DEPTHS - 2
    assert sum(sparse) >= sum(full)
