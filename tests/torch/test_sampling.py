"""Sampling: the processors and warpers of transformers, and definitions written out here."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pulse.types import SamplingParams
from pulse_torch.sampling import Sampler, _filtered, sample

VOCAB = 40
DRAWS = 4000


def logits(seed: int, rows: int = 1) -> Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sampler(prompt: tuple[int, ...] = (0,), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), prompt)


def taken(one: Sampler, row: Tensor) -> int:
    """A draw that counts."""
    token = one.draw(row)
    one.take(token)
    return token


def draws(row: Tensor, count: int = DRAWS, **params: Any) -> Counter[int]:
    """How often each token comes in independent draws from the same logits."""
    one = sampler(seed=0, **params)
    return Counter(taken(one, row) for _ in range(count))


def support(scores: Tensor) -> set[int]:
    """The tokens that a warper left over."""
    return set(torch.isfinite(scores[0]).nonzero().flatten().tolist())


def test_greedy_takes_the_best_of_each_row() -> None:
    rows = logits(0, 5)
    chosen = sample(rows, [sampler() for _ in rows])
    assert [token for token, _ in chosen] == rows.argmax(-1).tolist()
    wanted = rows.log_softmax(-1).amax(-1)
    torch.testing.assert_close(torch.tensor([logprob for _, logprob in chosen]), wanted)


def test_rows_keep_their_own_parameters() -> None:
    rows = logits(0, 4)
    mixed = [
        sampler(),
        sampler(temperature=1.0, seed=5),
        sampler(temperature=0.5, top_k=3, seed=6),
        sampler(repetition_penalty=5.0, prompt=tuple(range(VOCAB))),
    ]
    chosen = sample(rows, mixed)
    assert chosen[0][0] == int(rows[0].argmax())
    assert chosen[1][0] == sampler(temperature=1.0, seed=5).draw(rows[1])
    assert chosen[2][0] == sampler(temperature=0.5, top_k=3, seed=6).draw(rows[2])
    assert chosen[3][0] == int(rows[3].argmax())
    for (token, logprob), row in zip(chosen, rows, strict=True):
        assert logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 2**64, 10**30])
def test_a_seed_repeats_the_draws(seed: int) -> None:
    row = logits(0)[0]
    one, other = (sampler(temperature=2.0, seed=seed) for _ in range(2))
    assert [taken(one, row) for _ in range(50)] == [taken(other, row) for _ in range(50)]


def test_a_draw_changes_nothing_until_it_is_taken() -> None:
    row = logits(0)[0]
    one, other = (
        sampler(temperature=2.0, repetition_penalty=1.5, seed=3, forced=(7,)) for _ in range(2)
    )
    for _ in range(20):
        again = {one.draw(row) for _ in range(3)}
        assert again == {taken(one, row)} == {taken(other, row)}


def test_seeds_differ_and_none_is_fresh() -> None:
    row = logits(0)[0]
    samplers = [sampler(temperature=5.0, seed=seed) for seed in (0, 1, None, None)]
    runs = {tuple(taken(one, row) for _ in range(50)) for one in samplers}
    assert len(runs) == 4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    row = logits(3)[0]
    wanted = TemperatureLogitsWarper(temperature)(torch.zeros(1, 1), row[None])[0].softmax(-1)
    counts = draws(row, temperature=temperature)
    for token, probability in enumerate(wanted.tolist()):
        # Six standard deviations, and the seed is fixed.
        spread = 6 * math.sqrt(DRAWS * probability * (1 - probability)) + 3
        assert abs(counts[token] - DRAWS * probability) < spread


@pytest.mark.parametrize("temperature", [1e-9, 1e-38, 1e-45, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    row = logits(1)[0]
    assert set(draws(row, 20, temperature=temperature)) == {int(row.argmax())}


def test_a_huge_temperature_is_uniform() -> None:
    assert len(draws(logits(1)[0], temperature=1e300)) == VOCAB


WARPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "top_k 1": (TopKLogitsWarper(1), {"top_k": 1}),
    "top_k 7": (TopKLogitsWarper(7), {"top_k": 7}),
    "top_k over the vocabulary": (TopKLogitsWarper(1000), {"top_k": 1000}),
    "top_p 0.01": (TopPLogitsWarper(0.01), {"top_p": 0.01}),
    "top_p 0.5": (TopPLogitsWarper(0.5), {"top_p": 0.5}),
    "top_p 0.9": (TopPLogitsWarper(0.9), {"top_p": 0.9}),
    "min_p 0.02": (MinPLogitsWarper(0.02), {"min_p": 0.02}),
    "min_p 0.5": (MinPLogitsWarper(0.5), {"min_p": 0.5}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WARPERS)
def test_filters_leave_what_transformers_leaves(name: str, seed: int) -> None:
    warper, params = WARPERS[name]
    rows = logits(seed)
    flat = rows / 3
    wanted = support(warper(torch.zeros(1, 1), flat.clone()))
    assert set(draws(flat[0], temperature=1.0, **params)) <= wanted
    assert kept(flat[0], **params) == wanted


def kept(row: Tensor, **params: Any) -> set[int]:
    """The tokens with a probability after filtering."""
    probabilities = _filtered(row.softmax(-1), SamplingParams(temperature=1.0, **params))
    return set(probabilities.nonzero().flatten().tolist())


@pytest.mark.parametrize("seed", range(3))
def test_filters_by_their_definitions(seed: int) -> None:
    row = logits(seed)[0]
    ranked = sorted(enumerate(row.softmax(-1).tolist()), key=lambda pair: -pair[1])
    best = [token for token, _ in ranked]
    total, nucleus = 0.0, set()
    for token, probability in ranked:
        if total < 0.8:  # the fewest of the likeliest that reach the mass
            nucleus.add(token)
        total += probability
    assert kept(row, top_k=5) == set(best[:5])
    assert kept(row, top_p=0.8) == nucleus
    assert kept(row, min_p=0.1) == {token for token, p in ranked if p >= 0.1 * ranked[0][1]}
    assert kept(row, top_k=5, min_p=0.1, top_p=0.999) <= set(best[:5]) & kept(row, min_p=0.1)
    assert kept(row, top_p=1e-9) == {best[0]}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_comes_before_the_filters(temperature: float) -> None:
    row = logits(4)[0]
    warm = TemperatureLogitsWarper(temperature)(torch.zeros(1, 1), row[None])
    wanted = support(TopPLogitsWarper(0.7)(torch.zeros(1, 1), warm))
    assert set(draws(row, temperature=temperature, top_p=0.7)) == wanted


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_of_transformers(penalty: float) -> None:
    history = [3, 3, 17, 9]
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    one = sampler(tuple(history), repetition_penalty=penalty)
    for step in range(30):
        rows = logits(step)
        wanted = int(processor(torch.tensor([history]), rows.clone()).argmax())
        [(token, logprob)] = sample(rows, [one])
        one.take(token)
        assert token == wanted
        assert logprob == pytest.approx(float(rows.log_softmax(-1)[0, token]), abs=1e-5)
        history.append(token)


def test_repetition_penalty_with_a_temperature() -> None:
    rows, history = logits(8), tuple(range(0, VOCAB, 2))
    penalised = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([history]), rows.clone())
    warm = TemperatureLogitsWarper(1.5)(torch.tensor([history]), penalised)
    wanted = TopKLogitsWarper(4)(torch.tensor([history]), warm)
    for seed in range(50):
        one = sampler(history, repetition_penalty=3.0, temperature=1.5, top_k=4, seed=seed)
        assert one.draw(rows[0]) in support(wanted)


def test_logits_are_left_alone() -> None:
    rows = logits(0)
    before = rows.clone()
    options = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 1}
    sample(rows, [sampler((1, 2, 3), repetition_penalty=1.5, **options)])
    assert torch.equal(rows, before)


def test_forced_tokens_come_first() -> None:
    rows = logits(0)
    one = sampler(forced=(5, 6), repetition_penalty=2.0)
    chosen = []
    for _ in range(3):
        chosen.append(sample(rows, [one])[0])
        one.take(chosen[-1][0])
    history = torch.tensor([[0, 5, 6]])
    free = int(RepetitionPenaltyLogitsProcessor(2.0)(history, rows.clone()).argmax())
    assert [token for token, _ in chosen] == [5, 6, free]
    assert chosen[0][1] == pytest.approx(float(rows.log_softmax(-1)[0, 5]), abs=1e-5)
