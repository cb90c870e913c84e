"""The documents say what is: snippets run, names are the real ones, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from installed import declare
from write_structure import structure

import pulse
from pulse.plugins import Plugins

ROOT = Path(__file__).resolve().parent.parent


class Block(NamedTuple):
    """A fenced block: ```language note."""

    where: str
    language: str
    note: str
    text: str


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*) ?(.*)\n((?s:.*?))^```$", text, flags=re.MULTILINE)
    found = [
        Block(f"{document}:{text.count(chr(10), 0, fence.start()) + 1}", *fence.groups())
        for fence in fences
    ]
    assert text.count("```") == 2 * len(found), f"{document} has a fence that is not understood"
    return found


def snippets(document: str) -> list[str]:
    found = [block for block in blocks(document) if block.language == "python"]
    return [block.text for block in found if not block.note]


def run(
    *command: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_structure_page_is_current() -> None:
    assert (ROOT / "docs" / "structure.md").read_text(encoding="utf-8") == structure()


RUN = ("README.md", "docs/tutorial.md", "docs/reference/instruments.md")


@pytest.mark.parametrize(
    "code", [code for document in RUN for code in snippets(document)], ids=lambda code: code[:20]
)
def test_snippets_run(code: str) -> None:
    done = run(sys.executable, "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr


HOW_TOS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/how-to").glob("*.md"))


@pytest.mark.parametrize("document", HOW_TOS, ids=lambda document: Path(document).stem)
def test_a_how_to_can_be_followed(document: str, tmp_path: Path) -> None:
    """Block by block, in a folder that has what the document refers to in a clone.

    A block with the name of a file is saved, not run. Where it is a pyproject.toml, the project
    is installed from then on. Text is what somebody else does or sees; with the note "output" it
    is what the block before it prints.
    """
    (tmp_path / "tests").mkdir()
    for name in ("benchmarks", "tests/models"):
        (tmp_path / name).symlink_to(ROOT / name)
    scripts = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": os.pathsep.join([scripts, os.environ["PATH"]])}
    printed = ""
    for block in blocks(document):
        assert block.language in ("python", "sh", "text", "toml"), block.where
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language == "text":
            if block.note == "output":
                assert [line.rstrip() for line in printed.splitlines()] == block.text.splitlines()
            continue
        if block.note:
            (tmp_path / block.note).write_text(block.text, encoding="utf-8")
            if block.note == "pyproject.toml":
                declare(tmp_path / block.note, tmp_path)
                env["PYTHONPATH"] = str(tmp_path)
            continue
        commands = {"python": (sys.executable, "-W", "error", "-c"), "sh": ("sh", "-e", "-c")}
        done = run(*commands[block.language], block.text, cwd=tmp_path, env=env)
        assert done.returncode == 0, f"{block.where}\n{done.stdout}{done.stderr}"
        printed = done.stdout


def test_the_embedding_snippet_answers() -> None:
    done = run(sys.executable, "-c", snippets("README.md")[0])
    assert done.stdout.strip() == "v7", done.stderr


def test_every_plugin_is_named_in_the_readme_and_the_help_of_the_engine() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for item in Plugins().all():
        if item.plugin.name in ("null", "device"):
            continue
        assert item.plugin.name in readme, item.plugin.name
        assert item.plugin.name in (pulse.Engine.__doc__ or ""), item.plugin.name


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = document.read_text(encoding="utf-8")
        for target, heading in re.findall(r"\]\(([^)#:]*)#?([^)#:]*)\)", text):
            path = document.parent / target if target else document
            assert path.exists(), f"{document.name}: {target}"
            if heading:
                assert heading in anchors(path), f"{document.name}: {target}#{heading}"


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
