"""The conformance kit of arbiters: the whole kernel under drawn workloads, in virtual time.

An arbiter only chooses who computes next, so whatever it answers, no request may be lost, changed
or left waiting. The same kit proves the kernel itself: its invariants are these rules.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from pulse.errors import TransferError
from pulse.hookspecs import Build
from pulse.ports import Arbiter
from pulse.testing.checking import (
    COMPLETE,
    RAISES_NOTHING,
    SHRINKING_S,
    Broken,
    Checked,
    Property,
    Rule,
    Violation,
    attributes,
    require,
    search,
)
from pulse.testing.simulation import Simulation, simulate
from pulse.testing.subjects import Subject, resolve
from pulse.testing.workload import Workload, smaller, workloads
from pulse.types import LaneName, Operation

__all__ = ["RULES", "check_scheduler", "check_simulation"]

PROGRESS = Rule(
    "progress",
    "every request ends in bounded time, whatever the capacity, if it fits alone",
    "look at who waits for what; hold the lane only while something in flight will end",
)
EXACT = Rule(
    "exact",
    "a request that ends has the tokens it would have alone, and one that was cancelled or failed "
    "a beginning of them",
    "something read a block before it landed, or after its slot had gone to another",
)
ISOLATED = Rule(
    "isolated",
    "a request fails only if transfers of its own failed, and then with a TransferError",
    "a failure must reach the requests that it belongs to, and no other",
)
CANCELLED = Rule(
    "cancelled",
    "a request whose owner has left is given no token more",
    "a cancellation was lost on its way to the cohort",
)
ONCE = Rule(
    "once",
    "every operation that was submitted starts at most once and ends exactly once",
    "each way out of an operation must tell its lane, and only one may be taken",
)
LANES = Rule(
    "lanes",
    "the compute lane has at most two operations in flight, one of them before its milestone",
    "grant at the milestone or at the end, not before",
)
BOUNDARIES = Rule(
    "boundaries",
    "members of a cohort change only between two of its steps, and are in one cohort at a time",
    "let members join, leave and move at step boundaries",
)
LEFT = Rule(
    "nothing-left",
    "when all requests are over, no slot, block or task is left, and nothing wrote to free slots",
    "give slots back once, and only when nothing in flight can touch them",
)
AGEING = Rule(
    "ageing",
    "no operation is passed over more often than the bound and as many times as others waited",
    "go by Operation.skipped: what was passed over too often is next",
)
CONSERVING = Rule(
    "conserving",
    "the compute lane is not held idle while an operation waits for it",
    "answer None only while something runs on the compute lane",
)
ANSWERS = Rule(
    "answers",
    "choose answers one that waits, several decode layers alike, or None; pace a Pace of at least "
    "one cohort",
    "the kernel takes any other answer for none, so another choice is made than the one meant",
)
SAME = Rule(
    "deterministic",
    "the same workload runs the same way each time, event by event",
    "do not choose by id(), hash() of objects, set order, clocks or unseeded randomness",
)

RULES = (
    COMPLETE,
    PROGRESS,
    EXACT,
    ISOLATED,
    CANCELLED,
    ONCE,
    LANES,
    BOUNDARIES,
    LEFT,
    AGEING,
    CONSERVING,
    ANSWERS,
    SAME,
    RAISES_NOTHING,
)
"""The rules of this kit."""

TRIES = 400
"""Workloads that are run at most to make one smaller."""

_FLAGS = {rule.name: rule for rule in (LANES, BOUNDARIES, ANSWERS, RAISES_NOTHING)}


def check_scheduler(
    arbiter: Any,
    *,
    examples: int = 200,
    seed: int | None = None,
    bound: int = 64,
    conserving: bool = False,
    faults: bool = True,
) -> list[Checked]:
    """Run drawn workloads under an arbiter and check every invariant of the kernel.

    arbiter: a registered name, ``module:attribute``, or a class or function that makes one (it is
        made anew for each workload, so that what one has seen does not change the next).
    examples: workloads to draw. seed: draws others; the same each time by default.
    bound: grants that an operation may be passed over.
    conserving: whether it promises not to hold the lane idle, as `irq` does and baselines do not.
    faults: whether transfers fail, come late or are corrupt in some of the workloads.

    Returns the rules that hold. Raises Violation with the smallest workload found and its
    timeline; PluginNotFound, PluginUnavailable or ConfigError for what is no arbiter.
    """
    subject = resolve(arbiter, "schedule")
    subject.need_fresh()
    subject.probe(Build())
    rules = tuple(rule for rule in RULES if conserving or rule is not CONSERVING)

    def broken(workload: Workload) -> Broken | None:
        result = simulate(workload, _made(subject))
        try:
            _check(result, bound, conserving)
            if workload.seed % 4 == 0:
                again = simulate(workload, _made(subject))
                require(again.history == result.history, SAME, _difference(result, again))
        except Broken as found:
            found.story = _story(result)
            return found
        return None

    def check(workload: Workload) -> None:
        found = broken(workload)
        if found is not None:
            raise _smallest(workload, found, broken)

    def complete(_: None) -> None:
        attributes(_made(subject), Arbiter)

    return search(
        subject.label,
        [
            Property((COMPLETE,), st.none(), complete, share=0.0),
            Property(rules[1:], workloads(faults=faults), check, shrinks=False),
        ],
        examples=examples,
        seed=seed,
    )


def _smallest(
    workload: Workload, found: Broken, broken: Callable[[Workload], Broken | None]
) -> Broken:
    """The finding for the smallest workload that breaks the same rule.

    Hypothesis shrinks what its draws were made of; it takes far longer to find that a request
    can be left out, as that moves all draws behind it.
    """
    at, improved, began = 0, False, time.monotonic()
    for _ in range(TRIES):
        if time.monotonic() - began > SHRINKING_S:
            break
        candidates = list(smaller(workload))
        if at >= len(candidates):
            if not improved:
                break
            at, improved = 0, False
            continue
        again = broken(candidates[at])
        if again is not None and again.rule is found.rule:
            workload, found, improved = candidates[at], again, True
        else:
            at += 1
    return found


def _made(subject: Subject) -> Any:
    return subject.factory(Build())


def check_simulation(result: Simulation, *, bound: int = 64, conserving: bool = False) -> None:
    """Check the invariants on one run; see `check_scheduler`. Raises Violation."""
    try:
        _check(result, bound, conserving)
    except Broken as found:
        raise Violation("this run", found.rule, _story(result), found.seen) from None


def _check(result: Simulation, bound: int, conserving: bool) -> None:
    recorder = result.recorder
    for name, seen in recorder.wrong:
        raise Broken(_FLAGS[name], seen)
    require(not result.stuck, PROGRESS, result.stuck)
    for outcome in result.outcomes:
        _check_outcome(result, outcome)
    for number, operation in recorder.operations.items():
        ends, starts = recorder.ends.get(number, 0), recorder.starts.get(number, 0)
        what = f"{operation.kind} of {operation.cohort} (operation {number})"
        require(ends == 1, ONCE, f"{what} ended {ends} times")
        least = operation.status in ("done", "late")
        require(least <= starts <= 1, ONCE, f"{what} is {operation.status}, started {starts} times")
        allowed = bound + recorder.most_waiting
        require(
            operation.skipped <= allowed or operation.lane is not LaneName.COMPUTE,
            AGEING,
            f"{what} was passed over {operation.skipped} times; {allowed} are allowed",
        )
    require(not result.leaks, LEFT, "; ".join(result.leaks))
    if conserving:
        require(not (idle := _idle(result)), CONSERVING, idle)


def _check_outcome(result: Simulation, outcome: Any) -> None:
    name = f"request {outcome.request} ({outcome.placement})"
    if outcome.end == "refused":
        return
    if outcome.end == "failed":
        struck = outcome.request in result.struck
        require(
            struck and isinstance(outcome.error, TransferError),
            ISOLATED,
            f"{name} failed with {outcome.error!r}",
        )
    require(not outcome.after_leaving, CANCELLED, f"{name} got {outcome.after_leaving} tokens more")
    got, wanted = outcome.tokens, outcome.expected
    if outcome.end != "done":
        wanted = wanted[: len(got)]
    require(
        got == wanted,
        EXACT,
        f"{name} has the tokens {list(got)}; alone it has {list(wanted)}",
    )


def _idle(result: Simulation) -> str:
    """When the compute lane was idle although an operation waited for it; empty if never."""
    operations = [o for o in result.recorder.operations.values() if o.lane is LaneName.COMPUTE]
    busy = sorted((o.started, o.ended) for o in operations if not math.isnan(o.started))
    free = 0.0
    for started, ended in busy:
        for operation in operations:
            low = max(free, operation.submitted)
            high = min(started, _served(operation))
            if high - low > 1e-9:
                return (
                    f"the lane is idle from {low:g} s to {high:g} s, and {operation.kind} of "
                    f"{operation.cohort} waits"
                )
        free = max(free, ended)
    return ""


def _served(operation: Operation) -> float:
    return operation.ended if math.isnan(operation.started) else operation.started


def _difference(one: Simulation, other: Simulation) -> str:
    pairs = zip(one.history.splitlines(), other.history.splitlines(), strict=False)
    for number, (here, there) in enumerate(pairs):
        if here != there:
            return f"event {number} is {here!r} the first time and {there!r} the second"
    return "one run has more events than the other"


def _story(result: Simulation) -> str:
    return f"{result.workload!r}\n{result.timeline}"
