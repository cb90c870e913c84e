"""Makes a folder look installed, so that entry points are found without a package index."""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["declare"]


def declare(pyproject: Path, site: Path) -> None:
    """Write the metadata of the distribution in `pyproject` to `site`, as an installer would."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{point} = {module}" for point, module in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
