"""Run a coroutine on uvloop where it is installed, on asyncio otherwise."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["loop_name", "run"]

T = TypeVar("T")


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop  # type: ignore[no-any-return]


def loop_name() -> str:
    """The event loop that `run` uses."""
    return "asyncio" if _factory() is None else "uvloop"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end; Ctrl-C cancels `main`, waits for it to clean up, raises KeyboardInterrupt."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)
