"""A model whose every token depends on every value that attention reads, without tensors.

The kernel runs on it in milliseconds, and it tells: each token stores a value per layer, attention
folds the values it finds in the slots, and the next token is a hash of that. A block that has not
landed, a slot with two owners or a table with a wrong entry changes the tokens, which
`null_reference` computes without any cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pulse.hookspecs import Build, Plugin, hookimpl
from pulse.testing.nullcache import NullCache, NullState
from pulse.testing.nulltiers import NullStore, NullTransfer
from pulse.types import (
    Batch,
    Geometry,
    KVConfig,
    SamplingParams,
    SelectionView,
)

__all__ = [
    "NullExecutor",
    "NullPolicy",
    "NullSampler",
    "ScatteredPolicy",
    "null_reference",
]

PRIME = 2_147_483_647
VOCAB = 257
PREDICTED: Any = object()
"""The null model's predicted query."""


def _mix(*values: int) -> int:
    mixed = 17
    for value in values:
        mixed = (mixed * 1_000_003 + value + 1) % PRIME
    return mixed


def null_reference(
    prompt: Sequence[int], count: int, layers: int = 2, sparse: KVConfig | None = None
) -> list[int]:
    """The tokens that the null model gives, computed without a cache.

    sparse: decode reads what `ScatteredPolicy` selects under this configuration; all if None.
    """
    values: list[list[int]] = [[] for _ in range(layers)]
    tokens = list(prompt)
    state = 0
    for position in range(len(prompt) + count - 1):
        if position == len(tokens):
            tokens.append(state % VOCAB)
        state = _mix(tokens[position], position)
        for layer in range(layers):
            seen = values[layer]
            seen.append(_mix(state, layer, position))
            if sparse is not None and position >= len(prompt):
                block = sparse.block
                read = _read(layer, position // block, sparse)
                seen = [value for b in read for value in seen[b * block : (b + 1) * block]]
            state = _mix(state, sum(seen) % PRIME)
    return [*tokens[len(prompt) :], state % VOCAB][:count]


def _read(layer: int, current: int, config: KVConfig) -> list[int]:
    high = max(0, current - config.local_blocks + 1)
    low = min(config.sink_blocks, high)
    chosen = _scattered(layer, low, high, config.middle_blocks)
    return [*range(low), *chosen, *range(high, current + 1)]


def _scattered(layer: int, low: int, high: int, top_k: int) -> list[int]:
    turn = high * 31 + layer + 1
    order = sorted(range(low, high), key=lambda block: (block + 1) * turn * 7919 % 104_729)
    return order[:top_k]


class NullPolicy:
    """A `SelectionPolicy` that selects all, or the newest blocks of the middle."""

    per_head = False
    late = False

    def __init__(self, *, exhaustive: bool = True) -> None:
        self.exhaustive = exhaustive

    def digest_bytes(self, blocks: int) -> int:
        """No digests."""
        return 0

    def open(self, sequence: str, blocks: int) -> None:
        """Nothing to keep."""

    def close(self, sequence: str) -> None:
        """Nothing was kept."""

    def observe(self, layer: int, sequence: str, mass: Any) -> None:
        """Nothing to learn."""

    def update(self, layer: int, sequence: str, first: int, keys: Any) -> None:
        """Nothing to keep."""

    def select(self, layer: int, query: Any, view: SelectionView) -> list[list[list[int]]]:
        """Per sequence one group of block ids."""
        return [[list(range(max(low, high - view.top_k), high))] for low, high in view.middle]


class ScatteredPolicy(NullPolicy):
    """A sparse policy that jumps about, so that blocks leave the hot set and come back.

    wrong: what it answers first where it is asked twice for a layer, as by a prediction.
    """

    def __init__(self, *, wrong: bool = False) -> None:
        super().__init__(exhaustive=False)
        self.wrong = wrong

    def select(self, layer: int, query: Any, view: SelectionView) -> list[list[list[int]]]:
        """Per sequence one group of block ids, which depend on layer and length alone."""
        turn = layer + (7 if query is PREDICTED and self.wrong else 0)
        return [[_scattered(turn, low, high, view.top_k)] for low, high in view.middle]


class _NullTokenizer:
    """Bytes as tokens; token 256 stops."""

    stop_ids = frozenset({VOCAB - 1})
    has_chat_template = False

    def encode(self, prompt: str | Sequence[dict[str, str]], *, chat: bool) -> list[int]:
        text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
        return list(text.encode())

    def decoder(self) -> _NullDecoder:
        return _NullDecoder()


class _NullDecoder:
    def push(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


class NullSampler:
    """The null model's tokens do not depend on draws."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, token: int) -> None:
        """Noted, for whoever looks."""
        self.taken.append(token)


class NullExecutor:
    """A `ModelExecutor` that folds integers; see the module's docstring."""

    device = "cpu"
    fast_store = "null"

    def __init__(self, layers: int = 2, max_positions: int = 4096) -> None:
        self.geometry = Geometry(
            layers, 1, 1, 1, max_positions, VOCAB, "int", 4, (None,) * layers, "null"
        )
        self.tokenizer = _NullTokenizer()
        self._cache: NullCache | None = None

    def cache(self, **options: Any) -> NullCache:
        """The cache that attention reads."""
        self._cache = NullCache(self.geometry, **options)
        return self._cache

    def embed(self, batch: Batch) -> NullState:
        """Hash tokens and positions."""
        positions = [
            list(range(start, start + len(row)))
            for start, row in zip(batch.starts, batch.tokens, strict=True)
        ]
        h = [
            [_mix(token, position) for token, position in zip(row, places, strict=True)]
            for row, places in zip(batch.tokens, positions, strict=True)
        ]
        return NullState(batch, h, positions)

    def qkv(self, states: Sequence[NullState], layer: int) -> list[Any]:
        """The values to store are the layer's hash of the activations."""
        for state in states:
            state.folded = 0
            state.values = [
                [_mix(h, layer, position) for h, position in zip(row, places, strict=True)]
                for row, places in zip(state.h, state.positions, strict=True)
            ]
        return [state.h for state in states]

    def predict(self, state: NullState, layer: int) -> Any:
        """`PREDICTED`: null policies need to know no more."""
        return PREDICTED

    def attend_prefix(self, state: NullState, layer: int, piece: Any) -> None:
        """Add up a piece of the prefix."""
        state.folded += self._sum(piece[1])

    def attend(
        self, states: Sequence[NullState], layer: int, milestone: Callable[[], None]
    ) -> None:
        """Fold what the tables name into the activations."""
        for state in states:
            for i, table in enumerate(state.tables):
                seen = self._sum(table) - sum(state.values[i]) + state.folded
                for j, value in enumerate(state.values[i]):
                    seen += value
                    state.h[i][j] = _mix(state.h[i][j], seen % PRIME)
        milestone()

    def _sum(self, slots: Sequence[int]) -> int:
        assert self._cache is not None
        return sum(sum(self._cache.fast.memory[slot]) for slot in slots)

    def mass(self, state: NullState, layer: int) -> Any:
        """The null model has one head."""
        return [1.0]

    def sample(self, state: NullState, samplers: Sequence[Any]) -> list[tuple[int, float]]:
        """The activation of the last token is the next token."""
        return [(row[-1] % VOCAB, 0.0) for row in state.h]

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> NullSampler:
        """Nothing is drawn."""
        return NullSampler()

    def close(self) -> None:
        """Nothing to give back."""


def _null_store(build: Build) -> NullStore:
    assert build.shape is not None
    return NullStore(build.shape)


@hookimpl
def pulse_model_executors() -> list[Plugin]:
    """The null executor."""
    return [Plugin("null", lambda _: NullExecutor(), "integers instead of tensors, for tests")]


@hookimpl
def pulse_block_stores() -> list[Plugin]:
    """The null store."""
    return [Plugin("null", _null_store, "Python objects instead of bytes, for tests")]


@hookimpl
def pulse_transfer_engines() -> list[Plugin]:
    """The null transfer engine."""
    return [Plugin("null", lambda _: NullTransfer(), "between null stores, for tests")]


@hookimpl
def pulse_selection_policies() -> list[Plugin]:
    """The null policy."""
    return [Plugin("null", lambda _: NullPolicy(), "every block, without tensors, for tests")]
