"""``pulse generate``: one prompt, one answer, every plugin by name."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pulse.cli.progress import ProgressBars
from pulse.cli.report import panel, report
from pulse.cli.run import run
from pulse.engine.engine import Engine
from pulse.errors import ConfigError
from pulse.instruments import ChromeTrace, Stats
from pulse.ports import Instrument
from pulse.types import SamplingParams

__all__ = ["answer", "generate"]

MODEL = "Model and prompt"
SAMPLING = "Sampling"
MEMORY = "KV memory"
PLUGINS = "Plugins"
OUTPUT = "Output"


def _option(text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def generate(
    model: Annotated[str, _option("HF directory, GGUF file, or org/name on the hub.", MODEL)],
    prompt: Annotated[str | None, _option("The prompt.", MODEL)] = None,
    prompt_file: Annotated[
        Path | None, _option("Read the prompt from a file; - is standard input.", MODEL)
    ] = None,
    chat: Annotated[
        bool | None,
        _option(
            "Use the model's chat template; by default where it has one.", MODEL, "--chat/--raw"
        ),
    ] = None,
    max_tokens: Annotated[int, _option("New tokens at most.", SAMPLING)] = 128,
    temperature: Annotated[float, _option("0 is greedy.", SAMPLING)] = 0.0,
    top_k: Annotated[int, _option("0 is off.", SAMPLING)] = 0,
    top_p: Annotated[float, _option("1 is off.", SAMPLING)] = 1.0,
    min_p: Annotated[float, _option("0 is off.", SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, _option("1 is off.", SAMPLING)] = 1.0,
    seed: Annotated[int | None, _option("Makes draws reproducible.", SAMPLING)] = None,
    stop: Annotated[
        list[str] | None, _option("End at this string; may be repeated.", SAMPLING)
    ] = None,
    ignore_eos: Annotated[bool, _option("Go on past the end token.", SAMPLING)] = False,
    fast_tier: Annotated[str, _option("Hard limit, like 64MiB.", MEMORY)] = "1GiB",
    slow_tier: Annotated[str, _option("host, or disk:PATH.", MEMORY)] = "host",
    slow_limit: Annotated[
        str | None, _option("Hard limit; ten times the fast tier by default.", MEMORY)
    ] = None,
    block: Annotated[int, _option("Tokens of a KV block.", MEMORY)] = 16,
    budget: Annotated[
        int, _option("Tokens that attention may read when offloaded.", MEMORY)
    ] = 2048,
    sink: Annotated[int, _option("Tokens always read at the start.", MEMORY)] = 16,
    local: Annotated[int, _option("Tokens always read at the end.", MEMORY)] = 128,
    chunk: Annotated[int, _option("Prompt tokens per prefill chunk.", MEMORY)] = 512,
    select: Annotated[str, _option("Selection policy.", PLUGINS)] = "solohead",
    transfer: Annotated[str, _option("Transfer engine.", PLUGINS)] = "staged",
    admit: Annotated[str, _option("Admission rule.", PLUGINS)] = "threshold",
    schedule: Annotated[str, _option("Compute-lane arbiter.", PLUGINS)] = "irq",
    executor: Annotated[str, _option("Model executor.", PLUGINS)] = "torch",
    dtype: Annotated[str, _option("auto, bfloat16 or float32.", PLUGINS)] = "auto",
    device: Annotated[str, _option("auto, cpu or cuda.", PLUGINS)] = "auto",
    threads: Annotated[
        int | None, _option("CPU threads that compute; all cores but one by default.", PLUGINS)
    ] = None,
    as_json: Annotated[bool, _option("Print one JSON object.", OUTPUT, "--json")] = False,
    trace: Annotated[
        Path | None, _option("Write a trace for Perfetto / chrome://tracing.", OUTPUT)
    ] = None,
) -> None:
    """Answer one prompt and say where the KV cache was."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
        ignore_eos=ignore_eos,
    )
    text = _prompt(prompt, prompt_file)
    options = {
        "fast_tier": fast_tier,
        "slow_tier": slow_tier,
        "slow_limit": slow_limit,
        "block": block,
        "budget": budget,
        "sink": sink,
        "local": local,
        "chunk": chunk,
        "select": select,
        "transfer": transfer,
        "admit": admit,
        "schedule": schedule,
        "executor": executor,
        "dtype": dtype,
        "device": device,
        "threads": threads,
    }
    echo = None if as_json else sys.stdout
    with _traced(trace) as instruments:
        data = run(answer(model, text, params, chat, options, echo=echo, instruments=instruments))
    if as_json:
        print(json.dumps(data))
    else:
        Console(stderr=True).print(panel(data, "pulse generate"))


@contextlib.contextmanager
def _traced(path: Path | None) -> Iterator[list[Instrument]]:
    if path is None:
        yield []
        return
    with ChromeTrace(path) as trace:
        yield [trace]


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise ConfigError("give either --prompt or --prompt-file, not both")
    if prompt is not None:
        return prompt
    if file is None and sys.stdin.isatty():
        raise ConfigError("no prompt: give --prompt TEXT, --prompt-file FILE, or pipe one in")
    try:
        if file is None or str(file) == "-":
            return sys.stdin.read()
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--prompt-file {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {str(file)!r} is not UTF-8 text: {error}") from error


async def answer(
    model: str,
    prompt: str,
    params: SamplingParams,
    chat: bool | None,
    options: dict[str, Any],
    *,
    echo: Any,
    instruments: list[Instrument],
) -> dict[str, Any]:
    """Run one request in an engine of its own; text goes to `echo` as it comes."""
    stats = Stats()
    with ProgressBars(Console(stderr=True), params.max_tokens) as progress:
        watchers = [stats, progress, *instruments]
        async with Engine(model, instruments=watchers, **options) as engine:
            progress.parts = lambda: engine.parts
            if chat is None:
                chat = engine.parts.executor.tokenizer.has_chat_template
            stream = engine.generate(prompt, params, chat=chat)
            async for token in stream:
                if echo is not None:
                    echo.write(token.text)
                    echo.flush()
            if echo is not None:
                echo.write("\n")
            return report(await stream.result(), stats, engine.parts)
