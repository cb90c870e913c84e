"""Each package in contrib/ passes its own tests, installed or not, and uses public names only."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import declare

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in (ROOT / "contrib").glob("*/pyproject.toml"))
PUBLIC = {"pulse", "pulse.errors", "pulse.ports", "pulse.testing", "pulse.types"}


def run(*arguments: str, site: Path | None = None, cwd: Path = ROOT) -> str:
    env = {**os.environ, **({"PYTHONPATH": str(site)} if site else {})}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that holds the package and its metadata."""
    folder: Path = request.param
    shutil.copytree(folder / folder.name, tmp_path / folder.name)
    declare(folder / "pyproject.toml", tmp_path)
    return tmp_path


def test_there_is_an_example() -> None:
    assert "pulse_example" in {folder.name for folder in PACKAGES}


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_its_tests_pass_where_it_is_not_installed(folder: Path) -> None:
    run("-m", "pytest", "-q", str(folder.relative_to(ROOT)))


@pytest.mark.parametrize(
    ("site", "folder"),
    [pytest.param(folder, folder, id=folder.name) for folder in PACKAGES],
    indirect=["site"],
)
def test_its_tests_pass_where_it_is_installed(site: Path, folder: Path) -> None:
    run("-m", "pytest", "-q", "-o", "pythonpath=", str(folder), site=site)


@pytest.mark.parametrize("site", PACKAGES, indirect=True, ids=lambda folder: folder.name)
def test_it_is_discovered_where_it_is_installed(site: Path) -> None:
    code = (
        "import pulse\n"
        "plugins = pulse.Plugins()\n"
        "assert not plugins.broken, plugins.broken\n"
        "print(*(found.package for found in plugins.all()))"
    )
    (package,) = (path.name for path in site.iterdir() if path.suffix != ".dist-info")
    assert package in run("-W", "error", "-c", code, site=site).split()


def test_the_example_can_be_checked_in_its_folder() -> None:
    arguments = ("-m", "pulse", "check", "pulse_example:Centroid", "--examples", "5")
    assert "conforms" in run(*arguments, cwd=ROOT / "contrib" / "pulse_example")


def test_the_example_is_short() -> None:
    lines = [
        line
        for path in (ROOT / "contrib/pulse_example/pulse_example").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    assert len(lines) < 80


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_it_uses_public_names_only(folder: Path) -> None:
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {name for name in imported(tree) if name.split(".")[0] == "pulse"}
        assert used <= PUBLIC, path


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_it_declares_its_entry_point(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pulse"].keys() == {folder.name}
    assert any(need.startswith("pulse-llm") for need in project["dependencies"])


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
