"""The engine: the one object that a service embeds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from types import TracebackType
from typing import Any

from pulse.engine.assembly import Parts, assemble
from pulse.engine.config import EngineConfig
from pulse.engine.request import Prompt, Stream
from pulse.engine.running import Running, give_back
from pulse.errors import EngineClosed, SamplingError
from pulse.kernel.instruments import Instruments
from pulse.kernel.member import settle
from pulse.kernel.worker import Worker
from pulse.plugins import Plugins
from pulse.ports import Instrument
from pulse.types import KVConfig, SamplingParams

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
    schedule: arbiter of the compute lane ("irq", "fair", "lockstep", "prefetch-one").
    executor: model executor ("torch").
    fast_tier: hard limit of the fast tier, in bytes or like "64MiB": KV slots and digests.
    slow_tier: "host" or "disk:PATH"; PATH is a file to create or a directory.
    slow_limit: hard limit of the slow tier; ten times the fast tier by default, in host memory at
        most half of the machine's.
    block, budget, sink, local, chunk, hot_factor: see `pulse.KVConfig`.
    dtype: "float32", "bfloat16" or "auto"; device: "cpu", "cuda" or "auto".
    threads: CPU threads of the compute lane; None leaves one core to the event loop.
    cores: CPU cores that the engine's threads keep to, so that they never take another from the
        event loop (Linux); None for any that are free.
    max_waiting: requests that may wait to be admitted; one more is refused with Overloaded.
    transfer_timeout_s: seconds after which a transfer is late: it is tried once more, then its
        requests are computed again, then they fail. None waits for ever.
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
        cores: Iterable[int] | None = None,
        max_waiting: int = 1024,
        transfer_timeout_s: float | None = 30.0,
        instruments: Iterable[Instrument] = (),
        plugins: Plugins | None = None,
        worker: Callable[[str], Worker] | None = None,
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
            cores=cores,
            max_waiting=max_waiting,
            transfer_timeout_s=transfer_timeout_s,
            kv=KVConfig(block, budget, sink, local, chunk, hot_factor),
        )
        self.instruments = Instruments(instruments)
        self._plugins = plugins or Plugins()
        self._worker = worker or partial(Worker, cores=self.config.cores)
        self._ids = itertools.count(1)
        self._running: Running | None = None
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
            self._running = Running(self.config, made[0], worker, self.instruments)
        finally:
            if self._running is None:
                self._state = "closed"
                await _to_the_end(give_back(made, worker))

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
        priority: int = 0,
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Start a request and return the stream of its tokens.

        prompt: text, token ids, or chat messages (dicts with "role" and "content").
        params: a `SamplingParams`, or its fields as keyword arguments.
        chat: put a text through the model's chat template as one user message; chat messages
            always go through it.

        priority: higher ones are admitted first and may preempt lower ones, within bounds.
        deadline_s: seconds from now in which the answer is wanted; the "fair" arbiter serves the
            earliest deadline first. Nothing is cut off when it has passed.

        Raises SamplingError, Overloaded and EngineClosed at once; reading the stream raises
        PromptError, CapacityError (in RequestFailed) and whatever else ended the request.
        """
        if self._running is None:
            raise EngineClosed("the engine is not open: use `async with Engine(...)`, or open()")
        if params is None:
            params = SamplingParams(**sampling)
        elif sampling:
            raise TypeError("give either params or its fields, not both")
        if not isinstance(priority, int):
            raise SamplingError(f"priority={priority!r} must be a whole number")
        if deadline_s is not None and not deadline_s > 0:
            raise SamplingError(f"deadline_s={deadline_s!r} must be seconds above 0")
        self._running.check_room()
        return self._running.start(
            str(next(self._ids)), prompt, params, bool(chat), priority, deadline_s
        )

    @property
    def parts(self) -> Parts:
        """The resolved plugins and tiers of an open engine. Raises EngineClosed."""
        if self._running is None:
            raise EngineClosed("the engine is not open")
        return self._running.parts


async def _to_the_end(coroutine: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(coroutine)
    await settle(task)
    await task
