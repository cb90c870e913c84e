"""Prefill: a prompt computed in chunks, layer by layer, its KV streaming out as it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pulse.errors import PulseError, TransferTimeout
from pulse.kernel.machine import Machine, Milestone, Served
from pulse.kernel.member import Member, settle
from pulse.kernel.turn import Turn
from pulse.types import Batch, Placement, TransferPlan, TransferReport, Work

__all__ = ["prefill"]

Sampled = list[tuple[int, float]]
Pieces = list[tuple[Any, TransferPlan | None]]


async def prefill(
    machine: Machine, member: Member, boundary: Callable[[], None]
) -> tuple[int, float]:
    """Compute `member.prompt` in chunks and sample the token after it, with its log-probability.

    KV of an offloaded sequence streams out layer by layer while the next layer computes, and the
    prefix streams back in pieces, so the fast tier holds a hot set at any time. `boundary` is
    called before each chunk and may raise.
    """
    total = len(member.prompt)
    sampled: Sampled = []
    for start, end in _chunks(total, member.sequence.chunk, machine.config.block):
        boundary()
        batch = Batch(
            [member.sequence], [member.prompt[start:end]], [start], Work.PREFILL, end == total
        )
        sampled = await _Chunk(machine, member, batch).run()
        member.length = end
        machine.kernel.instruments.emit("prefill_progress", member.request, end, total)
    for layer in list(member.write_backs):
        await member.landed(layer)
    return sampled[0]


def _chunks(total: int, chunk: int, block: int) -> Iterable[tuple[int, int]]:
    # Block-aligned, the short chunk first: the last one holds as many of the queries and local
    # keys that late policies look at as a chunk can.
    step = max(1, chunk // block)
    blocks = -(-total // block)
    start, end = 0, (blocks - 1) % step + 1
    while start < blocks:
        yield start * block, min(total, end * block)
        start, end = end, end + step


class _Chunk:
    """One chunk of a prompt."""

    def __init__(self, machine: Machine, member: Member, batch: Batch) -> None:
        self.machine = machine
        self.member = member
        self.batch = batch
        self.serves = Served.of([member])
        self.state: Any = None
        self.pieces: Pieces = []
        """What of the prefix the layer attends to, and the recalls of that."""

    def _streams(self, layer: int) -> bool:
        return self.member.placement is Placement.OFFLOAD and layer in self.machine.growing

    def _plan(self, layer: int) -> None:
        # On the worker: planning a long prefix takes longer than the event loop may be kept.
        if self._streams(layer):
            self.pieces = list(self.machine.cache.prefix(self.state, layer))

    async def run(self) -> Sampled:
        machine, member, batch = self.machine, self.member, self.batch
        executor, last = machine.executor, machine.last
        for layer in list(member.write_backs):  # its slots are about to be used again
            await member.landed(layer)

        def begin(_: Milestone) -> Any:
            state = self.state = executor.embed(batch)
            executor.qkv([state], 0)
            self._plan(0)
            return state

        state = await self._compute("embed", begin)
        sampled: Sampled = []
        for layer in range(last + 1):
            streams = self._streams(layer)
            if streams:
                await self._stream(layer, "prefix", executor.attend_prefix)

            def attend(milestone: Milestone, layer: int = layer) -> None:
                machine.cache.place(state, layer, None)
                executor.attend([state], layer, milestone)

            await self._compute("layer", attend, layer)
            if streams and batch.sample and machine.policy.late:
                await self._look_back(layer)

            def leave(_: Milestone, layer: int = layer) -> Any:
                plan = machine.cache.seal(state, layer) if layer in machine.growing else None
                if layer < last:
                    executor.qkv([state], layer + 1)
                    self._plan(layer + 1)
                elif batch.sample:
                    sampled.extend(executor.sample(state, [member.sampler]))
                return plan

            plan = await self._compute("leave", leave, layer)
            if plan is not None:
                machine.write_back(member, layer, plan, Work.PREFILL, member.request)
        return sampled

    async def _look_back(self, layer: int) -> None:
        # The policy learns from the prompt's last queries what it keeps, so the keys that left
        # the fast tier have to come by once more.
        machine, request = self.machine, self.member.request

        def observe(_: Milestone) -> None:
            machine.policy.observe(layer, request, machine.executor.mass(self.state, layer))

        await self._compute("observe", observe, layer)
        await self._stream(layer, "digest", machine.cache.digest)

    async def _stream(self, layer: int, kind: str, use: Callable[[Any, int, Any], None]) -> None:
        """Recall the pieces of the prefix one ahead of their use."""
        pieces = self.pieces
        recalls: list[Turn[TransferReport] | None] = []

        def ahead(index: int) -> None:
            plan = pieces[index][1] if index < len(pieces) else None
            recalls.append(None if plan is None else self._recall(plan))

        try:
            ahead(0)
            for index, (piece, plan) in enumerate(pieces):
                arriving = recalls[index]
                ahead(index + 1)
                if arriving is not None and plan is not None:
                    await self._arrive(arriving, plan)

                def step(_: Milestone, piece: Any = piece) -> None:
                    use(self.state, layer, piece)

                await self._compute(kind, step, layer)
        finally:
            await self._abandon([turn for turn in recalls if turn is not None])

    async def _arrive(self, arriving: Turn[TransferReport], plan: TransferPlan) -> None:
        try:
            await arriving
        except TransferTimeout:
            # What is still under way would write into the slots of a later piece.
            if await self.machine.overdue([self.member.request]):
                raise
        except PulseError:
            pass
        else:
            return
        await self._recall(plan)

    async def _abandon(self, turns: Sequence[Turn[TransferReport]]) -> None:
        for turn in turns:
            turn.cancel()
        await settle(*turns)
        for turn in turns:
            if not turn.cancelled():
                turn.exception()  # seen, so that asyncio does not report it as lost

    def _compute(self, kind: str, function: Callable[[Milestone], Any], layer: int = -1) -> Any:
        return self.machine.compute(
            kind,
            Work.PREFILL,
            self.member.request,
            function,
            layer=layer,
            serves=self.serves,
        )

    def _recall(self, plan: TransferPlan) -> Turn[TransferReport]:
        return self.machine.recall(plan, Work.PREFILL, self.member.request)
