"""A plugin package to copy: the selection policy `centroid`."""

from __future__ import annotations

from typing import Any

from pulse import Build, Plugin, hookimpl
from pulse.errors import ConfigError
from pulse.types import SelectionView

__all__ = ["Centroid", "pulse_selection_policies"]


class Centroid:
    """Reads the blocks whose mean key is nearest to the query, the same for all KV heads.

    A block's score is the largest dot product of a query head with the mean key of its KV head.
    Only tensor methods are called, so torch need not be imported to list the plugin.
    """

    per_head = False
    exhaustive = False
    late = False

    def __init__(self, build: Build) -> None:
        if build.argument:
            raise ConfigError(f"centroid:{build.argument} is unknown: centroid takes no argument")
        self.geometry: Any = build.geometry
        self._room: dict[str, int] = {}
        self._means: dict[tuple[str, int], Any] = {}

    def digest_bytes(self, blocks: int) -> int:
        """One mean key per block, KV head and growing layer, in the model's dtype."""
        shape = self.geometry
        key_bytes: int = shape.kv_heads * shape.head_dim * shape.element_bytes
        return blocks * len(shape.growing) * key_bytes

    def open(self, sequence: str, blocks: int) -> None:
        """The means are allocated with the first keys, which bring dtype and device."""
        self._room[sequence] = blocks

    def close(self, sequence: str) -> None:
        """Forget the sequence; it may have been forgotten before."""
        self._room.pop(sequence, None)
        for layer in self.geometry.growing:
            self._means.pop((sequence, layer), None)

    def observe(self, layer: int, sequence: str, mass: Any) -> None:
        """Not asked for: `late` is False."""

    def update(self, layer: int, sequence: str, first: int, keys: Any) -> None:
        """Keep the means; the memory behind `keys` is reused afterwards."""
        blocks, heads, _, dim = keys.shape
        if (sequence, layer) not in self._means:
            room = (self._room[sequence], heads, dim)
            self._means[sequence, layer] = keys.new_empty(room)
        self._means[sequence, layer][first : first + blocks] = keys.mean(dim=2)

    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        """The best `top_k` blocks of each sequence, ``[sequences, 1, top_k]``."""
        chosen = query.new_full((len(view.sequences), 1, view.top_k), -1).long()
        for row, (sequence, (low, high)) in enumerate(
            zip(view.sequences, view.middle, strict=True)
        ):
            if low == high:
                continue  # a short sequence beside long ones has no middle yet
            means = self._means[sequence, layer][low:high].float().permute(1, 2, 0)
            heads = query[row].float().view(len(means), -1, means.shape[1])
            best = (heads @ means).amax(dim=(0, 1)).topk(min(view.top_k, high - low))
            chosen[row, 0, : len(best.indices)] = best.indices + low
        return chosen


@hookimpl
def pulse_selection_policies() -> list[Plugin]:
    """The policies of this package."""
    return [Plugin("centroid", Centroid, "blocks whose mean key is near the query", ("torch",))]
