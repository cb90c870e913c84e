"""Text of a request as it grows: incremental decoding and stop strings."""

from __future__ import annotations

from pulse.ports import TextDecoder

__all__ = ["TextBuffer"]


class TextBuffer:
    """Decodes tokens and holds back text that could still turn out to be a stop string."""

    def __init__(self, decoder: TextDecoder, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is certain now; sets `stopped` when a stop string has appeared."""
        return self._release(self._decoder.push(token), final=False)

    def flush(self) -> str:
        """What is left when no token follows."""
        return "" if self.stopped else self._release(self._decoder.flush(), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = 0 if final else self._possible()
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        return out

    def _possible(self) -> int:
        # The longest end of the text that is the beginning of a stop string.
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
