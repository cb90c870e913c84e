"""Dispatch of kernel events to instruments: an event nobody overrides costs one list check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from pulse.ports import Instrument

__all__ = ["Instruments"]

log = logging.getLogger("pulse")

EVENTS = tuple(name for name in vars(Instrument) if not name.startswith("_"))


class Instruments:
    """The instruments of one engine, indexed by the events that they override."""

    def __init__(self, instruments: Iterable[Instrument] = ()) -> None:
        self._handlers: dict[str, list[tuple[Instrument, Callable[..., None]]]] = {
            event: [] for event in EVENTS
        }
        for instrument in instruments:
            self.add(instrument)

    def add(self, instrument: Instrument) -> None:
        """Deliver events to `instrument` from now on."""
        for event, handlers in self._handlers.items():
            own = getattr(type(instrument), event, None)
            if own is not None and own is not getattr(Instrument, event):
                handlers.append((instrument, getattr(instrument, event)))

    def remove(self, instrument: Instrument) -> None:
        """Deliver no more events to `instrument`. Unknown ones are ignored."""
        for event, handlers in self._handlers.items():
            self._handlers[event] = [pair for pair in handlers if pair[0] is not instrument]

    def emit(self, event: str, *args: Any) -> None:
        """Call every handler of `event`; one that raises is logged and its instrument removed."""
        for instrument, handler in self._handlers[event]:
            try:
                handler(*args)
            except Exception:
                log.exception("instrument %r raised in %s and is removed", instrument, event)
                self.remove(instrument)
