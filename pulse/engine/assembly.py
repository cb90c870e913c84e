"""Puts an engine together: plugins by name, tiers by size, one machine out of it all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pulse.engine.config import EngineConfig
from pulse.errors import CapacityError
from pulse.hookspecs import Build, StoreShape
from pulse.memory.sizes import format_bytes, host_memory
from pulse.plugins import Plugins
from pulse.ports import (
    AdmissionRule,
    Arbiter,
    BlockStore,
    KVCache,
    ModelExecutor,
    SelectionPolicy,
    TransferEngine,
)
from pulse.types import Geometry

__all__ = ["Parts", "assemble"]

SLOW_TO_FAST = 10
"""Slow-tier capacity as a multiple of the fast tier's, by default (PulseInfer, "Defaults")."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The resolved plugins of one engine."""

    executor: ModelExecutor
    policy: SelectionPolicy
    fast: BlockStore
    slow: BlockStore
    transfer: TransferEngine
    cache: KVCache
    admission: AdmissionRule
    arbiter: Arbiter


def assemble(config: EngineConfig, plugins: Plugins) -> Parts:
    """Build every part; blocks while the model loads. What was opened is closed on failure."""
    opened: list[Any] = []
    try:
        return _assemble(config, plugins, opened)
    except BaseException:
        for part in reversed(opened):
            part.close()
        raise


def _assemble(config: EngineConfig, plugins: Plugins, opened: list[Any]) -> Parts:
    build = Build(
        model=config.model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        cores=config.cores,
        kv=config.kv,
    )
    # The cheap parts first: a misspelt name must not cost the loading of a model.
    arbiter = plugins.resolve("schedule", config.schedule, build)
    for kind in ("transfer", "select", "admit", "store"):
        plugins.check(kind, getattr(config, "slow_kind" if kind == "store" else kind))
    executor = plugins.resolve("executor", config.executor, build)
    opened.append(executor)
    geometry = executor.geometry
    build = Build(device=executor.device, cores=config.cores, kv=config.kv, geometry=geometry)
    policy = plugins.resolve("select", config.select, build)
    fast = _store(plugins, executor.fast_store, _fast_shape(config, geometry, policy))
    opened.append(fast)
    slow = _store(plugins, config.slow_kind, _slow_shape(config, geometry, policy))
    opened.append(slow)
    return Parts(
        executor=executor,
        policy=policy,
        fast=fast,
        slow=slow,
        transfer=plugins.resolve("transfer", config.transfer, build),
        cache=executor.cache(fast=fast, slow=slow, policy=policy, config=config.kv),
        admission=plugins.resolve("admit", config.admit, build),
        arbiter=arbiter,
    )


def _store(plugins: Plugins, choice: Any, shape: StoreShape) -> BlockStore:
    store: BlockStore = plugins.resolve("store", choice, Build(shape=shape))
    return store


def _units(geometry: Geometry, policy: SelectionPolicy) -> int:
    return geometry.kv_heads if policy.per_head else 1


def _fast_shape(config: EngineConfig, geometry: Geometry, policy: SelectionPolicy) -> StoreShape:
    slot = geometry.slot_bytes(config.kv.block)
    slots = config.fast_bytes // slot
    if slots < geometry.layers:
        raise CapacityError(
            f"fast_tier={format_bytes(config.fast_bytes)} is too small for this model: a block of "
            f"{config.kv.block} tokens takes {format_bytes(slot * geometry.layers)} over "
            f"{geometry.layers} layers; give the fast tier more"
        )
    units = _units(geometry, policy)
    return StoreShape(slots, 1, units, slot // units, config.fast_bytes)


def _slow_shape(config: EngineConfig, geometry: Geometry, policy: SelectionPolicy) -> StoreShape:
    limit = config.slow_bytes or _default_slow(config)
    planes = max(1, len(geometry.growing))
    slot = geometry.slot_bytes(config.kv.block)
    units = _units(geometry, policy)
    slots = limit // (slot * planes)
    if slots < 1:
        raise CapacityError(
            f"slow_tier of {format_bytes(limit)} is too small for this model: one block of "
            f"{config.kv.block} tokens takes {format_bytes(slot * planes)} over {planes} layers; "
            "give the slow tier more"
        )
    return StoreShape(slots, planes, units, slot // units, limit)


def _default_slow(config: EngineConfig) -> int:
    limit = SLOW_TO_FAST * config.fast_bytes
    # Memory that the machine does not have is a promise that ends in its killing us.
    return min(limit, host_memory() // 2) if config.slow_kind == "host" else limit
