"""What may be imported from where, and what importing pulse costs."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pulse
import pulse.errors
import pulse.ports
import pulse.types

ROOT = Path(__file__).parents[2]

WALK = """
import importlib, importlib.abc, pkgutil, sys

HEAVY = {"torch", "numpy", "cupy", "numba", "transformers"}

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"{name} is imported by a module of pulse")

sys.meta_path.insert(0, Block())
import pulse
names = [found.name for found in pkgutil.walk_packages(pulse.__path__, "pulse.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
from pulse import Plugins
plugins = Plugins()
assert plugins.broken == {}, plugins.broken
assert plugins.all()
print(*names)
"""


def test_every_module_imports_without_heavy_libraries() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WALK], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert {"pulse.engine.engine", "pulse.kernel.lanes", "pulse.testing.loop"} <= set(
        done.stdout.split()
    )


def test_importing_pulse_does_not_import_the_command_line() -> None:
    code = "import sys, pulse; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"typer", "rich", "pulse.cli", "pulse.testing"} & set(done.stdout.split())


def public(module: types.ModuleType) -> set[str]:
    """Names that a module defines for others; what it imports from elsewhere is its own affair."""
    own = {"annotations", "T"}
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in own
    }


def test_all_of_pulse_is_what_is_there() -> None:
    borrowed = {"PackageNotFoundError", "version"}
    assert set(pulse.__all__) - {"__version__"} == public(pulse) - borrowed
    assert pulse.__all__ == sorted(pulse.__all__)
    assert pulse.__version__


def test_all_of_the_contracts_is_what_they_define() -> None:
    for module in (pulse.errors, pulse.ports, pulse.types):
        defined = {
            name
            for name in public(module)
            if getattr(vars(module)[name], "__module__", "") == module.__name__
        }
        assert set(module.__all__) == defined
        assert module.__all__ == sorted(module.__all__)


def test_the_layers_are_kept() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [linter, "--no-cache"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
