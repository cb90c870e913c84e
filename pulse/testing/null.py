"""A model whose every token depends on every value that attention reads, without tensors.

The kernel runs on it in milliseconds, and it tells: each token stores a value per layer, attention
folds the values it finds in the slots, and the next token is a hash of that. A block that has not
landed, a slot with two owners or a table with a wrong entry changes the tokens, which
`null_reference` computes without any cache.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulse.errors import SelectionError, StoreError, TransferError
from pulse.hookspecs import Build, Plugin, StoreShape, hookimpl
from pulse.ports import BlockStore, SelectionPolicy
from pulse.types import (
    Batch,
    Demand,
    Geometry,
    KVConfig,
    Placed,
    Placement,
    SamplingParams,
    SelectionView,
    TransferPlan,
    TransferReport,
    Work,
)

__all__ = [
    "NullCache",
    "NullExecutor",
    "NullPolicy",
    "NullSequence",
    "NullStore",
    "NullTransfer",
    "null_reference",
]

PRIME = 2_147_483_647
VOCAB = 257


def _mix(*values: int) -> int:
    mixed = 17
    for value in values:
        mixed = (mixed * 1_000_003 + value + 1) % PRIME
    return mixed


def null_reference(prompt: Sequence[int], count: int, layers: int = 2) -> list[int]:
    """The tokens that the null model gives with full attention, computed without a cache."""
    values: list[list[int]] = [[] for _ in range(layers)]
    tokens = list(prompt)
    state = 0
    for position in range(len(prompt) + count - 1):
        if position == len(tokens):
            tokens.append(state % VOCAB)
        state = _mix(tokens[position], position)
        for layer in range(layers):
            values[layer].append(_mix(state, layer, position))
            state = _mix(state, sum(values[layer]) % PRIME)
    return [*tokens[len(prompt) :], state % VOCAB][:count]


class NullStore:
    """A `BlockStore` whose units are Python values."""

    kind = "null"
    description = "Python objects"

    def __init__(self, shape: StoreShape) -> None:
        self.slots, self.planes, self.units = shape.slots, shape.planes, shape.units
        self.unit_bytes = shape.unit_bytes
        self.limit_bytes = shape.limit_bytes
        self.memory: dict[int, Any] = {}
        self.used_bytes = self.peak_bytes = 0
        self._free = list(range(shape.slots - 1, -1, -1))

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot counts, all planes together."""
        return self.planes * self.units * self.unit_bytes

    def allocate(self, count: int) -> list[int]:
        """Free slot numbers. Raises StoreError."""
        if count > len(self._free):
            raise StoreError(f"{count} slots asked for, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._count(count)
        return taken

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. Raises StoreError for one that is free."""
        twice = set(slots) & set(self._free)
        if twice or len(set(slots)) != len(slots):
            raise StoreError(f"slot {min(twice, default=slots[0])} is freed twice")
        for slot in slots:
            for plane in range(self.planes):
                self.memory.pop(plane * self.slots + slot, None)
        self._free.extend(slots)
        self._count(-len(slots))

    def reserve(self, count: int) -> None:
        """Count bytes that are kept beside the slots. Raises StoreError."""
        if self.used_bytes + count > self.limit_bytes:
            raise StoreError(f"{count} bytes do not fit in {self.description}")
        self.used_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, count: int) -> None:
        """Count them no more."""
        self.used_bytes -= count

    def read(self, units: Sequence[int], out: Any) -> int:
        """Values of units. Raises TransferError for one that was never written."""
        for at, unit in enumerate(units):
            if unit not in self.memory:
                raise TransferError(f"unit {unit} was never written")
            out[at] = tuple(self.memory[unit])
        return len(units)

    def write(self, units: Sequence[int], data: Any) -> int:
        """Store values."""
        for unit, value in zip(units, data, strict=True):
            self.memory[unit] = list(value)
        return len(units)

    def close(self) -> None:
        """Nothing to give back."""

    def _count(self, slots: int) -> None:
        self.used_bytes += slots * self.slot_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class NullTransfer:
    """A `TransferEngine` that takes `delay(plan)` seconds of the loop's time per plan."""

    def __init__(self, delay: Callable[[TransferPlan], float] = lambda _: 0.0) -> None:
        self.delay = delay

    def supports(self, source: BlockStore, target: BlockStore) -> bool:
        """Between null stores."""
        return isinstance(source, NullStore) and isinstance(target, NullStore)

    async def recall(self, plan: TransferPlan) -> TransferReport:
        """Slow tier to fast tier."""
        return await self._move(plan)

    async def write_back(self, plan: TransferPlan) -> TransferReport:
        """Fast tier to slow tier."""
        return await self._move(plan)

    async def close(self) -> None:
        """Nothing is under way once recall and write_back have returned."""

    async def _move(self, plan: TransferPlan) -> TransferReport:
        seconds = self.delay(plan)
        await asyncio.sleep(seconds)
        # Read as late as can be, so that a slot reused too early is noticed.
        data: list[Any] = [None] * plan.units
        pieces = plan.source.read(plan.source_units, data)
        plan.target.write(plan.target_units, data)
        return TransferReport(plan.bytes, pieces, seconds)


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
class _State:
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

    def close(self, sequence: NullSequence) -> None:
        """Give the slots back. Idempotent."""
        if not sequence.closed:
            sequence.closed = True
            self.policy.close(sequence.request)
            self.fast.free(sequence.slots)
            self.slow.free(sequence.slow)

    def place(self, state: _State, layer: int, selection: Any) -> Placed:
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

    def _chosen(self, state: _State, selection: Any) -> list[list[int]]:
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

    def _store(self, state: _State, i: int, table: list[int]) -> None:
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
        self, state: _State, layer: int
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

    def digest(self, state: _State, layer: int, piece: Any) -> None:
        """The null policies keep nothing."""

    def seal(self, state: _State, layer: int) -> TransferPlan | None:
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

    def embed(self, batch: Batch) -> _State:
        """Hash tokens and positions."""
        positions = [
            list(range(start, start + len(row)))
            for start, row in zip(batch.starts, batch.tokens, strict=True)
        ]
        h = [
            [_mix(token, position) for token, position in zip(row, places, strict=True)]
            for row, places in zip(batch.tokens, positions, strict=True)
        ]
        return _State(batch, h, positions)

    def qkv(self, state: _State, layer: int) -> Any:
        """The values to store are the layer's hash of the activations."""
        state.folded = 0
        state.values = [
            [_mix(h, layer, position) for h, position in zip(row, places, strict=True)]
            for row, places in zip(state.h, state.positions, strict=True)
        ]
        return state.h

    def attend_prefix(self, state: _State, layer: int, piece: Any) -> None:
        """Add up a piece of the prefix."""
        state.folded += self._sum(piece[1])

    def attend(self, state: _State, layer: int, milestone: Callable[[], None]) -> None:
        """Fold what the tables name into the activations."""
        for i, table in enumerate(state.tables):
            seen = self._sum(table) - sum(state.values[i]) + state.folded
            for j, value in enumerate(state.values[i]):
                seen += value
                state.h[i][j] = _mix(state.h[i][j], seen % PRIME)
        milestone()

    def _sum(self, slots: Sequence[int]) -> int:
        assert self._cache is not None
        return sum(sum(self._cache.fast.memory[slot]) for slot in slots)

    def mass(self, state: _State, layer: int) -> Any:
        """The null model has one head."""
        return [1.0]

    def sample(self, state: _State, samplers: Sequence[Any]) -> list[tuple[int, float]]:
        """The activation of the last token is the next token."""
        return [(row[-1] % VOCAB, 0.0) for row in state.h]

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Any:
        """Nothing is drawn."""
        return None

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
