"""A decode step: one token for each member of a cohort.

It reads like the design's picture: qkv, select, recall (await: the compute lane goes to whoever is
ready), attend and FFN. One compute operation finishes layer l and starts layer l + 1, so the only
gap between two operations of a cohort is a wait for blocks (PulseInfer, IRQ).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pulse.errors import PulseError, TransferTimeout
from pulse.kernel.machine import Job, Machine, Milestone, Outcome, Served
from pulse.kernel.member import Member, settle
from pulse.kernel.turn import Turn
from pulse.types import Batch, Placed, SelectionView, TransferPlan, TransferReport, Work

__all__ = ["Step"]


class _Entered(NamedTuple):
    """A layer was begun: what its attention will read, and the recall for the layer after it."""

    placed: Placed
    ahead: TransferPlan | None


class _Arrival(NamedTuple):
    """A recall under way."""

    turn: Turn[TransferReport]
    plan: TransferPlan


class Step:
    """One decode step of `members`; the results are a token and its log-probability for each.

    alone: the step repeats a failed one and may not be merged with others.

    A member whose recall failed for good has its `error` set; the others are unharmed.
    """

    def __init__(
        self,
        machine: Machine,
        members: Sequence[Member],
        work: Work,
        cohort: str,
        *,
        alone: bool = False,
    ) -> None:
        self.machine = machine
        self.members = members
        self.work = work
        self.cohort = cohort
        self.kind = "retry" if alone else "layer"
        self.merged = False
        self.state: Any = None
        self.serves = Served.of(members)
        self.samplers = [member.sampler for member in members]
        self.batch = Batch(
            [m.sequence for m in members],
            [[m.token] for m in members],
            [m.length for m in members],
            work,
        )
        self.view = self._view()
        self.predicts = work is Work.OFFLOAD and machine.pace.predict and not alone
        self._recall: _Arrival | None = None
        self._correction: TransferPlan | None = None
        self._prediction: TransferPlan | None = None
        self._ahead: _Arrival | None = None
        self._ahead_next: _Arrival | None = None
        self._cause = -1

    async def run(self) -> list[tuple[int, float]]:
        """Walk the layers. Raises what a plugin raised where no single member can be blamed."""
        machine, began = self.machine, self.machine.kernel.now()
        result: Any = None
        try:
            await self._compute("embed", _Begin(self), 0)
            for layer in range(machine.last + 1):
                await self._arrive(layer)
                result = await self._compute(self.kind, _Advance(self, layer), layer)
            await self._seal()
        finally:
            await self._drain()
        for member in self.members:
            member.length += 1
        if self.work is Work.OFFLOAD:
            machine.costs.stepped(machine.kernel.now() - began)
        tokens: list[tuple[int, float]] = result
        return tokens

    def _compute(self, kind: str, job: Job[Any], layer: int) -> Turn[Any]:
        cause, self._cause = self._cause, -1
        return self.machine.compute(
            kind,
            self.work,
            self.cohort,
            job,
            layer=layer,
            serves=self.serves,
            cause=cause,
            then=self._computed,
        )

    # -- on the worker -------------------------------------------------------------------------

    def enter(self, layer: int, query: Any, job: Job[Any]) -> _Entered:
        """Select and place; the recall of what is missing may start here and now."""
        machine, selection = self.machine, None
        view = self.view if layer in machine.growing else None
        if view is not None:
            selection = machine.policy.select(layer, query, view)
        placed = machine.cache.place(self.state, layer, selection)
        if placed.recall is not None and job.handoff is not None and self._ahead_next is None:
            job.handoff.submit(placed.recall)
        ahead = None
        if (
            self.predicts
            and selection is not None
            and view is not None
            and layer + 1 in machine.growing
        ):
            query = machine.executor.predict(self.state, layer + 1)
            predicted = machine.policy.select(layer + 1, query, view)
            ahead = machine.cache.prefetch(self.state, layer + 1, predicted)
        return _Entered(placed, ahead)

    def _view(self) -> SelectionView | None:
        """What may be selected, the same in all layers; None where that is nothing."""
        if self.work is not Work.OFFLOAD:
            return None
        config, policy = self.machine.config, self.machine.policy
        middle = []
        for start in self.batch.starts:
            high = max(0, start // config.block - config.local_blocks + 1)
            middle.append((min(config.sink_blocks, high), high))
        if not any(high > low for low, high in middle):
            return None
        top_k = config.middle_blocks
        if policy.exhaustive:
            top_k = max(high - low for low, high in middle)
        return SelectionView(self.serves.requests, tuple(middle), top_k)

    # -- recalls -------------------------------------------------------------------------------

    def _computed(self, turn: Turn[Any], result: Any) -> None:
        """Send off what the operation selected, before the lane chooses again."""
        operation, handoff = turn.operation, turn.payload.handoff if turn.payload else None
        entered = result if isinstance(result, _Entered) else None
        plan = entered.placed.recall if entered is not None else None
        recall = self._operation("recall", plan, operation.id) if handoff and plan else None
        arriving = handoff.land(recall) if handoff is not None else None
        if entered is None:
            return
        if operation.kind == "layer" and self.work is Work.OFFLOAD and not self.merged:
            seconds = self.machine.kernel.now() - operation.started
            self.machine.costs.computed(len(self.members), seconds)
        layer, placed = operation.layer + (operation.kind != "embed"), entered.placed
        missed = 0 if plan is None else plan.units
        if placed.selected:
            self.machine.kernel.instruments.emit("selection", layer, placed.selected, missed)
        self._ahead, self._ahead_next = self._ahead_next, None
        self._prediction = entered.ahead
        if self._ahead is not None:
            self.machine.costs.corrected(self._ahead.plan.units, missed)
        if arriving is not None and plan is not None:
            self._recall = _Arrival(arriving, plan)
        else:
            self._correction = plan
        if self._ahead is None or _succeeded(self._ahead.turn):
            self._follow(operation.id)

    def _follow(self, cause: int) -> None:
        """Recall what a prediction missed, then what is predicted for the next layer."""
        plan, self._correction = self._correction, None
        if plan is not None:
            self._recall = _Arrival(self._start("recall", plan, cause), plan)
        plan, self._prediction = self._prediction, None
        if plan is not None:
            ahead = self._start("prefetch", plan, cause, self._prefetched)
            self._ahead_next = _Arrival(ahead, plan)

    def _prefetched(self, turn: Turn[TransferReport], report: TransferReport | None) -> None:
        if report is not None and self._ahead is not None and self._ahead.turn is turn:
            self._follow(turn.operation.id)

    def _operation(self, kind: str, plan: TransferPlan, cause: int) -> Any:
        return self.machine.recall_operation(kind, plan, self.work, self.cohort, cause)

    def _start(
        self, kind: str, plan: TransferPlan, cause: int, then: Any = None
    ) -> Turn[TransferReport]:
        return self.machine.recall(plan, self.work, self.cohort, kind=kind, cause=cause, then=then)

    async def _arrive(self, layer: int) -> None:
        """Wait until everything that attention of `layer` reads has landed."""
        ahead = self._ahead
        if ahead is not None:
            # A correction may take slots of the prefetch: not before that has ended.
            await self._landed(ahead)
            self._ahead = None
            self._follow(self._cause)  # nothing is left to do unless the prefetch had failed
        recall, self._recall = self._recall, None
        if recall is not None:
            await self._landed(recall, corrects=ahead is not None)

    async def _landed(self, arrival: _Arrival, *, corrects: bool = False) -> None:
        turn, plan = arrival
        self._cause = turn.operation.id
        try:
            report = await turn
        except PulseError as error:
            await self._apart(plan, error)
        else:
            if not corrects:
                each = report.seconds / len(self.members)
                self.machine.costs.recalled(plan.layer, each)

    async def _apart(self, plan: TransferPlan, error: PulseError) -> None:
        # One bad block must not cost its neighbours: each request's part is tried once more.
        by_request = {member.request: member for member in self.members}
        retries = [
            (by_request[request], self._start("recall", plan.part(index), self._cause))
            for index, request in enumerate(plan.requests)
            if plan.bounds[index + 1] > plan.bounds[index]
        ]
        for member, retry in retries:
            try:
                await retry
            except PulseError as again:
                member.error = member.error or again
        if not isinstance(error, TransferTimeout):
            return
        # A transfer that is still under way may write into slots that are given to other blocks
        # in the next step: whoever owns them has to go on elsewhere.
        for request in await self.machine.overdue(plan.requests):
            by_request[request].error = by_request[request].error or error

    async def _drain(self) -> None:
        """Let nothing of a failed step be under way when it is repeated."""
        arrivals = (self._recall, self._ahead, self._ahead_next)
        self._recall = self._ahead = self._ahead_next = None
        left = [arrival for arrival in arrivals if arrival is not None]
        if not left:
            return
        await settle(*(arrival.turn for arrival in left))
        for arrival in left:
            error = arrival.turn.exception() if not arrival.turn.cancelled() else None
            for member in self.members:
                if error is not None and member.request in arrival.plan.requests:
                    member.error = member.error or error

    # -- the end -------------------------------------------------------------------------------

    async def _seal(self) -> None:
        machine = self.machine
        if self.work is not Work.OFFLOAD or not machine.growing:
            return
        sealing = [m for m in self.members if (m.length + 1) % machine.config.block == 0]
        if not sealing:
            return
        # A sealed block may lose its slot from the next seal on: its write-back must be over.
        for member in sealing:
            try:
                await member.landed(-1)
            except PulseError as error:
                member.error = error
        plan = await machine.compute(
            "seal",
            self.work,
            self.cohort,
            lambda _: machine.cache.seal(self.state, -1),
            serves=Served.of(sealing),
        )
        if plan is None:
            return
        tasks = [
            machine.write_back(
                member, -1, plan.part(plan.requests.index(member.request)), self.work, self.cohort
            )
            for member in sealing
            if member.request in plan.requests
        ]
        if machine.config.local_blocks < 2:
            await settle(*tasks)


class _Begin(Job[_Entered]):
    """Embed and enter layer 0."""

    recalls = True

    def __init__(self, step: Step) -> None:
        self.step = step

    def together(self, jobs: Sequence[Any], milestone: Milestone) -> list[Outcome]:
        """Never merged."""
        step, executor = self.step, self.step.machine.executor
        step.state = executor.embed(step.batch)
        return [(step.enter(0, executor.qkv([step.state], 0)[0], self), None)]


class _Advance(Job[Any]):
    """Finish a layer and enter the next, or sample after the last; cohorts may be merged."""

    def __init__(self, step: Step, layer: int) -> None:
        self.step = step
        self.layer = layer
        self.recalls = layer < step.machine.last

    def together(self, jobs: Sequence[_Advance], milestone: Milestone) -> list[Outcome]:
        """One pass over the weights for all; each then selects for itself."""
        machine, layer = self.step.machine, self.layer
        for job in jobs:
            job.step.merged = job.step.merged or len(jobs) > 1
        states = [job.step.state for job in jobs]
        machine.executor.attend(states, layer, milestone)
        if layer == machine.last:
            return [_outcome(job.sample) for job in jobs]
        queries = machine.executor.qkv(states, layer + 1)
        return [_outcome(job.enter, query) for job, query in zip(jobs, queries, strict=True)]

    def enter(self, query: Any) -> _Entered:
        """Enter the next layer."""
        return self.step.enter(self.layer + 1, query, self)

    def sample(self) -> list[tuple[int, float]]:
        """A token and its log-probability per member."""
        return self.step.machine.executor.sample(self.step.state, self.step.samplers)


def _succeeded(turn: Turn[Any]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None


def _outcome(function: Any, *args: Any) -> Outcome:
    try:
        return function(*args), None
    except BaseException as error:  # it belongs to this cohort alone
        return None, error
