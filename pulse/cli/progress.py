"""Progress of one request on a terminal: prefill, decode, how full the tiers are."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pulse.engine.assembly import Parts
from pulse.memory.sizes import format_bytes
from pulse.ports import Instrument

__all__ = ["ProgressBars"]


class ProgressBars(Instrument):
    """Draws on `console` while entered; quiet where that is no terminal.

    parts: gives the engine's parts once it is open, for the tiers.
    """

    def __init__(self, console: Console, max_tokens: int | None) -> None:
        self._bars = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tiers]}", style="dim"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._max_tokens = max_tokens
        self._prefill = self._bars.add_task("prefill", total=None, tiers="")
        self._decode = self._bars.add_task("decode", total=max_tokens, tiers="", visible=False)
        self.parts: Callable[[], Parts] | None = None

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def prefill_progress(self, request: str, done: int, total: int) -> None:
        """Move the prefill bar."""
        self._bars.update(self._prefill, completed=done, total=total, tiers=self._tiers())

    def token(self, request: str, index: int) -> None:
        """Move the decode bar."""
        self._bars.update(self._decode, completed=index + 1, visible=True, tiers=self._tiers())

    def _tiers(self) -> str:
        if self.parts is None:
            return ""
        parts = self.parts()
        return (
            f"fast {format_bytes(parts.fast.used_bytes)}/{format_bytes(parts.fast.limit_bytes)}  "
            f"slow {format_bytes(parts.slow.used_bytes)}/{format_bytes(parts.slow.limit_bytes)}"
        )
