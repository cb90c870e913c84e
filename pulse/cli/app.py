"""The typer application and how errors become exit codes."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from pulse.cli.check import check
from pulse.cli.demo import demo
from pulse.cli.doctor import doctor, plugins
from pulse.cli.generate import generate
from pulse.cli.trace import trace
from pulse.errors import (
    ConfigError,
    ModelError,
    PulseError,
    RequestError,
    RequestFailed,
    StoreError,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="pulse",
    help="Decode long contexts when the KV cache does not fit in fast memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(demo)
app.command()(plugins)
app.command()(doctor)
app.command()(check)
app.add_typer(trace, name="trace")

USAGE, FAILED, INTERRUPTED = 2, 1, 130


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    try:
        app()
    except PulseError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"[red]error:[/] {_text(error)}", highlight=False
        )
        sys.exit(USAGE if _mendable(error) else FAILED)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(FAILED)


def _mendable(error: BaseException | None) -> bool:
    """Whether the user can mend it before trying again; a failed request is as its cause is."""
    if isinstance(error, RequestError) and error.__cause__ is not None:
        return _mendable(error.__cause__)
    return isinstance(error, ConfigError | ModelError | RequestError | StoreError)


def _text(error: BaseException) -> str:
    if isinstance(error, RequestFailed) and error.__cause__ is not None:
        return _text(error.__cause__)  # with one request, what failed it says it all
    return f"{type(error).__name__}: {error}".replace("[", r"\[")
