"""The future of one operation, settled through its lane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pulse.errors import PulseError, TransferError, TransferTimeout
from pulse.kernel.worker import Landing
from pulse.types import Operation

if TYPE_CHECKING:
    from pulse.kernel.lanes import Lane

__all__ = ["Turn", "Unit"]

log = logging.getLogger("pulse")

T = TypeVar("T")


class Unit:
    """What a lane counts as one: an operation, or several that were merged."""

    __slots__ = ("decided", "left", "passed", "turns")

    def __init__(self, left: int) -> None:
        self.turns: list[Turn[Any]] = []
        self.left = left
        self.decided = False
        self.passed = False
        """Set on the worker's thread, where the lane may not be told at once."""


class Turn(Landing[T]):
    """The future of one operation.

    Cancelled while it waits, it never starts. Cancelled while it runs, the transfer under it is
    asked to stop, and whoever awaits is told when it has ended: until then its slots are in use.
    Settling it frees the lane first, so the next operation starts before anybody resumes.
    """

    def __init__(
        self,
        lane: Lane,
        operation: Operation,
        launch: Callable[[Sequence[Turn[Any]]], None],
        payload: Any = None,
        then: Callable[[Turn[T], T | None], None] | None = None,
    ) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self.lane = lane
        self.operation = operation
        self.launch = launch
        self.payload = payload
        self.then = then
        self.unit: Unit | None = None
        self.inner: asyncio.Future[Any] | None = None

    def cancel(self, msg: Any = None) -> bool:
        """Withdraw what waits; of what runs, only ask its transfer to stop."""
        if self.done():
            return False
        if self.operation.status == "waiting":
            self._end("cancelled")
            return asyncio.Future.cancel(self, msg)
        if self.inner is not None:
            self.inner.cancel()
        return False

    def set_result(self, result: T) -> None:
        """The operation is done."""
        self._end("done", result)
        super().set_result(result)

    def set_exception(self, error: type[BaseException] | BaseException) -> None:
        """The operation failed."""
        self._end("failed")
        super().set_exception(error)

    def attach(self, transfer: Awaitable[T]) -> None:
        """Settle this when `transfer` ends."""
        self.inner = asyncio.ensure_future(transfer)
        self.inner.add_done_callback(self._transferred)

    def late(self) -> None:
        """Give up waiting: the lane goes on, the transfer's slots stay in use until it ends."""
        if self.done() or self.operation.status != "running":
            return
        operation = self.operation
        self.lane.strayed(self)
        self._end("late")
        super().set_exception(
            TransferTimeout(
                f"{operation.kind} of {operation.blocks} units ({operation.bytes} bytes) for "
                f"{', '.join(operation.requests)} took longer than "
                f"{operation.deadline - operation.started:g} s; check the slow tier, or raise "
                "transfer_timeout_s"
            )
        )

    def _transferred(self, transfer: asyncio.Future[Any]) -> None:
        error = None if transfer.cancelled() else transfer.exception()
        if self.done():  # it was late
            return
        if transfer.cancelled():
            self._end("cancelled")
            asyncio.Future.cancel(self)
        elif error is None:
            self.set_result(transfer.result())
        else:
            self.set_exception(_typed(error, self.operation.kind))

    def _end(self, status: str, result: Any = None) -> None:
        then, self.then = self.then, None
        if then is not None:
            try:
                then(self, result)
            except Exception:  # whoever settles this may be the bridge that all threads share
                log.exception("what follows %s failed", self.operation)
        self.lane.end(self, status, result)
        # A turn that somebody keeps must not keep the tensors of its closures.
        self.payload = self.launch = None  # type: ignore[assignment]


def _typed(error: BaseException, kind: str) -> BaseException:
    if isinstance(error, PulseError):
        return error
    typed = TransferError(f"{kind} failed: {type(error).__name__}: {error}")
    typed.__cause__ = error
    return typed
