"""The step coroutines: a cohort walks the layers with plain awaits.

A decode step reads like the design's picture: qkv, select, recall (await: the compute lane goes to
whoever is ready), attend and FFN. One compute operation finishes layer l and starts layer l + 1,
so the only gap between two operations of a cohort is a wait for blocks (PulseInfer, IRQ).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from pulse.errors import PulseError, TransferError
from pulse.kernel.lanes import Kernel
from pulse.kernel.worker import Worker
from pulse.ports import KVCache, ModelExecutor, SelectionPolicy, TransferEngine
from pulse.types import (
    Batch,
    KVConfig,
    LaneName,
    Placed,
    Placement,
    SelectionView,
    TransferPlan,
    TransferReport,
    Work,
)

__all__ = ["Machine", "Member", "settle"]

T = TypeVar("T")
Milestone = Callable[[], None]


class Member:
    """A request as the steps see it: its sequence, its position and what it waits for."""

    def __init__(
        self, request: str, sequence: Any, placement: Placement, prompt: Sequence[int], sampler: Any
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.placement = placement
        self.prompt = prompt
        self.sampler = sampler
        self.length = 0
        """Tokens whose keys and values are stored."""
        self.token = -1
        """The token to compute next: the last one sampled."""
        self.error: BaseException | None = None
        self.write_backs: dict[int, asyncio.Task[None]] = {}
        """Write-backs under way, by layer; -1 stands for all layers of a decode step."""

    async def landed(self, layer: int) -> None:
        """Wait until the write-back of `layer` has ended; raises what made it fail."""
        task = self.write_backs.pop(layer, None)
        if task is not None:
            await settle(task)
            await task


async def settle(*tasks: asyncio.Task[Any]) -> None:
    """Wait until `tasks` have ended, however often the caller is cancelled; then say so."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class Machine:
    """What a step runs on: the lanes, the compute worker and the plugins of one engine."""

    def __init__(
        self,
        kernel: Kernel,
        worker: Worker,
        executor: ModelExecutor,
        cache: KVCache,
        policy: SelectionPolicy,
        transfer: TransferEngine,
        config: KVConfig,
    ) -> None:
        self.kernel = kernel
        self.worker = worker
        self.executor = executor
        self.cache = cache
        self.policy = policy
        self.transfer = transfer
        self.config = config
        self._growing = frozenset(executor.geometry.growing)

    # -- decode ------------------------------------------------------------------------------

    async def decode(
        self, members: Sequence[Member], work: Work, cohort: str
    ) -> list[tuple[int, float]]:
        """One decode step: a token and its log-probability for each member.

        A member whose recall failed for good has its `error` set; the others are unharmed.
        Raises what a plugin raised where no single member can be blamed.
        """
        batch = Batch(
            [m.sequence for m in members],
            [[m.token] for m in members],
            [m.length for m in members],
            work,
        )
        last = self.executor.geometry.layers - 1

        def begin(_: Milestone) -> tuple[Any, Placed | None]:
            state = self.executor.embed(batch)
            return state, self._enter(state, 0, members, batch)

        state, placed = await self.compute("embed", work, cohort, begin, requests=len(members))
        for layer in range(last + 1):
            await self._recall(placed, members, work, cohort, layer)

            def advance(milestone: Milestone, layer: int = layer) -> Any:
                self.executor.attend(state, layer, milestone)
                if layer == last:
                    return self.executor.sample(state, [m.sampler for m in members])
                return self._enter(state, layer + 1, members, batch)

            placed = await self.compute(
                "layer", work, cohort, advance, layer=layer, requests=len(members)
            )
        await self._seal(state, members, work, cohort)
        for member in members:
            member.length += 1
        return placed  # type: ignore[return-value]  # the last operation sampled

    def _enter(self, state: Any, layer: int, members: Sequence[Member], batch: Batch) -> Placed:
        query = self.executor.qkv(state, layer)
        selection = None
        if batch.work is Work.OFFLOAD and layer in self._growing:
            view = self._view(members, batch)
            if any(high > low for low, high in view.middle):
                selection = self.policy.select(layer, query, view)
        return self.cache.place(state, layer, selection)

    def _view(self, members: Sequence[Member], batch: Batch) -> SelectionView:
        config = self.config
        middle = []
        for start in batch.starts:
            high = max(0, start // config.block - config.local_blocks + 1)
            middle.append((min(config.sink_blocks, high), high))
        top_k = config.middle_blocks
        if self.policy.exhaustive:
            top_k = max(high - low for low, high in middle)
        return SelectionView(tuple(m.request for m in members), tuple(middle), top_k)

    async def _recall(
        self, placed: Placed | None, members: Sequence[Member], work: Work, cohort: str, layer: int
    ) -> None:
        if placed is None or placed.selected == 0:
            return
        plan = placed.recall
        missed = 0 if plan is None else plan.units
        self.kernel.instruments.emit("selection", layer, placed.selected, missed)
        if plan is None:
            return
        try:
            await self.recall(plan, work, cohort)
        except PulseError:
            await self._recall_apart(plan, members, work, cohort)

    async def _recall_apart(
        self, plan: TransferPlan, members: Sequence[Member], work: Work, cohort: str
    ) -> None:
        # One bad block must not cost its neighbours: each request's part is tried once more.
        by_request = {member.request: member for member in members}
        for index, request in enumerate(plan.requests):
            part = plan.part(index)
            if part.units == 0:
                continue
            try:
                await self.recall(part, work, cohort)
            except PulseError as error:
                by_request[request].error = error

    async def _seal(self, state: Any, members: Sequence[Member], work: Work, cohort: str) -> None:
        if work is not Work.OFFLOAD or not self._growing:
            return
        sealing = [m for m in members if (m.length + 1) % self.config.block == 0]
        if not sealing:
            return
        # A sealed block may lose its slot from the next seal on: its write-back must be over.
        for member in sealing:
            await self._landed(member, -1)
        plan = await self.compute(
            "seal", work, cohort, lambda _: self.cache.seal(state, -1), requests=len(sealing)
        )
        if plan is None:
            return
        tasks = [
            self._write_back(member, -1, plan.part(plan.requests.index(member.request)), work)
            for member in sealing
            if member.request in plan.requests
        ]
        if self.config.local_blocks < 2:
            await settle(*tasks)

    async def _landed(self, member: Member, layer: int) -> None:
        try:
            await member.landed(layer)
        except PulseError as error:
            member.error = error

    # -- prefill -----------------------------------------------------------------------------

    async def prefill(self, member: Member) -> tuple[int, float]:
        """Compute the prompt in chunks and sample the first token.

        KV of an offloaded sequence streams out layer by layer while the next layer computes, and
        the prefix streams back in pieces, so the fast tier holds a hot set at any time.
        """
        total = len(member.prompt)
        sampled: list[tuple[int, float]] = []
        for start, end in self._chunks(total, member.sequence.chunk):
            batch = Batch(
                [member.sequence], [member.prompt[start:end]], [start], Work.PREFILL, end == total
            )
            sampled = await self._prefill_chunk(member, batch)
            member.length = end
            self.kernel.instruments.emit("prefill_progress", member.request, end, total)
        for layer in list(member.write_backs):
            await member.landed(layer)
        return sampled[0]

    def _chunks(self, total: int, chunk: int) -> Iterable[tuple[int, int]]:
        # Block-aligned, the short chunk first: the last one holds as many of the queries and
        # local keys that late policies look at as a chunk can.
        step = max(1, chunk // self.config.block)
        blocks = self.config.blocks(total)
        start, end = 0, (blocks - 1) % step + 1
        while start < blocks:
            yield start * self.config.block, min(total, end * self.config.block)
            start, end = end, end + step

    async def _prefill_chunk(self, member: Member, batch: Batch) -> list[tuple[int, float]]:
        request, last = member.request, self.executor.geometry.layers - 1
        for layer in list(member.write_backs):  # its slots are about to be used again
            await member.landed(layer)

        def begin(_: Milestone) -> Any:
            state = self.executor.embed(batch)
            self.executor.qkv(state, 0)
            return state

        state = await self.compute("embed", Work.PREFILL, request, begin, requests=1)
        sampled: list[tuple[int, float]] = []
        for layer in range(last + 1):
            streams = member.placement is Placement.OFFLOAD and layer in self._growing
            if streams:
                await self._stream(state, layer, request, "prefix", self.executor.attend_prefix)

            def attend(milestone: Milestone, layer: int = layer) -> None:
                self.cache.place(state, layer, None)
                self.executor.attend(state, layer, milestone)

            await self.compute("layer", Work.PREFILL, request, attend, layer=layer, requests=1)
            if streams and batch.sample and self.policy.late:
                await self._look_back(state, layer, request)

            def leave(_: Milestone, layer: int = layer) -> Any:
                plan = self.cache.seal(state, layer) if layer in self._growing else None
                if layer < last:
                    self.executor.qkv(state, layer + 1)
                elif batch.sample:
                    sampled.extend(self.executor.sample(state, [member.sampler]))
                return plan

            plan = await self.compute(
                "leave", Work.PREFILL, request, leave, layer=layer, requests=1
            )
            if plan is not None:
                self._write_back(member, layer, plan, Work.PREFILL)
        return sampled

    async def _look_back(self, state: Any, layer: int, request: str) -> None:
        # The policy learns from the prompt's last queries what it keeps, so the keys that left
        # the fast tier have to come by once more.
        def observe(_: Milestone) -> None:
            self.policy.observe(layer, request, self.executor.mass(state, layer))

        await self.compute("observe", Work.PREFILL, request, observe, layer=layer, requests=1)
        await self._stream(state, layer, request, "digest", self.cache.digest)

    async def _stream(
        self,
        state: Any,
        layer: int,
        request: str,
        kind: str,
        use: Callable[[Any, int, Any], None],
    ) -> None:
        """Recall the pieces of the prefix one ahead of their use."""
        pieces = list(self.cache.prefix(state, layer))
        recalls: list[asyncio.Task[Any] | None] = []

        def ahead(index: int) -> None:
            plan = pieces[index][1] if index < len(pieces) else None
            recalls.append(
                None if plan is None else asyncio.create_task(self._recall_twice(plan, request))
            )

        try:
            ahead(0)
            for index, (piece, _) in enumerate(pieces):
                arriving = recalls[index]
                ahead(index + 1)
                if arriving is not None:
                    await arriving

                def step(_: Milestone, piece: Any = piece) -> None:
                    use(state, layer, piece)

                await self.compute(kind, Work.PREFILL, request, step, layer=layer, requests=1)
        finally:
            under_way = [task for task in recalls if task is not None and not task.done()]
            for task in under_way:
                task.cancel()
            await settle(*under_way)

    async def _recall_twice(self, plan: TransferPlan, request: str) -> None:
        try:
            await self.recall(plan, Work.PREFILL, request)
        except PulseError:
            await self.recall(plan, Work.PREFILL, request)

    # -- lanes -------------------------------------------------------------------------------

    async def compute(
        self,
        kind: str,
        work: Work,
        cohort: str,
        function: Callable[[Milestone], T],
        *,
        layer: int = -1,
        requests: int = 0,
    ) -> T:
        """Run `function` on the compute lane's worker."""
        lane = self.kernel.compute
        operation = self.kernel.operation(
            kind, LaneName.COMPUTE, work, cohort, layer=layer, requests=requests
        )
        loop = asyncio.get_running_loop()

        def start(publish: Milestone) -> Awaitable[T]:
            def milestone() -> None:
                if lane.contended:  # nobody waits: no need to wake the loop
                    loop.call_soon_threadsafe(publish)

            return self.worker.submit(lambda: function(milestone))

        return await lane.run(operation, start)

    async def recall(self, plan: TransferPlan, work: Work, cohort: str) -> TransferReport:
        """Run a recall on its lane."""
        operation = self.kernel.operation(
            "recall",
            LaneName.RECALL,
            work,
            cohort,
            layer=plan.layer,
            requests=len(plan.requests),
            bytes=plan.bytes,
            blocks=plan.units,
        )
        return await _typed(
            self.kernel.recall.run(operation, lambda _: self.transfer.recall(plan)), "recall"
        )

    def _write_back(
        self, member: Member, layer: int, plan: TransferPlan, work: Work
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._write(member.request, plan, work))
        task.add_done_callback(_retrieve)
        member.write_backs[layer] = task
        return task

    async def _write(self, request: str, plan: TransferPlan, work: Work) -> None:
        for retry in (True, False):
            operation = self.kernel.operation(
                "write_back",
                LaneName.WRITE_BACK,
                work,
                request,
                layer=plan.layer,
                requests=1,
                bytes=plan.bytes,
                blocks=plan.units,
            )
            try:
                await _typed(
                    self.kernel.write_back.run(operation, lambda _: self.transfer.write_back(plan)),
                    "write-back",
                )
                return
            except PulseError:
                if not retry:
                    raise


def _retrieve(task: asyncio.Task[None]) -> None:
    # The error is raised where the write-back is awaited; asyncio need not log it as forgotten.
    if not task.cancelled():
        task.exception()


async def _typed(transfer: Awaitable[TransferReport], what: str) -> TransferReport:
    try:
        return await transfer
    except (PulseError, asyncio.CancelledError):
        raise
    except Exception as error:
        raise TransferError(f"{what} failed: {type(error).__name__}: {error}") from error
