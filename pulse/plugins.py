"""Discovery of plugins and resolution by name.

First-party plugins come through the same entry points as anybody's. A module that fails to import
is recorded and raises only when a name that is not found elsewhere is asked for.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from pulse import hookspecs
from pulse.errors import ConfigError, PluginNotFound, PluginUnavailable
from pulse.hookspecs import Build, Plugin

__all__ = ["KINDS", "Found", "Plugins"]

KINDS = {
    "executor": "pulse_model_executors",
    "store": "pulse_block_stores",
    "transfer": "pulse_transfer_engines",
    "select": "pulse_selection_policies",
    "admit": "pulse_admission_rules",
    "schedule": "pulse_arbiters",
    "arrays": "pulse_arrays",
}
"""Kind of plugin, as the engine's parameters and the command line name it, and its hook."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plugin that was discovered, where it comes from, and why it cannot be used (or None)."""

    kind: str
    plugin: Plugin
    package: str
    problem: str | None


class Plugins:
    """All plugins that are installed or were registered by hand."""

    def __init__(self, *, discover: bool = True) -> None:
        self._manager = pluggy.PluginManager("pulse")
        self._manager.add_hookspecs(hookspecs)
        self.broken: dict[str, str] = {}
        """Entry points that failed to load, with the reason."""
        if discover:
            for point in sorted(entry_points(group="pulse"), key=lambda p: p.name):
                self._load(point)

    def register(self, module: object, name: str | None = None) -> None:
        """Add a plugin module or object. Raises ConfigError for an unknown hook or signature."""
        try:
            self._manager.register(module, name)
            self._manager.check_pending()
        except (ValueError, pluggy.PluginValidationError) as error:
            if self._manager.is_registered(module):  # else it would spoil every later check
                self._manager.unregister(module)
            raise ConfigError(f"plugin {name or module!r} cannot be registered: {error}") from error

    def all(self) -> list[Found]:
        """Every plugin of every kind, sorted by kind and name."""
        found = [item for kind in KINDS for item in self._of_kind(kind)]
        return sorted(found, key=lambda item: (item.kind, item.plugin.name))

    def diagnose(self) -> list[tuple[str, bool, str]]:
        """What the plugins say of this machine: name, whether it works, text."""
        rows: list[tuple[str, bool, str]] = []
        for implementation in self._manager.hook.pulse_diagnostics.get_hookimpls():
            try:
                said: Any = implementation.function()
                rows.extend(said)
            except Exception as error:
                rows.append((implementation.plugin_name, False, f"{type(error).__name__}: {error}"))
        return rows

    def check(self, kind: str, choice: Any) -> Plugin | None:
        """The plugin that `choice` names, or None when it is an object already.

        Raises PluginNotFound with the nearest names, PluginUnavailable with what to install.
        """
        if not isinstance(choice, str):
            return None
        name = choice.partition(":")[0]
        found = {item.plugin.name: item for item in self._of_kind(kind)}
        if name not in found:
            raise PluginNotFound(self._unknown(kind, name, sorted(found)))
        item = found[name]
        if item.problem is not None:
            raise PluginUnavailable(f"{kind} plugin {name!r} ({item.package}): {item.problem}")
        return item.plugin

    def resolve(self, kind: str, choice: Any, build: Build) -> Any:
        """The object for `choice`: made by the plugin of that name, or `choice` itself.

        A name may carry an argument after a colon, as in ``threshold:4096``. Raises as `check`.
        """
        plugin = self.check(kind, choice)
        if plugin is None:
            return choice
        return plugin.factory(replace(build, argument=choice.partition(":")[2]))

    def _of_kind(self, kind: str) -> list[Found]:
        if kind not in KINDS:
            raise ConfigError(f"{kind!r} is no kind of plugin; the kinds are {', '.join(KINDS)}")
        caller = getattr(self._manager.hook, KINDS[kind])
        found = []
        for implementation in caller.get_hookimpls():
            for plugin in implementation.function():
                module = inspect.getmodule(implementation.function)
                package = (module.__name__ if module else implementation.plugin_name).split(".")[0]
                found.append(Found(kind, plugin, package, _problem(plugin)))
        return found

    def _unknown(self, kind: str, name: str, known: list[str]) -> str:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        text = f"no {kind} plugin is called {name!r}"
        text += f"; did you mean {' or '.join(near)}?" if near else ""
        text += f" Known: {', '.join(known) or 'none'}."
        for point, reason in self.broken.items():
            text += f" (The plugin package {point} failed to load: {reason})"
        return text

    def _load(self, point: EntryPoint) -> None:
        try:
            self.register(point.load(), point.name)
        except Exception as error:
            self.broken[point.name] = f"{type(error).__name__}: {error}"


def _problem(plugin: Plugin) -> str | None:
    missing = [name for name in plugin.requires if not _importable(name)]
    if not missing:
        return None
    return f"needs {', '.join(missing)}, which is not installed; pip install {' '.join(missing)}"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
