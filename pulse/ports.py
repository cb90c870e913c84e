"""The contracts between the kernel and its plugins.

Tensors are the plugins' business: `Any` in a signature is a value that one plugin hands to
another and that the kernel only passes on. Each port names the thread its methods run on:
*loop* is the event loop and must not block, *compute* is the worker of the compute lane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from pulse.types import (
    Batch,
    Demand,
    Geometry,
    Operation,
    Pace,
    Placed,
    Placement,
    SamplingParams,
    SelectionView,
    StepCosts,
    TransferPlan,
    TransferReport,
)

__all__ = [
    "AdmissionRule",
    "AdmissionView",
    "Arbiter",
    "BlockStore",
    "Instrument",
    "KVCache",
    "ModelExecutor",
    "Sampler",
    "SelectionPolicy",
    "TextDecoder",
    "Tokenizer",
    "TransferEngine",
]


@runtime_checkable
class TextDecoder(Protocol):
    """Turns a stream of token ids into text, one request's worth."""

    def push(self, token: int) -> str:
        """Text that `token` completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """Text that was held back, when no token follows."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Runs on the loop for short texts, on compute for prompts."""

    stop_ids: frozenset[int]
    has_chat_template: bool

    def encode(self, prompt: str | Sequence[dict[str, str]], *, chat: bool) -> list[int]:
        """Token ids of a text, or of chat messages through the model's chat template.

        A text with ``chat=True`` is one user message. Raises PromptError where the model has no
        chat template.
        """

    def decoder(self) -> TextDecoder:
        """A fresh incremental decoder."""


@runtime_checkable
class BlockStore(Protocol):
    """One tier's arena: a fixed number of equally large slots, allocated and freed by number.

    The arena is ``[planes, slots, units, unit]``: a slot number is valid in every plane (the slow
    tier has a plane per growing layer, so one slot holds a block of all of them; the fast tier has
    one plane), and a slot is ``units`` equal parts (one, or one per KV head). A *unit id* is
    ``(plane * slots + slot) * units + part``.

    Bytes are counted here, not by hope: `peak_bytes` never exceeds `limit_bytes`. Allocation runs
    on the loop; `read` and `write` run on the worker threads of transfer engines, several at a
    time on disjoint units.
    """

    kind: str
    description: str
    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    slots: int
    planes: int
    units: int
    unit_bytes: int

    def allocate(self, count: int) -> Any:
        """`count` free slot numbers, in ascending runs where possible. Raises StoreError."""

    def free(self, slots: Any) -> None:
        """Give slots back. Raises StoreError for a slot that is not allocated."""

    def reserve(self, count: int) -> None:
        """Fast tier: count bytes kept beside the slots (digests) in the limit. Or StoreError."""

    def release(self, count: int) -> None:
        """Fast tier: count reserved bytes no more."""

    def read(self, units: Any, out: Any) -> int:
        """Copy units into `out`, a byte buffer of ``[len(units), unit_bytes]``.

        Returns the number of contiguous pieces read. Raises TransferError, and ChecksumError for
        a unit whose bytes are not those written.
        """

    def write(self, units: Any, data: Any) -> int:
        """Copy ``[len(units), unit_bytes]`` bytes into units; the pieces written are returned."""

    def close(self) -> None:
        """Give the memory or the file back. Idempotent."""


@runtime_checkable
class TransferEngine(Protocol):
    """Moves units between stores. The work itself happens elsewhere than on the loop.

    `recall` and `write_back` return an awaitable that ends only when no byte of the plan can move
    any more, also when it is cancelled or fails: whoever awaited it may reuse the slots. A plan
    with no units is valid.

    eager: whether calling `recall` starts the transfer at once and may be done from any thread,
        once it has been called on the loop: the awaitable is a future of that loop. The worker of
        the compute lane then submits a recall as soon as it has selected, and nobody waits for the
        submission (PulseInfer, zero-sync submission). Where it is False, calling is done on the
        loop and a coroutine is good enough.
    """

    eager: bool

    def supports(self, source: BlockStore, target: BlockStore) -> bool:
        """Whether units can go from `source` to `target`."""

    def recall(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        """Slow tier to fast tier. Raises TransferError when awaited."""

    def write_back(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        """Fast tier to slow tier. Called on the loop. Raises TransferError when awaited."""

    async def close(self) -> None:
        """Wait for what is under way and end the engine's threads. Idempotent."""


@runtime_checkable
class SelectionPolicy(Protocol):
    """Chooses which middle blocks attention reads. All methods run on compute.

    per_head: whether each KV head selects for itself; otherwise one selection serves them all.
    exhaustive: whether all blocks are selected whatever the budget is.
    late: whether `update` for the prompt must come after `observe` (the policy learns from the
        prompt's last queries what to keep); the prompt's keys are then streamed once more.
    """

    per_head: bool
    exhaustive: bool
    late: bool

    def digest_bytes(self, blocks: int) -> int:
        """Fast-tier bytes kept for a sequence of `blocks` blocks, all layers together."""

    def open(self, sequence: str, blocks: int) -> None:
        """Make room for a sequence of at most `blocks` blocks."""

    def close(self, sequence: str) -> None:
        """Forget a sequence. Idempotent."""

    def observe(self, layer: int, sequence: str, mass: Any) -> None:
        """Middle attention mass of the prompt's last queries, ``[kv_heads]`` float32.

        Called once per growing layer at the end of prefill, if `late`.
        """

    def update(self, layer: int, sequence: str, first: int, keys: Any) -> None:
        """Keys of newly sealed blocks, ``[blocks, kv_heads, block, head_dim]``, from id `first`."""

    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        """Middle blocks to read: ``[sequences, groups, <= top_k]`` integers, -1 for none.

        `query` is ``[sequences, q_heads, head_dim]`` after RoPE; `groups` is `kv_heads` if
        `per_head`, else 1. Order is free, duplicates are read once.
        """


class Sampler(Protocol):
    """What the draws of one request depend on.

    Drawing changes nothing: a step that is repeated, because something in it failed, draws the
    same token again.
    """

    def take(self, token: int) -> None:
        """The draw counts: the next one comes after `token`. On the loop."""


@runtime_checkable
class ModelExecutor(Protocol):
    """The arithmetic of a model, in pieces that can be interleaved. Methods run on compute.

    A *state* is what `embed` returns: one batch's activations and metadata. The kernel keeps it
    while other cohorts compute, and drops it after `sample`.
    """

    geometry: Geometry
    tokenizer: Tokenizer
    device: str
    fast_store: str
    """Name of the store plugin that makes the fast tier for this device."""

    def cache(self, **options: Any) -> KVCache:
        """The KV cache that this executor's attention reads; stores, policy and KVConfig are
        given by `pulse.engine.assembly`."""

    def embed(self, batch: Batch) -> Any:
        """Start a step: the state before layer 0."""

    def qkv(self, states: Sequence[Any], layer: int) -> Sequence[Any]:
        """Project and rotate, all states in one pass over the weights.

        The query of each state is returned, ``[tokens, q_heads, head_dim]``.
        """

    def predict(self, state: Any, layer: int) -> Any:
        """An estimate of the query that `qkv` will return for `layer`, one layer ahead of it.

        Made from the activations before the layer in between has run (InfiniGen); valid after
        `qkv` of ``layer - 1``. Nothing is stored.
        """

    def attend_prefix(self, state: Any, layer: int, piece: Any) -> None:
        """Prefill: attend to a piece of the prefix that has landed; partial results are merged."""

    def attend(self, states: Sequence[Any], layer: int, milestone: Callable[[], None]) -> None:
        """Attention over what `KVCache.place` laid out, then FFN in one pass over the weights.

        Several states are those of merged cohorts. `milestone` is called when attention is done
        and the FFN is not: the point at which the next operation may be chosen (PulseInfer,
        semi-synchronous detection).
        """

    def mass(self, state: Any, layer: int) -> Any:
        """Middle attention mass of the chunk's last queries, ``[kv_heads]`` float32.

        Valid after `attend` of the same layer, for an offloaded sequence whose policy is late.
        """

    def sample(self, state: Any, samplers: Sequence[Sampler]) -> list[tuple[int, float]]:
        """A token and its log-probability per sequence; `samplers` come from `sampler`."""

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """What one request's draws depend on: its parameters, its seed, its history."""

    def close(self) -> None:
        """Give the weights back. Idempotent."""


@runtime_checkable
class KVCache(Protocol):
    """Block tables, hot sets and residency of all sequences, for one executor.

    `open` and `close` run on the loop, the rest on compute. The bytes live in two `BlockStore`s.
    """

    def demand(self, tokens: int, placement: Placement) -> Demand:
        """Bytes per tier for a sequence of `tokens` tokens."""

    def open(self, request: str, tokens: int, placement: Placement) -> Any:
        """Take the slots for a sequence of `tokens` tokens. Raises StoreError.

        An offloaded one never grows beyond them, a normal one does with `grow`.

        The handle has an attribute `chunk`: prompt tokens that one prefill chunk of it may have.
        """

    def grow(self, sequence: Any, tokens: int) -> None:
        """Take the slots that a normal sequence lacks to hold `tokens` tokens. On the loop.

        Nothing to do for an offloaded one, which took all at `open`. Raises StoreError, and
        nothing has changed then.
        """

    def close(self, sequence: Any) -> None:
        """Give all slots back; nothing may be in flight for them. Idempotent."""

    def place(self, state: Any, layer: int, selection: Any) -> Placed:
        """Lay out what attention of `layer` reads and store the state's new keys and values.

        Plans the block table from the selection (None: no middle block was selected, or all are
        resident anyway), gives the missing blocks slots and returns the recall that fills them.
        Raises SelectionError for a block that may not be selected.
        """

    def prefetch(self, state: Any, layer: int, selection: Any) -> TransferPlan | None:
        """Give missing blocks of a predicted selection slots in `layer`; the recall is returned.

        Called before `place` of the same layer and step, for offload cohorts. None where nothing
        is missing, or where no slots can be given that do not serve another layer. The blocks
        count as resident for `place`, so attention waits for this recall, and what `place` asks
        for is recalled only once this one has ended.
        """

    def prefix(self, state: Any, layer: int) -> Sequence[tuple[Any, TransferPlan | None]]:
        """Prefill of an offloaded sequence: pieces of the prefix to stream, in order.

        Consecutive pieces land in different slots, so a piece may be recalled while the one
        before it is attended to; not more than one ahead. They may land in slots of later
        layers: the write-backs of the chunk before have ended.
        """

    def digest(self, state: Any, layer: int, piece: Any) -> None:
        """Show the policy the keys of a piece that has landed (late policies)."""

    def seal(self, state: Any, layer: int) -> TransferPlan | None:
        """Blocks that the state filled in `layer`, as a write-back, or None.

        The policy is shown their keys. ``layer=-1`` asks for all growing layers at once (after a
        decode step).
        """


class AdmissionView(Protocol):
    """What an admission rule may ask of the engine at a step boundary."""

    @property
    def fast_free(self) -> int:
        """Bytes free in the fast tier."""

    @property
    def slow_free(self) -> int:
        """Bytes free in the slow tier."""

    @property
    def fast_limit(self) -> int:
        """Bytes of the fast tier."""

    @property
    def slow_limit(self) -> int:
        """Bytes of the slow tier."""

    def demand(self, tokens: int, placement: Placement) -> Demand:
        """Bytes per tier for a request of `tokens` tokens in all."""


@runtime_checkable
class AdmissionRule(Protocol):
    """Says at a step boundary how waiting requests start. Runs on the loop."""

    def admit(self, waiting: Sequence[int], view: AdmissionView) -> Sequence[Placement | None]:
        """A placement for each waiting request, or None to let it wait.

        `waiting` holds the total tokens (prompt + max_tokens) of each request in order of
        arrival. What does not fit is left waiting by the engine whatever the rule says.
        """


@runtime_checkable
class Arbiter(Protocol):
    """Picks the compute lane's next operation. Runs on the loop, must be fast."""

    def choose(
        self, waiting: Sequence[Operation], in_flight: Sequence[Operation]
    ) -> Operation | Sequence[Operation] | None:
        """One of `waiting` (never empty), or None to hold the lane until something ends.

        Several operations of kind ``layer``, not of prefill and all of the same layer, are
        computed as one, with a single pass over the weights. `in_flight` are the operations now
        running on any lane. The kernel overrules None when nothing is in flight.
        """

    def pace(self, costs: StepCosts) -> Pace:
        """How offloaded sequences step from here on. Asked at the boundaries of their steps."""


class Instrument:
    """Watches the kernel. Override what you need; what is not overridden costs nothing.

    Methods run on the loop. One that raises is logged and the instrument is removed. Times are
    seconds of the engine's clock.
    """

    def operation_submitted(self, operation: Operation) -> None:
        """An operation waits for its lane."""

    def operation_started(self, operation: Operation) -> None:
        """The lane runs it."""

    def operation_milestone(self, operation: Operation) -> None:
        """It reached its decision milestone."""

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        """It is over; `operation.status` is done, failed, cancelled or late."""

    def selection(self, layer: int, selected: int, missed: int) -> None:
        """A layer of an offload cohort selected that many units and missed so many of them."""

    def step_started(self, cohort: str, requests: tuple[str, ...]) -> None:
        """A cohort begins a decode step with these members."""

    def step_ended(self, cohort: str, requests: tuple[str, ...]) -> None:
        """The step is over; its members may change now."""

    def pace_changed(self, pace: Pace) -> None:
        """The arbiter changed how offloaded sequences step."""

    def request_submitted(self, request: str, prompt_tokens: int) -> None:
        """A request arrived."""

    def request_admitted(self, request: str, placement: Placement) -> None:
        """It got its slots; prefill follows. Again after it was preempted."""

    def request_preempted(self, request: str, reason: str) -> None:
        """It gave its slots back and waits to be admitted again; what it said is kept."""

    def prefill_progress(self, request: str, done: int, total: int) -> None:
        """So many of its prompt tokens are computed."""

    def token(self, request: str, index: int) -> None:
        """It produced its index-th token."""

    def quarantined(self, request: str, transfers: int) -> None:
        """So many transfers of it are late; its slots cannot be reused before they end (then 0)."""

    def request_ended(self, request: str, reason: str) -> None:
        """It is over: nothing more is said of it, and its slots are free or in quarantine."""
