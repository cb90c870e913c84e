"""What steps run on: the lanes, the compute worker and the plugins of one engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from pulse.errors import PulseError, TransferTimeout
from pulse.kernel.costs import Costs
from pulse.kernel.lanes import Kernel
from pulse.kernel.member import Member
from pulse.kernel.turn import Turn
from pulse.kernel.worker import Landing, Worker
from pulse.ports import KVCache, ModelExecutor, SelectionPolicy, TransferEngine
from pulse.types import (
    KVConfig,
    LaneName,
    Operation,
    Pace,
    TransferPlan,
    TransferReport,
    Work,
)

__all__ = ["Handoff", "Job", "Machine", "Milestone", "Outcome", "Served"]

T = TypeVar("T")
Milestone = Callable[[], None]
Outcome = tuple[Any, BaseException | None]
"""A result, or the error in its place."""


class Served(NamedTuple):
    """Requests that an operation serves, their highest priority and their earliest deadline."""

    requests: tuple[str, ...]
    priority: int = 0
    deadline: float = math.inf

    @classmethod
    def of(cls, members: Sequence[Member]) -> Served:
        """Those of some members."""
        return cls(
            tuple(member.request for member in members),
            max(member.priority for member in members),
            min(member.deadline for member in members),
        )


NOBODY = Served(())


class Handoff:
    """A recall that the compute worker submits itself, in a place of the recall lane kept for it.

    PulseInfer, section "Zero-sync submission": neither the compute thread nor the event loop waits
    for the other between a selection and the start of its recall.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._started = 0.0
        self._transfer: Any = None

    def submit(self, plan: TransferPlan) -> None:
        """Start the recall. On the compute worker."""
        self._started = self._machine.kernel.now()
        self._transfer = self._machine.transfer.recall(plan)

    def land(self, operation: Operation | None) -> Turn[TransferReport] | None:
        """Make the recall an operation of its lane, or give the place back. On the loop."""
        lane = self._machine.kernel.recall
        if self._transfer is None or operation is None:
            lane.release()
            return None
        return lane.adopt(operation, self._started, self._transfer)


class Job(Generic[T]):
    """A computation of one batch that may be merged with others of its kind.

    recalls: whether it ends with a selection, whose recall may then be handed over by the worker.
    """

    recalls = False
    handoff: Handoff | None = None

    def __init__(self, function: Callable[[Milestone], T]) -> None:
        self.function = function

    def together(self, jobs: Sequence[Any], milestone: Milestone) -> list[Outcome]:
        """Compute `jobs`, of which this is the first. On the worker; raises what hit them all."""
        return [(self.function(milestone), None)]


class Machine:
    """The primitives of a step: compute, recall, write back."""

    def __init__(
        self,
        kernel: Kernel,
        worker: Worker,
        executor: ModelExecutor,
        cache: KVCache,
        policy: SelectionPolicy,
        transfer: TransferEngine,
        config: KVConfig,
    ) -> None:
        self.kernel = kernel
        self.worker = worker
        self.executor = executor
        self.cache = cache
        self.policy = policy
        self.transfer = transfer
        self.config = config
        self.growing = frozenset(executor.geometry.growing)
        self.last = executor.geometry.layers - 1
        self.costs = Costs(executor.geometry.layers)
        self.pace = Pace()
        self._warm = False

    # -- compute -------------------------------------------------------------------------------

    def compute(
        self,
        kind: str,
        work: Work,
        cohort: str,
        job: Job[T] | Callable[[Milestone], T],
        *,
        layer: int = -1,
        serves: Served | None = None,
        cause: int = -1,
        then: Callable[[Turn[T], T | None], None] | None = None,
    ) -> Turn[T]:
        """Run a job on the compute lane's worker.

        serves: whom it serves, with their highest priority and earliest deadline. then: called
        with the turn and its result (None if it has none) when it ends, before the lane chooses
        again.
        """
        requests, priority, deadline = serves or NOBODY
        operation = self.kernel.operation(
            kind,
            LaneName.COMPUTE,
            work,
            cohort,
            layer=layer,
            requests=requests,
            priority=priority,
            deadline=deadline,
            cause=cause,
        )
        payload = job if isinstance(job, Job) else Job(job)
        return self.kernel.compute.submit(operation, self._launch, payload, then)

    def _launch(self, turns: Sequence[Turn[Any]]) -> None:
        unit, lane, jobs = turns[0].unit, self.kernel.compute, [turn.payload for turn in turns]
        loop = turns[0].get_loop()
        assert unit is not None
        if self._warm:
            for job in jobs:
                if job.recalls and self.kernel.recall.reserve():
                    job.handoff = Handoff(self)

        def milestone() -> None:
            unit.passed = True
            if lane.contended:  # nobody waits: no need to wake the loop
                loop.call_soon_threadsafe(lane.publish, unit)

        def work() -> Any:
            outcomes: list[Outcome] = jobs[0].together(jobs, milestone)
            if len(outcomes) > 1:
                return outcomes
            result, error = outcomes[0]
            if error is not None:
                raise error
            return result

        if len(turns) == 1:
            self.worker.submit(work, turns[0])
        else:
            self.worker.submit(work).add_done_callback(lambda done: _share_out(done, turns))

    # -- transfers -----------------------------------------------------------------------------

    def recall_operation(
        self, kind: str, plan: TransferPlan, work: Work, cohort: str, cause: int = -1
    ) -> Operation:
        """An operation for the recall lane."""
        return self._transfer_operation(kind, LaneName.RECALL, plan, work, cohort, cause)

    def recall(
        self,
        plan: TransferPlan,
        work: Work,
        cohort: str,
        *,
        kind: str = "recall",
        cause: int = -1,
        then: Callable[[Turn[TransferReport], TransferReport | None], None] | None = None,
    ) -> Turn[TransferReport]:
        """Run a recall on its lane; `then` is called as for `compute`."""
        operation = self.recall_operation(kind, plan, work, cohort, cause)

        def launch(turns: Sequence[Turn[TransferReport]]) -> None:
            turns[0].attach(self.transfer.recall(plan))
            # From its first call on, an eager engine may be called by the worker too.
            self._warm = self.transfer.eager

        return self.kernel.recall.submit(operation, launch, then=then)

    async def overdue(self, requests: Sequence[str]) -> list[str]:
        """Give late transfers of `requests` as long again; those with one under way still."""
        stragglers = self.kernel.stragglers
        late = [transfer for request in requests for transfer in stragglers.get(request, ())]
        if late:
            await asyncio.wait(late, timeout=self.kernel.timeout_s)
            await asyncio.sleep(0)  # each has told the kernel by then
        return [request for request in requests if stragglers.get(request)]

    def write_back(
        self, member: Member, layer: int, plan: TransferPlan, work: Work, cohort: str
    ) -> asyncio.Task[None]:
        """Start a write-back; `member.landed(layer)` waits for it."""
        task = asyncio.create_task(self._write(plan, work, cohort))
        task.add_done_callback(_retrieve)
        member.write_backs[layer] = task
        return task

    async def _write(self, plan: TransferPlan, work: Work, cohort: str) -> None:
        def launch(turns: Sequence[Turn[TransferReport]]) -> None:
            turns[0].attach(self.transfer.write_back(plan))

        for retry in (True, False):
            operation = self._transfer_operation(
                "write_back", LaneName.WRITE_BACK, plan, work, cohort, -1
            )
            try:
                await self.kernel.write_back.submit(operation, launch)
                return
            except TransferTimeout:
                raise  # the late one may still read slots that a retry would give free
            except PulseError:
                if not retry:
                    raise

    def _transfer_operation(
        self, kind: str, lane: LaneName, plan: TransferPlan, work: Work, cohort: str, cause: int
    ) -> Operation:
        bounds = plan.bounds
        return self.kernel.operation(
            kind,
            lane,
            work,
            cohort,
            layer=plan.layer,
            requests=plan.requests,
            shares=tuple((high - low) * plan.unit_bytes for low, high in pairwise(bounds)),
            bytes=plan.bytes,
            blocks=plan.units,
            cause=cause,
        )


def _share_out(done: Landing[list[Outcome]], turns: Sequence[Turn[Any]]) -> None:
    error = done.exception()
    outcomes: Sequence[Outcome] = [(None, error)] * len(turns) if error else done.result()
    for turn, (result, failure) in zip(turns, outcomes, strict=True):
        if failure is None:
            turn.set_result(result)
        else:
            turn.set_exception(failure)


def _retrieve(task: asyncio.Task[None]) -> None:
    # The error is raised where the write-back is awaited; asyncio need not log it as forgotten.
    if not task.cancelled():
        task.exception()
