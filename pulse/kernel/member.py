"""A request as the steps see it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from pulse.types import Placement

__all__ = ["Member", "Preempted", "settle"]


class Preempted(Exception):
    """The request has to give its slots back and start again later. Never leaves the engine."""


class Member:
    """A request's sequence, its position and what it waits for.

    prompt: tokens that prefill computes. replay: tokens that are known already and are decoded
    again after prefill, because an offloaded sequence's keys depend on what its steps selected.
    """

    def __init__(
        self,
        request: str,
        sequence: Any,
        placement: Placement,
        prompt: Sequence[int],
        sampler: Any,
        *,
        known: Iterable[int] = (),
        priority: int = 0,
        deadline: float = math.inf,
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.placement = placement
        self.prompt = prompt
        self.sampler = sampler
        self.known = deque(known)
        self.priority = priority
        self.deadline = deadline
        self.length = 0
        """Tokens whose keys and values are stored."""
        self.token = -1
        """The token to compute next: the last one sampled."""
        self.error: BaseException | None = None
        self.write_backs: dict[int, asyncio.Future[Any]] = {}
        """Write-backs under way, by layer; -1 stands for all layers of a decode step."""

    def take(self, token: int) -> bool:
        """Take a drawn token, or the known one in its place; says whether it is a new one."""
        if self.known:
            self.token = self.known.popleft()
            return False
        self.token = token
        self.sampler.take(token)
        return True

    async def landed(self, layer: int) -> None:
        """Wait until the write-back of `layer` has ended; raises what made it fail."""
        write_back = self.write_backs.pop(layer, None)
        if write_back is not None:
            await settle(write_back)
            await write_back


async def settle(*futures: asyncio.Future[Any]) -> None:
    """Wait until `futures` have ended, however often the caller is cancelled; then say so."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
