"""The hooks of pulse, one per port. A hook runs once, when plugins are discovered.

A plugin is a module (or object) declared under the entry-point group ``pulse`` whose functions
are marked with ``pulse.hookimpl``. Each hook returns a list of `Plugin`s: a name, a factory that
takes a `Build`, one line of summary and the modules that it needs. Import heavy libraries inside
the factory, so that listing plugins is cheap and a missing library disables only its own plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pluggy

from pulse.types import Geometry, KVConfig

__all__ = ["Build", "Plugin", "StoreShape", "hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("pulse")
hookimpl = pluggy.HookimplMarker("pulse")


@dataclass(frozen=True, slots=True)
class StoreShape:
    """The arena a `BlockStore` factory has to make; see `pulse.ports.BlockStore`."""

    slots: int
    planes: int
    units: int
    unit_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Build:
    """What a factory may need. A field that does not concern the hook is None or empty.

    argument: what follows the colon in the plugin's name, as in ``threshold:4096``.
    cores: CPU cores that threads of the engine keep to, see `Worker`; None for any.
    """

    argument: str = ""
    model: str = ""
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    cores: frozenset[int] | None = None
    geometry: Geometry | None = None
    kv: KVConfig = field(default_factory=KVConfig)
    shape: StoreShape | None = None


@dataclass(frozen=True, slots=True)
class Plugin:
    """One named plugin: how to make it and what it needs."""

    name: str
    factory: Callable[[Build], Any]
    summary: str = ""
    requires: tuple[str, ...] = ()


@hookspec
def pulse_model_executors() -> list[Plugin]:  # type: ignore[empty-body]
    """Model executors: `Build.model`, `dtype`, `device` and `threads` are given."""


@hookspec
def pulse_block_stores() -> list[Plugin]:  # type: ignore[empty-body]
    """Tiers: `Build.shape` and `argument` (a path, say) are given."""


@hookspec
def pulse_transfer_engines() -> list[Plugin]:  # type: ignore[empty-body]
    """Transfer engines: `Build.geometry` and `kv` are given."""


@hookspec
def pulse_selection_policies() -> list[Plugin]:  # type: ignore[empty-body]
    """Selection policies: `Build.geometry`, `kv` and `device` are given."""


@hookspec
def pulse_admission_rules() -> list[Plugin]:  # type: ignore[empty-body]
    """Admission rules: `Build.geometry`, `kv` and `argument` are given."""


@hookspec
def pulse_arbiters() -> list[Plugin]:  # type: ignore[empty-body]
    """Compute-lane arbiters: `Build.argument` is given."""


@hookspec
def pulse_arrays() -> list[Plugin]:  # type: ignore[empty-body]
    """Arrays of a tensor library for conformance kits: see `pulse.testing.arrays.Arrays`."""


@hookspec
def pulse_diagnostics() -> list[tuple[str, bool, str]]:  # type: ignore[empty-body]
    """Checks for ``pulse doctor``: what was checked, whether it works, what that means or fixes."""
