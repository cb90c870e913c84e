"""Write docs/structure.md: one line per module, from its docstring."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "plugins", "pulse", "scripts")


def structure() -> str:
    """The page's text."""
    modules = sorted(
        (path.parent.relative_to(ROOT), path)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    )
    lines = [
        "# Structure",
        "",
        "One line per module; `python scripts/write_structure.py` writes it.",
    ]
    for folder, group in groupby(modules, key=lambda pair: pair[0]):
        lines += ["", f"## `{folder}/`", "", "| module | what it is |", "|---|---|"]
        lines += [f"| `{path.name}` | {_summary(path)} |" for _, path in group]
    return "\n".join(lines) + "\n"


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    (ROOT / "docs" / "structure.md").write_text(structure(), encoding="utf-8")
