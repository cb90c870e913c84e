"""How many slots a sequence takes: rings, and hot sets that shrink to what the fast tier has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pulse.ports import BlockStore, SelectionPolicy
from pulse.types import Demand, Geometry, KVConfig, Placement

__all__ = ["HotSet", "Sizes"]


@dataclass(frozen=True, slots=True)
class HotSet:
    """Columns of an offloaded sequence: `own` per layer, and up to `usable` with the shared."""

    own: int
    usable: int
    digest_bytes: int
    chunk_blocks: int


class Sizes:
    """Sizes of sequences in slots and bytes.

    They depend on the tiers' limits only, not on what is free now, so a request's demand is the
    same whenever it is asked for.
    """

    def __init__(
        self,
        geometry: Geometry,
        config: KVConfig,
        policy: SelectionPolicy,
        fast: BlockStore,
        slow: BlockStore,
    ) -> None:
        self.geometry = geometry
        self.config = config
        self.policy = policy
        self._fast_limit = fast.limit_bytes
        self._slot = fast.units * fast.unit_bytes
        self._slow_slot = slow.planes * slow.units * slow.unit_bytes
        self.hot = lru_cache(maxsize=4096)(self._hot)

    def demand(self, tokens: int, placement: Placement) -> Demand:
        """Bytes per tier for a sequence of `tokens` tokens."""
        blocks = self.config.blocks(tokens)
        rings, growing = self._rings(blocks), len(self.geometry.growing)
        if placement is Placement.NORMAL:
            return Demand((rings + growing * blocks) * self._slot, 0)
        hot = self.hot(blocks)
        columns = growing * hot.own + (hot.usable - hot.own if growing else 0)
        return Demand(
            (rings + columns) * self._slot + hot.digest_bytes,
            blocks * self._slow_slot if growing else 0,
        )

    def ring_blocks(self, layer: int, blocks: int) -> int:
        """Slots of a layer whose blocks all stay, or those in its window."""
        window = self.geometry.windows[layer]
        return blocks if window is None else min(blocks, self.config.blocks(window) + 1)

    def _rings(self, blocks: int) -> int:
        return sum(self.ring_blocks(layer, blocks) for layer in self.geometry.windowed)

    def _hot(self, blocks: int) -> HotSet:
        """The hot set of a sequence of `blocks` blocks: as large as wished, if that fits."""
        config, layers = self.config, len(self.geometry.growing)
        pinned = config.sink_blocks + config.local_blocks
        middle = blocks if self.policy.exhaustive else config.middle_blocks
        needed = max(min(blocks, pinned + middle), config.sink_blocks + 3)
        extra = 0 if self.policy.exhaustive else int(config.middle_blocks * (config.hot_factor - 1))
        wished = max(needed, min(blocks, needed + extra))
        digests = self.policy.digest_bytes(blocks)
        room = max(0, (self._fast_limit - digests) // self._slot - self._rings(blocks))
        if layers * wished <= room or layers < 2:
            own = usable = wished
        else:
            # Each own column costs a slot in every layer, a shared one a single slot.
            least = min(needed, max(pinned, config.sink_blocks + 1))
            own = max(least, min(needed, (room - needed) // (layers - 1)))
            usable = max(needed, own)
        # An eighth is left for two pieces of the prefix to land in while a chunk is held.
        free = usable - config.sink_blocks
        room = min(own - config.sink_blocks, free - max(2, free // 8))
        chunk = max(1, min(room, config.chunk // config.block))
        return HotSet(own, usable, digests, chunk)
