"""Attention over KV blocks: one token against a block table, a chunk against a landed piece.

Decode runs straight over the block table on the CPU (numba, bfloat16 or float32, no gathering copy)
and gathers for `scaled_dot_product_attention` elsewhere. A chunk of a prompt is attended piece by
piece: each piece yields an output and its log-sum-exp, and partial results are merged, so no piece
need see another (the online softmax of SpecStream, section "Verification", applied to prefill).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

__all__ = ["Partial", "attend_piece", "decode_attention", "decode_attention_gather", "merge"]

# numba's workqueue threading layer ends the process when two threads enter it at once, as two
# engines of one process would.
_PARALLEL = threading.Lock()


@intrinsic
def _widen(_context: Any, value: Any) -> Any:
    """float32 of a float32, or of a bfloat16 given as uint16."""
    if value == types.float32:
        return types.float32(value), lambda _ctx, _builder, _sig, args: args[0]

    def shift(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(value), shift


@numba.njit(nogil=True, fastmath=True, cache=True)
def _attend_head(query, arena, table, count, head, skip, tail, scale, out):  # type: ignore[no-untyped-def]
    # One KV head of one sequence against its blocks; online softmax per block. Long on purpose:
    # this is the decode path's inner loop and every helper call would cost a copy.
    group, dim = query.shape
    block = arena.shape[3]
    running = np.full(group, -np.inf, np.float32)
    total = np.zeros(group, np.float32)
    scores = np.empty((group, block), np.float32)
    row = np.empty(dim, np.float32)
    out[:] = 0.0
    for index in range(count):
        unit = table[index]
        low = skip if index == 0 else 0
        high = tail if index == count - 1 else block
        for t in range(low, high):
            for d in range(dim):
                row[d] = _widen(arena[unit, head, 0, t, d])
            for g in range(group):
                dot = np.float32(0.0)
                for d in range(dim):
                    dot += query[g, d] * row[d]
                scores[g, t] = dot * scale
        for g in range(group):
            peak = running[g]
            for t in range(low, high):
                peak = max(peak, scores[g, t])
            shrink = np.exp(running[g] - peak)
            running[g] = peak
            total[g] *= shrink
            for d in range(dim):
                out[g, d] *= shrink
            for t in range(low, high):
                scores[g, t] = np.exp(scores[g, t] - peak)
                total[g] += scores[g, t]
        for t in range(low, high):
            for d in range(dim):
                row[d] = _widen(arena[unit, head, 1, t, d])
            for g in range(group):
                weight = scores[g, t]
                for d in range(dim):
                    out[g, d] += weight * row[d]
    for g in range(group):
        inverse = np.float32(1.0) / total[g]
        for d in range(dim):
            out[g, d] *= inverse


@numba.njit(nogil=True, fastmath=True, cache=True, parallel=True)
def _decode(query, arena, table, count, skip, tail, scale, out):  # type: ignore[no-untyped-def]
    sequences, heads = query.shape[0], query.shape[1]
    groups = table.shape[1]
    for task in numba.prange(sequences * heads):
        b, h = task // heads, task % heads
        g = h if groups > 1 else 0
        inner = 0 if groups > 1 else h
        _attend_head(
            query[b, h], arena, table[b, g], count[b, g], inner, skip[b], tail[b], scale, out[b, h]
        )


@dataclass(slots=True)
class BlockTable:
    """What attention of one layer reads, for the sequences of a cohort.

    units: ``[sequences, groups, width]`` int64 unit ids in ascending block order; count: entries
    used, ``[sequences, groups]``. Of the first block `skip` tokens are outside the window, of the
    last block `tail` tokens are stored, ``[sequences]``.
    """

    units: np.ndarray
    count: np.ndarray
    skip: np.ndarray
    tail: np.ndarray


def decode_attention(query: Tensor, arena: Tensor, table: BlockTable, scale: float) -> Tensor:
    """One token per sequence against its block table.

    query: ``[sequences, q_heads, head_dim]``. arena: ``[units, heads, 2, block, head_dim]``, where
    `heads` is the KV heads in a unit. Returns ``[sequences, q_heads * head_dim]`` in the query's
    dtype; sums are float32.
    """
    if query.device.type != "cpu":
        return decode_attention_gather(query, arena, table, scale)
    sequences, q_heads, dim = query.shape
    kv_heads = arena.shape[1] * table.units.shape[1]
    folded = query.to(torch.float32).reshape(sequences, kv_heads, q_heads // kv_heads, dim)
    out = torch.empty(folded.shape, dtype=torch.float32)
    with _PARALLEL:
        _decode(
            folded.numpy(),
            _as_numpy(arena),
            table.units,
            table.count,
            table.skip,
            table.tail,
            np.float32(scale),
            out.numpy(),
        )
    return out.reshape(sequences, q_heads * dim).to(query.dtype)


def decode_attention_gather(
    query: Tensor, arena: Tensor, table: BlockTable, scale: float
) -> Tensor:
    """The same through a gather and `scaled_dot_product_attention`, on any device."""
    sequences, q_heads, dim = query.shape
    groups, width = table.units.shape[1:]
    heads, block = arena.shape[1], arena.shape[3]
    kv_heads = heads * groups
    device = arena.device
    used = np.arange(width) < table.count[:, :, None]
    units = torch.from_numpy(np.where(used, table.units, 0)).to(device)
    blocks = arena[units]  # [sequences, groups, width, heads, 2, block, dim]
    keys, values = (
        blocks[..., part, :, :]
        .permute(0, 1, 3, 2, 4, 5)
        .reshape(sequences, kv_heads, width * block, dim)
        for part in (0, 1)
    )
    mask = torch.from_numpy(_valid(table, block)).to(device)
    mask = mask.repeat_interleave(heads, dim=1)  # [sequences, kv_heads, width * block]
    folded = query.reshape(sequences, kv_heads, q_heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(
        folded, keys, values, attn_mask=mask[:, :, None, :], scale=scale
    )
    return out.reshape(sequences, q_heads * dim)


def _valid(table: BlockTable, block: int) -> np.ndarray:
    width = table.units.shape[2]
    position = np.arange(width * block)
    end = (table.count - 1) * block + table.tail[:, None]
    valid: np.ndarray = (position >= table.skip[:, None, None]) & (position < end[:, :, None])
    return valid


def _as_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: np.ndarray = tensor.numpy()
    return array


@dataclass(slots=True)
class Partial:
    """Attention over part of the keys: output ``[q_heads, tokens, head_dim]`` and log-sum-exp.

    Both float32; the log-sum-exp is ``[q_heads, tokens]``.
    """

    out: Tensor
    lse: Tensor


def attend_piece(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool = False
) -> Partial:
    """A chunk's queries ``[q_heads, tokens, head_dim]`` against ``[kv_heads, keys, head_dim]``.

    With `causal`, keys are the chunk's own and each token sees those up to itself.
    """
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], keys[None], values[None], 0.0, causal, scale=scale
        )
        return Partial(out[0].float(), lse[0])
    repeat = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    scores = (query @ keys.mT).float() * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return Partial(torch.exp(scores - lse[..., None]) @ values.float(), lse)


def merge(one: Partial | None, other: Partial) -> Partial:
    """Attention over the keys of both."""
    if one is None:
        return other
    lse = torch.logaddexp(one.lse, other.lse)
    out = one.out * torch.exp(one.lse - lse)[..., None]
    out.addcmul_(other.out, torch.exp(other.lse - lse)[..., None])
    return Partial(out, lse)
