"""The null model's KV cache: the same tables as a real one, in plain Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulse.errors import SelectionError, StoreError
from pulse.ports import SelectionPolicy
from pulse.testing.nulltiers import NullStore
from pulse.types import Batch, Demand, Geometry, KVConfig, Placed, Placement, TransferPlan, Work

__all__ = ["NullCache", "NullSequence", "NullState"]


@dataclass(eq=False)
class NullSequence:
    """A sequence's slots: a list per layer, or a hot set per layer in order of last selection."""

    request: str
    placement: Placement
    chunk: int
    slots: list[int]
    slow: list[int]
    own: list[list[int]]
    hot: list[OrderedDict[int, int]]
    closed: bool = False


@dataclass(eq=False)
class NullState:
    """One batch between two operations: activations, positions, values to store, tables."""

    batch: Batch
    h: list[list[int]]
    positions: list[list[int]]
    values: list[list[int]] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    folded: int = 0


class NullCache:
    """A `KVCache` in plain Python: the same tables as a real one, kept in dictionaries."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        fast: NullStore,
        slow: NullStore,
        policy: SelectionPolicy,
        config: KVConfig,
    ) -> None:
        self.geometry, self.config, self.policy = geometry, config, policy
        self.fast, self.slow = fast, slow

    def demand(self, tokens: int, placement: Placement) -> Demand:
        """Bytes per tier."""
        blocks, layers = self.config.blocks(tokens), self.geometry.layers
        if placement is Placement.NORMAL:
            return Demand(blocks * layers * self.fast.slot_bytes, 0)
        return Demand(
            self._columns(blocks) * layers * self.fast.slot_bytes, blocks * self.slow.slot_bytes
        )

    def _columns(self, blocks: int) -> int:
        pinned = self.config.sink_blocks + self.config.local_blocks
        middle = blocks if self.policy.exhaustive else self.config.middle_blocks
        return max(min(blocks, pinned + middle), self.config.sink_blocks + 3)

    def open(self, request: str, tokens: int, placement: Placement) -> NullSequence:
        """Take the slots. Raises StoreError."""
        blocks, layers = self.config.blocks(tokens), self.geometry.layers
        offload = placement is Placement.OFFLOAD
        columns = self._columns(blocks) if offload else blocks
        slots = self.fast.allocate(columns * layers)
        try:
            slow = self.slow.allocate(blocks) if offload else []
        except StoreError:
            self.fast.free(slots)
            raise
        own = [slots[i * columns : (i + 1) * columns] for i in range(layers)]
        free = (columns - self.config.sink_blocks) // 2
        chunk = max(1, min(free, self.config.chunk // self.config.block)) * self.config.block
        hot: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(layers)]
        return NullSequence(request, placement, chunk, slots, slow, own, hot)

    def grow(self, sequence: NullSequence, tokens: int) -> None:
        """One more block per layer of a normal sequence, where it needs one. Raises StoreError."""
        lacking = self.config.blocks(tokens) - len(sequence.own[0])
        if sequence.placement is Placement.OFFLOAD or lacking <= 0:
            return
        slots = self.fast.allocate(lacking * self.geometry.layers)
        sequence.slots.extend(slots)
        for layer, own in enumerate(sequence.own):
            own.extend(slots[layer * lacking : (layer + 1) * lacking])

    def close(self, sequence: NullSequence) -> None:
        """Give the slots back. Idempotent."""
        if not sequence.closed:
            sequence.closed = True
            self.policy.close(sequence.request)
            self.fast.free(sequence.slots)
            self.slow.free(sequence.slow)

    def place(self, state: NullState, layer: int, selection: Any) -> Placed:
        """Lay out the tables and store the new values."""
        plans, state.tables, selected = [], [], 0
        chosen = self._chosen(state, selection)
        for i, sequence in enumerate(state.batch.sequences):
            first, last = state.positions[i][0], state.positions[i][-1]
            if sequence.placement is Placement.NORMAL:
                table = sequence.own[layer][: last // self.config.block + 1]
            elif state.batch.work is Work.PREFILL:
                table = self._hold(sequence, layer, first, last)
            else:
                table, plan = self._recall(sequence, layer, last, chosen[i])
                selected += len(table)
                plans.append((sequence.request, plan))
            state.tables.append(table)
            self._store(state, i, table)
        return Placed(selected, self._joined(layer, plans))

    def prefetch(self, state: NullState, layer: int, selection: Any) -> TransferPlan | None:
        """Make a predicted selection resident ahead of `place`."""
        chosen, plans = self._chosen(state, selection), []
        for i, sequence in enumerate(state.batch.sequences):
            _, plan = self._recall(sequence, layer, state.positions[i][-1], chosen[i])
            plans.append((sequence.request, plan))
        return self._joined(layer, plans)

    def _chosen(self, state: NullState, selection: Any) -> list[list[int]]:
        # Checked for all before a hot set changes: a step that fails here can be repeated.
        if selection is None:
            return [[] for _ in state.positions]
        if len(selection) != len(state.positions):
            raise SelectionError(
                f"{len(selection)} selections for {len(state.positions)} sequences"
            )
        chosen = [groups[0] for groups in selection]
        for positions, blocks in zip(state.positions, chosen, strict=True):
            low, high = self._middle(positions[-1])
            outside = [block for block in blocks if not low <= block < high]
            if outside:
                raise SelectionError(f"block {outside[0]} is outside the middle {low}…{high - 1}")
        return chosen

    def _middle(self, position: int) -> tuple[int, int]:
        local = max(0, position // self.config.block - self.config.local_blocks + 1)
        return min(self.config.sink_blocks, local), local

    def _store(self, state: NullState, i: int, table: list[int]) -> None:
        block = self.config.block
        last = state.positions[i][-1] // block
        for position, value in zip(state.positions[i], state.values[i], strict=True):
            slot = table[len(table) - 1 - (last - position // block)]
            if position % block == 0:
                self.fast.memory[slot] = []
            held = self.fast.memory[slot]
            del held[position % block :]
            held.append(value)

    def _hold(self, sequence: NullSequence, layer: int, first: int, last: int) -> list[int]:
        block, sink = self.config.block, self.config.sink_blocks
        hot = sequence.hot[layer]
        for name in [name for name in hot if name >= sink]:
            del hot[name]
        ids = list(range(first // block, last // block + 1))
        for name in ids:
            hot[name] = sequence.own[layer][
                name if name < sink else sink + name - max(ids[0], sink)
            ]
        return [hot[name] for name in ids]

    def _recall(
        self, sequence: NullSequence, layer: int, position: int, chosen: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        block, hot = self.config.block, sequence.hot[layer]
        current = position // block
        sink, local = self._middle(position)
        need = sorted({*range(sink), *chosen, *range(local, current + 1)})
        for name in need:
            if name in hot:
                hot.move_to_end(name)
        plan = []
        for name in need:
            if name in hot:
                continue
            free = set(sequence.own[layer]) - set(hot.values())
            hot[name] = min(free) if free else self._evict(hot, need)
            if name != current:
                plan.append((layer * self.slow.slots + sequence.slow[name], hot[name]))
        return [hot[name] for name in need], plan

    def _evict(self, hot: OrderedDict[int, int], need: Sequence[int]) -> int:
        oldest = next(name for name in hot if name not in need)
        slot = hot.pop(oldest)
        self.fast.memory.pop(slot, None)  # a table that still names it must not go unnoticed
        return slot

    def _joined(
        self, layer: int, plans: Sequence[tuple[str, list[tuple[int, int]]]]
    ) -> TransferPlan | None:
        pairs = [pair for _, plan in plans for pair in plan]
        if not pairs:
            return None
        bounds = [0]
        for _, plan in plans:
            bounds.append(bounds[-1] + len(plan))
        source, target = [s for s, _ in pairs], [t for _, t in pairs]
        for slot in target:
            self.fast.memory.pop(slot, None)
        return TransferPlan(
            self.slow,
            self.fast,
            source,
            target,
            len(pairs),
            self.fast.unit_bytes,
            layer,
            tuple(request for request, _ in plans),
            tuple(bounds),
        )

    def prefix(
        self, state: NullState, layer: int
    ) -> Iterator[tuple[tuple[int, list[int]], TransferPlan | None]]:
        """The sink, then pieces of the prefix, each in the other half of the free columns."""
        sequence, block = state.batch.sequences[0], self.config.block
        before, sink = state.batch.starts[0] // block, self.config.sink_blocks
        own = sequence.own[layer]
        if before and sink:
            yield (0, own[: min(sink, before)]), None
        landing = own[sink + sequence.chunk // block :]
        size = max(1, len(landing) // 2)
        for turn, first in enumerate(range(sink, before, size)):
            ids = range(first, min(first + size, before))
            half = landing[(turn % 2) * size :][: len(ids)]
            pairs = [
                (layer * self.slow.slots + sequence.slow[name], slot)
                for name, slot in zip(ids, half, strict=True)
            ]
            yield (first, half), self._joined(layer, [(sequence.request, pairs)])

    def digest(self, state: NullState, layer: int, piece: Any) -> None:
        """The null policies keep nothing."""

    def seal(self, state: NullState, layer: int) -> TransferPlan | None:
        """Blocks that were filled, as a write-back."""
        block, plans = self.config.block, []
        layers = range(self.geometry.layers) if layer < 0 else [layer]
        for i, sequence in enumerate(state.batch.sequences):
            if sequence.placement is Placement.NORMAL:
                continue
            first, end = state.positions[i][0] // block, (state.positions[i][-1] + 1) // block
            plans.append(
                (
                    sequence.request,
                    [
                        (sequence.hot[at][name], at * self.slow.slots + sequence.slow[name])
                        for at in layers
                        for name in range(first, end)
                    ],
                )
            )
        joined = [(request, plan) for request, plan in plans if plan]
        if not joined:
            return None
        bounds = [0]
        for _, plan in joined:
            bounds.append(bounds[-1] + len(plan))
        pairs = [pair for _, plan in joined for pair in plan]
        return TransferPlan(
            self.fast,
            self.slow,
            [s for s, _ in pairs],
            [t for _, t in pairs],
            len(pairs),
            self.fast.unit_bytes,
            layer,
            tuple(request for request, _ in joined),
            tuple(bounds),
        )
