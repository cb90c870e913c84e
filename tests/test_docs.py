"""The documents say what is: snippets run, names are the real ones, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from write_structure import structure

import pulse
from pulse.plugins import Plugins

ROOT = Path(__file__).resolve().parent.parent


def snippets(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_structure_page_is_current() -> None:
    assert (ROOT / "docs" / "structure.md").read_text(encoding="utf-8") == structure()


@pytest.mark.parametrize(
    "code", [*snippets("README.md"), *snippets("docs/tutorial.md")], ids=lambda code: code[:20]
)
def test_snippets_run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_embedding_snippet_answers() -> None:
    code = snippets("README.md")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "v7"


def test_every_plugin_is_named_in_the_readme_and_the_help_of_the_engine() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for item in Plugins().all():
        if item.plugin.name in ("null", "device"):
            continue
        assert item.plugin.name in readme, item.plugin.name
        assert item.plugin.name in (pulse.Engine.__doc__ or ""), item.plugin.name


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
