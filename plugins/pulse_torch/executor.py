"""The torch model executor: a decoder in the pieces that the kernel interleaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pulse.hookspecs import Build
from pulse.types import Batch, KVConfig, Placement, SamplingParams, Work
from pulse_torch.attention import (
    BlockTable,
    Partial,
    attend_piece,
    decode_attention,
    merge,
)
from pulse_torch.decoder import Decoder
from pulse_torch.kv import Piece, TorchKVCache, TorchSequence
from pulse_torch.loaders import load
from pulse_torch.sampling import Sampler, sample
from pulse_torch.threads import default_threads

__all__ = ["State", "TorchExecutor"]

PIECE_TOKENS = 4096
"""Prefix tokens gathered at a time when a chunk attends to KV that is in the fast tier."""
LAST_QUERIES = 32
"""Queries at the end of the prompt whose attention late policies look at."""


@dataclass(slots=True, eq=False)
class State:
    """One batch between two operations. Tensors are on the executor's device.

    h: ``[tokens, hidden]``; q ``[tokens, q_heads, head_dim]``; k, v ``[tokens, kv_heads,
    head_dim]`` of the current layer. rows, starts: int64 arrays over the sequences.
    """

    batch: Batch
    rows: np.ndarray
    starts: np.ndarray
    positions: Tensor
    h: Tensor
    q: Any = None
    k: Any = None
    v: Any = None
    table: BlockTable | None = None
    current: dict[int, np.ndarray] = field(default_factory=dict)
    chunk_slots: Piece | None = None
    window: tuple[Tensor, Tensor] | None = None
    partial: Partial | None = None
    pinned_lse: Tensor | None = None
    lse: Tensor | None = None

    @property
    def requests(self) -> tuple[str, ...]:
        """The request of each sequence."""
        return tuple(sequence.request for sequence in self.batch.sequences)

    @property
    def sequence(self) -> TorchSequence:
        """The only sequence of a prefill chunk."""
        sequence: TorchSequence = self.batch.sequences[0]
        return sequence

    @property
    def span(self) -> tuple[int, int]:
        """First position of a prefill chunk and the one after its last."""
        return self.batch.starts[0], self.batch.starts[0] + len(self.batch.tokens[0])

    @property
    def offload(self) -> bool:
        """Whether the (first) sequence is offloaded."""
        return self.sequence.placement is Placement.OFFLOAD


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


class TorchExecutor:
    """`pulse.ports.ModelExecutor` for the decoder family of `ModelSpec`."""

    def __init__(self, build: Build) -> None:
        threads = build.threads or default_threads(build.cores)
        torch.set_num_threads(threads)
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        loaded = load(build.model, build.dtype, build.device)
        self.spec = loaded.spec
        self.geometry = loaded.geometry
        self.tokenizer = loaded.tokenizer
        self.dtype = loaded.dtype
        self.device = loaded.device.type
        self.fast_store = "host" if self.device == "cpu" else "device"
        self._device = loaded.device
        self._decoder = Decoder(loaded.spec, loaded.weights)
        self._cache: TorchKVCache | None = None

    def cache(self, **options: Any) -> TorchKVCache:
        """The KV cache that attention reads; one per executor."""
        self._cache = TorchKVCache(self.geometry, self.dtype, **options)
        return self._cache

    def close(self) -> None:
        """Drop the weights. Idempotent."""
        self._cache = None
        self._decoder = None  # type: ignore[assignment]

    # -- pieces --------------------------------------------------------------------------------

    @torch.inference_mode()
    def embed(self, batch: Batch) -> State:
        """Start a step: the state before layer 0."""
        tokens = torch.tensor([token for row in batch.tokens for token in row])
        positions = torch.cat(
            [
                torch.arange(start, start + len(row))
                for start, row in zip(batch.starts, batch.tokens, strict=True)
            ]
        ).to(self._device)
        return State(
            batch,
            rows=np.array([sequence.row for sequence in batch.sequences], np.int64),
            starts=np.array(batch.starts, np.int64),
            positions=positions,
            h=self._decoder.embed(tokens.to(self._device)),
        )

    @torch.inference_mode()
    def qkv(self, states: Sequence[State], layer: int) -> list[Tensor]:
        """Project and rotate; the query of each state is returned, ``[tokens, q_heads, head_dim]``.

        All states go through the weights together.
        """
        h, positions = _joined([s.h for s in states]), _joined([s.positions for s in states])
        q, k, v = self._decoder.qkv(h, layer, positions)
        low = 0
        for state in states:
            part = slice(low, low + len(state.h))
            state.partial = state.pinned_lse = None
            state.q, state.k, state.v = q[part], k[part], v[part]
            low = part.stop
        return [state.q for state in states]

    @torch.inference_mode()
    def predict(self, state: State, layer: int) -> Tensor:
        """The query that `layer` would have if the layer before it did nothing.

        InfiniGen: a residual stream changes little from layer to layer.
        """
        query: Tensor = self._decoder.qkv(state.h, layer, state.positions)[0]
        return query

    @torch.inference_mode()
    def attend_prefix(self, state: State, layer: int, piece: Piece) -> None:
        """Prefill: attend to a piece of the prefix that has landed."""
        assert self._cache is not None
        keys, values = self._cache.read(piece.slots)
        part = attend_piece(state.q.transpose(0, 1), keys, values, self.spec.scale)
        state.partial = merge(state.partial, part)
        if state.batch.sample and state.offload:
            self._note_pinned(state, piece, keys, part)

    def _note_pinned(self, state: State, piece: Piece, keys: Tensor, part: Partial) -> None:
        """Keep what the last queries see in the sink and in the prefix's share of their window."""
        count = self._last_queries(state)
        if piece.first == 0:
            seen = part.lse[:, -count:]
        else:
            first = piece.first * self._config.block
            if first + keys.shape[1] <= state.span[1] - count - self._local_tokens:
                return
            seen = self._local_lse(state, keys, first)
        state.pinned_lse = seen if state.pinned_lse is None else seen.logaddexp(state.pinned_lse)

    @torch.inference_mode()
    def attend(self, states: Sequence[State], layer: int, milestone: Callable[[], None]) -> None:
        """Attention over what `TorchKVCache.place` laid out, then FFN for all states together."""
        attention = _joined([self._attention(state, layer) for state in states])
        h = self._decoder.finish(_joined([s.h for s in states]), attention, layer, milestone)
        low = 0
        for state in states:
            high = low + len(state.h)
            state.h = h[low:high]
            low = high

    def _attention(self, state: State, layer: int) -> Tensor:
        if state.batch.work is Work.PREFILL:
            return self._attend_chunk(state, layer)
        assert self._cache is not None and state.table is not None
        return decode_attention(state.q, self._cache.units, state.table, self.spec.scale)

    @torch.inference_mode()
    def mass(self, state: State, layer: int) -> Tensor:
        """Middle attention mass of the chunk's last queries, ``[kv_heads]`` float32.

        PulseInfer, section "SoloHead selection": per query head the attention weight on middle
        positions, averaged over the last queries. A KV head's mass is that of its query head which
        looks at the middle most, not their mean as in the paper: a single query head that
        retrieves is what selection is for (see ``docs/log.md``).
        """
        assert state.lse is not None
        first, end = state.span
        count = self._last_queries(state)
        near = max(0, end - count - self._local_tokens - first)
        pinned = self._local_lse(state, state.k[near:].transpose(0, 1), first + near)
        if state.pinned_lse is not None:
            pinned = torch.logaddexp(pinned, state.pinned_lse)
        elif first == 0:
            pinned = torch.logaddexp(pinned, self._own_sink_lse(state))
        middle = (1 - torch.exp(pinned - state.lse[:, -count:])).clamp_(min=0).mean(-1)
        return middle.view(self.geometry.kv_heads, -1).amax(-1)

    @property
    def _config(self) -> KVConfig:
        assert self._cache is not None
        return self._cache.config

    @property
    def _local_tokens(self) -> int:
        return self._config.local_blocks * self._config.block

    def _last_queries(self, state: State) -> int:
        return min(LAST_QUERIES, len(state.h))

    def _local_lse(self, state: State, keys: Tensor, first: int) -> Tensor:
        """What the last queries see of `keys`, which start at `first`, in their local window."""
        count = self._last_queries(state)
        position = state.positions[-count:, None]
        key_position = torch.arange(first, first + keys.shape[1], device=keys.device)
        local = (key_position <= position) & (key_position > position - self._local_tokens)
        return self._lse(state.q[-count:].transpose(0, 1), keys, local)

    def _own_sink_lse(self, state: State) -> Tensor:
        """What the last queries see of the sink, where prompt and sink are in one chunk."""
        count = self._last_queries(state)
        size = min(self._config.sink_blocks * self._config.block, len(state.h))
        position = state.positions[-count:, None]
        outside = torch.arange(size, device=position.device) <= position - self._local_tokens
        keys = state.k[:size].transpose(0, 1)
        return self._lse(state.q[-count:].transpose(0, 1), keys, outside)

    def _lse(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Log-sum-exp of the masked scores, ``[q_heads, queries]``; -inf where none is left."""
        keys = keys.repeat_interleave(query.shape[0] // keys.shape[0], 0)
        scores = (query.float() @ keys.float().mT) * self.spec.scale
        return torch.logsumexp(scores.masked_fill(~mask, float("-inf")), -1)

    @torch.inference_mode()
    def sample(self, state: State, samplers: Sequence[Sampler]) -> list[tuple[int, float]]:
        """A token and its log-probability per sequence."""
        last = state.h[-1:] if state.batch.work is Work.PREFILL else state.h
        return sample(self._decoder.logits(last), samplers)

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """A request's sampler."""
        return Sampler(params, prompt)

    # -- prefill attention ---------------------------------------------------------------------

    def _attend_chunk(self, state: State, layer: int) -> Tensor:
        query = state.q.transpose(0, 1)
        keys, values = state.k.transpose(0, 1), state.v.transpose(0, 1)
        scale = self.spec.scale
        if self.geometry.windows[layer] is not None:
            out = self._attend_window(state, layer, query, keys, values)
        else:
            if not state.offload:
                self._attend_own_prefix(state, layer)
            whole = merge(state.partial, attend_piece(query, keys, values, scale, causal=True))
            state.lse = whole.lse
            out = whole.out
        return out.transpose(0, 1).reshape(len(state.h), -1).to(state.h.dtype)

    def _attend_own_prefix(self, state: State, layer: int) -> None:
        assert self._cache is not None
        block = self._cache.config.block
        slots = self._cache.pool.ring(int(state.rows[0]), layer)[: state.span[0] // block]
        step = max(1, PIECE_TOKENS // block)
        for first in range(0, len(slots), step):
            self.attend_prefix(state, layer, Piece(first, slots[first : first + step]))

    def _attend_window(
        self, state: State, layer: int, query: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        window = self.geometry.windows[layer]
        assert window is not None
        if state.window is not None:
            keys = torch.cat([state.window[0], keys], dim=1)
            values = torch.cat([state.window[1], values], dim=1)
        end = state.span[1]
        position = state.positions[:, None]
        key_position = torch.arange(end - keys.shape[1], end, device=query.device)
        mask = (key_position <= position) & (key_position > position - window)
        return F.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=mask[None, None],
            scale=self.spec.scale,
            enable_gqa=True,
        )[0]
