"""Opening a sequence takes everything it needs or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulse.errors import StoreError
from pulse.hookspecs import Build
from pulse.types import KVConfig, Placement
from pulse_select.policies import SoloHead
from pulse_store.host import HostStore
from pulse_torch.executor import TorchExecutor

MODEL = Path(__file__).parents[1] / "models" / "recall-tiny"


@pytest.mark.parametrize("short", ["fast", "slow", "digests"])
def test_a_lease_that_cannot_be_had_whole_takes_nothing(short: str) -> None:
    executor = TorchExecutor(Build(model=str(MODEL), dtype="float32", device="cpu"))
    geometry, config = executor.geometry, KVConfig(budget=256)
    slot = geometry.slot_bytes(config.block)
    policy = SoloHead(Build(geometry=geometry, kv=config, device="cpu"))
    fast = HostStore(100, 1, 1, slot, 100 * slot)
    slow = HostStore(100 if short != "slow" else 10, geometry.layers, 1, slot)
    cache = executor.cache(fast=fast, slow=slow, policy=policy, config=config)
    need = cache.demand(600, Placement.OFFLOAD).fast
    spare = {"fast": slot, "slow": need, "digests": need - 1}[short]
    fast.reserve(fast.limit_bytes - spare)
    with pytest.raises(StoreError):
        cache.open("1", 600, Placement.OFFLOAD)
    assert fast.used_bytes == fast.limit_bytes - spare
    assert slow.used_bytes == 0
