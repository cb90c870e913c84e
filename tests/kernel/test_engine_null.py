"""The engine on the null model in virtual time: tokens, isolation, capacity, nothing left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel.harness import (
    Delays,
    FailingTransfer,
    Rig,
    Scattered,
    Setup,
    prompt_of,
    until_stop,
)

from pulse import Placement, SamplingParams, Stream
from pulse.engine.text import TextBuffer
from pulse.errors import (
    CapacityError,
    EngineClosed,
    PromptError,
    RequestFailed,
    SamplingError,
    TransferError,
)
from pulse.testing.loop import run
from pulse.testing.null import NullExecutor, NullPolicy, null_reference
from pulse.testing.nulltiers import NullTransfer
from pulse.types import Operation, TransferPlan

# -- drawing ------------------------------------------------------------------------------------


@st.composite
def setups(draw: Any) -> Setup:
    """An engine with drawn blocks, windows, policy, arbiter and durations."""
    block = draw(st.sampled_from([1, 2, 4, 5]))
    sink = block * draw(st.integers(0, 2))
    local = block * draw(st.integers(0, 3))
    delays = st.builds(Delays, st.sampled_from(["none", "even", "random"]), st.integers(0, 99))
    return Setup(
        block=block,
        sink=sink,
        local=local,
        budget=sink + local + block * draw(st.integers(1, 8)),
        chunk=block * draw(st.integers(1, 6)),
        layers=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from([NullPolicy, Scattered]))(),
        transfer=NullTransfer(draw(delays)),
        admit=f"threshold:{draw(st.sampled_from([0, 24, 10_000]))}",
        schedule=draw(st.sampled_from(["irq", "irq:1", "lockstep"])),
        compute=draw(delays),
    )


def requests(most: int = 6) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Lengths of prompts and of answers."""
    return st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=most)


SEEDS = st.none() | st.integers(0, 2**32)


async def check_all(rig: Rig, lengths: Sequence[tuple[int, int]]) -> None:
    await asyncio.gather(
        *(rig.check(prompt_of(prompt, i), count) for i, (prompt, count) in enumerate(lengths))
    )


# -- tokens -------------------------------------------------------------------------------------


@given(setups(), requests(), SEEDS)
@settings(max_examples=150)
def test_tokens_are_those_of_the_reference(
    setup: Setup, lengths: list[tuple[int, int]], seed: int | None
) -> None:
    async def main() -> None:
        async with Rig(setup) as rig:
            await check_all(rig, lengths)

    run(main(), seed=seed)


def test_within_the_budget_sparse_is_exact() -> None:
    setup = Setup(policy=Scattered(), budget=64, admit="threshold:0")

    async def main() -> None:
        async with Rig(setup) as rig:
            completion = await rig.generate(prompt_of(40), 20).result()
            assert completion.placement is Placement.OFFLOAD
            assert list(completion.token_ids) == null_reference(prompt_of(40), 20)

    run(main())


def test_the_hot_set_churns_and_tokens_stay_right() -> None:
    # Under irq the null model is predicted so well that little is missed.
    setup = Setup(policy=Scattered(), budget=20, admit="threshold:0", block=2, schedule="lockstep")

    async def main() -> None:
        async with Rig(setup) as rig:
            await rig.check(prompt_of(60), 40)
            assert rig.watch.missed > 100

    run(main())


@given(setups(), requests(4), st.integers(0, 2**32))
@settings(max_examples=30)
def test_the_same_seed_gives_the_same_timeline(
    setup: Setup, lengths: list[tuple[int, int]], seed: int
) -> None:
    def timeline() -> Any:
        transfer = NullTransfer(Delays("random", seed))
        drawn = replace(setup, transfer=transfer, compute=Delays("random", seed))

        async def main() -> Any:
            async with Rig(drawn) as rig:
                streams = [rig.generate(prompt_of(n, i), m) for i, (n, m) in enumerate(lengths)]
                await streams[0].result()
                await rig.engine.aclose()  # while the others run
            return rig.watch.timeline

        return run(main(), seed=seed)

    assert timeline() == timeline()


def test_text_chat_and_stop_token() -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            texts = [rig.engine.generate("hello", max_tokens=5)]
            texts.append(rig.engine.generate([{"role": "user", "content": "hello"}], max_tokens=5))
            for stream in texts:
                tokens = [token async for token in stream]
                ids = [token.id for token in tokens]
                assert ids == until_stop(null_reference(list(b"hello"), 5))
                assert [token.index for token in tokens] == list(range(len(ids)))
                assert "".join(t.text for t in tokens) == "".join(f"{i} " for i in ids)

    run(main())


def test_the_models_stop_token_ends_a_request_and_is_no_text() -> None:
    salt = next(s for s in range(999) if 256 in null_reference(prompt_of(9, s), 30)[1:])
    expected = until_stop(null_reference(prompt_of(9, salt), 30))

    async def main() -> None:
        async with Rig(Setup()) as rig:
            stopped = await rig.generate(prompt_of(9, salt), 30, ignore_eos=False).result()
            assert list(stopped.token_ids) == expected
            assert stopped.finish_reason == "stop"
            assert stopped.text == "".join(f"{i} " for i in expected[:-1])
            await rig.check(prompt_of(9, salt), 30)

    run(main())


def test_a_stop_string_ends_a_request() -> None:
    tokens = null_reference(prompt_of(9), 30)
    stop = f"{tokens[4]} {tokens[5]} "

    async def main() -> None:
        async with Rig(Setup()) as rig:
            done = await rig.generate(prompt_of(9), 30, stop=[stop]).result()
            assert list(done.token_ids) == tokens[:6]
            assert done.finish_reason == "stop"
            assert done.text == "".join(f"{i} " for i in tokens[:4])

    run(main())


def test_a_request_may_fill_the_model_and_one_token_is_enough() -> None:
    async def main() -> None:
        async with Rig(Setup(max_positions=40)) as rig:
            done = await rig.generate(prompt_of(30), 1, max_tokens=None).result()
            assert list(done.token_ids) == null_reference(prompt_of(30), 10)
            await rig.check(prompt_of(39), 1)
            await rig.check(prompt_of(1), 39)

    run(main())


# -- leaving early -------------------------------------------------------------------------------

HOW = st.sampled_from(["aclose", "reader", "drop", "engine"])
WHEN = st.tuples(st.just("step"), st.integers(0, 400)) | st.tuples(
    st.just("time"), st.floats(0, 0.2).map(lambda t: round(t, 4))
)


class Leaver:
    """Readers of several streams, one of whom leaves in a drawn way at a drawn moment."""

    def __init__(self, rig: Rig, lengths: Sequence[tuple[int, int]], victim: int) -> None:
        self.rig, self.lengths, self.victim = rig, lengths, victim % len(lengths)
        self.prompts = [prompt_of(n, i) for i, (n, _) in enumerate(lengths)]
        self.reading = False
        self.seen: list[int] = []
        self.stream: Stream | None = None
        self.reader: asyncio.Task[None] | None = None

    async def go(self, how: str, when: tuple[str, Any]) -> None:
        others = [
            asyncio.create_task(self._other(i))
            for i in range(len(self.lengths))
            if i != self.victim
        ]
        self.stream = self.rig.generate(self.prompts[self.victim], self.lengths[self.victim][1])
        if how != "drop":
            self.reader = asyncio.create_task(self._read(self.stream))
        await self._moment(when, others)
        await self._leave(how)
        assert all(await asyncio.gather(*others)) or how == "engine"
        self._check_prefix()

    async def _other(self, index: int) -> bool:
        """Whether it came to its end; what it produced is right anyway."""
        try:
            stream = self.rig.generate(self.prompts[index], self.lengths[index][1])
        except EngineClosed:
            return False
        done = await stream.result()
        tokens, count = list(done.token_ids), self.lengths[index][1]
        expected = self.rig.setup.expected(self.prompts[index], count, done.placement)
        assert tokens == expected[: len(tokens)]
        assert done.finish_reason == ("length" if len(tokens) == count else "cancelled")
        return len(tokens) == count

    async def _read(self, stream: Stream) -> None:
        self.reading = True
        async for token in stream:
            self.seen.append(token.id)

    async def _moment(self, when: tuple[str, Any], others: list[Any]) -> None:
        loop: Any = asyncio.get_running_loop()
        kind, at = when
        if kind == "step":
            come = loop.create_future()
            loop.call_at_step(loop.steps + at, lambda: come.done() or come.set_result(None))
            assert self.stream is not None
            busy = [*others, self.stream._task]
            await asyncio.wait([come, *busy], return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(at)

    async def _leave(self, how: str) -> None:
        assert self.stream is not None
        if how == "drop":
            self.stream = None
            await asyncio.sleep(0.5)
            return
        assert self.reader is not None
        if how == "reader":
            self.reader.cancel()
        elif how == "aclose":
            await self.stream.aclose()
            assert self.stream._task.done()
        else:
            await self.rig.engine.aclose()
        await asyncio.wait([self.reader])
        if not self.reading:  # cancelled before it began, it cannot have ended the request
            await self.stream.aclose()
        assert self.stream._task.done()

    def _check_prefix(self) -> None:
        prompt, count = self.prompts[self.victim], self.lengths[self.victim][1]
        setup = self.rig.setup
        possible = [setup.expected(prompt, count, placement) for placement in Placement]
        assert any(tokens[: len(self.seen)] == self.seen for tokens in possible)


@given(setups(), requests(4), st.integers(0, 3), HOW, WHEN, SEEDS)
@settings(max_examples=300)
def test_leaving_at_any_moment_harms_nobody(
    setup: Setup,
    lengths: list[tuple[int, int]],
    victim: int,
    how: str,
    when: tuple[str, Any],
    seed: int | None,
) -> None:
    async def main() -> None:
        async with Rig(setup) as rig:
            await Leaver(rig, lengths, victim).go(how, when)

    run(main(), seed=seed)


@given(
    setups(),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=3, max_size=6),
    st.lists(st.integers(0, 300), min_size=2, max_size=5),
    SEEDS,
)
@settings(max_examples=150)
def test_many_leave_when_slots_are_scarce(
    setup: Setup, lengths: list[tuple[int, int]], steps: list[int], seed: int | None
) -> None:
    scarce = fitting_one(setup, lengths)

    async def main() -> None:
        async with Rig(scarce) as rig:
            loop: Any = asyncio.get_running_loop()
            streams = [rig.generate(prompt_of(n, i), m) for i, (n, m) in enumerate(lengths)]
            for stream, step in zip(streams, steps, strict=False):
                loop.call_at_step(loop.steps + step, stream._task.cancel)
            for i, stream in enumerate(streams):
                done = await stream.result()
                if i >= len(steps):
                    rig.check_tokens(prompt_of(lengths[i][0], i), lengths[i][1], done)

    run(main(), seed=seed)


def test_a_stream_in_a_cycle_is_cancelled_when_it_is_collected() -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            cycle: list[Any] = [rig.generate(prompt_of(30), 2000)]
            cycle.append(cycle)
            await asyncio.sleep(0.2)
            assert rig.parts.fast.used_bytes > 0
            del cycle
            gc.collect()
            await asyncio.sleep(0.2)
            await rig.check_idle()

    run(main())


def test_leaving_a_stream_block_ends_the_request() -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            async with rig.generate(prompt_of(30), 500) as stream:
                async for token in stream:
                    if token.index == 3:
                        break
            assert rig.parts.fast.used_bytes == 0
            assert stream._request.completion().finish_reason == "cancelled"

    run(main())


def test_a_request_cancelled_before_its_first_step_does_not_hang_its_reader() -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            stream = rig.generate(prompt_of(5), 5)
            stream._task.cancel()
            assert [token async for token in stream] == []

    run(main())


def test_closing_the_engine_ends_streams_and_refuses_more() -> None:
    async def main() -> None:
        async with Rig(Setup(admit="threshold:80", fast_slots=60)) as rig:
            streams = [rig.generate(prompt_of(10 + 8 * i, i), 60) for i in range(5)]
            readers = [asyncio.create_task(stream.result()) for stream in streams]
            await asyncio.sleep(0.05)
            closers = [asyncio.create_task(rig.engine.aclose()) for _ in range(3)]
            await asyncio.wait(closers, return_when=asyncio.FIRST_COMPLETED)
            rig.check_stores_closed()
            await asyncio.gather(*closers)
            for done in await asyncio.gather(*readers):
                assert done.finish_reason == "cancelled"
            with pytest.raises(EngineClosed):
                rig.generate(prompt_of(3), 3)
            with pytest.raises(EngineClosed):
                await rig.engine.open()
            with pytest.raises(EngineClosed):
                _ = rig.engine.parts

    run(main())


@pytest.mark.parametrize("cancels", [1, 2, 3])
def test_closing_the_engine_cannot_be_cut_short(cancels: int) -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            reader = asyncio.create_task(rig.generate(prompt_of(40), 60).result())
            await asyncio.sleep(0.05)
            closer = asyncio.create_task(rig.engine.aclose())
            for _ in range(cancels):
                await asyncio.sleep(0)
                closer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closer
            rig.check_stores_closed()
            await reader

    run(main())


# -- opening -------------------------------------------------------------------------------------


class Opened(NullExecutor):
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_opening_that_is_cancelled_gives_everything_back() -> None:
    async def main() -> None:
        executor = Opened()
        engine = Setup(executor=executor, compute=lambda: 5.0).engine()
        opening = asyncio.create_task(engine.open())
        await asyncio.sleep(1)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert executor.closed == 1
        with pytest.raises(EngineClosed):
            engine.generate([1])
        await engine.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_opening_that_fails_gives_everything_back() -> None:
    async def main() -> None:
        executor = Opened()
        engine = Setup(executor=executor, fast_slots=1).engine()
        with pytest.raises(CapacityError, match="too small"):
            await engine.open()
        assert executor.closed == 1
        await engine.aclose()

    run(main())


def test_an_engine_that_is_not_open_says_so() -> None:
    async def main() -> None:
        engine = Setup().engine()
        with pytest.raises(EngineClosed, match="async with"):
            engine.generate([1])
        with pytest.raises(EngineClosed):
            _ = engine.parts
        await engine.aclose()
        with pytest.raises(EngineClosed, match="closed"):
            await engine.open()

    run(main())


def test_closing_while_opening_leaves_nothing_open() -> None:
    async def main() -> None:
        executor = Opened()
        engine = Setup(executor=executor, compute=lambda: 5.0).engine()
        opening = asyncio.create_task(engine.open())
        await asyncio.sleep(1)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await opening
        with pytest.raises(EngineClosed):
            engine.generate([1])
        assert executor.closed == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


# -- capacity ------------------------------------------------------------------------------------


def fitting_one(setup: Setup, lengths: Sequence[tuple[int, int]]) -> Setup:
    """The same engine with room for the largest of the requests, however it is placed."""
    executor = NullExecutor(setup.layers)
    build: Any = setup.engine()
    cache = executor.cache(
        fast=_Slots(8 * setup.block),
        slow=_Slots(setup.layers * 8 * setup.block),
        policy=setup.policy,
        config=build.config.kv,
    )
    demands = [cache.demand(n + m, placement) for n, m in lengths for placement in Placement]
    return replace(
        setup,
        fast_slots=max(demand.fast for demand in demands) // (8 * setup.block),
        slow_slots=max(demand.slow for demand in demands) // (setup.layers * 8 * setup.block),
    )


class _Slots:
    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes


@given(setups(), requests(), SEEDS)
def test_a_fast_tier_for_one_serves_all(
    setup: Setup, lengths: list[tuple[int, int]], seed: int | None
) -> None:
    scarce = fitting_one(setup, lengths)

    async def main() -> None:
        async with Rig(scarce) as rig:
            await check_all(rig, lengths)

    run(main(), seed=seed)


def test_a_request_that_does_not_fit_as_normal_is_offloaded() -> None:
    setup = Setup(policy=Scattered(), budget=24, admit="threshold:10000", fast_slots=12)

    async def main() -> None:
        async with Rig(setup) as rig:
            done = await rig.check(prompt_of(60), 10)
            assert done.placement is Placement.OFFLOAD

    run(main())


def test_a_request_that_can_never_fit_fails_alone() -> None:
    async def main() -> None:
        async with Rig(Setup(fast_slots=40, slow_slots=20)) as rig:
            small = asyncio.create_task(rig.check(prompt_of(10), 10))
            stream = rig.generate(prompt_of(400), 10)
            with pytest.raises(RequestFailed, match="does not fit") as caught:
                await stream.result()
            assert isinstance(caught.value.__cause__, CapacityError)
            await small
            await rig.check(prompt_of(30), 10)

    run(main())


def test_a_long_request_is_not_starved_by_short_ones() -> None:
    async def main() -> None:
        async with Rig(Setup(fast_slots=24, admit="threshold:10000")) as rig:
            order: list[str] = []

            async def read(name: str, length: int) -> None:
                await rig.check(prompt_of(length, length), 8)
                order.append(name)

            first = asyncio.create_task(read("first", 8))
            await asyncio.sleep(0.001)
            long = asyncio.create_task(read("long", 38))
            short = [asyncio.create_task(read("short", 4)) for _ in range(8)]
            await asyncio.gather(first, long, *short)
            assert order[:2] == ["first", "long"]

    run(main())


def test_when_the_one_that_blocks_leaves_the_next_are_admitted_at_once() -> None:
    async def main() -> None:
        async with Rig(Setup(fast_slots=24, admit="threshold:10000")) as rig:
            running = asyncio.create_task(rig.check(prompt_of(8), 30))
            await asyncio.sleep(0.01)
            blocking = rig.generate(prompt_of(38), 8)
            await asyncio.sleep(0.01)
            short = asyncio.create_task(rig.check(prompt_of(2), 2))
            await asyncio.sleep(0.01)
            await blocking.aclose()
            await short
            assert not running.done()
            await running

    run(main())


# -- failing transfers ---------------------------------------------------------------------------

VICTIM = "2"
"""The id of the request that fails: the second one."""


def of_victim(kind: str) -> Callable[[str, TransferPlan], bool]:
    return lambda what, plan: what == kind and VICTIM in plan.requests


async def fails_alone(rig: Rig, cause: type[BaseException], *, length: int = 30) -> None:
    """Three requests; the second fails with `cause`, the others are right."""
    streams = [rig.generate(prompt_of(length, i), 25) for i in range(3)]
    results = await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)
    for i in (0, 2):
        assert not isinstance(results[i], BaseException), results[i]
        rig.check_tokens(prompt_of(length, i), 25, results[i])
    assert isinstance(results[1], RequestFailed), results[1]
    assert isinstance(results[1].__cause__, cause), repr(results[1].__cause__)
    assert f"request {VICTIM} failed" in str(results[1])


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["recall", "write_back"])
@pytest.mark.parametrize("policy", [NullPolicy, Scattered])
@pytest.mark.parametrize("error", [TransferError, OSError])
def test_a_transfer_that_always_fails_fails_its_request_alone(
    seed: int | None, late: bool, kind: str, policy: Any, error: Any
) -> None:
    transfer = FailingTransfer(of_victim(kind), late=late, error=error)
    setup = Setup(policy=policy(), budget=24, transfer=transfer, admit="threshold:0")

    async def main() -> None:
        async with Rig(setup) as rig:
            await fails_alone(rig, TransferError)

    run(main(), seed=seed)
    assert transfer.failed >= (2 if kind == "write_back" else 1)


class Nth:
    """Says of the n-th plan of a kind, in prefill or in decode, that it fails."""

    def __init__(self, kind: str, decoding: bool, which: int) -> None:
        self.kind, self.decoding, self.which, self.count = kind, decoding, which, 0
        self.rig: Rig

    def __call__(self, what: str, plan: TransferPlan) -> bool:
        events = self.rig.watch.requests
        decoding = all("prefilled" in events[request] for request in plan.requests)
        if (what, decoding) != (self.kind, self.decoding):
            return False
        self.count += 1
        return self.count == self.which


def check_repeated(
    nth: Nth, late: bool = False, policy: Any = Scattered, seed: int | None = None
) -> None:
    transfer = FailingTransfer(nth, late=late)
    setup = Setup(policy=policy(), budget=24, transfer=transfer, admit="threshold:0")

    async def main() -> None:
        async with Rig(setup) as rig:
            nth.rig = rig
            await check_all(rig, [(30, 12), (9, 20), (40, 12)])

    run(main(), seed=seed)
    assert transfer.failed == 1 or nth.count < nth.which


@given(
    st.sampled_from([("recall", True), ("write_back", True), ("write_back", False)]),
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from([NullPolicy, Scattered]),
    SEEDS,
)
def test_a_transfer_that_fails_once_is_repeated(
    what: tuple[str, bool], which: int, late: bool, policy: Any, seed: int | None
) -> None:
    check_repeated(Nth(*what, which), late, policy, seed)


@pytest.mark.parametrize("which", [1, 2, 5])
def test_a_recall_of_the_prefix_that_fails_once_is_repeated(which: int) -> None:
    check_repeated(Nth("recall", False, which))


def test_recalls_that_fail_late_in_decode_fail_their_request_alone() -> None:
    class Late:
        def __call__(self, what: str, plan: TransferPlan) -> bool:
            decoding = rigs[0].watch.tokens.get(VICTIM, [])
            return what == "recall" and VICTIM in plan.requests and len(decoding) > 3

    rigs: list[Rig] = []
    setup = Setup(
        policy=Scattered(), budget=20, transfer=FailingTransfer(Late()), admit="threshold:0"
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            rigs.append(rig)
            await fails_alone(rig, TransferError, length=40)
            assert len(rig.watch.tokens[VICTIM]) >= 4

    run(main())


# -- failing plugins -----------------------------------------------------------------------------


class BrokenError(ZeroDivisionError):
    """What a broken plugin raises."""


class BrokenExecutor(NullExecutor):
    """Raises in one method whenever one request is in the batch, from its n-th call on."""

    def __init__(self, method: str, after: int, layers: int = 2) -> None:
        super().__init__(layers)
        self.method, self.after, self.calls = method, after, 0

    def _break(self, method: str, batch: Any) -> None:
        if method == self.method and any(s.request == VICTIM for s in batch.sequences):
            self.calls += 1
            if self.calls > self.after:
                raise BrokenError("a broken executor")

    def embed(self, batch: Any) -> Any:
        self._break("embed", batch)
        return super().embed(batch)

    def qkv(self, states: Any, layer: int) -> Any:
        for state in states:
            self._break("qkv", state.batch)
        return super().qkv(states, layer)

    def attend(self, states: Any, layer: int, milestone: Any) -> None:
        for state in states:
            self._break("attend", state.batch)
        super().attend(states, layer, milestone)

    def sample(self, state: Any, samplers: Any) -> Any:
        self._break("sample", state.batch)
        return super().sample(state, samplers)


@given(
    st.sampled_from(["embed", "qkv", "attend", "sample"]),
    st.integers(0, 20),
    st.sampled_from(["threshold:0", "threshold:24", "threshold:10000"]),
    st.sampled_from([NullPolicy, Scattered]),
    SEEDS,
)
def test_an_executor_that_raises_for_one_fails_that_one(
    method: str, after: int, admit: str, policy: Any, seed: int | None
) -> None:
    executor = BrokenExecutor(method, after)
    setup = Setup(executor=executor, admit=admit, policy=policy(), budget=24)

    async def main() -> None:
        async with Rig(setup) as rig:
            await fails_alone(rig, BrokenError)

    run(main(), seed=seed)


class BrokenPolicy(Scattered):
    """After a while it raises, or selects what there is not, for one request."""

    def __init__(self, how: str, after: int) -> None:
        super().__init__()
        self.how, self.after = how, after

    def select(self, layer: int, query: Any, view: Any) -> Any:
        selected = super().select(layer, query, view)
        if VICTIM not in view.sequences:
            return selected
        self.after -= 1
        if self.after >= 0:
            return selected
        if self.how == "raises":
            raise BrokenError("a broken policy")
        at = view.sequences.index(VICTIM)
        if self.how == "short":
            return selected[:at]
        selected[at] = [[10**6]]
        return selected


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("after", [0, 7, 20])
@pytest.mark.parametrize("how", ["raises", "short", "outside"])
def test_a_policy_that_is_broken_for_one_fails_that_one(
    how: str, after: int, seed: int | None
) -> None:
    setup = Setup(policy=BrokenPolicy(how, after), admit="threshold:0", budget=20, block=2)

    async def main() -> None:
        async with Rig(setup) as rig:
            await fails_alone(rig, Exception)

    run(main(), seed=seed)


class BrokenText(NullExecutor):
    """Its decoder raises for one request's tokens after a while."""

    def __init__(self) -> None:
        super().__init__()
        made = self.tokenizer.decoder
        count = iter(range(1, 100))

        def decoder() -> Any:
            plain, number = made(), next(count)
            push = plain.push

            def broken(token: int) -> str:
                if str(number) == VICTIM:
                    plain.seen = getattr(plain, "seen", 0) + 1  # type: ignore[attr-defined]
                    if plain.seen > 3:  # type: ignore[attr-defined]
                        raise BrokenError("a broken decoder")
                return push(token)

            plain.push = broken  # type: ignore[method-assign]
            return plain

        self.tokenizer.decoder = decoder  # type: ignore[method-assign]


@pytest.mark.parametrize("admit", ["threshold:0", "threshold:10000"])
def test_a_decoder_that_raises_fails_that_request(admit: str) -> None:
    async def main() -> None:
        async with Rig(Setup(executor=BrokenText(), admit=admit)) as rig:
            await fails_alone(rig, BrokenError)

    run(main())


class Rule:
    """An admission rule that answers what a function says."""

    def __init__(self, answer: Callable[[Sequence[int]], Any]) -> None:
        self.answer = answer

    def admit(self, waiting: Sequence[int], view: Any) -> Any:
        return self.answer(waiting)


def raises(_: Sequence[int]) -> Any:
    raise BrokenError("a broken rule")


@pytest.mark.parametrize("answer", [raises, lambda waiting: [], lambda waiting: 3])
def test_a_broken_rule_fails_requests_and_strands_none(answer: Any) -> None:
    async def main() -> None:
        async with Rig(Setup(admit=Rule(answer))) as rig:
            streams = [rig.generate(prompt_of(5, i), 5) for i in range(4)]
            for stream in streams:
                with pytest.raises(RequestFailed):
                    await stream.result()

    run(main())


def test_a_rule_that_breaks_later_spares_what_runs() -> None:
    def answer(waiting: Sequence[int]) -> Any:
        if max(waiting) > 20:
            raise BrokenError("too long for this rule")
        return [Placement.NORMAL] * len(waiting)

    async def main() -> None:
        async with Rig(Setup(admit=Rule(answer))) as rig:
            good = asyncio.create_task(rig.check(prompt_of(5), 10))
            await asyncio.sleep(0.004)
            with pytest.raises(RequestFailed) as caught:
                await rig.generate(prompt_of(30), 10).result()
            assert isinstance(caught.value.__cause__, BrokenError)
            await good
            await rig.check(prompt_of(6), 10)

    run(main())


def test_a_rule_that_admits_nobody_is_overruled_when_idle() -> None:
    async def main() -> None:
        rule = Rule(lambda waiting: [None] * len(waiting))
        async with Rig(Setup(admit=rule)) as rig:
            await check_all(rig, [(5, 5), (30, 5), (7, 5)])
            events = [e for _, who, e in rig.watch.timeline if who in "123"]
            assert events.count("admitted") == 3
            assert events.index("ended") < len(events) - 1 - events[::-1].index("admitted")

    run(main())


class BrokenArbiter:
    """Raises from its n-th choice on."""

    def __init__(self, after: int) -> None:
        self.left = after

    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Operation:
        self.left -= 1
        if self.left < 0:
            raise BrokenError("a broken arbiter")
        return waiting[-1]


@pytest.mark.parametrize("after", [0, 1, 10, 50])
def test_a_broken_arbiter_is_replaced(after: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Rig(Setup(schedule=BrokenArbiter(after))) as rig:
            await check_all(rig, [(5, 15), (30, 15), (40, 15)])

    run(main())
    assert "first come, first served" in caplog.text


@pytest.mark.parametrize("after", [0, 5])
def test_a_failing_cache_fails_the_request_that_it_opens(after: int) -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            cache, opened = rig.parts.cache, iter(range(100))
            original = cache.open

            def broken(request: str, tokens: int, placement: Placement) -> Any:
                if request == VICTIM and next(opened) >= 0:
                    raise BrokenError("a broken cache")
                return original(request, tokens, placement)

            cache.open = broken  # type: ignore[method-assign]
            await fails_alone(rig, BrokenError)

    run(main())


# -- what the user can get wrong -----------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 1.5},
        {"min_p": 1.0},
        {"repetition_penalty": 0},
        {"max_tokens": 0},
        {"max_tokens": 1.0},
        {"max_tokens": True},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [3]},
        {"seed": -1},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_sampling_parameters_are_checked_at_once(sampling: dict[str, Any]) -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            with pytest.raises(SamplingError, match=next(iter(sampling))):
                rig.engine.generate([1], **sampling)
            await rig.check(prompt_of(5), 5)

    run(main())


def test_params_or_fields_but_not_both() -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            with pytest.raises(TypeError):
                rig.engine.generate([1], SamplingParams(), max_tokens=3)
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            done = await rig.engine.generate([1, 2], params).result()
            assert list(done.token_ids) == null_reference([1, 2], 3)

    run(main())


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, 257], "257"),
        ([-1], "-1"),
        (list(range(64)), "64 tokens"),
        ("x" * 100, "100 tokens"),
    ],
    ids=["no text", "no ids", "over the vocabulary", "negative", "too long", "too long a text"],
)
def test_a_bad_prompt_is_told_when_reading_and_harms_nobody(prompt: Any, says: str) -> None:
    async def main() -> None:
        async with Rig(Setup(max_positions=64)) as rig:
            good = asyncio.create_task(rig.check(prompt_of(5), 20))
            stream = rig.engine.generate(prompt)
            with pytest.raises(PromptError, match=says):
                await stream.result()
            with pytest.raises(StopAsyncIteration):
                await stream.__anext__()
            await good

    run(main())


def test_instruments_see_the_life_of_a_request() -> None:
    async def main() -> list[str]:
        async with Rig(Setup(chunk=8, admit="threshold:0")) as rig:
            await rig.check(prompt_of(20), 6)
            assert rig.watch.tokens == {"1": list(range(6))}
            return rig.watch.requests["1"]

    seen = run(main())
    assert [e for e in seen if e != "progress"] == ["submitted", "admitted", "prefilled", "ended"]
    assert seen.count("progress") == 2


# -- stop strings --------------------------------------------------------------------------------


class Pieces:
    """A decoder whose tokens are indices of given pieces of text."""

    def __init__(self, pieces: Sequence[str], rest: str) -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return self.rest


def streamed(pieces: Sequence[str], rest: str, stops: tuple[str, ...]) -> tuple[list[str], bool]:
    buffer = TextBuffer(Pieces(pieces, rest), stops)
    out: list[str] = []
    for token in range(len(pieces)):
        out.append(buffer.push(token))
        if buffer.stopped:
            break
    out.append(buffer.flush())
    return out, buffer.stopped


AB = st.text("ab", max_size=4)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple)


def nested(stops: tuple[str, ...]) -> bool:
    return any(one != other and one in other for one in stops for other in stops)


@given(st.lists(AB, max_size=12), AB, STOPS)
@settings(max_examples=500)
def test_text_is_cut_where_a_stop_begins(
    pieces: list[str], rest: str, stops: tuple[str, ...]
) -> None:
    out, stopped = streamed(pieces, rest, stops)
    whole, text = "".join(pieces) + rest, "".join(out)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert stopped == any(stop in whole for stop in stops)
    if not stopped:
        assert text == whole
    else:
        assert any(whole.startswith(stop, len(text)) for stop in stops)
        if not nested(stops):
            assert len(text) == min(whole.find(stop) for stop in stops if stop in whole)


@given(st.text("ab", max_size=30), STOPS)
@settings(max_examples=300)
def test_text_that_cannot_be_a_stop_is_not_held_back(text: str, stops: tuple[str, ...]) -> None:
    buffer = TextBuffer(Pieces(text, ""), stops)
    sent = ""
    for end in range(1, len(text) + 1):
        sent += buffer.push(end - 1)
        if buffer.stopped:
            return
        held = text[len(sent) : end]
        if held:
            assert any(stop.startswith(held) for stop in stops)
        for size in range(1, end + 1):  # what was sent is not the beginning of a stop
            if any(s.startswith(text[end - size : end]) for s in stops):
                assert size <= len(held)
