"""Attention over block tables, the planning of hot sets, and the device store."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pulse.errors import StoreError, TransferError
from pulse.hookspecs import StoreShape
from pulse_torch.attention import (
    BlockTable,
    Partial,
    attend_piece,
    decode_attention,
    decode_attention_gather,
    merge,
)
from pulse_torch.device import DeviceStore
from pulse_torch.residency import NOT_RESIDENT, OUT_OF_RANGE, plan_hot, ring_table

EXAMPLES = settings(deadline=None, max_examples=60, derandomize=True)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

# -- one token against a block table ---------------------------------------------------------------


@dataclass
class Case:
    """Drawn arguments of `decode_attention`."""

    query: Tensor
    arena: Tensor
    table: BlockTable
    scale: float


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tables over a drawn arena: one unit per block, or one per block and KV head."""
    sequences, kv_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    block, width = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 5))
    groups = draw(st.sampled_from([1, kv_heads]))
    dim, q_heads = draw(st.sampled_from([4, 16])), kv_heads * draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    units = width * groups + 2
    normal = torch.from_numpy(rng.standard_normal((units, kv_heads // groups, 2, block, dim)))
    query = torch.from_numpy(rng.standard_normal((sequences, q_heads, dim)))
    count = rng.integers(1, width + 1, (sequences, groups))
    tail = rng.integers(1, block + 1, sequences)
    alone = (count == 1).any(1)  # a first block that is the last one too
    skip = rng.integers(0, np.where(alone, tail, block))
    table = rng.permuted(np.tile(np.arange(units), (sequences, groups, 1)), axis=2)[..., :width]
    table[np.arange(width) >= count[..., None]] = 10**9  # beyond the count nothing may be read
    return Case(
        query.to(dtype), normal.to(dtype), BlockTable(table, count, skip, tail), 1.3 / dim**0.5
    )


def naive(case: Case) -> Tensor:
    """What `decode_attention` should return, in float64, one head after the other."""
    query, arena, table = case.query.double(), case.arena.double(), case.table
    sequences, q_heads, dim = query.shape
    groups, heads, block = table.units.shape[1], arena.shape[1], arena.shape[3]
    share = q_heads // (groups * heads)
    out = torch.empty(sequences, q_heads, dim, dtype=torch.float64)
    for b in range(sequences):
        for head in range(q_heads):
            group, inner = divmod(head // share, heads)
            count = table.count[b, group]
            blocks = arena[table.units[b, group, :count], inner]
            keys, values = blocks[:, 0].reshape(-1, dim), blocks[:, 1].reshape(-1, dim)
            seen = slice(table.skip[b], (count - 1) * block + table.tail[b])
            weights = (keys[seen] @ query[b, head] * case.scale).softmax(-1)
            out[b, head] = weights @ values[seen]
    return out.flatten(1)


@EXAMPLES
@given(cases())
@pytest.mark.parametrize("attend", [decode_attention, decode_attention_gather])
def test_decode_attention(attend: Callable[..., Tensor], case: Case) -> None:
    out = attend(case.query, case.arena, case.table, case.scale)
    assert out.dtype is case.query.dtype
    torch.testing.assert_close(out.double(), naive(case), rtol=0, atol=TOLERANCES[case.query.dtype])


# -- a chunk against pieces ------------------------------------------------------------------------


def dense(query: Tensor, keys: Tensor, values: Tensor, scale: float, before: int) -> Partial:
    """A chunk that comes after `before` keys, over all of them and itself, in float64."""
    share = query.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(share, 0) for x in (keys, values))
    scores = query.double() @ keys.mT * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(before + 1)
    scores = scores.masked_fill(later, -math.inf)
    return Partial(scores.softmax(-1) @ values, scores.logsumexp(-1))


@EXAMPLES
@given(
    pieces=st.lists(st.integers(1, 40), max_size=4),
    tokens=st.integers(1, 40),
    kv_heads=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(list(TOLERANCES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_merged_pieces_are_dense_attention(
    pieces: list[int], tokens: int, kv_heads: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before, dim, scale = sum(pieces), 16, 0.4

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = normal(4, tokens, dim)
    keys, values = normal(kv_heads, before + tokens, dim), normal(kv_heads, before + tokens, dim)
    partial, at = None, 0
    for size in pieces:
        part = slice(at, at + size)
        partial = merge(partial, attend_piece(query, keys[:, part], values[:, part], scale))
        at += size
    own = attend_piece(query, keys[:, at:], values[:, at:], scale, causal=True)
    out = merge(partial, own)
    wanted = dense(query, keys, values, scale, before)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.out.double(), wanted.out, rtol=0, atol=tolerance)
    torch.testing.assert_close(out.lse.double(), wanted.lse, rtol=0, atol=tolerance)


# -- rings -----------------------------------------------------------------------------------------


@EXAMPLES
@given(
    starts=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    window=st.integers(0, 20),
    block=st.sampled_from([1, 4, 5]),
)
def test_ring_table(starts: list[int], window: int, block: int) -> None:
    longest = max(starts) // block + 1
    length = min(longest, -(-window // block) + 1) if window else longest
    batch = len(starts)
    ring = np.arange(batch * length).reshape(batch, length)
    table, count = np.full((batch, 1, length), -1), np.zeros((batch, 1), np.int64)
    skip, tail = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    lengths = np.full(batch, length)
    rows = np.arange(batch)
    ring_table(rows, np.array(starts), ring, lengths, window, block, table, count, skip, tail)
    for b, start in enumerate(starts):
        oldest = max(0, start - window + 1) if window else 0
        blocks = list(range(oldest // block, start // block + 1))
        assert table[b, 0, : count[b, 0]].tolist() == [ring[b, i % length] for i in blocks]
        assert (skip[b], tail[b]) == (oldest % block, start % block + 1)


# -- hot sets --------------------------------------------------------------------------------------

Place = tuple[int, int]
"""A plane and a group: what has a table of its own."""


@dataclass
class Sequence:
    """A sequence of the model: its columns, and when a block was last selected where."""

    row: int
    own: int
    usable: int
    start: int
    units: np.ndarray
    """``[planes, groups, usable]``"""
    selected: dict[Place, dict[int, int]] = field(default_factory=dict)


class Model:
    """The contract of `plan_hot` in sets and dicts, next to the arrays that it works on.

    contents: what lies in each fast unit, as (row, plane, group, block). A plan is carried out on
    it, recall by recall, and then has to find there what its table promises.
    """

    BLOCK = 2
    BLOCKS = 24

    def __init__(
        self, columns: list[tuple[int, int]], planes: int, groups: int, sink: int, local: int
    ) -> None:
        self.planes, self.groups, self.sink, self.local = planes, groups, sink, local
        rows, widest = len(columns) + 1, max(usable for _, usable in columns) + 1
        shape = (rows, planes, groups, widest)
        # What is beyond a row's columns, and rows that are not in the batch, must not matter.
        self.units = np.full(shape, 10**9)
        self.resident = np.zeros(shape, np.int64)
        self.stamp = np.zeros(shape, np.int64)
        self.own, self.usable = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.slow = np.arange(rows * self.BLOCKS).reshape(rows, self.BLOCKS)
        self.contents: dict[int, tuple[int, int, int, int]] = {}
        self.clock = 0
        self.sequences: list[Sequence] = []
        free = 0
        for index, (own, usable) in enumerate(columns):
            row = rows - 1 - index
            mine = free + np.arange(planes * own).reshape(planes, own)
            shared = free + planes * own + np.arange(usable - own)
            free += planes * own + usable - own
            slots = np.concatenate([mine, np.tile(shared, (planes, 1))], axis=1)
            units = slots[:, None, :] * groups + np.arange(groups)[:, None]
            self.units[row, :, :, :usable] = units
            self.resident[row, :, :, :usable] = -1
            self.own[row], self.usable[row] = own, usable
            self.sequences.append(Sequence(row, own, usable, 0, units))

    def middle(self, sequence: Sequence) -> range:
        """The blocks open to selection."""
        high = max(0, sequence.start // self.BLOCK - self.local + 1)
        return range(min(self.sink, high), high)

    def pinned(self, sequence: Sequence) -> set[int]:
        """The blocks that are always read."""
        written = range(sequence.start // self.BLOCK + 1)
        return set(written) - set(self.middle(sequence))

    def plan(self, batch: list[Sequence], plane: int, chosen: np.ndarray) -> Plan:
        """Call `plan_hot`; the first of everything that it returns is the misses."""
        size, width = len(batch), self.sink + chosen.shape[2] + self.local
        table = np.full((size, self.groups, width), -7)
        count, bounds = np.zeros((size, self.groups), np.int64), np.zeros(size + 1, np.int64)
        source, target = np.full(table.size, -7), np.full(table.size, -7)
        self.clock += 1
        misses = plan_hot(
            np.array([sequence.row for sequence in batch]),
            np.array([sequence.start for sequence in batch]),
            chosen,
            plane,
            self.clock,
            self.BLOCK,
            self.sink,
            self.local,
            self.slow.size,
            self.units,
            self.resident,
            self.stamp,
            self.own,
            self.usable,
            self.slow,
            table,
            count,
            source,
            target,
            bounds,
        )
        return Plan(misses, table, count, source, target, bounds)

    def held(self, sequence: Sequence, plane: int, group: int) -> set[int]:
        """The blocks in a layer's own columns."""
        units = sequence.units[plane, group, : sequence.own].tolist()
        found = [self.contents[unit] for unit in units if unit in self.contents]
        mine = [block for *where, block in found if where == [sequence.row, plane, group]]
        assert len(mine) == len(set(mine)), "a block is in two columns"
        return set(mine)

    def step(self, batch: list[Sequence], plane: int, chosen: np.ndarray) -> None:
        """Plan, carry out and check one layer."""
        before = {
            (b, s): self.held(sequence, plane, s)
            for b, sequence in enumerate(batch)
            for s in range(self.groups)
        }
        plan = self.plan(batch, plane, chosen)
        assert plan.misses >= 0
        recalled: dict[Place, list[int]] = {key: [] for key in before}
        for b in range(len(batch)):
            for i in range(plan.bounds[b], plan.bounds[b + 1]):
                group, block = self.recall(batch[b], plane, plan.source[i], plan.target[i])
                recalled[b, group].append(block)
        assert plan.bounds[len(batch)] == plan.misses
        assert len(set(plan.target[: plan.misses])) == plan.misses
        for (b, s), held in before.items():
            units = plan.table[b, s, : plan.count[b, s]].tolist()
            self.check(batch[b], plane, s, units, chosen[b, s], held, recalled[b, s])

    def recall(self, sequence: Sequence, plane: int, source: int, target: int) -> Place:
        """Copy a slow unit to a fast one; the group and the block are returned."""
        slot, group = divmod(int(source), self.groups)
        in_plane, slot = divmod(slot, self.slow.size)
        row, block = divmod(slot, self.BLOCKS)
        assert (in_plane, row) == (plane, sequence.row)
        self.contents[int(target)] = (row, plane, group, block)
        return group, block

    def check(
        self,
        sequence: Sequence,
        plane: int,
        group: int,
        units: list[int],
        chosen: np.ndarray,
        held: set[int],
        recalled: list[int],
    ) -> None:
        """One table against what the contract says of it."""
        current = sequence.start // self.BLOCK
        pinned = self.pinned(sequence)
        needed = sorted(pinned | {int(block) for block in chosen if block >= 0})
        mine = sequence.units[plane, group].tolist()
        assert len(units) == len(needed)
        assert len(set(units)) == len(units)
        assert set(units) <= set(mine)
        if sequence.start % self.BLOCK == 0:  # the token's block is new: it is written, not read
            self.contents[units[-1]] = (sequence.row, plane, group, current)
        place = (sequence.row, plane, group)
        assert [self.contents[unit] for unit in units] == [(*place, block) for block in needed]
        shared = set(mine[sequence.own :])
        assert all(unit not in shared for unit, b in zip(units, needed, strict=True) if b in pinned)
        # What was resident is not recalled, but for a middle block that gave way to a pinned one.
        absent = set(needed) - held - {current}
        assert len(recalled) == len(set(recalled))
        assert absent <= set(recalled) <= set(needed) - {current}
        assert not (set(recalled) - absent) & pinned
        assert len(set(recalled) - absent) <= len(pinned - held)
        self.check_replacement(sequence, plane, group, needed, held)

    def check_replacement(
        self, sequence: Sequence, plane: int, group: int, needed: list[int], held: set[int]
    ) -> None:
        """Of the blocks not needed now, those selected last are the ones that stay."""
        last = sequence.selected.setdefault((plane, group), {})
        kept = self.held(sequence, plane, group) - set(needed)
        gone = held - kept - set(needed)
        assert not kept or all(last[block] <= min(last[b] for b in kept) for block in gone)
        last.update(dict.fromkeys(needed, self.clock))


@dataclass
class Plan:
    """What `plan_hot` wrote."""

    misses: int
    table: np.ndarray
    count: np.ndarray
    source: np.ndarray
    target: np.ndarray
    bounds: np.ndarray


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, int]:
    """A model and how many blocks a policy may select."""
    sink, local, k = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 5))
    columns = []
    for _ in range(draw(st.integers(1, 3))):
        own = draw(st.integers(sink + local, sink + local + k + 3))
        columns.append((own, max(own, sink + local + k) + draw(st.integers(0, 1))))
    planes, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Model(columns, planes, groups, sink, local), k


def selection(draw: st.DrawFn, model: Model, batch: list[Sequence], k: int) -> np.ndarray:
    """Blocks for each sequence and group, some padded, some named twice."""
    chosen = np.full((len(batch), model.groups, k), -1)
    for b, sequence in enumerate(batch):
        blocks = st.sampled_from([-1, *model.middle(sequence)])
        for s in range(model.groups):
            chosen[b, s] = draw(st.lists(blocks, min_size=k, max_size=k))
    return chosen


@EXAMPLES
@given(st.data())
def test_plan_hot(data: st.DataObject) -> None:
    model, k = data.draw(models())
    waiting = list(model.sequences)
    batch = []
    for _ in range(data.draw(st.integers(1, 30))):
        if waiting and (not batch or data.draw(st.booleans())):
            sequence = waiting.pop()
            sequence.start = model.BLOCK * data.draw(st.integers(0, 8))
            batch.append(sequence)
        for plane in range(model.planes):
            for _ in range(1 + data.draw(st.sampled_from([0, 0, 0, 1]))):  # a step may be repeated
                model.step(batch, plane, selection(data.draw, model, batch, k))
        for sequence in batch:
            sequence.start += 1


def planned(model: Model, blocks: list[int]) -> int:
    """What a selection for the first sequence is answered with."""
    return model.plan([model.sequences[0]], 0, np.array(blocks)[None, None]).misses


@pytest.mark.parametrize("blocks", [[0], [1], [7], [8], [99], [3, 3, 9]])
def test_plan_hot_refuses_blocks_outside_the_middle(blocks: list[int]) -> None:
    model = Model([(8, 8)], planes=1, groups=1, sink=2, local=3)
    model.sequences[0].start = 9 * model.BLOCK
    assert model.middle(model.sequences[0]) == range(2, 7)
    assert planned(model, blocks) == OUT_OF_RANGE
    assert planned(model, [2, 6, -1]) == 6  # two in the middle, two of the sink, two local ones


def test_plan_hot_notices_that_the_block_being_written_is_gone() -> None:
    model = Model([(8, 8)], planes=1, groups=1, sink=2, local=3)
    model.sequences[0].start = 9 * model.BLOCK + 1
    assert planned(model, [2]) == NOT_RESIDENT


def test_a_refused_plan_changes_nothing() -> None:
    model = Model([(5, 8), (5, 8)], planes=1, groups=1, sink=2, local=2)
    first, second = model.sequences
    first.start = second.start = 9 * model.BLOCK
    model.step([first, second], 0, np.array([[[3, 4]], [[3, 4]]]))
    before = model.resident.copy(), model.stamp.copy()
    refused = model.plan([first, second], 0, np.array([[[5, 6]], [[5, 99]]]))
    assert refused.misses == OUT_OF_RANGE
    second.start += model.BLOCK + 1
    refused = model.plan([first, second], 0, np.array([[[5, 6]], [[5, 6]]]))
    assert refused.misses == NOT_RESIDENT
    np.testing.assert_array_equal((model.resident, model.stamp), before)


def test_plan_hot_looks_only_at_a_sequence_s_own_columns() -> None:
    # The longer sequence holds block 0 in a column that the shorter one does not have.
    model = Model([(8, 8), (2, 3)], planes=1, groups=1, sink=0, local=1)
    longer, shorter = model.sequences
    longer.start = shorter.start = 9 * model.BLOCK
    model.step([longer], 0, np.array([[[3, 4, 5, 6]]]))
    model.step([longer], 0, np.array([[[0, 5]]]))
    model.step([longer, shorter], 0, np.array([[[0, 5]], [[0, 5]]]))


# -- the device store ------------------------------------------------------------------------------


@pytest.fixture
def store() -> DeviceStore:
    # 6 slots of 2 units of 12 bytes, and 16 bytes that are no slot's.
    return DeviceStore(StoreShape(6, 1, 2, 12, 160), "cpu")


def random_units(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 12), np.uint8)


def test_device_store_round_trip(store: DeviceStore) -> None:
    data, units = random_units(5), np.array([11, 0, 7, 3, 4])
    assert store.write(units, data) == 1
    out = np.zeros_like(data)
    assert store.read(units[::-1].copy(), out) == 1
    np.testing.assert_array_equal(out, data[::-1])


def test_device_store_moves_nothing(store: DeviceStore) -> None:
    store.write(np.empty(0, np.int64), random_units(0))
    store.read(np.empty(0, np.int64), random_units(0))


@pytest.mark.parametrize("units", [[12], [-1], [0, 99]])
@pytest.mark.parametrize("move", ["read", "write"])
def test_device_store_knows_its_units(store: DeviceStore, move: str, units: list[int]) -> None:
    with pytest.raises(TransferError, match="is not in cpu memory"):
        getattr(store, move)(np.array(units), random_units(len(units)))


def test_device_store_counts_bytes(store: DeviceStore) -> None:
    slots = store.allocate(4)
    assert slots.tolist() == [0, 1, 2, 3]
    store.reserve(16)
    assert (store.used_bytes, store.peak_bytes) == (112, 112)
    with pytest.raises(StoreError, match="112 of 160"):
        store.reserve(49)
    with pytest.raises(StoreError, match="2 are free"):
        store.allocate(3)
    store.free(slots[1:3])
    store.release(16)
    assert (store.used_bytes, store.peak_bytes) == (48, 112)
    assert store.allocate(3).tolist() == [1, 2, 4]


def test_device_store_keeps_its_limit() -> None:
    store = DeviceStore(StoreShape(6, 1, 2, 12, 150), "cpu")
    store.reserve(30)
    with pytest.raises(StoreError, match="do not fit"):
        store.allocate(6)
    assert store.used_bytes == 30
    assert len(store.allocate(5)) == 5


@pytest.mark.parametrize("slots", [[1, 1], [3], [0, 3], [-1], [6]])
def test_device_store_frees_only_what_is_allocated(store: DeviceStore, slots: list[int]) -> None:
    store.allocate(3)
    used: Any = store.used_bytes
    with pytest.raises(StoreError):
        store.free(slots)
    assert store.used_bytes == used
    store.free([0, 1, 2])
    assert store.used_bytes == 0


def test_device_store_closes_twice(store: DeviceStore) -> None:
    store.close()
    store.close()
    with pytest.raises(TransferError):
        store.read(np.array([0]), random_units(1))


def test_device_store_without_room() -> None:
    with pytest.raises(StoreError, match="smaller fast_tier"):
        DeviceStore(StoreShape(1 << 40, 1, 1, 1 << 20, 1 << 60), "cpu")
