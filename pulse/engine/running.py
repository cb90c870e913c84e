"""An open engine: the life of its requests, from prompt to last token."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Sequence
from typing import Any

from pulse.engine.assembly import Parts
from pulse.engine.config import EngineConfig
from pulse.engine.entrance import Entrance
from pulse.engine.outer import Outer
from pulse.engine.request import Prompt, Request, Stream
from pulse.engine.text import TextBuffer
from pulse.errors import Overloaded, PromptError, TransferError
from pulse.kernel.cohort import Cohorts
from pulse.kernel.instruments import Instruments
from pulse.kernel.lanes import Kernel
from pulse.kernel.machine import Machine, Served
from pulse.kernel.member import Member, Preempted, settle
from pulse.kernel.prefill import prefill
from pulse.kernel.worker import Worker
from pulse.types import FinishReason, Placement, SamplingParams, Work

__all__ = ["Running", "give_back"]


class Running:
    """An open engine: its requests, its cohorts and the outer scheduler."""

    def __init__(
        self, config: EngineConfig, parts: Parts, worker: Worker, instruments: Instruments
    ) -> None:
        self.config = config
        self.parts = parts
        self.worker = worker
        self.instruments = instruments
        self.kernel = Kernel(parts.arbiter, instruments, config.transfer_timeout_s)
        self.machine = Machine(
            self.kernel,
            worker,
            parts.executor,
            parts.cache,
            parts.policy,
            parts.transfer,
            config.kv,
        )
        self.entrance = Entrance()
        self.outer = Outer(parts, self.kernel, self._preempt, self._wake)
        self.cohorts = {
            Placement.NORMAL: Cohorts(Work.NORMAL, self.machine, self.outer.grow, self._repace),
            Placement.OFFLOAD: Cohorts(Work.OFFLOAD, self.machine, lambda _: True, self._repace),
        }
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, unlike a set
        self._unfinished: set[str] = set()
        self._loop = asyncio.get_running_loop()

    # -- requests ------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raise Overloaded if one more request would have to wait behind too many."""
        waiting = len(self._unfinished) - len(self.outer.residents)
        if waiting >= self.config.max_waiting:
            raise Overloaded(
                f"{waiting} requests wait already (max_waiting={self.config.max_waiting}); try "
                "again later, or raise max_waiting"
            )

    def start(
        self,
        id: str,
        prompt: Prompt,
        params: SamplingParams,
        chat: bool,
        priority: int,
        deadline_s: float | None,
    ) -> Stream:
        """Serve a request; its stream is returned at once."""
        now = self.kernel.now()
        deadline = math.inf if deadline_s is None else now + deadline_s
        request = Request(
            id, prompt, params, chat=chat, now=now, priority=priority, deadline=deadline
        )
        task = asyncio.create_task(self._serve(request), name=f"pulse-request-{id}")
        self._tasks[task] = None
        self._unfinished.add(id)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.pop(task, None)
            # One cancelled before it ran has not said so.
            self._unfinished.discard(id)
            request.end(FinishReason.CANCELLED)

        task.add_done_callback(over)

        def orphaned() -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(task.cancel)

        return Stream(request, task, orphaned)

    async def _serve(self, request: Request) -> None:
        try:
            await self._prepare(request)
            await self._live(request)
        except asyncio.CancelledError:
            request.end(FinishReason.CANCELLED)
            raise
        except Exception as error:
            request.end(FinishReason.ERROR, error)
        finally:
            self._unfinished.discard(request.id)
            reason = request.reason or FinishReason.ERROR
            request.end(reason)
            self.instruments.emit("request_ended", request.id, str(reason))

    async def _prepare(self, request: Request) -> None:
        """Turn the prompt into tokens and see whether it can be served at all."""
        executor = self.parts.executor
        request.prompt_ids = await self._encode(request)
        _check_ids(request.params.forced, executor.geometry.vocab_size)
        self.instruments.emit("request_submitted", request.id, len(request.prompt_ids))
        limit = executor.geometry.max_positions
        count = len(request.prompt_ids)
        if count == 0:
            raise PromptError("the prompt is empty: give at least one token")
        if count >= limit:
            raise PromptError(
                f"the prompt has {count:,} tokens, the model takes {limit:,} with at least one to "
                "generate; shorten the prompt"
            )
        new = min(request.params.max_tokens or limit, limit - count)
        request.total = count + new
        request.buffer = TextBuffer(executor.tokenizer.decoder(), request.params.stop)
        request.stop_ids = executor.tokenizer.stop_ids
        request.sampler = executor.sampler(request.params, request.prompt_ids)
        if not any(self.outer.fits_alone(request, placement) for placement in Placement):
            raise self.outer.too_large(request)

    async def _encode(self, request: Request) -> list[int]:
        prompt = request.prompt
        if not isinstance(prompt, str) and not any(isinstance(part, dict) for part in prompt):
            vocab = self.parts.executor.geometry.vocab_size
            ids = [_token_id(token) for token in prompt]
            _check_ids(ids, vocab)
            return ids
        if not prompt:
            return []
        chat = request.chat or not isinstance(prompt, str)
        encode = self.parts.executor.tokenizer.encode
        return await self.machine.compute(
            "tokenize",
            Work.PREFILL,
            request.id,
            lambda _: encode(prompt, chat=chat),  # type: ignore[arg-type]
            serves=Served((request.id,), request.priority, request.deadline),
        )

    async def _live(self, request: Request) -> None:
        """Decode to the end, from the start again where the slots have to be given back."""
        while True:
            sequence = await self.outer.admission(request)
            member = self._member(request, sequence)
            try:
                try:
                    await self._decode(request, member)
                finally:
                    await settle(*member.write_backs.values())
                return
            except Preempted as why:
                reason = str(why)
            except TransferError as error:
                # What was lost on the way to a tier can be computed again.
                if request.recomputed:
                    raise
                request.recomputed = True
                reason = f"recomputed after: {error}"
            finally:
                self.outer.release(request, sequence)
            self.instruments.emit("request_preempted", request.id, reason)

    def _member(self, request: Request, sequence: Any) -> Member:
        # A normal sequence's keys are the same whether its tokens came from the prompt or were
        # generated; those of an offloaded one depend on what each step selected.
        prompt, known = request.prompt_ids, request.token_ids
        if request.placement is Placement.NORMAL and known:
            prompt, known = [*prompt, *known[:-1]], known[-1:]
        return Member(
            request.id,
            sequence,
            request.placement,
            prompt,
            request.sampler,
            known=known,
            priority=request.priority,
            deadline=request.deadline,
        )

    async def _decode(self, request: Request, member: Member) -> None:
        def boundary() -> None:
            if request.preempted is not None:
                raise Preempted(request.preempted)

        def deliver(token: int, logprob: float) -> bool:
            goes_on = request.deliver(token, logprob, self.kernel.now())
            self.instruments.emit("token", request.id, len(request.token_ids) - 1)
            return goes_on

        boundary()
        await self.entrance.enter(request.id)
        try:
            token, logprob = await prefill(self.machine, member, boundary)
        finally:
            self.entrance.leave()
        if member.take(token) and not deliver(token, logprob):
            return
        boundary()
        await self.cohorts[request.placement].live(member, deliver)

    # -- scheduling ----------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        reason = request.preempted or ""
        if not self.entrance.turn_away(request.id, Preempted(reason)):
            self.cohorts[request.placement].preempt(request.id, reason)

    def _wake(self) -> None:
        self.cohorts[Placement.NORMAL].wake()

    def _repace(self) -> None:
        machine = self.machine
        others = self.cohorts[Placement.NORMAL].members > 0 or self.entrance.inside is not None
        costs = machine.costs.view(self.cohorts[Placement.OFFLOAD].members, others=others)
        pace = self.kernel.pace(costs)
        if pace != machine.pace:
            machine.pace = pace
            machine.costs.repaced()
            self.instruments.emit("pace_changed", pace)

    # -- end -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel what runs and give everything back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            await settle(*tasks)
        finally:
            for cohorts in self.cohorts.values():
                await cohorts.ended()
            await self.outer.drained()
            for lane in self.kernel.lanes:
                lane.close()
            await give_back([self.parts], self.worker)


async def give_back(made: Sequence[Parts], worker: Worker) -> None:
    """Close what was built, on the threads that it wants."""
    try:
        for parts in made:
            await parts.transfer.close()
    finally:
        try:
            for parts in made:
                await worker.run(parts.executor.close)
        finally:
            await worker.close()
            for parts in made:
                parts.fast.close()
                parts.slow.close()


def _token_id(token: Any) -> int:
    try:
        return operator.index(token)
    except TypeError:
        raise PromptError(f"{token!r} is no token id; give whole numbers") from None


def _check_ids(ids: Sequence[int], vocab: int) -> None:
    outside = [token for token in ids if not 0 <= token < vocab]
    if outside:
        raise PromptError(f"token id {outside[0]} is outside the vocabulary 0…{vocab - 1}")
