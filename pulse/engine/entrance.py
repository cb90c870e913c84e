"""A door that lets in one at a time."""

from __future__ import annotations

import asyncio

__all__ = ["Entrance"]


class Entrance:
    """First come, first served; whoever waits can be turned away."""

    def __init__(self) -> None:
        self.inside: str | None = None
        self._line: dict[str, asyncio.Future[None]] = {}

    async def enter(self, name: str) -> None:
        """Wait until nobody is inside. Raises what `name` is turned away with."""
        if self.inside is None:
            self.inside = name
            return
        admitted = self._line[name] = asyncio.get_running_loop().create_future()
        try:
            await admitted
        except asyncio.CancelledError:
            if self.inside == name:  # let in while it was being cancelled
                self.leave()
            raise
        finally:
            self._line.pop(name, None)

    def turn_away(self, name: str, error: Exception) -> bool:
        """Raise `error` where `name` waits; False if it does not."""
        waits = self._line.get(name)
        if waits is None or waits.done():
            return False
        waits.set_exception(error)
        return True

    def leave(self) -> None:
        """Let the next one in."""
        self.inside = None
        for name, admitted in self._line.items():
            if not admitted.done():
                self.inside = name
                admitted.set_result(None)
                return
