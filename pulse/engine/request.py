"""One request from arrival to its end, and the stream that its owner reads."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pulse.engine.text import TextBuffer
from pulse.errors import RequestError, RequestFailed
from pulse.types import Completion, FinishReason, Placement, SamplingParams, Token, Usage

__all__ = ["Request", "Stream"]

Prompt = str | Sequence[int] | Sequence[dict[str, str]]


class Request:
    """What the engine knows of a request. Times are seconds of the loop's clock."""

    def __init__(
        self,
        id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        chat: bool,
        now: float,
        priority: int = 0,
        deadline: float = math.inf,
    ) -> None:
        self.id = id
        self.priority = priority
        self.deadline = deadline
        self.overtaken = 0
        """Later requests that were admitted before it."""
        self.placed = False
        """Whether its placement is settled: it stays the same if the request starts again."""
        self.preempted: str | None = None
        """Why it has to give its slots back."""
        self.preemptions = 0
        self.recomputed = False
        self.sampler: Any = None
        self.prompt = prompt
        self.params = params
        self.chat = chat
        self.prompt_ids: list[int] = []
        self.total = 0
        self.placement = Placement.NORMAL
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.arrived = now
        self.admitted = self.first = self.last = math.nan
        self.buffer: TextBuffer | None = None
        self.stop_ids: frozenset[int] = frozenset()
        self.ready: deque[Token] = deque()
        self._changed = asyncio.Event()

    @property
    def rank(self) -> tuple[int, int]:
        """Who comes first when there is not room for all: priority, then order of arrival."""
        return -self.priority, int(self.id)

    def deliver(self, token: int, logprob: float, now: float) -> bool:
        """Take a sampled token; says whether the request goes on."""
        assert self.buffer is not None
        if math.isnan(self.first):
            self.first = now
        self.last = now
        self.token_ids.append(token)
        ends = token in self.stop_ids and not self.params.ignore_eos
        text = "" if ends else self.buffer.push(token)
        if ends or self.buffer.stopped:
            self.reason = FinishReason.STOP
        elif len(self.token_ids) >= self.total - len(self.prompt_ids):
            self.reason = FinishReason.LENGTH
        if self.reason is not None:
            text += self.buffer.flush()
        self.texts.append(text)
        self.ready.append(Token(token, text, len(self.token_ids) - 1, logprob))
        self._changed.set()
        return self.reason is None

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Nothing follows. An error that is not the request's own is wrapped in RequestFailed."""
        if error is not None and not isinstance(error, RequestError):
            failed = RequestFailed(f"request {self.id} failed: {error}")
            failed.__cause__ = error
            error = failed
        self.reason = self.reason or reason
        self.error = self.error or error
        self._changed.set()

    async def changed(self) -> None:
        """Wait for the next token or the end."""
        await self._changed.wait()
        self._changed.clear()

    def completion(self) -> Completion:
        """The request's result as it stands."""
        count = len(self.token_ids)
        return Completion(
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.reason or FinishReason.CANCELLED,
            usage=Usage(len(self.prompt_ids), count),
            placement=self.placement,
            ttft_s=self.first - self.arrived,
            tpot_s=(self.last - self.first) / (count - 1) if count > 1 else math.nan,
            prefill_s=self.first - self.admitted,
        )


class Stream:
    """The tokens of one request, as an async iterator of `Token`.

    Leaving early is safe: `aclose()`, ``async with stream:`` or cancelling the task that reads
    end the request and return once its slots are free. A stream that is dropped while unread is
    cancelled when it is collected.
    """

    def __init__(
        self, request: Request, task: asyncio.Task[None], orphaned: Callable[[], Any]
    ) -> None:
        self._request = request
        self._task = task
        self._orphaned = orphaned

    @property
    def id(self) -> str:
        """The request's id, as instruments see it."""
        return self._request.id

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Token:
        """The next token. Raises what the request failed with, after the tokens it produced."""
        request = self._request
        while not request.ready:
            if self._task.done():
                self._raise()
                raise StopAsyncIteration
            try:
                await request.changed()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        return request.ready.popleft()

    async def result(self) -> Completion:
        """Read to the end and return the whole completion. Raises what the request failed with."""
        async for _ in self:
            pass
        return self._request.completion()

    def completion(self) -> Completion:
        """What there is so far."""
        return self._request.completion()

    async def aclose(self) -> None:
        """Cancel the request if it has not ended; returns when nothing of it is left."""
        self._task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not self._task.done():
            try:
                await asyncio.wait([self._task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._task.done():
            self._orphaned()

    def _raise(self) -> None:
        error, self._request.error = self._request.error, None
        if error is not None:
            raise error
