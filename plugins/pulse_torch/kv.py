"""The KV cache of the torch executor: slots, block tables and hot sets over two stores.

A slot of the fast tier holds one block of one layer, ``[kv_heads, 2, block, head_dim]``. With the
heads outermost a whole block is contiguous for a shared selection, and so is one head's share
(K and V) for a per-head selection; both address the same arena in units.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pulse.errors import SelectionError
from pulse.ports import BlockStore, SelectionPolicy
from pulse.types import Demand, Geometry, KVConfig, Placed, Placement, TransferPlan, Work
from pulse_torch.attention import BlockTable
from pulse_torch.pool import Pool
from pulse_torch.residency import NOT_RESIDENT, OUT_OF_RANGE, plan_hot, ring_table
from pulse_torch.sizing import Sizes

if TYPE_CHECKING:
    from pulse_torch.executor import State

LANDING_TOKENS = 1024
"""Prefix tokens that a piece streamed into the fast tier during prefill has at most."""

__all__ = ["Piece", "TorchKVCache", "TorchSequence"]


@dataclass(slots=True, eq=False)
class TorchSequence:
    """A sequence's lease: its slots in both tiers and its row in the pool."""

    request: str
    row: int
    placement: Placement
    chunk: int
    blocks: int
    slots: np.ndarray
    slow: np.ndarray
    digest_bytes: int
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of a prefix that lie, or are about to land, in fast-tier slots."""

    first: int
    slots: np.ndarray


class TorchKVCache:
    """`pulse.ports.KVCache` over numpy-addressed stores and a torch view of the fast arena."""

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        *,
        fast: BlockStore,
        slow: BlockStore,
        policy: SelectionPolicy,
        config: KVConfig,
    ) -> None:
        self.geometry = geometry
        self.fast = fast
        self.slow = slow
        self.policy = policy
        self.config = config
        self.groups = geometry.kv_heads if policy.per_head else 1
        self.sizes = Sizes(geometry, config, policy, fast, slow)
        self.plane = {layer: plane for plane, layer in enumerate(geometry.growing)}
        shape = (geometry.kv_heads // self.groups, 2, config.block, geometry.head_dim)
        self.units: Tensor = _arena(fast, dtype).view(-1, *shape)
        """``[units, heads per unit, 2, block, head_dim]``: what a unit id addresses."""
        self.slots: Tensor = self.units.view(fast.slots, geometry.kv_heads, *shape[1:])
        self.pool = Pool(geometry, self.groups)
        # The loop opens and grows sequences while compute fills the tables of others: an array
        # that is replaced by a larger one meanwhile would lose what is written to the old.
        self._tables = threading.Lock()
        self._clock = 0

    def demand(self, tokens: int, placement: Placement) -> Demand:
        """Bytes per tier for a sequence of `tokens` tokens."""
        return self.sizes.demand(tokens, placement)

    # -- leases --------------------------------------------------------------------------------

    def open(self, request: str, tokens: int, placement: Placement) -> TorchSequence:
        """Take the slots for a sequence of `tokens` tokens. Raises StoreError."""
        blocks = self.config.blocks(tokens)
        offload = placement is Placement.OFFLOAD
        hot = self.sizes.hot(blocks) if offload else None
        rings = [
            0 if offload and layer in self.plane else self.sizes.ring_blocks(layer, blocks)
            for layer in range(self.geometry.layers)
        ]
        growing = len(self.plane)
        columns = 0
        if hot is not None and growing:
            columns = growing * hot.own + hot.usable - hot.own
        slow = slots = np.empty(0, np.int64)
        digests = hot.digest_bytes if hot is not None else 0
        try:
            if columns:
                slow = self.slow.allocate(blocks)
            slots = self.fast.allocate(sum(rings) + columns)
            if digests:
                self.fast.reserve(digests)
        except BaseException:
            self.fast.free(slots)
            self.slow.free(slow)
            raise
        with self._tables:
            row = self.pool.take(blocks, hot.usable if columns and hot is not None else 0)
            self.pool.set_rings(row, rings, slots[: sum(rings)])
            if columns and hot is not None:
                self.pool.set_hot(row, hot.own, hot.usable, slots[sum(rings) :], slow)
        if columns:
            self.policy.open(request, blocks)
        chunk = self.config.chunk if hot is None else hot.chunk_blocks * self.config.block
        return TorchSequence(request, row, placement, chunk, blocks, slots, slow, digests)

    def grow(self, sequence: TorchSequence, tokens: int) -> None:
        """Take the slots that a normal sequence lacks for `tokens` tokens. Raises StoreError."""
        blocks = self.config.blocks(tokens)
        if sequence.placement is Placement.OFFLOAD or blocks <= sequence.blocks:
            return
        lacking = [
            self.sizes.ring_blocks(layer, blocks) - self.sizes.ring_blocks(layer, sequence.blocks)
            for layer in range(self.geometry.layers)
        ]
        slots = self.fast.allocate(sum(lacking))
        with self._tables:
            self.pool.extend_rings(sequence.row, lacking, slots)
        sequence.slots = np.concatenate([sequence.slots, slots])
        sequence.blocks = blocks

    def close(self, sequence: TorchSequence) -> None:
        """Give all slots back; nothing may be in flight for them. Idempotent."""
        if sequence.closed:
            return
        sequence.closed = True
        self.policy.close(sequence.request)
        self.fast.free(sequence.slots)
        if sequence.digest_bytes:
            self.fast.release(sequence.digest_bytes)
        if len(sequence.slow):
            self.slow.free(sequence.slow)
        with self._tables:
            self.pool.give(sequence.row)

    # -- what attention reads ------------------------------------------------------------------

    def place(self, state: State, layer: int, selection: Any) -> Placed:
        """Lay out what attention of `layer` reads and store the state's new keys and values."""
        with self._tables:
            return self._place(state, layer, selection)

    def _place(self, state: State, layer: int, selection: Any) -> Placed:
        if state.batch.work is Work.PREFILL:
            self._place_chunk(state, layer)
            return Placed(0, None)
        if state.batch.work is Work.OFFLOAD and layer in self.plane:
            placed = self._place_hot(state, layer, selection)
        else:
            placed = self._place_ring(state, layer)
        self._store_tokens(state)
        return placed

    def _place_ring(self, state: State, layer: int) -> Placed:
        window = self.geometry.windows[layer] or 0
        longest = int(state.starts.max()) // self.config.block + 1
        width = min(longest, self.config.blocks(window) + 1) if window else longest
        table = _table(len(state.rows), 1, width)
        ring_table(
            state.rows,
            state.starts,
            self.pool.rings[layer],
            self.pool.ring_blocks[layer],
            window,
            self.config.block,
            table.units,
            table.count,
            table.skip,
            table.tail,
        )
        if self.groups > 1:  # the arena is cut into one unit per head; a ring owns whole slots
            heads = np.arange(self.groups)[None, :, None]
            table.units = table.units * self.groups + heads
            table.count = np.repeat(table.count, self.groups, axis=1)
        state.table = table
        return Placed(0, None)

    def _place_hot(self, state: State, layer: int, selection: Any) -> Placed:
        state.table, plan = self._plan_hot(state, layer, selection)
        table = state.table
        state.current[layer] = np.take_along_axis(table.units, table.count[:, :, None] - 1, 2)[
            ..., 0
        ]
        return Placed(int(table.count.sum()), plan)

    def prefetch(self, state: State, layer: int, selection: Any) -> TransferPlan | None:
        """Make a predicted selection resident ahead of `place`.

        It is planned as if it were the selection itself. Columns that layers share hold nothing
        until the layer's turn, so a sequence that has such columns is not served ahead.
        """
        with self._tables:
            if (self.pool.own[state.rows] < self.pool.usable[state.rows]).any():
                return None
            return self._plan_hot(state, layer, selection)[1]

    def _plan_hot(
        self, state: State, layer: int, selection: Any
    ) -> tuple[BlockTable, TransferPlan | None]:
        config, pool, plane = self.config, self.pool, self.plane[layer]
        chosen = self._chosen(state, selection)
        batch, groups, k = chosen.shape
        table = _table(batch, groups, config.sink_blocks + k + config.local_blocks)
        table.tail[:] = state.starts % config.block + 1
        size = table.units.size
        source, target = np.empty(size, np.int64), np.empty(size, np.int64)
        bounds = np.empty(batch + 1, np.int64)
        self._clock += 1
        misses = plan_hot(
            state.rows,
            state.starts,
            chosen,
            plane,
            self._clock,
            config.block,
            config.sink_blocks,
            config.local_blocks,
            self.slow.slots,
            pool.units,
            pool.resident,
            pool.stamp,
            pool.own,
            pool.usable,
            pool.slow,
            table.units,
            table.count,
            source,
            target,
            bounds,
        )
        _check(misses, self.policy, layer)
        if not misses:
            return table, None
        return table, TransferPlan(
            self.slow,
            self.fast,
            source[:misses],
            target[:misses],
            int(misses),
            self.fast.unit_bytes,
            layer,
            state.requests,
            tuple(bounds.tolist()),
        )

    def _chosen(self, state: State, selection: Any) -> np.ndarray:
        batch = len(state.rows)
        if selection is None:
            return np.empty((batch, self.groups, 0), np.int64)
        if isinstance(selection, Tensor):
            selection = selection.cpu().numpy()
        chosen = np.ascontiguousarray(selection, np.int64)
        most = self.config.middle_blocks
        if chosen.ndim != 3 or chosen.shape[:2] != (batch, self.groups):
            raise SelectionError(
                f"{type(self.policy).__name__}.select returned shape {chosen.shape}; "
                f"wanted ({batch}, {self.groups}, at most {most})"
            )
        if chosen.shape[2] > most and not self.policy.exhaustive:
            raise SelectionError(
                f"{type(self.policy).__name__}.select returned {chosen.shape[2]} blocks per "
                f"selection; the budget leaves {most}"
            )
        return chosen

    def _store_tokens(self, state: State) -> None:
        # The token's slot is the last of its table, in every group.
        table = state.table
        assert table is not None
        last = np.take_along_axis(table.units, table.count[:, :, None] - 1, 2)[..., 0]
        units = torch.from_numpy(last).to(self.units.device)
        offsets = torch.from_numpy(state.starts % self.config.block).to(self.units.device)
        batch, groups = last.shape
        heads = self.units.shape[1]
        dim = self.geometry.head_dim
        for part, new in enumerate((state.k, state.v)):
            view = new.view(batch, groups, heads, dim)
            self.units[:, :, part][units, :, offsets[:, None]] = view

    # -- prefill -------------------------------------------------------------------------------

    def _place_chunk(self, state: State, layer: int) -> None:
        row = int(state.rows[0])
        first, end = state.span
        block = self.config.block
        ids = np.arange(first // block, self.config.blocks(end))
        if layer in self.plane and state.offload:
            columns = self._columns(ids)
            slots = self.pool.slots(row, self.plane[layer])[columns]
            self.pool.hold(row, self.plane[layer], self.config.sink_blocks, columns, ids)
        else:
            ring = self.pool.ring(row, layer)
            if self.geometry.windows[layer] is not None:
                self._keep_window(state, layer, ring)
            ids = ids[-len(ring) :]
            slots = ring[ids % len(ring)]
        state.chunk_slots = Piece(int(ids[0]), slots)
        self._store_chunk(state, state.chunk_slots)

    def _columns(self, ids: np.ndarray) -> np.ndarray:
        # Sink blocks stay in the first columns; a chunk's others follow from there.
        sink = self.config.sink_blocks
        return np.where(ids < sink, ids, sink + ids - max(int(ids[0]), sink))

    def _store_chunk(self, state: State, piece: Piece) -> None:
        block, (first, end) = self.config.block, state.span
        position = np.arange(max(first, piece.first * block), end)
        device = self.slots.device
        slots = torch.from_numpy(piece.slots[position // block - piece.first]).to(device)
        offsets = torch.from_numpy(position % block).to(device)
        skip = len(state.k) - len(position)
        self.slots[:, :, 0][slots, :, offsets] = state.k[skip:]
        self.slots[:, :, 1][slots, :, offsets] = state.v[skip:]

    def _keep_window(self, state: State, layer: int, ring: np.ndarray) -> None:
        # The chunk may overwrite what its first tokens still have to see.
        window = self.geometry.windows[layer]
        assert window is not None
        first, block = state.span[0], self.config.block
        oldest = max(0, first - window + 1)
        state.window = None
        if first == 0:
            return
        ids = np.arange(oldest // block, first // block)
        keys, values = self.read(ring[ids % len(ring)])
        skip = oldest - int(ids[0]) * block
        state.window = (keys[:, skip:], values[:, skip:])

    def prefix(self, state: State, layer: int) -> Sequence[tuple[Piece, TransferPlan | None]]:
        """The prefix of an offloaded sequence's chunk: its sink, then pieces that stream in."""
        row, plane, sink = int(state.rows[0]), self.plane[layer], self.config.sink_blocks
        before = state.span[0] // self.config.block
        if before == 0:
            return []
        slots = self.pool.slots(row, plane)
        pieces: list[tuple[Piece, TransferPlan | None]] = []
        if sink:
            pieces.append((Piece(0, slots[: min(sink, before)]), None))
        landing = self._landing(state, row, plane)
        size = max(1, len(landing) // 2)
        for turn, first in enumerate(range(sink, before, size)):
            ids = np.arange(first, min(first + size, before))
            half = landing[(turn % 2) * size :][: len(ids)]
            source = plane * self.slow.slots + self.pool.slow[row, ids]
            pieces.append((Piece(first, half), self._plan(state, layer, source, half)))
        return pieces

    def _landing(self, state: State, row: int, plane: int) -> np.ndarray:
        """Slots for two pieces: what the chunk leaves of the layer's own, and of later layers'.

        The next layers hold nothing that is needed until the chunk reaches them: the kernel has
        waited for the write-backs of the chunk before.
        """
        skip = self.config.sink_blocks + state.sequence.chunk // self.config.block
        most = 2 * max(1, LANDING_TOKENS // self.config.block)
        slots = self.pool.slots(row, plane)[skip:]
        own = int(self.pool.own[row])
        for later in range(plane + 1, len(self.plane)):
            if len(slots) >= most:
                break
            borrowed = self.pool.slots(row, later)[self.config.sink_blocks : own]
            slots = np.concatenate([slots, borrowed])
        return slots[:most]

    def _plan(
        self, state: State, layer: int, slow: np.ndarray, fast: np.ndarray, *, back: bool = False
    ) -> TransferPlan:
        """Whole slots between the tiers, as units."""
        parts = np.arange(self.groups)
        slow_units = (slow[:, None] * self.groups + parts).ravel()
        fast_units = (fast[:, None] * self.groups + parts).ravel()
        stores, units = (self.slow, self.fast), (slow_units, fast_units)
        if back:
            stores, units = (self.fast, self.slow), (fast_units, slow_units)
        count = len(slow_units)
        return TransferPlan(
            *stores, *units, count, self.fast.unit_bytes, layer, state.requests, (0, count)
        )

    def read(self, slots: np.ndarray) -> tuple[Tensor, Tensor]:
        """Keys and values of whole slots in order, ``[kv_heads, tokens, head_dim]`` each."""
        index = torch.from_numpy(slots).to(self.slots.device)
        blocks = self.slots.index_select(0, index)
        kv_heads, dim = self.geometry.kv_heads, self.geometry.head_dim
        keys, values = (
            blocks[:, :, part].transpose(0, 1).reshape(kv_heads, -1, dim) for part in (0, 1)
        )
        return keys, values

    def digest(self, state: State, layer: int, piece: Piece) -> None:
        """Show the policy the keys of a piece that has landed."""
        self._show(layer, state.sequence.request, piece.first, piece.slots)

    def _show(self, layer: int, request: str, first: int, slots: np.ndarray) -> None:
        skip = max(0, self.config.sink_blocks - first)
        if skip < len(slots):
            index = torch.from_numpy(slots[skip:]).to(self.slots.device)
            keys = self.slots[:, :, 0].index_select(0, index)
            self.policy.update(layer, request, first + skip, keys)

    # -- write-back ----------------------------------------------------------------------------

    def seal(self, state: State, layer: int) -> TransferPlan | None:
        """Blocks that the state filled, as a write-back; the policy is shown their keys."""
        if layer < 0:
            return self._seal_tokens(state)
        if not state.offload:
            return None
        piece = state.chunk_slots
        assert piece is not None
        full = state.span[1] // self.config.block - piece.first
        if full <= 0:
            return None
        slots = piece.slots[:full]
        if state.batch.sample or not self.policy.late:
            self._show(layer, state.sequence.request, piece.first, slots)
        ids = np.arange(piece.first, piece.first + full)
        slow = self.plane[layer] * self.slow.slots + self.pool.slow[int(state.rows[0]), ids]
        return self._plan(state, layer, slow, slots, back=True)

    def _seal_tokens(self, state: State) -> TransferPlan | None:
        block = self.config.block
        sealing = np.flatnonzero(state.starts % block == block - 1)
        if not len(sealing) or not self.plane:
            return None
        ids = state.starts[sealing] // block
        # [sealing, planes, groups] unit ids
        fast = np.stack([state.current[layer][sealing] for layer in self.plane], axis=1)
        planes = np.arange(len(self.plane))
        slow_slots = self.pool.slow[state.rows[sealing], ids]
        slow = planes[None, :] * self.slow.slots + slow_slots[:, None]
        slow = slow[:, :, None] * self.groups + np.arange(self.groups)
        for i, b in enumerate(sealing.tolist()):
            self._show_sealed(state.batch.sequences[b].request, int(ids[i]), fast[i])
        each = fast[0].size
        return TransferPlan(
            self.fast,
            self.slow,
            fast.ravel(),
            slow.ravel(),
            fast.size,
            self.fast.unit_bytes,
            -1,
            tuple(state.batch.sequences[b].request for b in sealing.tolist()),
            tuple(range(0, fast.size + 1, each)),
        )

    def _show_sealed(self, request: str, block: int, units: np.ndarray) -> None:
        if block < self.config.sink_blocks:
            return
        index = torch.from_numpy(units).to(self.units.device)
        keys = self.units[:, :, 0][index]  # [planes, groups, heads, block, head_dim]
        keys = keys.flatten(1, 2)[:, None]
        for plane, layer in enumerate(self.geometry.growing):
            self.policy.update(layer, request, block, keys[plane])


def _table(batch: int, groups: int, width: int) -> BlockTable:
    return BlockTable(
        np.empty((batch, groups, width), np.int64),
        np.empty((batch, groups), np.int64),
        np.zeros(batch, np.int64),
        np.empty(batch, np.int64),
    )


def _arena(store: BlockStore, dtype: torch.dtype) -> Tensor:
    tensor = getattr(store, "tensor", None)  # a device store is made of one
    if tensor is None:
        tensor = torch.from_numpy(getattr(store, "memory"))  # noqa: B009 - not in the port
    arena: Tensor = tensor.reshape(-1).view(dtype)
    return arena


def _check(misses: int, policy: SelectionPolicy, layer: int) -> None:
    if misses == OUT_OF_RANGE:
        raise SelectionError(
            f"{type(policy).__name__}.select named a block outside the middle of its sequence in "
            f"layer {layer}; choose within view.middle"
        )
    if misses == NOT_RESIDENT:
        raise SelectionError(f"the block being written is not resident in layer {layer}")
