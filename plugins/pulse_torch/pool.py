"""Per-sequence tables in arrays that compiled code reads for a whole cohort at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pulse.types import Geometry

__all__ = ["Pool"]


class Pool:
    """Rows of tables, one per sequence; rows and columns grow by doubling, never shrink.

    rings[layer] ``[rows, blocks]``: fast slots of a layer whose KV stays in the fast tier, of
    which `ring_blocks[layer]` ``[rows]`` are in use; block b is in slot b modulo that.
    units, resident, stamp ``[rows, planes, groups, columns]``: the hot set, see `residency`.
    own, usable ``[rows]``: its columns. slow ``[rows, blocks]``: slow slots by block.
    """

    def __init__(self, geometry: Geometry, groups: int) -> None:
        planes = len(geometry.growing)
        self._free: list[int] = []
        self.groups = groups
        self.rings = [np.zeros((0, 0), np.int64) for _ in range(geometry.layers)]
        self.ring_blocks = [np.zeros(0, np.int64) for _ in range(geometry.layers)]
        self.units = np.zeros((0, planes, groups, 0), np.int64)
        self.resident = np.zeros((0, planes, groups, 0), np.int64)
        self.stamp = np.zeros((0, planes, groups, 0), np.int64)
        self.own = np.zeros(0, np.int64)
        self.usable = np.zeros(0, np.int64)
        self.slow = np.zeros((0, 0), np.int64)

    def take(self, blocks: int, columns: int) -> int:
        """A free row with room for `blocks` blocks and `columns` hot columns per layer."""
        if not self._free:
            rows = len(self.own)
            self._grow_rows(max(4, 2 * rows))
            self._free = list(range(len(self.own) - 1, rows - 1, -1))
        self.slow = _wider(self.slow, blocks)
        for name in ("units", "resident", "stamp"):
            setattr(self, name, _wider(getattr(self, name), columns))
        row = self._free.pop()
        self.resident[row] = -1
        self.stamp[row] = 0
        self.own[row] = self.usable[row] = 0
        return row

    def give(self, row: int) -> None:
        """The row's sequence is over."""
        self._free.append(row)

    def set_rings(self, row: int, sizes: Sequence[int], slots: np.ndarray) -> None:
        """Deal `slots` out to the layers, ``sizes[layer]`` to each."""
        at = 0
        for layer, size in enumerate(sizes):
            self.rings[layer] = _wider(self.rings[layer], size)
            self.rings[layer][row, :size] = slots[at : at + size]
            self.ring_blocks[layer][row] = size
            at += size

    def extend_rings(self, row: int, sizes: Sequence[int], slots: np.ndarray) -> None:
        """Deal out more `slots`; a ring grows only before it has gone round."""
        at = 0
        for layer, size in enumerate(sizes):
            held = int(self.ring_blocks[layer][row])
            self.rings[layer] = _wider(self.rings[layer], held + size)
            self.rings[layer][row, held : held + size] = slots[at : at + size]
            self.ring_blocks[layer][row] = held + size
            at += size

    def set_hot(self, row: int, own: int, usable: int, slots: np.ndarray, slow: np.ndarray) -> None:
        """Deal `slots` out: `own` to each plane, the rest shared by all planes."""
        planes = self.units.shape[1]
        mine = slots[: planes * own].reshape(planes, own)
        shared = np.broadcast_to(slots[planes * own :], (planes, usable - own))
        columns = np.concatenate([mine, shared], axis=1)
        parts = np.arange(self.groups)[None, :, None]
        self.units[row, :, :, :usable] = columns[:, None, :] * self.groups + parts
        self.own[row], self.usable[row] = own, usable
        self.slow[row, : len(slow)] = slow

    def ring(self, row: int, layer: int) -> np.ndarray:
        """The slots of one sequence's ring."""
        return self.rings[layer][row, : self.ring_blocks[layer][row]]

    def slots(self, row: int, plane: int) -> np.ndarray:
        """The slots of one sequence's usable columns in a layer."""
        return self.units[row, plane, 0, : self.usable[row]] // self.groups

    def hold(
        self, row: int, plane: int, sink: int, columns: np.ndarray, blocks: np.ndarray
    ) -> None:
        """A chunk's blocks are now in `columns`; what was there beyond the sink is gone."""
        self.resident[row, plane, :, sink:] = -1
        self.resident[row, plane][:, columns] = blocks

    def _grow_rows(self, rows: int) -> None:
        for name in ("units", "resident", "stamp", "own", "usable", "slow"):
            setattr(self, name, _longer(getattr(self, name), rows))
        self.rings = [_longer(ring, rows) for ring in self.rings]
        self.ring_blocks = [_longer(blocks, rows) for blocks in self.ring_blocks]


def _longer(array: np.ndarray, rows: int) -> np.ndarray:
    grown = np.zeros((rows, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def _wider(array: np.ndarray, columns: int) -> np.ndarray:
    if array.shape[-1] >= columns:
        return array
    grown = np.zeros((*array.shape[:-1], max(columns, 2 * array.shape[-1])), array.dtype)
    grown[..., : array.shape[-1]] = array
    return grown
