"""A thread that runs functions in order and hands each result to the event loop once.

A long-lived thread with a queue costs half of what `run_in_executor` does per call, and
completions that land together cross to the loop with a single `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any, TypeVar

from pulse.errors import EngineClosed

__all__ = ["Landing", "Worker"]

T = TypeVar("T")


class Landing(asyncio.Future[T]):
    """A future that cannot be cancelled: it stands for work that cannot be called back.

    Cancelling a task that awaits it takes effect only when the work has ended, so whoever is
    unwound by a cancellation knows that nothing of theirs is still running.
    """

    def cancel(self, msg: Any = None) -> bool:
        """Refuse; the awaiting task is told when the work has ended."""
        return False


class Worker:
    """A named thread that runs functions one after another. Belongs to one event loop.

    The thread starts with the first function. `close` waits for what is queued.

    cores: CPU cores that the thread, and those that it starts, keep to; None for any.
    """

    def __init__(self, name: str, cores: Collection[int] | None = None) -> None:
        self.name = name
        self.cores = cores
        self._queue: SimpleQueue[tuple[Callable[[], Any], Landing[Any]] | None] = SimpleQueue()
        self._landed: deque[tuple[Landing[Any], Any, BaseException | None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ended: Landing[None] | None = None

    def start(self) -> None:
        """Start the thread for the running loop, after which any thread may `submit`."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
            self._thread.start()

    def submit(self, function: Callable[[], T], landing: Landing[T] | None = None) -> Landing[T]:
        """Queue `function`; `landing` (made if not given) gets its outcome, on the loop.

        To be called on the loop, or on any thread after `start`. Raises EngineClosed after
        `close`.
        """
        if self._closed:
            raise EngineClosed(f"worker {self.name!r} is closed; it takes no more work")
        self.start()
        if landing is None:
            landing = Landing(loop=self._loop)
        self._queue.put((function, landing))
        return landing

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread; returns (or is cancelled) only once it has ended."""
        return await self.submit(function)

    async def close(self) -> None:
        """Finish what is queued and end the thread. Idempotent, cannot be cut short."""
        self._closed = True
        if self._loop is None or self._thread is None:
            return
        if self._ended is None:
            self._ended = Landing(loop=self._loop)
            self._queue.put((lambda: None, self._ended))
            self._queue.put(None)
        try:
            await self._ended
        finally:
            self._thread.join()

    def _main(self) -> None:
        if self.cores:
            _keep_to(self.cores)
        while (job := self._queue.get()) is not None:
            self._do(*job)
            # A finished job must not keep its closure (tensors) alive until the next one arrives.
            del job

    def _do(self, function: Callable[[], Any], landing: Landing[Any]) -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:  # it belongs to whoever awaits the landing
            outcome = (None, error)
        self._land(landing, *outcome)

    def _land(self, landing: Landing[Any], result: Any, error: BaseException | None) -> None:
        self._landed.append((landing, result, error))
        if len(self._landed) > 1:
            return  # the hand-over that is already scheduled takes this one along
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._landed.clear()

    def _hand_over(self) -> None:
        while self._landed:
            landing, result, error = self._landed[0]
            if landing.done():  # only a closing loop completes landings itself
                pass
            elif error is None:
                landing.set_result(result)
            else:
                landing.set_exception(_portable(error))
            # Popped last: while an entry is left, the worker schedules no second hand-over.
            self._landed.popleft()


def _keep_to(cores: Collection[int]) -> None:
    """Leave the other cores to the event loop (Linux)."""
    os.sched_setaffinity(0, cores)
    # Threads of the engine that share a core must not interrupt each other when they wake: one
    # that is interrupted while it has the interpreter's lock keeps the loop waiting for a whole
    # slice of the scheduler, some milliseconds.
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _portable(error: BaseException) -> BaseException:
    # A future refuses StopIteration; a SystemExit raised in a worker must not end the loop.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} was raised on a worker thread: {error}")
    wrapped.__cause__ = error
    return wrapped
