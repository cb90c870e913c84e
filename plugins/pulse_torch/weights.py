"""The weights of a decoder in one canonical form, whatever file they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pulse.errors import ModelFormatError
from pulse_torch.spec import ModelSpec

__all__ = ["LayerWeights", "TensorSource", "Weights", "assemble"]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Matrices are ``[outputs, inputs]``; norms are as stored (no offset added).

    qkv: query, key and value rows, in this order; gate_up: gate and up rows.
    """

    attn_norm: Tensor
    qkv: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attn_norm: Tensor | None = None
    post_ffn_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights, of one dtype on one device. A tied `head` is the tensor `embedding`."""

    embedding: Tensor
    final_norm: Tensor
    head: Tensor
    layers: tuple[LayerWeights, ...]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        yield self.embedding
        yield self.final_norm
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            values = (getattr(layer, name) for name in LayerWeights.__slots__)
            yield from (value for value in values if value is not None)

    @property
    def bytes(self) -> int:
        """Bytes of memory that the weights take."""
        return sum(tensor.nbytes for tensor in self.tensors())


class TensorSource(Protocol):
    """A model file. A *part* is a canonical name, such as ``q.weight`` or ``attn_norm.weight``.

    Parts outside the layers (``embedding.weight``, ``final_norm.weight``, ``head.weight``) have
    layer None.
    """

    def name(self, part: str, layer: int | None) -> str:
        """What the file calls the part; for messages."""

    def shape(self, part: str, layer: int | None) -> tuple[int, ...] | None:
        """The part's shape in torch's order, or None where the file does not have it."""

    def read(self, part: str, layer: int | None, out: Tensor) -> None:
        """Copy the part into `out`, casting to its dtype; holds no more than a piece in memory."""


def assemble(
    spec: ModelSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Read all weights of `spec` from `source`, tensor by tensor.

    Raises ModelFormatError for a missing tensor and for one of another shape, naming it.
    """
    fill = _Fill(source, dtype, device)
    embedding = fill([("embedding.weight", spec.vocab)], spec.hidden)
    head = embedding if spec.tied_head else fill([("head.weight", spec.vocab)], spec.hidden)
    return Weights(
        embedding=embedding,
        final_norm=fill([("final_norm.weight", spec.hidden)]),
        head=head,
        layers=tuple(_layer(spec, fill, layer) for layer in range(spec.layers)),
    )


def _layer(spec: ModelSpec, fill: _Fill, layer: int) -> LayerWeights:
    queries, keys = spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    heads = (("q", queries), ("k", keys), ("v", keys))
    gates = (("gate", spec.ffn), ("up", spec.ffn))

    def matrix(inputs: int, *pieces: tuple[str, int]) -> Tensor:
        return fill([(f"{name}.weight", rows) for name, rows in pieces], inputs, layer=layer)

    def bias(wanted: bool, *pieces: tuple[str, int]) -> Tensor | None:
        if not wanted:
            return None
        return fill([(f"{name}.bias", rows) for name, rows in pieces], layer=layer)

    def norm(name: str, size: int) -> Tensor:
        return fill([(f"{name}.weight", size)], layer=layer)

    return LayerWeights(
        attn_norm=norm("attn_norm", spec.hidden),
        qkv=matrix(spec.hidden, *heads),
        out=matrix(queries, ("out", spec.hidden)),
        ffn_norm=norm("ffn_norm", spec.hidden),
        gate_up=matrix(spec.hidden, *gates),
        down=matrix(spec.ffn, ("down", spec.hidden)),
        qkv_bias=bias(spec.qkv_bias, *heads),
        out_bias=bias(spec.out_bias, ("out", spec.hidden)),
        gate_up_bias=bias(spec.mlp_bias, *gates),
        down_bias=bias(spec.mlp_bias, ("down", spec.hidden)),
        q_norm=norm("q_norm", spec.head_dim) if spec.qk_norm else None,
        k_norm=norm("k_norm", spec.head_dim) if spec.qk_norm else None,
        post_attn_norm=norm("post_attn_norm", spec.hidden) if spec.sandwich_norms else None,
        post_ffn_norm=norm("post_ffn_norm", spec.hidden) if spec.sandwich_norms else None,
    )


class _Fill:
    """Allocates a tensor and fills its rows from the parts that make it up."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device

    def __call__(
        self, pieces: list[tuple[str, int]], inputs: int | None = None, *, layer: int | None = None
    ) -> Tensor:
        """`pieces` are (part, rows); `inputs` is None for a vector."""
        tail = () if inputs is None else (inputs,)
        for part, rows in pieces:
            self._check(part, layer, (rows, *tail))
        total = sum(rows for _, rows in pieces)
        out = torch.empty((total, *tail), dtype=self._dtype, device=self._device)
        start = 0
        for part, rows in pieces:
            self._source.read(part, layer, out[start : start + rows])
            start += rows
        return out

    def _check(self, part: str, layer: int | None, wanted: tuple[int, ...]) -> None:
        shape = self._source.shape(part, layer)
        name = self._source.name(part, layer)
        if shape is None:
            raise ModelFormatError(f"tensor {name} is missing; it should have shape {wanted}")
        if shape != wanted:
            raise ModelFormatError(
                f"tensor {name} has shape {shape}; the configuration wants {wanted}"
            )
