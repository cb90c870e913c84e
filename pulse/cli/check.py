"""``pulse check``: try a plugin against the contract of its port."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pulse.errors import ConfigError

if TYPE_CHECKING:
    from pulse.testing.checking import Checked
    from pulse.testing.subjects import Subject

__all__ = ["check"]

_CHECKS = {
    "store": ("stores", "check_block_store"),
    "transfer": ("transfers", "check_transfer_engine"),
    "select": ("policies", "check_selection_policy"),
    "admit": ("admissions", "check_admission_rule"),
    "schedule": ("scheduler", "check_scheduler"),
}
"""Kind of plugin: the module of its kit in `pulse.testing`, and the function."""


def check(
    plugin: Annotated[
        str, typer.Argument(help="A registered name like solohead:2, or module:attribute.")
    ],
    kind: Annotated[
        str | None,
        typer.Option(help="store, transfer, select, admit or schedule; found out if not given."),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Examples per property; the kit's own by default.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draw other examples; the same ones by default.")
    ] = None,
    bound: Annotated[
        int | None,
        typer.Option(min=0, help="Of an arbiter: how often an operation may be passed over."),
    ] = None,
    conserving: Annotated[
        bool, typer.Option("--conserving", help="Of an arbiter: it never holds the lane idle.")
    ] = False,
) -> None:
    """Check that a plugin keeps its contract. Exit code 1 with the smallest counterexample."""
    # As with `python -m`: what lies in the current directory can be named.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    # Here and not above: hypothesis is an extra, and its lack is told only to who checks.
    from pulse.testing.checking import Violation
    from pulse.testing.subjects import find

    subject = find(plugin, kind)
    run = _kit(subject)
    promises = {"bound": bound, "conserving": conserving or None}
    if subject.kind != "schedule" and any(v is not None for v in promises.values()):
        raise ConfigError(f"{subject.label} is no arbiter: leave out --bound and --conserving")
    options = {"examples": examples, "seed": seed, **promises}
    try:
        checked = run(subject, **{k: v for k, v in options.items() if v is not None})
    except Violation as violation:
        print(violation)
        raise typer.Exit(1) from None
    _tell(subject, checked)


def _kit(subject: Subject) -> Any:
    if subject.kind not in _CHECKS:
        raise ConfigError(
            f"there is no check for {subject.label} yet; what can be checked: {', '.join(_CHECKS)}"
        )
    module, function = _CHECKS[subject.kind]
    try:
        return getattr(importlib.import_module(f"pulse.testing.{module}"), function)
    except ModuleNotFoundError as error:
        if error.name != f"pulse.testing.{module}":
            raise
        raise ConfigError(f"there is no check for {subject.label} in this version") from error


def _tell(subject: Subject, checked: list[Checked] | None) -> None:
    console = Console(highlight=False)
    table = Table("rule", "what holds", box=None, header_style="bold")
    for one in checked or ():
        rest = f" (not put to the test: {one.remark})" if one.remark else ""
        table.add_row(one.rule.name, Text(one.rule.text + rest))
    if checked:
        console.print(table)
    console.print(Text(f"{subject.label} conforms"))
