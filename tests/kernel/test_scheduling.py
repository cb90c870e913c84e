"""What the kernel does beyond one batch: many cohorts, growth, preemption, deadlines, merging."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from kernel.harness import Rig, Scattered, Setup, prompt_of
from kernel.test_engine_null import BrokenError, BrokenExecutor

from pulse import Engine, Landing, Placement, Worker
from pulse.errors import Overloaded, RequestFailed, SamplingError, TransferTimeout
from pulse.testing import FaultyTransfer, NullExecutor, NullTransfer, run
from pulse.testing.loop import VirtualLoop
from pulse.types import Operation, Pace, StepCosts, TransferPlan, TransferReport, Work
from pulse_schedule import IRQ, Fair

ALL_NORMAL = "threshold:10000"
ALL_OFFLOAD = "threshold:0"


def events(rig: Rig, name: str) -> list[str]:
    """The requests that something happened to."""
    return [who for _, who, event in rig.watch.timeline if event == name]


def operations(rig: Rig) -> list[Operation]:
    return [operation for operation, _ in rig.watch.operations.values()]


# -- growth and preemption -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_two_that_fill_the_pool_and_need_one_block_more_both_end(seed: int) -> None:
    # Seven blocks; one request holds four and the other three, and each needs one more.
    setup = Setup(layers=1, fast_slots=7, admit=ALL_NORMAL)

    async def main() -> None:
        async with Rig(setup) as rig:
            jobs = [(prompt_of(15, 1), 5), (prompt_of(11, 2), 5)]
            await asyncio.gather(*(rig.check(prompt, count) for prompt, count in jobs))
            assert events(rig, "preempted") == ["2"]

    run(main(), seed=seed)


@pytest.mark.parametrize("placement", [ALL_NORMAL, ALL_OFFLOAD, "threshold:30"])
@pytest.mark.parametrize("blocks", range(12, 30, 2))
def test_every_capacity_that_fits_one_makes_progress(blocks: int, placement: str) -> None:
    setup = Setup(
        fast_slots=2 * blocks, admit=placement, policy=Scattered(), budget=24, chunk=8, sink=4
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            jobs = [(prompt_of(3 + 5 * i, i), 40 - 5 * i) for i in range(6)]
            await asyncio.gather(*(rig.check(prompt, count) for prompt, count in jobs))

    run(main(), seed=blocks)


def test_higher_priority_takes_the_place_of_lower_and_both_are_right() -> None:
    setup = Setup(layers=1, fast_slots=8, admit=ALL_NORMAL)

    async def main() -> None:
        async with Rig(setup) as rig:
            low = asyncio.create_task(rig.check(prompt_of(20, 1), 10, priority=-1))
            await asyncio.sleep(0.012)
            await rig.check(prompt_of(20, 2), 10, priority=3)
            assert not low.done()
            await low
            assert events(rig, "preempted") == ["1"]

    run(main())


def test_lower_priority_is_not_pushed_aside_for_ever() -> None:
    setup = Setup(layers=1, fast_slots=8, admit=ALL_NORMAL)

    async def main() -> None:
        async with Rig(setup) as rig:
            low = asyncio.create_task(rig.check(prompt_of(20, 1), 10, priority=-1))
            urgent = 0
            while not low.done():  # there is always one more of higher priority
                urgent += 1
                await rig.check(prompt_of(20, urgent), 2, priority=1)
                assert urgent < 100
            await low
            assert events(rig, "preempted").count("1") <= 4

    run(main())


def test_waiting_requests_are_overtaken_within_a_bound() -> None:
    setup = Setup(layers=1, fast_slots=8, admit=ALL_NORMAL)

    async def main() -> None:
        async with Rig(setup) as rig:
            running = asyncio.create_task(rig.check(prompt_of(20, 1), 4, priority=1))
            await asyncio.sleep(0.001)
            low = asyncio.create_task(rig.check(prompt_of(20, 2), 2))
            await asyncio.sleep(0.001)
            high = [
                asyncio.create_task(rig.check(prompt_of(16, i), 2, priority=1)) for i in range(99)
            ]
            await low
            assert sum(task.done() for task in high) in range(60, 70)
            await asyncio.gather(running, *high)

    run(main())


def test_large_requests_do_not_starve_a_small_one() -> None:
    setup = Setup(layers=1, fast_slots=24, admit=ALL_NORMAL)

    async def main() -> None:
        async with Rig(setup) as rig:
            large = [asyncio.create_task(rig.check(prompt_of(60, i), 8)) for i in range(3)]
            await asyncio.sleep(0.001)
            small = asyncio.create_task(rig.check(prompt_of(4), 2))
            await asyncio.sleep(0.001)
            later = [asyncio.create_task(rig.check(prompt_of(60, i), 8)) for i in range(9)]
            await small
            assert not any(task.done() for task in later)
            await asyncio.gather(*large, *later)

    run(main())


# -- backpressure --------------------------------------------------------------------------------


def test_one_more_than_may_wait_is_refused_at_once() -> None:
    setup = Setup(layers=1, fast_slots=8, admit=ALL_NORMAL, options={"max_waiting": 2})

    async def main() -> None:
        async with Rig(setup) as rig:
            running = asyncio.create_task(rig.check(prompt_of(20, 1), 10))
            await asyncio.sleep(0.005)
            waiting = [asyncio.create_task(rig.check(prompt_of(20, i), 2)) for i in (2, 3)]
            await asyncio.sleep(0.001)
            with pytest.raises(Overloaded, match="2 requests wait already"):
                rig.generate(prompt_of(2), 1)
            await asyncio.gather(running, *waiting)
            await rig.check(prompt_of(2), 1)

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_who_has_its_answer_does_not_count_as_waiting(seed: int) -> None:
    setup = Setup(layers=1, fast_slots=8, admit=ALL_NORMAL, options={"max_waiting": 1})

    async def main() -> None:
        async with Rig(setup) as rig:
            for count in (1, 3):
                for _ in range(3):
                    await rig.generate(prompt_of(9), count).result()
                dropped = rig.generate(prompt_of(9), count)
                await dropped.aclose()

    run(main(), seed=seed)


@pytest.mark.parametrize("options", [{"priority": 1.5}, {"deadline_s": 0}, {"deadline_s": -1}])
def test_priority_and_deadline_are_checked(options: dict[str, Any]) -> None:
    async def main() -> None:
        async with Rig(Setup()) as rig:
            with pytest.raises(SamplingError, match=next(iter(options))):
                rig.generate(prompt_of(2), 1, **options)

    run(main())


@pytest.mark.parametrize("at", range(2, 1200, 23))
def test_64_clients_on_a_pool_for_4_all_dropped_at_once(at: int) -> None:
    # Each needs 6 of the 24 slots at its end.
    setup = Setup(fast_slots=24, admit="threshold:10" if at % 2 else ALL_NORMAL, chunk=8)

    async def main() -> None:
        async with Rig(setup) as rig:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            readers = [
                asyncio.create_task(rig.generate(prompt_of(6, i), 5).result()) for i in range(64)
            ]
            loop.call_at_step(loop.steps + at, lambda: [reader.cancel() for reader in readers])
            ended = await asyncio.gather(*readers, return_exceptions=True)
            for i, completion in enumerate(ended):
                if not isinstance(completion, BaseException):
                    rig.check_tokens(prompt_of(6, i), 5, completion)
            await rig.check(prompt_of(7), 5)

    run(main(), seed=at)


# -- deadlines of transfers ----------------------------------------------------------------------


def late(*which: int, request: str = "2", **options: Any) -> FaultyTransfer:
    faults = {(request, at): "late" for at in which}
    return FaultyTransfer(faults, late_s=options.pop("late_s", 5.0), **options)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_late_transfer_costs_nobody_a_token(at: int, eager: bool) -> None:
    setup = Setup(
        policy=Scattered(),
        budget=24,
        admit=ALL_OFFLOAD,
        transfer=late(at, eager=eager),
        options={"transfer_timeout_s": 1.0},
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            jobs = [rig.check(prompt_of(40, i), 25) for i in range(3)]
            await asyncio.gather(*jobs)
            statuses = [operation.status for operation in operations(rig)]
            assert statuses.count("late") == 1
            await asyncio.sleep(10)  # what was late has ended, and its slots are free

    run(main())


def test_a_transfer_that_is_late_again_and_again_fails_its_request_alone() -> None:
    setup = Setup(
        policy=Scattered(),
        budget=24,
        admit=ALL_OFFLOAD,
        transfer=late(*range(30, 500)),
        options={"transfer_timeout_s": 1.0},
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            streams = [rig.generate(prompt_of(40, i), 25) for i in range(3)]
            results = await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)
            assert isinstance(results[1], RequestFailed)
            assert isinstance(results[1].__cause__, TransferTimeout)
            for i in (0, 2):
                assert not isinstance(results[i], BaseException)
                rig.check_tokens(prompt_of(40, i), 25, results[i])
            await asyncio.sleep(20)

    run(main())


def test_slots_of_a_late_transfer_have_no_new_owner_before_it_ends() -> None:
    # Room for one; the next request waits for the quarantine and not for the failed one's end.
    setup = Setup(
        policy=Scattered(),
        budget=24,
        admit=ALL_OFFLOAD,
        fast_slots=16,
        transfer=late(*range(500), request="1", late_s=30.0),
        options={"transfer_timeout_s": 1.0},
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            first = rig.generate(prompt_of(40, 1), 25)
            second = asyncio.create_task(rig.check(prompt_of(40, 2), 25))
            with pytest.raises(RequestFailed, match="took longer than 1 s"):
                await first.result()
            ended = asyncio.get_running_loop().time()
            assert not second.done()
            await second
            assert asyncio.get_running_loop().time() - ended > 20

    run(main())


# -- several cohorts, merged and predicted -------------------------------------------------------


class Paced(IRQ):
    """Always the same pace; merges whatever may be merged."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._fixed = pace

    def pace(self, costs: StepCosts) -> Pace:
        return self._fixed


class Merging(Paced):
    """Holds a cohort back until another one has come to the same layer."""

    def __init__(self, cohorts: int = 2) -> None:
        super().__init__(Pace(cohorts))

    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Any:
        layers = [one for one in waiting if one.kind == "layer" and one.work is not Work.PREFILL]
        for one in layers:
            same = [other for other in layers if other.layer == one.layer]
            if len(same) > 1:
                return same
        others = [one for one in waiting if one not in layers]
        return others[0] if others else None


@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("cohorts", [1, 2, 3])
def test_offloaded_requests_are_spread_over_cohorts(cohorts: int, predict: bool) -> None:
    setup = Setup(
        policy=Scattered(),
        budget=24,
        admit=ALL_OFFLOAD,
        schedule=Paced(Pace(cohorts, predict)),
        transfer=NullTransfer(lambda _: 0.003, eager=True),
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            await asyncio.gather(*(rig.check(prompt_of(20, i), 200) for i in range(6)))
            names = {o.cohort for o in operations(rig) if o.work is Work.OFFLOAD}
            assert names == {"offload", "offload-2", "offload-3"} - {
                f"offload-{i}" for i in range(cohorts + 1, 4)
            }
            sizes = {
                len(o.requests) for o in operations(rig) if (o.kind, o.work) == ("layer", "offload")
            }
            assert max(sizes) == 6 // cohorts
            assert any(o.kind == "prefetch" for o in operations(rig)) == predict

    run(main())


def test_cohorts_at_the_same_layer_are_computed_as_one() -> None:
    setup = Setup(
        policy=Scattered(), budget=24, admit="threshold:100", schedule=Merging(), layers=3
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            lengths = [20, 21, 60, 61]  # two normal ones, two offloaded
            await asyncio.gather(*(rig.check(prompt_of(n, n), 60) for n in lengths))
            followers = [o for o in operations(rig) if o.leader >= 0]
            assert len(followers) > 10
            by_id = {o.id: o for o in operations(rig)}
            for follower in followers:
                leader = by_id[follower.leader]
                assert (leader.layer, leader.started) == (follower.layer, follower.started)
                assert leader.cohort != follower.cohort

    run(main())


@pytest.mark.parametrize("method", ["attend", "qkv", "sample"])
@pytest.mark.parametrize("after", [0, 5, 20])
def test_a_failure_in_merged_cohorts_fails_its_request_alone(method: str, after: int) -> None:
    executor = BrokenExecutor(method, after)
    setup = Setup(
        policy=Scattered(), budget=24, admit=ALL_OFFLOAD, schedule=Merging(3), executor=executor
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            streams = [rig.generate(prompt_of(30, i), 25) for i in range(3)]
            results = await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)
            assert isinstance(results[1], RequestFailed)
            assert isinstance(results[1].__cause__, BrokenError)
            for i in (0, 2):
                assert not isinstance(results[i], BaseException), results[i]
                rig.check_tokens(prompt_of(30, i), 25, results[i])

    run(main())


@pytest.mark.parametrize("which", range(0, 80, 8))
def test_a_prediction_is_corrected_and_may_fail(which: int) -> None:
    faults = {("2", which): "fails", ("1", which + 3): "fails-after"}
    setup = Setup(
        policy=Scattered(wrong=True),
        budget=24,
        admit=ALL_OFFLOAD,
        schedule=Paced(Pace(1, predict=True)),
        transfer=FaultyTransfer(faults, eager=bool(which % 16)),
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            await asyncio.gather(*(rig.check(prompt_of(40, i), 30) for i in range(3)))
            kinds = [o.kind for o in operations(rig) if o.work is Work.OFFLOAD]
            assert kinds.count("prefetch") > 10 and kinds.count("recall") > 10

    run(main())


# -- choosing ------------------------------------------------------------------------------------


def test_a_landed_cohort_waits_for_one_prefill_operation_at_most() -> None:
    setup = Setup(
        policy=Scattered(),
        budget=24,
        admit=ALL_OFFLOAD,
        compute=lambda: 0.004,
        transfer=NullTransfer(lambda _: 0.002),
    )

    async def main() -> None:
        async with Rig(setup) as rig:
            decoding = asyncio.create_task(rig.check(prompt_of(40, 1), 60))
            await asyncio.sleep(0.3)
            await asyncio.gather(decoding, *(rig.check(prompt_of(200, i), 2) for i in (2, 3)))
            ops = sorted(operations(rig), key=lambda o: o.started)
            prefills = [o for o in ops if o.lane == "compute" and o.work is Work.PREFILL]
            landed = [
                o for o in ops if o.cohort == "offload" and o.kind == "layer" and o.cause >= 0
            ]
            assert len(landed) > 30
            for operation in landed:
                ahead = [
                    p for p in prefills if operation.submitted < p.ended <= operation.started + 1e-9
                ]
                assert len(ahead) <= 1, operation

    run(main())


@pytest.mark.parametrize("arbiter", [Fair, IRQ])
def test_fair_serves_priority_and_deadline_first(arbiter: type[IRQ]) -> None:
    def waiting(**fields: Any) -> Operation:
        number = fields.pop("id")
        return Operation(number, "layer", "compute", Work.NORMAL, "c", **fields)

    plain, urgent = waiting(id=1), waiting(id=2, priority=1, layer=1)
    soon, starved = waiting(id=3, deadline=9.0, layer=2), waiting(id=4, skipped=99, layer=3)
    chosen = arbiter().choose([plain, urgent, soon], [])
    assert chosen == ([urgent] if arbiter is Fair else [plain])
    chosen = arbiter().choose([plain, soon], [])
    assert chosen == ([soon] if arbiter is Fair else [plain])
    assert arbiter().choose([plain, urgent, soon, starved], []) == [starved]


class Eager:
    """A transfer engine with a thread of its own; notes who calls it."""

    eager = True

    def __init__(self) -> None:
        self.worker = Worker("transfers")
        self.callers: list[str] = []

    def supports(self, source: Any, target: Any) -> bool:
        return True

    def recall(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        self.callers.append(threading.current_thread().name)
        return self._move(plan)

    def write_back(self, plan: TransferPlan) -> Awaitable[TransferReport]:
        return self._move(plan)

    def _move(self, plan: TransferPlan) -> Landing[TransferReport]:
        def move() -> TransferReport:
            data: list[Any] = [None] * plan.units
            plan.source.read(plan.source_units, data)
            plan.target.write(plan.target_units, data)
            return TransferReport(plan.bytes, plan.units, 0.0)

        return self.worker.submit(move)

    async def close(self) -> None:
        await self.worker.close()


def test_the_compute_worker_hands_recalls_over_itself() -> None:
    transfer = Eager()
    setup = Setup(policy=Scattered(), budget=24, admit=ALL_OFFLOAD)

    async def main() -> None:
        engine = Engine(
            "null",
            select=Scattered(),
            transfer=transfer,
            admit=ALL_OFFLOAD,
            executor=NullExecutor(),
            fast_tier="64KiB",
            slow_tier="null",
            block=4,
            sink=4,
            local=8,
            budget=24,
            chunk=16,
        )
        async with engine:
            streams = [
                engine.generate(prompt_of(40, i), max_tokens=25, ignore_eos=True) for i in range(3)
            ]
            for i, stream in enumerate(streams):
                completion = await stream.result()
                wanted = setup.expected(prompt_of(40, i), 25, Placement.OFFLOAD)
                assert list(completion.token_ids) == wanted

    asyncio.run(main())
    assert transfer.callers[0] == "MainThread"  # the first call starts the engine's thread
    assert transfer.callers.count("pulse-compute") > 20  # the loop submits those of prefill
