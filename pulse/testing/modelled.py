"""A model of time alone: no values, only how long computations and recalls take.

The kernel runs on it in virtual time, so schedules can be compared on timings that are drawn from
a distribution, or measured on a machine that is not there. What it says is a property of the
schedule, never a measurement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pulse.kernel.worker import Landing
from pulse.ports import BlockStore
from pulse.testing.loop import InlineWorker
from pulse.testing.null import VOCAB, NullPolicy, NullSampler
from pulse.testing.nulltiers import NullStore
from pulse.types import (
    Batch,
    Demand,
    Geometry,
    KVConfig,
    Placed,
    Placement,
    SamplingParams,
    TransferPlan,
    TransferReport,
    Work,
)

__all__ = ["ModelledExecutor", "ModelledTransfer", "ModelledWorker", "Timing"]

UNITS = 64
"""Units that a sequence misses in a layer; a share of them is what a prediction missed."""


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds.

    pass_s, token_s: a layer of n tokens takes ``pass_s + n * token_s``, of which `attention` is
        before the decision milestone.
    recall_s: given request, position and layer, what recalling the misses of one sequence takes;
        recalls share one link.
    hit: share of a prediction that turns out right.
    """

    layers: int
    pass_s: float
    token_s: float
    recall_s: Callable[[str, int, int], float]
    hit: float = 0.8
    attention: float = 0.4


@dataclass
class _Spent:
    """What the function that runs now has cost so far."""

    seconds: float = 0.0
    milestones: list[tuple[float, Callable[[], None]]] = field(default_factory=list)


class ModelledWorker(InlineWorker):
    """Runs a function at once, and lets it end when what it cost has passed.

    intervals: when it was busy, as (start, end).
    """

    def __init__(self, name: str, executor: ModelledExecutor) -> None:
        super().__init__(name)
        self.intervals: list[tuple[float, float]] = []
        self._executor = executor

    def _next(self) -> None:
        assert self._loop is not None
        function, landing = self._jobs[0]
        spent = self._executor.spent = _Spent()
        try:
            outcome: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        now = self._loop.time()
        for after, milestone in spent.milestones:
            self._loop.call_later(after, milestone)
        self.intervals.append((now, now + spent.seconds))
        self._loop.call_later(spent.seconds, self._end, landing, outcome)

    def _end(self, landing: Landing[Any], outcome: tuple[Any, BaseException | None]) -> None:
        self._jobs.popleft()
        self._land(landing, *outcome)
        if self._jobs:
            self._next()


@dataclass(eq=False)
class _Sequence:
    request: str
    placement: Placement
    chunk: int = 1 << 30


@dataclass(eq=False)
class _State:
    batch: Batch
    ahead: set[int] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.batch.tokens))


class _Cache:
    """A `KVCache` that misses as much as its timing says, and takes no room."""

    def __init__(self, timing: Timing, fast: NullStore, slow: NullStore) -> None:
        self.timing, self.fast, self.slow = timing, fast, slow

    def demand(self, tokens: int, placement: Placement) -> Demand:
        return Demand(0, 0)

    def open(self, request: str, tokens: int, placement: Placement) -> _Sequence:
        return _Sequence(request, placement)

    def grow(self, sequence: _Sequence, tokens: int) -> None:
        pass

    def close(self, sequence: _Sequence) -> None:
        pass

    def place(self, state: _State, layer: int, selection: Any) -> Placed:
        if state.batch.work is not Work.OFFLOAD:
            return Placed(0, None)
        missed = UNITS
        if layer in state.ahead:
            missed = round(UNITS * (1 - self.timing.hit))
        return Placed(UNITS * len(state.batch.sequences), self._plan(state, layer, missed))

    def prefetch(self, state: _State, layer: int, selection: Any) -> TransferPlan | None:
        state.ahead.add(layer)
        return self._plan(state, layer, UNITS)

    def _plan(self, state: _State, layer: int, missed: int) -> TransferPlan | None:
        # A unit's id is the time it takes: plans can then be split, as the kernel does.
        seconds: list[float] = []
        for sequence, start in zip(state.batch.sequences, state.batch.starts, strict=True):
            seconds += [self.timing.recall_s(sequence.request, start, layer) / UNITS] * missed
        if not seconds:
            return None
        requests = tuple(sequence.request for sequence in state.batch.sequences)
        bounds = tuple(range(0, len(seconds) + 1, missed))
        return TransferPlan(
            self.slow, self.fast, seconds, seconds, len(seconds), 1, layer, requests, bounds
        )

    def prefix(self, state: _State, layer: int) -> Iterator[Any]:
        return iter(())

    def digest(self, state: _State, layer: int, piece: Any) -> None:
        pass

    def seal(self, state: _State, layer: int) -> None:
        return None


class ModelledTransfer:
    """A `TransferEngine` with one link, on which plans go one after the other."""

    eager = False

    def __init__(self) -> None:
        self._free = 0.0

    def supports(self, source: BlockStore, target: BlockStore) -> bool:
        """Between null stores."""
        return isinstance(source, NullStore) and isinstance(target, NullStore)

    def recall(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        """Takes what the plan's units take, once the link is free."""
        now, seconds = asyncio.get_running_loop().time(), sum(plan.source_units)
        self._free = max(self._free, now) + seconds
        report = TransferReport(plan.bytes, 1, seconds)
        return asyncio.sleep(self._free - now, report)

    def write_back(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        """There are none."""
        return self.recall(plan)

    async def close(self) -> None:
        """Nothing is under way."""


class _Tokenizer:
    stop_ids: frozenset[int] = frozenset()
    has_chat_template = False

    def encode(self, prompt: Any, *, chat: bool) -> list[int]:
        return [0] * len(prompt)

    def decoder(self) -> _Tokenizer:
        return self

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ModelledExecutor:
    """A `ModelExecutor` that only counts time."""

    device = "cpu"
    fast_store = "null"

    def __init__(self, timing: Timing) -> None:
        layers = timing.layers
        self.timing = timing
        self.spent = _Spent()
        self.geometry = Geometry(
            layers, 1, 1, 1, 1 << 30, VOCAB, "int", 4, (None,) * layers, "modelled"
        )
        self.tokenizer = _Tokenizer()

    def cache(
        self, *, fast: NullStore, slow: NullStore, policy: NullPolicy, config: KVConfig
    ) -> _Cache:
        """A cache without slots."""
        return _Cache(self.timing, fast, slow)

    def embed(self, batch: Batch) -> _State:
        """Takes no time."""
        return _State(batch)

    def qkv(self, states: Sequence[_State], layer: int) -> list[None]:
        """Counted with `attend`."""
        return [None] * len(states)

    def predict(self, state: _State, layer: int) -> None:
        """Takes no time."""

    def attend_prefix(self, state: _State, layer: int, piece: Any) -> None:
        """There is no prefix."""

    def attend(self, states: Sequence[_State], layer: int, milestone: Callable[[], None]) -> None:
        """One pass, and each token."""
        timing = self.timing
        seconds = timing.pass_s + timing.token_s * sum(state.tokens for state in states)
        self.spent.seconds += seconds
        self.spent.milestones.append((timing.attention * seconds, milestone))

    def mass(self, state: _State, layer: int) -> None:
        """Nothing to learn from."""

    def sample(self, state: _State, samplers: Sequence[Any]) -> list[tuple[int, float]]:
        """Always token 0."""
        return [(0, 0.0)] * len(state.batch.sequences)

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> NullSampler:
        """Nothing is drawn."""
        return NullSampler()

    def close(self) -> None:
        """Nothing to give back."""
