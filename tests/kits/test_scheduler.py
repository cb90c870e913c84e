"""The kernel's invariants over drawn workloads, and the bugs that the kit has to find."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel.harness import Erratic

from pulse import Instrument
from pulse.engine.outer import Outer
from pulse.kernel.cohort import Cohort, Seat
from pulse.kernel.lanes import Lane
from pulse.kernel.member import Member
from pulse.kernel.worker import Worker
from pulse.testing import (
    Arrival,
    Violation,
    Workload,
    check_scheduler,
    check_simulation,
    simulate,
    workloads,
)
from pulse.testing.nullcache import NullCache
from pulse.testing.scheduler import CONSERVING, RULES
from pulse.types import LaneName, Operation, Pace, StepCosts, Work
from pulse_schedule import IRQ

MANY = int(os.environ.get("PULSE_WORKLOADS", "1"))
"""How many times as many workloads as usual are drawn: a nightly run sets more."""


@pytest.mark.parametrize(
    ("arbiter", "examples", "options"),
    [
        ("irq", 700, {"conserving": True}),
        (Erratic, 700, {"bound": 10**6}),
        ("fair", 250, {"conserving": True}),
        ("irq:3", 150, {"bound": 3}),
        ("lockstep", 150, {}),
        ("prefetch-one", 150, {}),
    ],
)
def test_every_invariant_holds_over_2000_workloads(
    arbiter: Any, examples: int, options: dict[str, Any]
) -> None:
    checked = check_scheduler(
        arbiter, examples=MANY * examples, seed=None if MANY == 1 else MANY, **options
    )
    wanted = {rule for rule in RULES if options.get("conserving") or rule is not CONSERVING}
    assert {one.rule for one in checked} == wanted
    assert not [one for one in checked if one.remark]


# -- planted bugs --------------------------------------------------------------------------------


def caught(arbiter: Any, *rules: str, examples: int = 2_000, **options: Any) -> Violation:
    """The kit finds a bug, says which rule it breaks, and shows it with three requests at most."""
    with pytest.raises(Violation) as info:
        check_scheduler(arbiter, examples=examples, **options)
    violation = info.value
    assert violation.rule.name in rules, violation
    assert violation.example.count("Arrival(") <= 3, violation
    assert "compute" in violation.example, "the timeline is told, too"
    return violation


def test_a_slot_freed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Outer.release

    def release(self: Outer, request: Any, sequence: Any) -> None:
        self.kernel.stragglers.pop(request.id, None)  # as if what is late could not harm
        real(self, request, sequence)

    monkeypatch.setattr(Outer, "release", release)
    caught("irq", "nothing-left", "exact")


def test_a_slot_freed_while_it_is_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def landed(self: Member, layer: int) -> None:
        self.write_backs.pop(layer, None)

    monkeypatch.setattr(Member, "landed", landed)
    caught("irq", "nothing-left", "exact", "raises-nothing", "isolated")


def test_a_completion_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    real, counts = Worker._land, Counter[Worker]()

    def land(self: Worker, *outcome: Any) -> None:
        counts[self] += 1
        if counts[self] % 50:
            real(self, *outcome)

    monkeypatch.setattr(Worker, "_land", land)
    caught("irq", "progress")


def test_a_block_table_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NullCache._recall

    def recall(self: NullCache, *args: Any) -> Any:
        table, plan = real(self, *args)
        return ([*table[1:2], *table[1:]] if len(table) > 2 else table), plan

    monkeypatch.setattr(NullCache, "_recall", recall)
    caught("irq", "exact")


class Starving(IRQ):
    """Prefill only when nobody else wants the lane."""

    def __init__(self) -> None:
        super().__init__(patience=10**9)


def test_an_arbiter_that_starves() -> None:
    violation = caught(Starving, "ageing", bound=6)
    assert "passed over" in violation.seen


class Holding(IRQ):
    """Waits for whatever is on its way, as if it could not compute meanwhile."""

    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Any:
        return None if in_flight else super().choose(waiting, in_flight)


def test_an_arbiter_that_starves_is_found_without_being_asked_for() -> None:
    with pytest.raises(Violation) as info:
        check_scheduler(Starving)
    assert info.value.rule.name == "ageing"


class Raising(IRQ):
    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Any:
        raise KeyError("no such request")


class Pacing(IRQ):
    def pace(self, costs: StepCosts) -> Any:
        return None


class Tired(IRQ):
    def pace(self, costs: StepCosts) -> Any:
        return Pace(0)


class Inventing(IRQ):
    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Any:
        return Operation(0, "layer", LaneName.COMPUTE, Work.NORMAL, "mine")


class Numbering(IRQ):
    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Any:
        return waiting[0].id


class Merging(IRQ):
    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Any:
        return waiting


@pytest.mark.parametrize(
    ("arbiter", "rule", "seen"),
    [
        (Raising, "raises-nothing", "choose raised KeyError: 'no such request' ("),
        (Pacing, "answers", "pace answered None"),
        (Tired, "answers", "pace answered Pace(cohorts=0, predict=False)"),
        (Inventing, "answers", "choose answered layer of mine (operation 0), where "),
        (Numbering, "answers", "choose answered 0"),
        (Merging, "answers", "waited"),
    ],
)
def test_what_the_kernel_puts_up_with_is_told(arbiter: type, rule: str, seen: str) -> None:
    assert seen in caught(arbiter, rule, examples=300).seen


def test_an_arbiter_that_holds_the_lane_idle() -> None:
    caught(Holding, "conserving", conserving=True)


class Dice(IRQ):
    """Goes by something outside of it."""

    source = random.Random(0)

    def choose(self, waiting: Sequence[Operation], in_flight: Sequence[Operation]) -> Any:
        return self.source.choice(waiting)


def test_an_arbiter_that_is_not_deterministic() -> None:
    caught(Dice, "deterministic", "ageing")


def test_a_member_that_leaves_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: Seat, leaving: bool) -> None:
        vars(self)["_leaving"] = leaving
        if leaving and not self.left.done():
            self.left.set_result(None)

    leaving = property(lambda seat: vars(seat)["_leaving"], leave)
    monkeypatch.setattr(Seat, "leaving", leaving, raising=False)
    monkeypatch.setattr(Cohort, "_boundary", _tolerant(Cohort._boundary))
    caught("irq", "boundaries", "nothing-left", "exact", "raises-nothing")


def _tolerant(real: Any) -> Any:
    def boundary(self: Cohort) -> Any:
        for seat in (*self._seats, *self._joining):
            if seat.left.done():
                self._seats = [one for one in self._seats if one is not seat]
                self._joining = [one for one in self._joining if one is not seat]
        return real(self)

    return boundary


def test_a_cancellation_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real, heard = Cohort._boundary, Counter[str]()

    def boundary(self: Cohort) -> Any:
        for seat in (*self._seats, *self._joining):
            if seat.over.cancelled():  # it is noticed, but only three steps later
                heard[seat.member.request] += 1
                seat.leaving = heard[seat.member.request] % 4 == 0
        return real(self)

    monkeypatch.setattr(Cohort, "_boundary", boundary)
    caught("irq", "cancelled")


def test_a_lane_that_overlaps_what_it_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Lane.decide

    def decide(self: Lane) -> None:
        self.width = self.depth
        real(self)

    monkeypatch.setattr(Lane, "decide", decide)
    caught("irq", "lanes")


# -- single runs ---------------------------------------------------------------------------------


def test_a_run_tells_when_what_happened() -> None:
    class Tokens(Instrument):
        count = 0

        def token(self, request: str, index: int) -> None:
            self.count += 1

    tokens = Tokens()
    workload = Workload((Arrival(prompt=3, tokens=4), Arrival(at=0.5, tokens=9, leaves=0.002)))
    result = simulate(workload, IRQ, instruments=[tokens])  # a class is made
    first, second = result.outcomes
    opened = first.arrived_s  # opening the engine takes a moment
    assert opened < first.first_token_s < first.ended_s < 0.5
    assert second.arrived_s == pytest.approx(opened + 0.5) and second.end == "cancelled"
    assert math.isnan(second.first_token_s)
    assert second.ended_s == pytest.approx(second.arrived_s + 0.002, abs=0.001)
    assert tokens.count == 4
    check_simulation(result)


def test_a_run_that_breaks_a_rule_is_a_violation() -> None:
    with pytest.raises(Violation, match="this run breaks the rule 'answers'") as info:
        check_simulation(simulate(Workload((Arrival(prompt=40, tokens=2),)), Pacing()))
    assert "Workload(" in info.value.example and "compute" in info.value.example


def test_fields_of_workloads_are_fixed_or_drawn_as_told() -> None:
    @settings(max_examples=30, deadline=None)
    @given(workloads(most=2, layers=2, seed=st.integers(5, 6)))
    def holds(workload: Workload) -> None:
        assert len(workload.requests) <= 2
        assert workload.layers == 2
        assert workload.seed in (5, 6)

    holds()
