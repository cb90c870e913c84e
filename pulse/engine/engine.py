"""The engine: the one object that a service embeds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any

from pulse.engine.assembly import Parts, assemble
from pulse.engine.config import EngineConfig
from pulse.engine.request import Prompt, Request, Stream
from pulse.engine.text import TextBuffer
from pulse.errors import CapacityError, EngineClosed, PromptError
from pulse.kernel.cohort import Cohort
from pulse.kernel.instruments import Instruments
from pulse.kernel.lanes import Kernel
from pulse.kernel.steps import Machine, Member, settle
from pulse.kernel.worker import Worker
from pulse.memory.sizes import format_bytes
from pulse.plugins import Plugins
from pulse.ports import Instrument
from pulse.types import Demand, FinishReason, KVConfig, Placement, SamplingParams, Work

__all__ = ["Engine"]


class Engine:
    """Decodes with a KV cache that need not fit in fast memory. An async context manager.

        async with pulse.Engine(model=PATH, select="solohead", fast_tier="64MiB") as engine:
            async for token in engine.generate("Once upon a time", max_tokens=8):
                print(token.text, end="")

    Opening loads the model off the event loop; closing cancels what runs and returns when no
    slot, task or thread is left. Works on asyncio and on uvloop, one engine per loop.

    model: a Hugging Face directory, a GGUF file, or ``org/name`` on the Hugging Face hub.
    select: selection policy, which middle blocks attention reads ("solohead", "headwise",
        "sink-window", "full").
    transfer: transfer engine between the tiers ("staged", "torch-copy").
    admit: admission rule, which requests are offloaded ("threshold", "threshold:TOKENS").
    schedule: arbiter of the compute lane ("irq", "lockstep").
    executor: model executor ("torch").
    fast_tier: hard limit of the fast tier, in bytes or like "64MiB": KV slots and digests.
    slow_tier: "host" or "disk:PATH"; PATH is a file to create or a directory.
    slow_limit: hard limit of the slow tier; ten times the fast tier by default, in host memory at
        most half of the machine's.
    block, budget, sink, local, chunk, hot_factor: see `pulse.KVConfig`.
    dtype: "float32", "bfloat16" or "auto"; device: "cpu", "cuda" or "auto".
    threads: CPU threads of the compute lane; None leaves the library's default.
    instruments: `pulse.Instrument` objects that watch the kernel.
    plugins: a `pulse.Plugins`, to add plugins that are not installed packages.
    worker: makes the worker of the compute lane from its name; for tests on virtual time.

    Every plugin parameter takes a name or an object that fulfils the port in `pulse.ports`.
    Opening raises ConfigError, ModelError or StoreError.
    """

    def __init__(
        self,
        model: Any,
        *,
        select: Any = "solohead",
        transfer: Any = "staged",
        admit: Any = "threshold",
        schedule: Any = "irq",
        executor: Any = "torch",
        fast_tier: str | int = "1GiB",
        slow_tier: Any = "host",
        slow_limit: str | int | None = None,
        block: int = 16,
        budget: int = 2048,
        sink: int = 16,
        local: int = 128,
        chunk: int = 512,
        hot_factor: float = 1.5,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        instruments: Iterable[Instrument] = (),
        plugins: Plugins | None = None,
        worker: Callable[[str], Worker] = Worker,
    ) -> None:
        self.config = EngineConfig.make(
            model=model,
            select=select,
            transfer=transfer,
            admit=admit,
            schedule=schedule,
            executor=executor,
            fast_tier=fast_tier,
            slow_tier=slow_tier,
            slow_limit=slow_limit,
            dtype=dtype,
            device=device,
            threads=threads,
            kv=KVConfig(block, budget, sink, local, chunk, hot_factor),
        )
        self.instruments = Instruments(instruments)
        self._plugins = plugins or Plugins()
        self._worker = worker
        self._ids = itertools.count(1)
        self._running: _Running | None = None
        self._closing: asyncio.Task[None] | None = None
        self._state = "new"

    # -- life --------------------------------------------------------------------------------

    async def __aenter__(self) -> Engine:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def open(self) -> None:
        """Load the model and take the tiers. Raises ConfigError, ModelError or StoreError."""
        if self._state != "new":
            raise EngineClosed(f"this engine is {self._state}; make a new one")
        self._state = "open"
        worker = self._worker("pulse-compute")
        made: list[Parts] = []  # filled even if this is cancelled while the worker assembles
        try:
            await worker.run(lambda: made.append(assemble(self.config, self._plugins)))
            if self._state != "open":
                raise EngineClosed("the engine was closed while it opened")
            self._running = _Running(self.config, made[0], worker, self.instruments)
        finally:
            if self._running is None:
                self._state = "closed"
                await _to_the_end(_give_back(made, worker))

    async def aclose(self) -> None:
        """Cancel what runs and give everything back. Idempotent, cannot be cut short."""
        self._state = "closed"
        running, self._running = self._running, None
        if running is not None:
            self._closing = asyncio.create_task(running.close(), name="pulse-close")
        if self._closing is not None:
            await settle(self._closing)
            await self._closing

    # -- requests ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        **sampling: Any,
    ) -> Stream:
        """Start a request and return the stream of its tokens.

        prompt: text, token ids, or chat messages (dicts with "role" and "content").
        params: a `SamplingParams`, or its fields as keyword arguments.
        chat: put a text through the model's chat template as one user message; chat messages
            always go through it.

        Raises SamplingError and EngineClosed at once; reading the stream raises PromptError,
        CapacityError (in RequestFailed) and whatever else ended the request.
        """
        if self._running is None:
            raise EngineClosed("the engine is not open: use `async with Engine(...)`, or open()")
        if params is None:
            params = SamplingParams(**sampling)
        elif sampling:
            raise TypeError("give either params or its fields, not both")
        return self._running.start(str(next(self._ids)), prompt, params, bool(chat))

    @property
    def parts(self) -> Parts:
        """The resolved plugins and tiers of an open engine. Raises EngineClosed."""
        if self._running is None:
            raise EngineClosed("the engine is not open")
        return self._running.parts


class _Running:
    """An open engine: its requests, its cohorts and the outer scheduler."""

    def __init__(
        self, config: EngineConfig, parts: Parts, worker: Worker, instruments: Instruments
    ) -> None:
        self.config = config
        self.parts = parts
        self.worker = worker
        self.instruments = instruments
        self.kernel = Kernel(parts.arbiter, instruments)
        self.machine = Machine(
            self.kernel,
            worker,
            parts.executor,
            parts.cache,
            parts.policy,
            parts.transfer,
            config.kv,
        )
        self.cohorts = {
            Placement.NORMAL: Cohort(Work.NORMAL, self.machine),
            Placement.OFFLOAD: Cohort(Work.OFFLOAD, self.machine),
        }
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, unlike a set
        self._waiting: dict[str, tuple[Request, asyncio.Future[Any]]] = {}
        self._admitted = 0
        self._prefilling = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    # -- what admission rules see --------------------------------------------------------------

    @property
    def fast_limit(self) -> int:
        return self.parts.fast.limit_bytes

    @property
    def slow_limit(self) -> int:
        return self.parts.slow.limit_bytes

    @property
    def fast_free(self) -> int:
        return self.parts.fast.limit_bytes - self.parts.fast.used_bytes

    @property
    def slow_free(self) -> int:
        return self.parts.slow.limit_bytes - self.parts.slow.used_bytes

    def demand(self, tokens: int, placement: Placement) -> Demand:
        return self.parts.cache.demand(tokens, placement)

    # -- requests ------------------------------------------------------------------------------

    def start(self, id: str, prompt: Prompt, params: SamplingParams, chat: bool) -> Stream:
        request = Request(id, prompt, params, chat, self.kernel.now())
        task = asyncio.create_task(self._serve(request), name=f"pulse-request-{id}")
        self._tasks[task] = None

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.pop(task, None)
            request.end(FinishReason.CANCELLED)  # one cancelled before it ran has not said so

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
        if not any(self._fits(request, placement, empty=True) for placement in Placement):
            raise self._too_large(request)

    async def _encode(self, request: Request) -> list[int]:
        prompt = request.prompt
        if not isinstance(prompt, str) and not any(isinstance(part, dict) for part in prompt):
            vocab = self.parts.executor.geometry.vocab_size
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
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
        )

    async def _live(self, request: Request) -> None:
        sequence = await self._admission(request)
        try:
            member = Member(
                request.id,
                sequence,
                request.placement,
                request.prompt_ids,
                self.parts.executor.sampler(request.params, request.prompt_ids),
            )
            try:
                await self._decode(request, member)
            finally:
                await settle(*member.write_backs.values())
        finally:
            self.parts.cache.close(sequence)
            self._admitted -= 1
            self.boundary()

    async def _decode(self, request: Request, member: Member) -> None:
        async with self._prefilling:
            member.token, logprob = await self.machine.prefill(member)
        if self._deliver(request, member.token, logprob):
            await self.cohorts[request.placement].live(
                member, lambda token, logprob: self._deliver(request, token, logprob)
            )

    def _deliver(self, request: Request, token: int, logprob: float) -> bool:
        goes_on = request.deliver(token, logprob, self.kernel.now())
        self.instruments.emit("token", request.id, len(request.token_ids) - 1)
        return goes_on

    # -- outer scheduler -----------------------------------------------------------------------

    async def _admission(self, request: Request) -> Any:
        grant: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[request.id] = (request, grant)
        self.boundary()
        try:
            return await grant
        except asyncio.CancelledError:
            self._waiting.pop(request.id, None)
            if grant.done() and not grant.cancelled() and grant.exception() is None:
                self.parts.cache.close(grant.result())
                self._admitted -= 1
            self.boundary()
            raise

    def boundary(self) -> None:
        """Admit what the rule and the tiers allow, in order of arrival."""
        # Whoever was cancelled in this tick is still listed, but nobody awaits the grant.
        waiting = [entry for entry in self._waiting.values() if not entry[1].done()]
        if not waiting:
            return
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
                return  # no overtaking: a long request must not starve behind short ones
            self._admit(request, grant, placement)

    def _placements(self, waiting: Sequence[Request]) -> Sequence[Placement | None]:
        answer = self.parts.admission.admit([r.total for r in waiting], self)
        placements = [None if item is None else Placement(item) for item in answer]
        if len(placements) != len(waiting):
            raise ValueError(f"{len(placements)} placements for {len(waiting)} requests")
        if self._admitted == 0 and all(placement is None for placement in placements):
            placements[0] = Placement.NORMAL  # an idle engine may not refuse for ever
        return placements

    def _possible(self, request: Request, placement: Placement) -> Placement:
        if self._fits(request, placement, empty=True):
            return placement
        return Placement.OFFLOAD if placement is Placement.NORMAL else Placement.NORMAL

    def _fits(self, request: Request, placement: Placement, *, empty: bool = False) -> bool:
        demand = self.demand(request.total, placement)
        if empty:
            return demand.fast <= self.fast_limit and demand.slow <= self.slow_limit
        return demand.fast <= self.fast_free and demand.slow <= self.slow_free

    def _admit(self, request: Request, grant: asyncio.Future[Any], placement: Placement) -> None:
        del self._waiting[request.id]
        try:
            sequence = self.parts.cache.open(request.id, request.total, placement)
        except Exception as error:
            grant.set_exception(error)
            return
        request.placement = placement
        request.admitted = self.kernel.now()
        self._admitted += 1
        grant.set_result(sequence)
        self.instruments.emit("request_admitted", request.id, placement)

    def _too_large(self, request: Request) -> CapacityError:
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

    # -- end -----------------------------------------------------------------------------------

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            await settle(*tasks)
        finally:
            for cohort in self.cohorts.values():
                await cohort.ended()
            for lane in self.kernel.lanes:
                lane.close()
            await _give_back([self.parts], self.worker)


async def _give_back(made: Sequence[Parts], worker: Worker) -> None:
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


async def _to_the_end(coroutine: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(coroutine)
    await settle(task)
    await task


def _check_ids(ids: Sequence[int], vocab: int) -> None:
    outside = [token for token in ids if not 0 <= token < vocab]
    if outside:
        raise PromptError(f"token id {outside[0]} is outside the vocabulary 0…{vocab - 1}")
