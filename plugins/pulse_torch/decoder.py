"""The arithmetic of a decoder: everything of a block but attention itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pulse_torch.spec import ModelSpec, Rope
from pulse_torch.weights import LayerWeights, Weights

__all__ = ["Decoder"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
_FIRST_POSITIONS = 4096
_CUDA_POSITIONS = 131072


class Decoder:
    """A decoder's functions over tokens of any number of sequences, laid end to end.

    Inference only; inputs are never modified, so a failed step may be repeated. `n` is the number
    of tokens, `hd` the head dimension; all tensors have the dtype and device of the weights unless
    said otherwise. Not thread-safe while the rotary tables grow: one thread computes.

    A step is ``h = embed(ids)``, per layer ``q, k, v = qkv(h, layer, positions)``, attention, and
    ``h = finish(h, attention, layer)``, then ``logits(h[last])``.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        # The factor is rounded first, as the model was trained with the rounded one.
        self._embed_scale = float(torch.tensor(spec.embed_scale, dtype=self.dtype))
        self._activate = _ACTIVATIONS[spec.activation]
        self._norms = [_LayerNorms(spec, layer) for layer in weights.layers]
        self._final_norm = _offset(spec, weights.final_norm)
        self._tables: list[Tensor] = []
        on_cuda = self.device.type == "cuda"
        self.reserve(min(spec.max_positions, _CUDA_POSITIONS if on_cuda else _FIRST_POSITIONS))

    @property
    def positions(self) -> int:
        """Positions that the rotary tables reach; see `reserve`."""
        return self._tables[0].shape[0]

    def reserve(self, positions: int) -> None:
        """Let the rotary tables reach `positions` positions.

        On the CPU `qkv` does this on its own. On CUDA looking at the positions would stall the
        device once per layer, so whoever runs contexts over 131,072 tokens calls this first; a
        position past the tables is a device-side assertion there.
        """
        if self._tables and positions <= self.positions:
            return
        if self._tables:
            positions = max(positions, min(2 * self.positions, self.spec.max_positions))
        self._tables = [
            _rotary_table(rope, positions, self.dtype, self.device) for rope in self.spec.ropes
        ]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings ``[n, hidden]`` of int64 or int32 `token_ids` ``[n]``."""
        h = F.embedding(token_ids, self.weights.embedding)
        return h if self._embed_scale == 1.0 else h.mul_(self._embed_scale)

    def qkv(self, h: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise, project and rotate.

        `h` is ``[n, hidden]``, `positions` int64 ``[n]``, counted from 0 within each sequence.
        Returns q ``[n, q_heads, hd]``, k and v ``[n, kv_heads, hd]``: views whose rows are
        contiguous.
        """
        spec, weights, norms = self.spec, self.weights.layers[layer], self._norms[layer]
        x = F.linear(self._norm(h, norms.attn), weights.qkv, weights.qkv_bias)
        x = x.view(-1, spec.q_heads + 2 * spec.kv_heads, spec.head_dim)
        rotated = spec.q_heads + spec.kv_heads
        qk, v = x[:, :rotated], x[:, rotated:]
        if norms.heads is not None:
            qk = self._norm(qk, norms.heads)
        qk = self._rotate(qk, layer, positions)
        return qk[:, : spec.q_heads], qk[:, spec.q_heads :], v

    def finish(
        self,
        h: Tensor,
        attention: Tensor,
        layer: int,
        milestone: Callable[[], None] | None = None,
    ) -> Tensor:
        """Output projection and FFN, each with its residual; the next layer's ``[n, hidden]``.

        `attention` is ``[n, q_heads * hd]``. `milestone` is called once the attention part is
        queued and the FFN is not.
        """
        weights, norms = self.weights.layers[layer], self._norms[layer]
        x = F.linear(attention, weights.out, weights.out_bias)
        if norms.post_attn is not None:
            x = self._norm(x, norms.post_attn)
        h = x.add_(h)
        if milestone is not None:
            milestone()
        x = self._ffn(self._norm(h, norms.ffn), weights)
        if norms.post_ffn is not None:
            x = self._norm(x, norms.post_ffn)
        return x.add_(h)

    def logits(self, h: Tensor) -> Tensor:
        """float32 logits ``[m, vocab]`` of the last layer's `h` ``[m, hidden]``."""
        return F.linear(self._norm(h, self._final_norm), self.weights.head).float()

    def _ffn(self, x: Tensor, weights: LayerWeights) -> Tensor:
        gate, up = F.linear(x, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
        gated = self._activate(gate).mul_(up)
        return F.linear(gated, weights.down, weights.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension in float32; `weight` may also be one vector per head."""
        size = (x.shape[-1],)
        if weight.dtype == x.dtype:
            if weight.dim() == 1:
                return F.rms_norm(x, size, weight, self.spec.norm_eps)
            return F.rms_norm(x, size, None, self.spec.norm_eps).mul_(weight)
        # A float32 weight under bfloat16: 1 + w does not fit bfloat16 (see `_offset`).
        return F.rms_norm(x.float(), size, None, self.spec.norm_eps).mul_(weight).to(x.dtype)

    def _rotate(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        """Rotary embedding of ``[n, heads, hd]``; dimension i pairs with i + hd / 2."""
        if self.device.type == "cpu" and positions.numel():
            self.reserve(int(positions.max()) + 1)
        cos, sin = self._tables[self.spec.rope_of[layer]][positions].unsqueeze(2).unbind(1)
        return (x * cos).addcmul_(x.roll(self.spec.head_dim // 2, -1), sin)


class _LayerNorms:
    """A layer's norm weights as they are multiplied: with the offset, query and key together.

    heads: ``[q_heads + kv_heads, hd]``, so that one pass does both.
    """

    __slots__ = ("attn", "ffn", "heads", "post_attn", "post_ffn")

    def __init__(self, spec: ModelSpec, layer: LayerWeights) -> None:
        self.attn = _offset(spec, layer.attn_norm)
        self.ffn = _offset(spec, layer.ffn_norm)
        self.post_attn = _maybe_offset(spec, layer.post_attn_norm)
        self.post_ffn = _maybe_offset(spec, layer.post_ffn_norm)
        self.heads: Tensor | None = None
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = layer.q_norm.expand(spec.q_heads, -1)
            keys = layer.k_norm.expand(spec.kv_heads, -1)
            self.heads = _offset(spec, torch.cat((queries, keys)))


def _maybe_offset(spec: ModelSpec, weight: Tensor | None) -> Tensor | None:
    return None if weight is None else _offset(spec, weight)


def _offset(spec: ModelSpec, weight: Tensor) -> Tensor:
    """The stored weight plus the offset; float32 then, as w is small against 1."""
    return weight if spec.norm_offset == 0.0 else weight.float() + spec.norm_offset


def _rotary_table(rope: Rope, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[positions, 2, hd]``: cosines, and sines with the first half negated.

    The sign makes a rotation ``x * cos + roll(x, hd / 2) * sin``.
    """
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequencies
    cos, sin = angles.cos().mul_(rope.scaling), angles.sin().mul_(rope.scaling)
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return table.to(dtype)
