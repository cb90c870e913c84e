"""What a conformance kit checks: a plugin by name, by import path, as an object or a factory."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pulse.errors import ConfigError, PulseError
from pulse.hookspecs import Build, Plugin
from pulse.plugins import Plugins
from pulse.ports import (
    AdmissionRule,
    Arbiter,
    BlockStore,
    ModelExecutor,
    SelectionPolicy,
    TransferEngine,
)
from pulse.testing.checking import methods, told

__all__ = ["PORTS", "Subject", "find", "resolve"]

PORTS: dict[str, type] = {
    "store": BlockStore,
    "transfer": TransferEngine,
    "select": SelectionPolicy,
    "admit": AdmissionRule,
    "schedule": Arbiter,
    "executor": ModelExecutor,
}
"""Kind of plugin and its port."""

NOUNS = {
    "store": "block store",
    "transfer": "transfer engine",
    "select": "selection policy",
    "admit": "admission rule",
    "schedule": "arbiter",
    "executor": "model executor",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A plugin to check.

    factory: makes one. fresh: whether each call makes another one.
    """

    kind: str
    name: str
    factory: Callable[[Build], Any]
    fresh: bool = True

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{NOUNS[self.kind]} {self.name!r}"

    def probe(self, build: Build) -> Any:
        """Make one to see whether it can be made at all. Raises ConfigError, StoreError, …."""
        try:
            return self.factory(build)
        except PulseError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.label} cannot be made here: {told(error)}") from error

    def need_fresh(self) -> None:
        """Raise ConfigError for an object that cannot be made anew."""
        if not self.fresh:
            raise ConfigError(
                f"{self.label} is one object, but its check closes it and needs many; pass its "
                "class or a function that takes a pulse.Build and makes one"
            )


def resolve(choice: Any, kind: str, plugins: Plugins | None = None) -> Subject:
    """The plugin of `kind` that `choice` means.

    choice: a registered name (with an argument after a colon, as in ``threshold:0``), an import
        path ``module:attribute``, a `Plugin`, an object of the port, or a callable that makes
        one: without arguments, or given a `Build`.

    A `Subject` is taken as it is. Raises PluginNotFound, PluginUnavailable, ConfigError.
    """
    if isinstance(choice, Subject):
        return choice
    if not isinstance(choice, str):
        return _object(choice, kind, _name_of(choice))
    plugins = Plugins() if plugins is None else plugins
    name, colon, argument = choice.partition(":")
    registered = name in {item.plugin.name for item in plugins.all() if item.kind == kind}
    if colon and not registered:
        return _object(_imported(choice), kind, choice)
    plugin = plugins.check(kind, choice)
    assert plugin is not None
    return Subject(kind, choice, _with_argument(plugin.factory, argument))


def find(choice: str, kind: str | None = None, plugins: Plugins | None = None) -> Subject:
    """As `resolve`; the kind is found out if it is not given.

    Raises ConfigError where the name means plugins of several kinds, or what it means fulfils no
    port.
    """
    plugins = Plugins() if plugins is None else plugins
    if kind is not None:
        if kind not in PORTS:
            raise ConfigError(f"kind={kind!r} must be one of {', '.join(PORTS)}")
        return resolve(choice, kind, plugins)
    name, colon, _ = choice.partition(":")
    kinds = [item.kind for item in plugins.all() if item.plugin.name == name and item.kind in PORTS]
    if len(kinds) > 1:
        raise ConfigError(f"{name!r} is the name of a {', a '.join(kinds)}: say which with --kind")
    if kinds:
        return resolve(choice, kinds[0], plugins)
    if colon:
        found = _imported(choice)
        return _object(found, _kind_of(found, choice), choice)
    names = sorted({item.plugin.name for item in plugins.all() if item.kind in PORTS})
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"no plugin is called {choice!r}; {hint}Known: {', '.join(names)}. What is not registered "
        "is written module:attribute"
    )


def _with_argument(factory: Callable[[Build], Any], argument: str) -> Callable[[Build], Any]:
    if not argument:
        return factory
    return lambda build: factory(replace(build, argument=argument))


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"{path!r}: cannot import {module!r}: {told(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"{path!r}: there is no {part!r} in {module!r}{hint}")
        found = getattr(found, part)
    return found


def _object(found: Any, kind: str, name: str) -> Subject:
    if isinstance(found, Plugin):
        return Subject(kind, name, found.factory)
    if not inspect.isclass(found) and _fulfils(found, PORTS[kind]):
        return Subject(kind, name, lambda _: found, fresh=False)
    if callable(found):
        return Subject(kind, name, _caller(found, name))
    if any(hasattr(found, method) for method in methods(PORTS[kind])):
        return Subject(kind, name, lambda _: found, fresh=False)  # the kit says what is missing
    raise ConfigError(
        f"{name!r}, of type {type(found).__name__}, is neither the wanted {NOUNS[kind]} nor a "
        "callable that makes one"
    )


def _caller(factory: Any, name: str) -> Callable[[Build], Any]:
    """Calls a class or function without arguments, or with the one that it needs."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # a built-in that does not tell
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    if len(needed) > 1 or any(p not in positional for p in needed):
        raise ConfigError(
            f"{name!r} needs {len(needed)} arguments ({', '.join(p.name for p in needed)}); pass "
            "a function that takes a pulse.Build and returns the plugin"
        )
    if needed and needed[0].name == "shape":
        return lambda build: factory(build.shape)
    if needed or (positional and positional[0].name == "build"):
        return lambda build: factory(build)
    return lambda _: factory()


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _fulfils(found: Any, port: type) -> bool:
    return all(callable(getattr(found, name, None)) for name in methods(port))


def _kind_of(found: Any, path: str) -> str:
    shown = found
    if isinstance(found, Plugin) or (callable(found) and inspect.isroutine(found)):
        make = found.factory if isinstance(found, Plugin) else _caller(found, path)
        try:
            shown = make(Build())
        except Exception as error:
            raise ConfigError(
                f"{path!r} makes nothing from an empty Build ({told(error)}), so its kind is "
                f"unknown; say --kind {'|'.join(PORTS)}"
            ) from error
    kinds = [kind for kind, port in PORTS.items() if _fulfils(shown, port)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise ConfigError(f"{path!r} fulfils several ports; say --kind {'|'.join(kinds)}")
    raise ConfigError(f"{path!r} fulfils no port{_nearest(shown)}")


def _nearest(shown: Any) -> str:
    def has(kind: str) -> int:
        return sum(callable(getattr(shown, name, None)) for name in methods(PORTS[kind]))

    best = max(PORTS, key=lambda kind: has(kind) / len(methods(PORTS[kind])))
    if not has(best):
        return f" of {', '.join(port.__name__ for port in PORTS.values())}"
    lacking = [m for m in methods(PORTS[best]) if not callable(getattr(shown, m, None))]
    return f"; for a {NOUNS[best]} it lacks {', '.join(lacking)}"


def _name_of(choice: Any) -> str:
    if isinstance(choice, Plugin):
        return choice.name
    return str(getattr(choice, "__qualname__", type(choice).__qualname__)).rpartition(".")[2]
