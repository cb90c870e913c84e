"""``pulse doctor`` and ``pulse plugins``: what works here, and how to fix what does not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from rich.console import Console
from rich.table import Table

import pulse
from pulse.cli.run import loop_name
from pulse.memory.sizes import format_bytes, host_memory
from pulse.plugins import Plugins

__all__ = ["doctor", "plugins"]

_PACKAGES = ("torch", "numpy", "numba", "transformers", "safetensors", "gguf", "uvloop", "cupy")
_OPTIONAL = {
    "uvloop": "pip install uvloop (a faster event loop)",
    "cupy": "pip install 'pulse-llm\\[gpu]' (CUDA transfer engines, not part of this version)",
}


def plugins() -> None:
    """List every plugin: name, kind, package, and whether it can be used here."""
    found = Plugins()
    table = Table("kind", "name", "package", "available", "what it is", box=None)
    for item in found.all():
        state = "[green]yes[/]" if item.problem is None else f"[red]no[/]: {item.problem}"
        table.add_row(item.kind, item.plugin.name, item.package, state, item.plugin.summary)
    console = Console()
    console.print(table)
    for point, reason in found.broken.items():
        console.print(f"[red]broken[/] {point}: {reason}")


def doctor() -> None:
    """Describe the machine and the versions, and say what works."""
    console = Console(soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    for name, value in _machine():
        table.add_row(name, value)
    console.print(table)
    console.print()
    checks = Table.grid(padding=(0, 2))
    for name, good, text in _checks():
        checks.add_row("[green]ok[/]" if good else "[yellow]--[/]", name, text)
    console.print(checks)


def _machine() -> list[tuple[str, str]]:
    rows = [
        ("pulse", pulse.__version__),
        ("python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})"),
        ("event loop", loop_name()),
        ("cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "?")),
        ("memory", format_bytes(host_memory())),
    ]
    rows += [(name, _version(name) or f"not installed{_hint(name)}") for name in _PACKAGES]
    return rows


def _hint(package: str) -> str:
    return f"; {_OPTIONAL[package]}" if package in _OPTIONAL else f"; pip install {package}"


def _version(package: str) -> str | None:
    if package == "cupy":
        names = [d.metadata["Name"] for d in importlib.metadata.distributions()]
        package = next((name for name in names if name and name.startswith("cupy")), package)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checks() -> list[tuple[str, bool, str]]:
    return [*Plugins().diagnose(), *_plugin_checks()]


def _plugin_checks() -> list[tuple[str, bool, str]]:
    found = Plugins()
    rows = [
        (f"{item.kind} {item.plugin.name}", False, item.problem)
        for item in found.all()
        if item.problem is not None
    ]
    rows += [(f"plugin package {point}", False, reason) for point, reason in found.broken.items()]
    return rows or [("plugins", True, f"all {len(found.all())} are usable; see `pulse plugins`")]
