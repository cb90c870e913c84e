"""The whole engine against transformers: the same tokens, and logits that agree, in float32."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel.harness import Erratic
from reference import ARCHITECTURES, TOLERANCE, WINDOW, Models, Recorder, decode

from pulse import Instrument
from pulse.types import Placement, SelectionView

NORMAL = {"admit": "threshold:100000"}
OFFLOAD = {"admit": "threshold:0"}
PLACEMENTS = {"normal": NORMAL, "offload": OFFLOAD}
LENGTHS = (1, 15, 16, 17, 31, 33, 77)
SPARSE: dict[str, Any] = {"budget": 160, "sink": 16, "local": 64, **OFFLOAD}
LONG = (600, 333, 450, 519, 222)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def check(
    models: Models, name: str, lengths: Sequence[int], count: int, **options: Any
) -> Recorder:
    """Tokens and logits of an engine are those of transformers; the executor is returned."""
    prompts = [models.prompt(name, length, count) for length in lengths]
    recorder = Recorder(models.path(name), fast_store=options.pop("fast_store", "host"))
    completions = decode(models.path(name), prompts, count, executor=recorder, **options)
    wanted = Placement.OFFLOAD if options["admit"] == "threshold:0" else Placement.NORMAL
    mixed = options["admit"] == "threshold:100"
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        reference = models.greedy(name, prompt, count)
        assert completion.placement is wanted or mixed
        assert completion.token_ids == reference.tokens
        distance = (recorder.of(number, prompt, count) - reference.logits).abs().max()
        assert distance < TOLERANCE
    assert recorder.kv.fast.peak_bytes <= recorder.kv.fast.limit_bytes
    return recorder


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(models: Models, name: str, placement: str) -> None:
    length = 109
    assert length > WINDOW
    check(models, name, [length], 64, chunk=48, **PLACEMENTS[placement])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("chunk", [16, 48, 512])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_every_prompt_length(models: Models, name: str, chunk: int, placement: str) -> None:
    check(models, name, LENGTHS, 24, chunk=chunk, **PLACEMENTS[placement])


# Every value of every choice at least once, in as few runs as that takes.
CHOICES: dict[str, dict[str, Any]] = {
    "normal, small blocks": {"block": 8, **NORMAL},
    "normal, large blocks": {"block": 32, "schedule": "lockstep", **NORMAL},
    "normal, per head": {"select": "headwise", **NORMAL},
    "torch-copy": {"transfer": "torch-copy", "block": 8, **OFFLOAD},
    "lockstep": {"schedule": "lockstep", "block": 32, **OFFLOAD},
    "disk": {"slow_tier": "disk", **OFFLOAD},
    "disk, torch-copy": {"slow_tier": "disk", "transfer": "torch-copy", "block": 32, **OFFLOAD},
    "headwise": {"select": "headwise", "block": 8, "schedule": "lockstep", **OFFLOAD},
    "headwise, disk": {"select": "headwise", "slow_tier": "disk", **OFFLOAD},
    "full": {"select": "full", "transfer": "torch-copy", **OFFLOAD},
    "full, lockstep": {"select": "full", "schedule": "lockstep", "block": 32, **OFFLOAD},
    "sink-window": {"select": "sink-window", "local": 1024, **OFFLOAD},
    "device store": {"fast_store": "device:cpu", **OFFLOAD},
    "predicted": {"schedule": "prefetch-one", "select": "headwise", **OFFLOAD},
    "erratic": {"schedule": Erratic(), **OFFLOAD},
    "erratic, normal beside offload": {"schedule": Erratic(), "admit": "threshold:100"},
}


def located(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The options with a place for the disk tier."""
    return options | {"slow_tier": f"disk:{folder / 'kv'}"} if "slow_tier" in options else options


@pytest.mark.parametrize("lengths", [[109], [77, 33], [109, 16, 77, 33, 1]], ids=len)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_within_the_budget(
    models: Models, tmp_path: Path, choice: str, lengths: list[int]
) -> None:
    check(models, "llama", lengths, 24, chunk=48, **located(CHOICES[choice], tmp_path))


@pytest.mark.parametrize("choice", ["headwise", "full", "disk", "torch-copy"])
def test_windowed_and_growing_layers_together(models: Models, tmp_path: Path, choice: str) -> None:
    check(models, "gemma3", [77, 33], 24, chunk=48, **located(CHOICES[choice], tmp_path))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_preempted_requests_go_on_as_if_nothing_had_been(models: Models, name: str) -> None:
    # Room for the largest alone, so that most have to give their slots back on the way.
    lengths, count = [109, 77, 80, 60], 40
    geometry = Recorder(models.path(name)).geometry
    blocks = -(-(max(lengths) + count) // 16)
    fast_tier = blocks * geometry.slot_bytes(16) * geometry.layers
    preempted: list[str] = []

    class Watch(Instrument):
        def request_preempted(self, request: str, reason: str) -> None:
            preempted.append(request)

    check(models, name, lengths, count, fast_tier=fast_tier, instruments=[Watch()], **NORMAL)
    assert preempted


# -- more context than the budget ------------------------------------------------------------------


class Drawn:
    """A policy that draws its blocks, the same ones in every layer, anew for every block written.

    The choice has no meaning, but transformers can be told it as a mask.
    """

    exhaustive = False
    late = False

    def __init__(self, block: int, groups: int) -> None:
        self.block = block
        self.groups = groups
        self.per_head = groups > 1
        self.sink, self.local, self.top_k = 2, 4, 5

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options that leave the policy its `top_k` blocks."""
        sizes = {"sink": self.sink, "local": self.local}
        tokens = {name: blocks * self.block for name, blocks in sizes.items()}
        budget = (self.sink + self.local + self.top_k) * self.block
        return {"select": self, "block": self.block, "budget": budget, **tokens, **OFFLOAD}

    def digest_bytes(self, blocks: int) -> int:
        return 0

    def open(self, sequence: str, blocks: int) -> None: ...

    def close(self, sequence: str) -> None: ...

    def observe(self, layer: int, sequence: str, mass: Any) -> None: ...

    def update(self, layer: int, sequence: str, first: int, keys: Any) -> None: ...

    def select(self, layer: int, query: Any, view: SelectionView) -> torch.Tensor:
        assert view.top_k == self.top_k
        rows = [
            [self.drawn(low, high, group) for group in range(self.groups)]
            for low, high in view.middle
        ]
        return torch.tensor(rows)

    def drawn(self, low: int, high: int, group: int) -> list[int]:
        """The middle blocks that a group reads, padded with -1."""
        middle = range(low, high)
        count = min(self.top_k, len(middle))
        chosen = random.Random(f"{high} {group}").sample(middle, count)
        return chosen + [-1] * (self.top_k - count)

    def mask(self, sparse_from: int, q_heads: int, length: int) -> torch.Tensor:
        """What each token sees: everything before `sparse_from`, then what was drawn for it."""
        seen = np.tri(length, dtype=np.bool_)[None].repeat(self.groups, 0)
        block = np.arange(length) // self.block
        for row in range(sparse_from, length):
            high = max(0, row // self.block - self.local + 1)
            pinned = (block < self.sink) | (block >= high)
            for group in range(self.groups):
                middle = self.drawn(min(self.sink, high), high, group)
                seen[group, row] &= pinned | np.isin(block, middle)
        return torch.from_numpy(seen).repeat_interleave(q_heads // self.groups, 0)


@pytest.mark.parametrize("fast_tier", ["4MiB", "tight"])
@pytest.mark.parametrize(("block", "groups"), [(8, 1), (8, 2), (16, 1)])
def test_sparse_attention_reads_what_was_selected(
    models: Models, block: int, groups: int, fast_tier: str
) -> None:
    name, length, count = "llama", 301, 40
    policy = Drawn(block, groups)

    @cache
    def mask(size: int) -> torch.Tensor:
        return policy.mask(length, 4, size)  # the prompt's own tokens see everything

    prompt = models.masked_prompt(name, length, count, mask)
    reference = models.greedy(name, prompt, count, mask)
    recorder = Recorder(models.path(name))
    if fast_tier == "tight":
        fast_tier = tight(recorder, policy.options, length + count)
    [completion] = decode(
        models.path(name), [prompt], count, executor=recorder, fast_tier=fast_tier, **policy.options
    )
    assert completion.token_ids == reference.tokens
    assert (recorder.of(0, prompt, count) - reference.logits).abs().max() < TOLERANCE
    assert models.greedy(name, prompt, count).tokens != reference.tokens  # it does read less


def needed_blocks(options: dict[str, Any], tokens: int) -> int:
    """Blocks that attention of one layer reads at most."""
    block = options.get("block", 16)
    budget = 10**9 if options["select"] == "full" else options.get("budget", 2048)
    return -(-min(budget, tokens) // block)


def tight(recorder: Recorder, options: dict[str, Any], tokens: int) -> int:
    """A fast tier in which the layers cannot each have all the columns that they need."""
    geometry = recorder.geometry
    needed, layers = needed_blocks(options, tokens), len(geometry.growing)
    block = options.get("block", 16)
    pinned = -(-options.get("sink", 16) // block) + -(-options.get("local", 128) // block)
    slots = needed + (layers - 1) * (pinned + (needed - pinned) // 3)
    digests = layers * -(-tokens // block) * 2 * geometry.head_dim * 4 * geometry.kv_heads
    return slots * geometry.slot_bytes(block) + digests


@pytest.mark.parametrize("length", [109, 333, 600])
def test_full_in_a_tight_fast_tier(models: Models, length: int) -> None:
    options = {"select": "full", "budget": 160, "local": 64, **OFFLOAD}
    path = models.path("llama")
    fast_tier = tight(Recorder(path), options, length + 24)
    recorder = check(models, "llama", [length], 24, fast_tier=fast_tier, **options)
    hot = recorder.kv.sizes.hot(recorder.kv.config.blocks(length + 24))
    assert hot.own < hot.usable


def tokens_of(
    models: Models, lengths: Sequence[int], *, alone: bool = False, **options: Any
) -> list[tuple[int, ...]]:
    """What the engine writes after prompts that are longer than its budget."""
    path = models.path("llama")
    prompts = [models.prompt("llama", length, 24) for length in lengths]
    runs = [[prompt] for prompt in prompts] if alone else [prompts]
    settings = SPARSE | options
    return [done.token_ids for run in runs for done in decode(path, run, 24, **settings)]


VARIANTS: dict[str, dict[str, Any]] = {
    "torch-copy": {"transfer": "torch-copy"},
    "lockstep": {"schedule": "lockstep"},
    "disk": {"slow_tier": "disk"},
    "everything kept": {"hot_factor": 100.0},
    "short chunks": {"chunk": 48},
    "predicted": {"schedule": "prefetch-one", "slow_tier": "disk"},
    "erratic": {"schedule": Erratic()},
    "nothing kept": {"hot_factor": 1.0, "schedule": "lockstep"},
    "disk, torch-copy, lockstep": {
        "slow_tier": "disk",
        "transfer": "torch-copy",
        "schedule": "lockstep",
    },
}


@pytest.fixture(scope="module")
def base(models: Models) -> dict[str, list[tuple[int, ...]]]:
    """The tokens of each policy with defaults, one request at a time."""
    policies = ("solohead", "headwise", "sink-window")
    return {name: tokens_of(models, LONG, alone=True, select=name) for name in policies}


@pytest.mark.parametrize("policy", ["solohead", "headwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_choice_beyond_the_budget(
    models: Models,
    base: dict[str, list[tuple[int, ...]]],
    tmp_path: Path,
    policy: str,
    variant: str,
) -> None:
    options = located(VARIANTS[variant], tmp_path)
    assert tokens_of(models, LONG, select=policy, **options) == base[policy]


def test_two_requests_beyond_the_budget(
    models: Models, base: dict[str, list[tuple[int, ...]]]
) -> None:
    assert tokens_of(models, LONG[:2], select="solohead") == base["solohead"][:2]


def test_policies_differ_beyond_the_budget(
    models: Models, base: dict[str, list[tuple[int, ...]]]
) -> None:
    # If they did not, the tests above would say little.
    prompts = [models.prompt("llama", length, 24) for length in LONG]
    full = [models.greedy("llama", prompt, 24).tokens for prompt in prompts]
    for one, other in itertools.combinations([full, *base.values()], 2):
        assert one != other


@pytest.mark.parametrize("policy", ["solohead", "headwise"])
def test_a_tight_fast_tier_changes_no_token(
    models: Models, base: dict[str, list[tuple[int, ...]]], policy: str
) -> None:
    recorder = Recorder(models.path("llama"))
    options = SPARSE | {"select": policy}
    fast_tier = tight(recorder, options, max(LONG) + 24)
    tokens = tokens_of(models, LONG, select=policy, fast_tier=fast_tier, executor=recorder)
    hot = recorder.kv.sizes.hot(recorder.kv.config.blocks(max(LONG) + 24))
    assert hot.own < hot.usable
    assert tokens == base[policy]
