"""The outer scheduler: at step boundaries, who gets slots, who gives them back, who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pulse.engine.assembly import Parts
from pulse.engine.request import Request
from pulse.errors import CapacityError, StoreError
from pulse.kernel.lanes import Kernel
from pulse.kernel.member import Member
from pulse.memory.sizes import format_bytes
from pulse.types import Demand, Placement

__all__ = ["Outer"]

OVERTAKEN = 64
"""Later requests of higher priority that are admitted before one, at most."""
PREEMPTIONS = 4
"""Times that a request gives way to one of higher priority, at most."""


class Outer:
    """Admission, growth, preemption and quarantine. An `AdmissionView`.

    An offloaded sequence takes all its slots when it is admitted; a normal one those of what it
    has computed, and grows. Where there is no room to grow, the request of the lowest rank (see
    `Request.rank`) gives its slots back and is computed again later. The one of the highest rank
    never does, so it ends, and then the next: whatever fits alone makes progress.

    preempt: makes a request give its slots back at its next boundary.
    freed: tells those that wait to grow that there may be room.
    """

    def __init__(
        self,
        parts: Parts,
        kernel: Kernel,
        preempt: Callable[[Request], None],
        freed: Callable[[], None],
    ) -> None:
        self.parts = parts
        self.kernel = kernel
        self.residents: dict[str, Request] = {}
        self._preempt = preempt
        self._freed = freed
        self._waiting: dict[str, tuple[Request, asyncio.Future[Any]]] = {}
        self._growing: dict[str, None] = {}
        self._quarantined: dict[asyncio.Future[Any], None] = {}

    # -- what admission rules see --------------------------------------------------------------

    @property
    def fast_limit(self) -> int:
        """Bytes."""
        return self.parts.fast.limit_bytes

    @property
    def slow_limit(self) -> int:
        """Bytes."""
        return self.parts.slow.limit_bytes

    @property
    def fast_free(self) -> int:
        """Bytes."""
        return self.parts.fast.limit_bytes - self.parts.fast.used_bytes

    @property
    def slow_free(self) -> int:
        """Bytes."""
        return self.parts.slow.limit_bytes - self.parts.slow.used_bytes

    def demand(self, tokens: int, placement: Placement) -> Demand:
        """Bytes per tier."""
        return self.parts.cache.demand(tokens, placement)

    # -- admission -----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._waiting)

    async def admission(self, request: Request) -> Any:
        """Wait for slots; the sequence that has them is returned."""
        grant: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = (request, grant)
        self.boundary()
        try:
            return await grant
        except asyncio.CancelledError:
            self._waiting.pop(request.id, None)
            if grant.done() and not grant.cancelled() and grant.exception() is None:
                self.release(request, grant.result())
            else:
                self.boundary()
            raise

    def boundary(self) -> None:
        """Hand out what is free: first to those that grow, then to those that wait."""
        if self._growing:
            self._freed()
            return
        # Whoever was cancelled in this tick is still listed, but nobody awaits the grant.
        waiting = [entry for entry in self._waiting.values() if not entry[1].done()]
        if not waiting:
            return
        waiting.sort(key=lambda entry: (entry[0].overtaken < OVERTAKEN, entry[0].rank))
        try:
            placements = self._placements([request for request, _ in waiting])
        except Exception as error:
            # A broken rule must not strand requests: those it was asked about fail, typed.
            self._waiting.clear()
            for _, grant in waiting:
                grant.set_exception(error)
            return
        for (request, grant), placement in zip(waiting, placements, strict=True):
            if placement is None:
                continue
            placement = self._possible(request, placement)
            if not self._fits(request, placement):
                self._make_way(request)
                return  # no overtaking: a long request must not starve behind short ones
            self._admit(request, grant, placement)

    def _placements(self, waiting: Sequence[Request]) -> Sequence[Placement | None]:
        answer = self.parts.admission.admit([request.total for request in waiting], self)
        placements = [None if item is None else Placement(item) for item in answer]
        if len(placements) != len(waiting):
            raise ValueError(f"{len(placements)} placements for {len(waiting)} requests")
        if not self.residents and all(placement is None for placement in placements):
            placements[0] = Placement.NORMAL  # an idle engine may not refuse for ever
        return placements

    def _possible(self, request: Request, placement: Placement) -> Placement:
        if request.placed:
            return request.placement
        if self.fits_alone(request, placement):
            return placement
        return Placement.OFFLOAD if placement is Placement.NORMAL else Placement.NORMAL

    def fits_alone(self, request: Request, placement: Placement) -> bool:
        """Whether it could be served to its end if there were no other."""
        demand = self.demand(request.total, placement)
        return demand.fast <= self.fast_limit and demand.slow <= self.slow_limit

    def _fits(self, request: Request, placement: Placement) -> bool:
        demand = self.demand(_tokens(request, placement), placement)
        return demand.fast <= self.fast_free and demand.slow <= self.slow_free

    def _admit(self, request: Request, grant: asyncio.Future[Any], placement: Placement) -> None:
        del self._waiting[request.id]
        try:
            tokens = _tokens(request, placement)
            sequence = self.parts.cache.open(request.id, tokens, placement)
        except Exception as error:
            grant.set_exception(error)
            return
        request.placement, request.placed, request.preempted = placement, True, None
        request.admitted = self.kernel.now()
        for other, _ in self._waiting.values():
            other.overtaken += int(other.id) < int(request.id)
        self.residents[request.id] = request
        grant.set_result(sequence)
        self.kernel.instruments.emit("request_admitted", request.id, placement)

    # -- growth and preemption -----------------------------------------------------------------

    def grow(self, member: Member) -> bool:
        """Make room for the member's next token; False if it has to wait for that."""
        try:
            self.parts.cache.grow(member.sequence, member.length + 1)
        except StoreError as error:
            self._growing[member.request] = None
            self._clear(self.residents[member.request], error)
            return False
        if member.request in self._growing:
            del self._growing[member.request]
            self.boundary()
        return True

    def _clear(self, grower: Request, error: StoreError) -> None:
        """Preempt one request for `grower`, or the grower itself if it ranks lowest."""
        if self._leaving():
            return
        below = [r for r in self.residents.values() if r.rank > grower.rank]
        if not below and len(self.residents) == 1 and not self._quarantined:
            raise error  # nothing will ever be freed for it
        victim = max(below or [grower], key=lambda r: (r.placement is Placement.NORMAL, r.rank))
        self._evict(victim, f"room for request {grower.id}")

    def _make_way(self, request: Request) -> None:
        """Preempt a resident of lower priority than a request that waits, within a bound."""
        below = [
            resident
            for resident in self.residents.values()
            if resident.priority < request.priority and resident.preemptions < PREEMPTIONS
        ]
        if below and not self._leaving():
            victim = max(below, key=lambda resident: resident.rank)
            victim.preemptions += 1
            self._evict(victim, f"request {request.id} has priority")

    def _leaving(self) -> bool:
        return any(resident.preempted is not None for resident in self.residents.values())

    def _evict(self, victim: Request, reason: str) -> None:
        victim.preempted = reason
        self._preempt(victim)

    # -- the end of a lease --------------------------------------------------------------------

    def release(self, request: Request, sequence: Any) -> None:
        """Take a sequence's slots back, or put them in quarantine while transfers are late."""
        self.residents.pop(request.id, None)
        self._growing.pop(request.id, None)
        late = [t for t in self.kernel.stragglers.pop(request.id, ()) if not t.done()]
        if not late:
            self.parts.cache.close(sequence)
            self.boundary()
            return
        emit, left = self.kernel.instruments.emit, set(late)

        def ended(transfer: asyncio.Future[Any]) -> None:
            self._quarantined.pop(transfer, None)
            left.discard(transfer)
            if not left:
                self.parts.cache.close(sequence)
                emit("quarantined", request.id, 0)
                self.boundary()

        emit("quarantined", request.id, len(late))
        for transfer in late:
            self._quarantined[transfer] = None
            transfer.add_done_callback(ended)
        self.boundary()

    async def drained(self) -> None:
        """Wait until nothing is in quarantine."""
        while self._quarantined:
            await asyncio.wait(list(self._quarantined))
            await asyncio.sleep(0)

    def too_large(self, request: Request) -> CapacityError:
        """Why a request cannot be served however long it waits."""
        lines = []
        for placement in Placement:
            demand = self.demand(request.total, placement)
            lines.append(
                f"{placement} needs {format_bytes(demand.fast)} fast and "
                f"{format_bytes(demand.slow)} slow"
            )
        return CapacityError(
            f"a request of {request.total:,} tokens does not fit in the tiers "
            f"(fast {format_bytes(self.fast_limit)}, slow {format_bytes(self.slow_limit)}): "
            f"{'; '.join(lines)}. Raise fast_tier or slow_limit, lower the budget, or shorten the "
            "request"
        )


def _tokens(request: Request, placement: Placement) -> int:
    """Tokens that a sequence has to have room for when it is opened."""
    if placement is Placement.OFFLOAD:
        return request.total
    return len(request.prompt_ids) + max(1, len(request.token_ids))
