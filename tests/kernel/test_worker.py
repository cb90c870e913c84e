"""The worker: every outcome reaches its awaiter once, in order, and no thread is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from pulse.errors import EngineClosed
from pulse.kernel.worker import Landing, Worker
from pulse.testing.loop import InlineWorker
from pulse.testing.loop import run as run_virtual

Main = Callable[[], Awaitable[None]]
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
try:
    import uvloop
except ImportError:
    pass
else:
    LOOPS["uvloop"] = uvloop.new_event_loop


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Run a coroutine on each kind of loop; no thread of ours outlives it."""

    def on_loop(coroutine: Any) -> Any:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(asyncio.wait_for(coroutine, 20))

    yield on_loop
    assert [t.name for t in threading.enumerate() if t.name.startswith("pulse-")] == []


def fail(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


class Gate:
    """A function that tells when it runs and ends when it is told to."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.over = False

    def __call__(self) -> str:
        self.entered.set()
        assert self.go.wait(20)
        self.over = True
        return "through"

    async def running(self) -> None:
        await asyncio.to_thread(self.entered.wait, 20)


def test_results_come_back_from_another_thread(run: Any) -> None:
    async def main() -> None:
        worker = Worker("pulse-test")
        assert await worker.run(lambda: 7) == 7
        assert await worker.run(threading.current_thread) is not threading.current_thread()
        assert await worker.run(lambda: threading.current_thread().name) == "pulse-test"
        await worker.close()

    run(main())


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (ValueError("no"), ValueError),
        (StopIteration(3), RuntimeError),
        (SystemExit(3), RuntimeError),
        (KeyboardInterrupt(), RuntimeError),
        (asyncio.CancelledError(), RuntimeError),
    ],
)
def test_whatever_is_raised_is_an_error_for_the_awaiter(
    run: Any, error: BaseException, arrives: type[Exception]
) -> None:
    async def main() -> None:
        worker = Worker("pulse-test")
        with pytest.raises(arrives) as caught:
            await worker.run(fail(error))
        assert error in (caught.value, caught.value.__cause__)
        assert await worker.run(lambda: "alive") == "alive"
        await worker.close()

    run(main())


def test_functions_run_in_order_and_land_in_order(run: Any) -> None:
    async def main() -> None:
        worker, gate = Worker("pulse-test"), Gate()
        ran: list[int] = []
        landed: list[int] = []
        worker.submit(gate)
        landings = [worker.submit(lambda i=i: ran.append(i)) for i in range(100)]  # type: ignore[misc]
        for i, landing in enumerate(landings):
            landing.add_done_callback(lambda _, i=i: landed.append(i))  # type: ignore[misc]
        gate.go.set()
        await landings[-1]
        await asyncio.sleep(0)
        assert ran == landed == list(range(100))
        await worker.close()

    run(main())


def test_completions_that_land_together_cross_to_the_loop_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        worker = Worker("pulse-test")
        ran = threading.Event()
        crossings: list[object] = []
        cross = loop.call_soon_threadsafe

        def counted(callback: Any, *args: Any, **kwargs: Any) -> Any:
            crossings.append(callback)
            return cross(callback, *args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        landings = [worker.submit(lambda: None) for _ in range(50)]
        worker.submit(ran.set)
        assert ran.wait(20)  # blocks the loop on purpose: all 50 land meanwhile
        await asyncio.wait(landings)
        assert len(crossings) == 1
        monkeypatch.undo()
        await worker.close()

    asyncio.run(main())


def test_cancellation_waits_for_the_function(run: Any) -> None:
    async def main() -> None:
        worker, gate = Worker("pulse-test"), Gate()
        task = asyncio.create_task(worker.run(gate))
        await gate.running()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.over
        await worker.close()

    run(main())


def test_a_landing_refuses_to_be_cancelled(run: Any) -> None:
    async def main() -> None:
        landing: Landing[int] = Landing(loop=asyncio.get_running_loop())
        assert landing.cancel() is False
        assert not landing.done()
        landing.set_result(1)
        assert await landing == 1

    run(main())


def test_close_waits_for_what_is_queued_whoever_calls_it(run: Any) -> None:
    async def main() -> None:
        worker, gate = Worker("pulse-test"), Gate()
        first, last = worker.submit(gate), worker.submit(lambda: "last")
        await gate.running()
        closers = [asyncio.create_task(worker.close()) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(closer.done() for closer in closers)
        gate.go.set()
        await asyncio.wait(closers, return_when=asyncio.FIRST_COMPLETED)
        assert not [t for t in threading.enumerate() if t.name == "pulse-test"]
        await asyncio.gather(*closers)
        assert (await first, await last) == ("through", "last")
        await worker.close()

    run(main())


def test_close_cannot_be_cut_short(run: Any) -> None:
    async def main() -> None:
        worker, gate = Worker("pulse-test"), Gate()
        worker.submit(gate)
        await gate.running()
        closer = asyncio.create_task(worker.close())
        await asyncio.sleep(0)
        closer.cancel()
        await asyncio.sleep(0)
        assert not closer.done()
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await closer
        assert not [t for t in threading.enumerate() if t.name == "pulse-test"]

    run(main())


@pytest.mark.parametrize("used", [False, True])
def test_a_closed_worker_takes_nothing(run: Any, used: bool) -> None:
    async def main() -> None:
        worker = Worker("pulse-test")
        if used:
            await worker.run(lambda: None)
        await worker.close()
        with pytest.raises(EngineClosed, match="pulse-test"):
            worker.submit(lambda: None)
        with pytest.raises(EngineClosed):
            await worker.run(lambda: None)

    run(main())


def test_a_finished_job_is_not_kept_alive(run: Any) -> None:
    class Tensor:
        pass

    async def main() -> None:
        import weakref

        worker = Worker("pulse-test")
        tensor = Tensor()
        ghost = weakref.ref(tensor)
        await worker.run(lambda tensor=tensor: id(tensor))
        del tensor
        await worker.run(lambda: None)  # the thread is past what it did after the first
        assert ghost() is None
        await worker.close()

    run(main())


def test_a_loop_that_dies_first_does_not_hurt_the_thread() -> None:
    worker, gate = Worker("pulse-orphan"), Gate()

    async def main() -> None:
        worker.submit(gate)
        await gate.running()

    asyncio.run(main())
    thread = worker._thread
    assert thread is not None
    worker._queue.put(None)
    gate.go.set()
    thread.join(20)
    assert not thread.is_alive()


# -- the worker without a thread -----------------------------------------------------------------


def test_inline_worker_takes_virtual_time_one_at_a_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        worker = InlineWorker("pulse-test", lambda: 2.0)
        times = await asyncio.gather(*(worker.run(loop.time) for _ in range(3)))
        assert times == [2.0, 4.0, 6.0]
        await worker.close()
        with pytest.raises(EngineClosed):
            worker.submit(lambda: None)

    run_virtual(main())


def test_inline_worker_lands_errors_and_outlasts_cancellation() -> None:
    async def main() -> None:
        worker = InlineWorker("pulse-test", lambda: 1.0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await worker.run(fail(StopIteration()))
        done: list[int] = []
        task = asyncio.create_task(worker.run(lambda: done.append(1)))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.sleep(0.1)
        assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [1]
        closers = [asyncio.create_task(worker.close()) for _ in range(2)]
        await asyncio.gather(*closers)

    run_virtual(main())


def test_inline_worker_may_be_closed_unused() -> None:
    async def main() -> None:
        worker = InlineWorker("pulse-test")
        await worker.close()
        with pytest.raises(EngineClosed):
            worker.submit(lambda: None)

    run_virtual(main())
