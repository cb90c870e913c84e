"""Frozen values that kernel, engine and plugins exchange. Nothing here holds a tensor."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pulse.errors import BudgetError, ConfigError, SamplingError

__all__ = [
    "Batch",
    "Completion",
    "Demand",
    "FinishReason",
    "Geometry",
    "KVConfig",
    "LaneName",
    "Operation",
    "Pace",
    "Placed",
    "Placement",
    "SamplingParams",
    "SelectionView",
    "StepCosts",
    "Token",
    "TransferPlan",
    "TransferReport",
    "Usage",
    "Work",
]


class Placement(enum.StrEnum):
    """Where the KV of a sequence lives (PulseInfer, IRQ: the two batches)."""

    NORMAL = "normal"
    """All KV in the fast tier; never recalls."""
    OFFLOAD = "offload"
    """Full KV in the slow tier, a hot set in the fast tier."""


class LaneName(enum.StrEnum):
    """The serial resources of an engine."""

    COMPUTE = "compute"
    RECALL = "recall"
    WRITE_BACK = "write_back"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Work(enum.StrEnum):
    """What a compute operation belongs to; arbiters rank by it."""

    NORMAL = "normal"
    OFFLOAD = "offload"
    PREFILL = "prefill"


@dataclass(frozen=True)
class Geometry:
    """The shape of a model as far as scheduling and KV memory are concerned.

    ``windows[layer]`` is the sliding window in tokens of that layer, or None where the layer
    attends to the whole context (its KV grows).
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    vocab_size: int
    dtype: str
    element_bytes: int
    windows: tuple[int | None, ...]
    identity: str = ""

    @cached_property
    def growing(self) -> tuple[int, ...]:
        """The layers whose KV grows with the context, in order."""
        return tuple(i for i, window in enumerate(self.windows) if window is None)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """The layers that keep a ring of their sliding window, in order."""
        return tuple(i for i, window in enumerate(self.windows) if window is not None)

    def slot_bytes(self, block: int) -> int:
        """Bytes of one slot: K and V of `block` tokens for all KV heads of one layer."""
        return self.kv_heads * 2 * block * self.head_dim * self.element_bytes


@dataclass(frozen=True, slots=True)
class KVConfig:
    """How KV memory is cut and how much of it attention may read.

    Defaults are those of PulseInfer (section "Defaults"): blocks of 16 tokens and a budget of
    2,048 tokens, of which 16 sink and 128 local tokens are always read.

    block: tokens of a KV block.
    budget: tokens that attention of an offloaded sequence may read in a growing layer, rounded up
        to whole blocks; a context within the budget is read whole.
    sink, local: tokens at the start and the end of the context that are always read, in whole
        blocks; the block being written counts as local.
    chunk: prompt tokens that one prefill chunk computes at most.
    hot_factor: middle slots of the hot set, as a multiple of the middle blocks in the budget;
        fewer where the fast tier has no room for as many.
    """

    block: int = 16
    budget: int = 2048
    sink: int = 16
    local: int = 128
    chunk: int = 512
    hot_factor: float = 1.5

    def __post_init__(self) -> None:
        for name in ("block", "budget", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of tokens, at least 1")
        for name in ("sink", "local"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a whole number of tokens, 0 or more")
        if not (math.isfinite(self.hot_factor) and self.hot_factor >= 1.0):
            raise ConfigError(f"hot_factor={self.hot_factor!r} must be a number of at least 1.0")
        least = self.sink + self.local + self.block
        if self.budget < least:
            raise BudgetError(
                f"budget={self.budget} is below sink + local + one block = "
                f"{self.sink} + {self.local} + {self.block} = {least} tokens; "
                f"raise the budget to at least {least} or lower sink or local"
            )

    @property
    def sink_blocks(self) -> int:
        """Blocks that hold the sink."""
        return self.blocks(self.sink)

    @property
    def local_blocks(self) -> int:
        """Blocks of the local window, the one being written included; at least that one."""
        return max(1, self.blocks(self.local))

    @property
    def middle_blocks(self) -> int:
        """Middle blocks that a policy may select (the paper's top-k)."""
        return max(1, self.blocks(self.budget) - self.sink_blocks - self.local_blocks)

    @property
    def table_blocks(self) -> int:
        """Blocks that attention reads at most in a growing layer of an offloaded sequence."""
        return self.sink_blocks + self.middle_blocks + self.local_blocks

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Greedy when `temperature` is 0.

    max_tokens: new tokens at most; None generates up to the model's limit.
    stop: strings that end the request; they are not part of its text.
    seed: draws are reproducible per request when given.
    ignore_eos: go on past the model's end-of-sequence token.
    forced: token ids taken in place of the first draws (teacher forcing); they count as generated,
        with their own log-probabilities.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def bad(name: str, want: str) -> SamplingError:
            return SamplingError(f"{name}={getattr(self, name)!r} must be {want}")

        if self.max_tokens is not None and (
            not isinstance(self.max_tokens, int)
            or isinstance(self.max_tokens, bool)
            or self.max_tokens < 1
        ):
            raise bad("max_tokens", "a whole number of at least 1, or None")
        if not (_number(self.temperature) and self.temperature >= 0):
            raise bad("temperature", "a finite number, 0 (greedy) or more")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise bad("top_k", "a whole number, 0 (off) or more")
        if not (_number(self.top_p) and 0 < self.top_p <= 1):
            raise bad("top_p", "a number over 0 and at most 1")
        if not (_number(self.min_p) and 0 <= self.min_p < 1):
            raise bad("min_p", "a number from 0 to below 1")
        if not (_number(self.repetition_penalty) and self.repetition_penalty > 0):
            raise bad("repetition_penalty", "a finite number over 0")
        if not isinstance(self.stop, tuple):
            object.__setattr__(self, "stop", _stops(self.stop))
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise bad("stop", "strings that are not empty")
        object.__setattr__(self, "forced", tuple(self.forced))
        if any(not isinstance(token, int) or token < 0 for token in self.forced):
            raise bad("forced", "token ids, 0 or more")
        if self.seed is not None and (not isinstance(self.seed, int) or self.seed < 0):
            raise bad("seed", "a whole number, 0 or more, or None")


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    try:
        return tuple(stop)
    except TypeError:
        raise SamplingError(f"stop={stop!r} must be a string or strings") from None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token as a stream yields it.

    text: what this token adds to the text; empty while a character or a possible stop string is
        incomplete. The texts of a stream, joined, are the text of the completion.
    """

    id: int
    text: str
    index: int
    logprob: float = math.nan


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. Durations are seconds.

    ttft_s: arrival to first token; tpot_s: mean time per output token after the first (NaN for
    a single token).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    placement: Placement
    ttft_s: float
    tpot_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes per tier that a request needs until it ends."""

    fast: int
    slow: int


@dataclass(slots=True, eq=False)
class Operation:
    """One unit of work on a lane.

    `kind` says what it does (``embed``, ``layer``, ``prefix``, ``recall``, ``write_back``, …),
    `work` whom it serves, `cohort` names the cohort or, in prefill, the request. Times are seconds
    of the engine's clock; NaN until they happen.

    requests, shares: the requests that it serves, and of a transfer the bytes of each.
    priority: the highest among its requests. deadline: the earliest among its requests; of a
        transfer, when it counts as late.
    cause: the id of the operation that led to this one: the compute operation that selected what
        a recall brings, the recall that a compute operation waited for; -1 where there is none.
    leader: the id of the operation that this one was merged into; -1 where it ran by itself.
    skipped: grants that went to others while this one waited.
    decided: set once the decision milestone is passed.
    status: waiting, running, and at the end done, failed, cancelled or late.
    """

    id: int
    kind: str
    lane: LaneName
    work: Work
    cohort: str
    layer: int = -1
    requests: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    bytes: int = 0
    blocks: int = 0
    priority: int = 0
    deadline: float = math.inf
    cause: int = -1
    leader: int = -1
    submitted: float = math.nan
    started: float = math.nan
    ended: float = math.nan
    skipped: int = 0
    decided: bool = False
    status: str = "waiting"


@dataclass(frozen=True, slots=True)
class Pace:
    """How offloaded sequences step: in how many cohorts, and whether recalls are predicted.

    cohorts: offload cohorts to spread the sequences over; each costs a pass over the weights and
        computes while the others wait for their blocks.
    predict: recall one layer ahead on a selection made with an estimated query (InfiniGen), and
        correct on arrival.
    """

    cohorts: int = 1
    predict: bool = False


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What decode steps of offload cohorts have cost lately, in seconds.

    steps: offload steps observed so far. sequences: offloaded sequences that decode now.
    others: whether anything else (a normal cohort, a prefill) wants the compute lane.
    pass_s, sequence_s: a layer's compute, as ``pass_s + sequence_s * sequences``.
    recall_s: per growing layer, what recalling a whole selection's misses takes per sequence.
    hit: share of the predicted misses that turned out right.
    step_s: seconds per step (one token of every sequence) at the current pace; NaN if unknown.
    """

    steps: int
    sequences: int
    others: bool
    pass_s: float
    sequence_s: float
    recall_s: tuple[float, ...]
    hit: float
    step_s: float


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Units to copy from one store to another, in any order; no unit occurs twice in `target`.

    A unit is a slot's share of one selection group: the whole slot when all KV heads share a
    selection, one KV head's part when each head selects for itself. `source_units` and
    `target_units` are equally long integer arrays of the plugins' kind (numpy int64 for the
    first-party ones). `bounds[i]:bounds[i + 1]` are the units of the i-th of `requests`, so that
    a failure can be told to the request it belongs to.
    """

    source: Any
    target: Any
    source_units: Any
    target_units: Any
    units: int
    unit_bytes: int
    layer: int = -1
    requests: tuple[str, ...] = ()
    bounds: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that the plan moves."""
        return self.units * self.unit_bytes

    def part(self, index: int) -> TransferPlan:
        """The units of the `index`-th request alone."""
        low, high = self.bounds[index], self.bounds[index + 1]
        return TransferPlan(
            self.source,
            self.target,
            self.source_units[low:high],
            self.target_units[low:high],
            high - low,
            self.unit_bytes,
            self.layer,
            (self.requests[index],),
            (0, high - low),
        )


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a transfer did: bytes moved, pieces (contiguous runs) they moved in, seconds taken."""

    bytes: int
    pieces: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placed:
    """What attention of one layer will read: how many units, and the recall of those missing."""

    selected: int
    recall: TransferPlan | None


@dataclass(slots=True, eq=False)
class Batch:
    """What one cohort computes next: tokens ``starts[i] … starts[i] + len(tokens[i]) - 1`` of each.

    A decode step has one token per sequence; a prefill chunk has one sequence. `sequences` are
    the handles that `KVCache.open` returned. `sample` tells whether logits of each sequence's
    last token are wanted.
    """

    sequences: Sequence[Any]
    tokens: Sequence[Sequence[int]]
    starts: Sequence[int]
    work: Work
    sample: bool = True


@dataclass(frozen=True, slots=True)
class SelectionView:
    """What a selection policy may choose from, for the sequences of one cohort in one layer.

    sequences: the request ids, in the order of the query's rows.
    middle: per sequence the half-open range of block ids ``(low, high)`` open to selection: all
        sealed blocks between the sink and the local window.
    top_k: blocks that may be selected per sequence (and per KV head, if the policy is per head).
    """

    sequences: tuple[str, ...]
    middle: tuple[tuple[int, int], ...]
    top_k: int
