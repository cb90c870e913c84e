"""Selection policies on torch tensors: which middle blocks attention reads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pulse.errors import ConfigError, SelectionError
from pulse.hookspecs import Build
from pulse.types import Geometry, SelectionView

__all__ = ["Full", "HeadWise", "SinkWindow", "SoloHead"]


class SinkWindow:
    """Reads sink and local window only; keeps no digest (StreamingLLM's pattern)."""

    per_head = False
    exhaustive = False
    late = False

    def __init__(self, build: Build) -> None:
        assert build.geometry is not None
        self.geometry: Geometry = build.geometry

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

    def select(self, layer: int, query: Any, view: SelectionView) -> Tensor:
        """No middle block."""
        return torch.full((len(view.sequences), 1, 0), -1, dtype=torch.int64)


class Full(SinkWindow):
    """Reads every block, whatever the budget: exact attention over an offloaded context."""

    exhaustive = True

    def select(self, layer: int, query: Any, view: SelectionView) -> Tensor:
        """All middle blocks."""
        ids = torch.arange(view.top_k).expand(len(view.sequences), 1, -1)
        low = torch.tensor([low for low, _ in view.middle])[:, None, None]
        high = torch.tensor([high for _, high in view.middle])[:, None, None]
        return torch.where(ids + low < high, ids + low, -1)


class BoxPolicy:
    """Shared by policies that keep boxes around the keys of each block.

    A block is cut into `boxes` runs of tokens. The digest of a run is the element-wise minimum and
    maximum of its keys, both moved by `shrink` of the way to its mean key, in the KV dtype:
    ``[2 * head_dim]`` per kept head. A run's score for a query is the largest dot product over its
    box, which without shrinking is an upper bound of the scores in it (Quest's form); a block's
    score is its best run's. Query heads of a group are combined by the maximum. PulseInfer is
    silent on digest, score and combination; ``docs/log.md`` has the comparison behind these.
    """

    shrink = 0.0
    boxes = 1
    per_head = False
    exhaustive = False
    late = False
    kept_heads = 1

    def __init__(self, build: Build) -> None:
        assert build.geometry is not None
        self.geometry: Geometry = build.geometry
        self.device = torch.device(build.device)
        self.dtype = getattr(torch, self.geometry.dtype)
        self._plane = {layer: plane for plane, layer in enumerate(self.geometry.growing)}
        self._digests: dict[str, Tensor] = {}

    def digest_bytes(self, blocks: int) -> int:
        """Two vectors of `head_dim` per run, kept head and growing layer."""
        row = 2 * self.boxes * self.geometry.head_dim * self.geometry.element_bytes
        return blocks * len(self._plane) * self.kept_heads * row

    def open(self, sequence: str, blocks: int) -> None:
        """Allocate the digests ``[planes, kept heads, blocks * boxes, 2 * head_dim]``."""
        rows, width = blocks * self.boxes, 2 * self.geometry.head_dim
        shape = (len(self._plane), self.kept_heads, rows, width)
        self._digests[sequence] = torch.empty(shape, dtype=self.dtype, device=self.device)

    def close(self, sequence: str) -> None:
        """Drop the boxes."""
        self._digests.pop(sequence, None)

    def observe(self, layer: int, sequence: str, mass: Any) -> None:
        """Nothing to learn."""

    def kept(self, layer: int, sequence: str, keys: Tensor) -> Tensor:
        """The keys of the kept heads, ``[blocks, kept, block, head_dim]``."""
        return keys

    def update(self, layer: int, sequence: str, first: int, keys: Tensor) -> None:
        """Store the boxes of newly sealed blocks."""
        kept = self.kept(layer, sequence, keys).transpose(0, 1)
        block, dim = kept.shape[2:]
        runs = kept.reshape(len(kept), -1, block // self.boxes, dim)
        low, high = runs.aminmax(dim=2)
        if self.shrink:
            mean = runs.mean(dim=2)
            low, high = low.lerp(mean, self.shrink), high.lerp(mean, self.shrink)
        rows = slice(first * self.boxes, (first + len(keys)) * self.boxes)
        self._digests[sequence][self._plane[layer], :, rows] = torch.cat([low, high], dim=-1)

    def grouped(self, layer: int, query: Tensor, view: SelectionView) -> list[Tensor]:
        """Per sequence the queries of the kept heads, ``[kept, group, head_dim]``."""
        heads = self.geometry.kv_heads
        return list(query.view(len(query), heads, -1, self.geometry.head_dim))

    def select(self, layer: int, query: Tensor, view: SelectionView) -> Tensor:
        """The best `top_k` blocks of each sequence by box score, ``[B, kept heads, top_k]``."""
        chosen = torch.full(
            (len(view.sequences), self.kept_heads, view.top_k), -1, dtype=torch.int64
        )
        queries = self.grouped(layer, query, view)
        for row, (sequence, (low, high)) in enumerate(
            zip(view.sequences, view.middle, strict=True)
        ):
            count = min(view.top_k, high - low)
            if count == high - low:
                chosen[row, :, :count] = torch.arange(low, high)
            elif count:
                rows = slice(low * self.boxes, high * self.boxes)
                boxes = self._digests[sequence][self._plane[layer], :, rows]
                best = self._scores(queries[row], boxes).topk(count, dim=-1, sorted=False)
                chosen[row, :, :count] = best.indices + low
        return chosen

    def _scores(self, query: Tensor, boxes: Tensor) -> Tensor:
        # max(q*low, q*high) summed over dims is one product with q's negative and positive parts.
        # In float32: rounded to bfloat16, the scores of a long context are full of ties.
        query = query.float()
        parts = torch.cat([query.clamp(max=0), query.clamp(min=0)], dim=-1)
        scores = parts @ boxes.float().mT  # [kept, group, runs]
        best = scores.amax(dim=-2)
        return best.view(len(best), -1, self.boxes).amax(dim=-1)


class HeadWise(BoxPolicy):
    """Each KV head selects for itself from boxes of its own keys (ArkVale, Quest)."""

    per_head = True

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.kept_heads = self.geometry.kv_heads


class SoloHead(BoxPolicy):
    """One KV head per layer selects for all (PulseInfer, section "SoloHead selection").

    The head is the one with the highest middle attention mass. Until there are calibrated
    profiles it is chosen per sequence, from the prompt's own last queries. As it keeps one head's
    digests, it affords finer ones: `boxes` per block (``solohead:BOXES``), each half as wide as
    the keys' extent, since one head that speaks for all must rank blocks well rather than bound
    them.
    """

    late = True
    shrink = 0.5

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.boxes = _boxes(build, default=2)
        self._heads: dict[str, dict[int, int]] = {}

    def open(self, sequence: str, blocks: int) -> None:
        """Allocate the boxes of one head per layer."""
        super().open(sequence, blocks)
        self._heads[sequence] = {}

    def close(self, sequence: str) -> None:
        """Drop boxes and choices."""
        super().close(sequence)
        self._heads.pop(sequence, None)

    def observe(self, layer: int, sequence: str, mass: Tensor) -> None:
        """Choose the head."""
        self._heads[sequence][layer] = int(mass.argmax())

    def head(self, layer: int, sequence: str) -> int:
        """The head chosen for a layer of a sequence. Raises SelectionError before `observe`."""
        try:
            return self._heads[sequence][layer]
        except KeyError:
            raise SelectionError(f"no head was chosen for layer {layer} of {sequence!r}") from None

    def kept(self, layer: int, sequence: str, keys: Tensor) -> Tensor:
        """The chosen head's keys."""
        head = self.head(layer, sequence)
        return keys[:, head : head + 1]

    def grouped(self, layer: int, query: Tensor, view: SelectionView) -> list[Tensor]:
        """The queries of each sequence's chosen head."""
        grouped = super().grouped(layer, query, view)
        heads = [self.head(layer, sequence) for sequence in view.sequences]
        return [rows[head : head + 1] for rows, head in zip(grouped, heads, strict=True)]


def _boxes(build: Build, default: int) -> int:
    block = build.kv.block
    if not build.argument:
        return math.gcd(default, block)
    boxes = int(build.argument) if build.argument.isdecimal() else 0
    if boxes < 1 or block % boxes:
        raise ConfigError(
            f"solohead:{build.argument} needs a number of boxes that divides the block of {block} "
            "tokens, like solohead:2"
        )
    return boxes
