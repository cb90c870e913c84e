"""Drawing tokens from logits, one request's parameters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from pulse.types import SamplingParams

__all__ = ["Sampler", "sample"]

_COLDEST = 1e-30
"""The least temperature that float32 logits can be divided by."""


class Sampler:
    """One request's parameters, seed and history.

    A draw depends on the seed and on how many tokens were taken before, and changes nothing.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.params = params
        self.generator = torch.Generator()
        self.seed = self.generator.seed() if params.seed is None else params.seed
        self.taken = 0
        self.seen = set(prompt) if params.repetition_penalty != 1.0 else set()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken as it is."""
        params = self.params
        return (
            self.taken >= len(params.forced)
            and params.temperature == 0
            and params.repetition_penalty == 1.0
        )

    def take(self, token: int) -> None:
        """`token` was drawn, and counts."""
        self.taken += 1
        if self.params.repetition_penalty != 1.0:
            self.seen.add(token)

    def draw(self, logits: Tensor) -> int:
        """A token from float32 ``[vocab]`` logits on the CPU."""
        params = self.params
        if params.repetition_penalty != 1.0:
            logits = self._penalised(logits)
        if self.taken < len(params.forced):
            return params.forced[self.taken]
        if params.temperature == 0:
            return int(logits.argmax())
        # Shifted first, so that no temperature, however small, divides up to infinity.
        scores = (logits - logits.max()) / max(params.temperature, _COLDEST)
        probabilities = _filtered(torch.softmax(scores, -1), params)
        self.generator.manual_seed(_mixed(self.seed, self.taken))
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def _penalised(self, logits: Tensor) -> Tensor:
        seen = torch.tensor(sorted(self.seen))
        scores = logits[seen]
        penalty = self.params.repetition_penalty
        return logits.index_put(
            (seen,), torch.where(scores > 0, scores / penalty, scores * penalty)
        )


def _mixed(seed: int, index: int) -> int:
    """A 64-bit seed for each draw, unlike those of its neighbours."""
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest())


def _filtered(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities with what top-k, top-p and min-p exclude set to zero (not normalised)."""
    if params.top_k:
        kept = min(params.top_k, len(probabilities))
        probabilities = probabilities * (probabilities >= probabilities.topk(kept).values[-1])
    if params.min_p:
        probabilities = probabilities * (probabilities >= params.min_p * probabilities.max())
    if params.top_p < 1:
        ranked, order = probabilities.sort(descending=True)
        before = ranked.cumsum(0) - ranked
        ranked = ranked * (before < params.top_p * ranked.sum())
        probabilities = torch.zeros_like(probabilities).scatter(0, order, ranked)
    return probabilities


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[tuple[int, float]]:
    """A token and its log-probability (before any filtering) per row of ``[B, vocab]`` float32."""
    if all(sampler.greedy for sampler in samplers):
        tokens = logits.argmax(-1).tolist()
    else:
        rows = logits.cpu()
        tokens = [sampler.draw(row) for sampler, row in zip(samplers, rows, strict=True)]
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    logprobs = (chosen - logits.logsumexp(-1)).tolist()
    return list(zip(tokens, logprobs, strict=True))
