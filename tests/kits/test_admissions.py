"""The kit of admission rules: first-party ones pass, broken ones are told what they break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pulse import Placement
from pulse.ports import AdmissionView
from pulse.testing import Violation, check_admission_rule
from pulse.testing.admissions import RULES

Answer = list[Placement | None]


def fits(tokens: int, placement: Placement, view: AdmissionView) -> bool:
    """Whether it fits in an empty machine."""
    demand = view.demand(tokens, placement)
    return demand.fast <= view.fast_limit and demand.slow <= view.slow_limit


class NormalFirst:
    """Conforms: normal where that can fit, else offloaded."""

    def admit(self, waiting: Sequence[int], view: AdmissionView) -> Any:
        return [self.place(tokens, view) for tokens in waiting]

    def place(self, tokens: int, view: AdmissionView) -> Placement | None:
        return Placement.NORMAL if fits(tokens, Placement.NORMAL, view) else Placement.OFFLOAD


@pytest.mark.parametrize(
    "rule", ["threshold", "threshold:0", "threshold:100", NormalFirst, NormalFirst()]
)
def test_conforming_rules_pass(rule: Any) -> None:
    checked = check_admission_rule(rule, examples=30)
    assert {one.rule for one in checked} == set(RULES)
    assert not [one for one in checked if one.remark]


class Short(NormalFirst):
    def admit(self, waiting: Sequence[int], view: AdmissionView) -> Any:
        return super().admit(waiting[:3], view)


class Misspelt(NormalFirst):
    def place(self, tokens: int, view: AdmissionView) -> Any:
        return "offloaded"


class Sorts(NormalFirst):
    def admit(self, waiting: Any, view: AdmissionView) -> Any:
        waiting.sort()
        return super().admit(waiting, view)


class Alternates(NormalFirst):
    turn = 0

    def admit(self, waiting: Sequence[int], view: AdmissionView) -> Any:
        self.turn += 1
        return super().admit(waiting, view) if self.turn % 2 else [None] * len(waiting)


class AlwaysNormal(NormalFirst):
    def place(self, tokens: int, view: AdmissionView) -> Placement | None:
        return Placement.NORMAL


class NeverOffloads(NormalFirst):
    def place(self, tokens: int, view: AdmissionView) -> Placement | None:
        return Placement.NORMAL if fits(tokens, Placement.NORMAL, view) else None


class WaitsForRoomBeside(NormalFirst):
    """Wants half of the fast tier free after it has been placed."""

    def place(self, tokens: int, view: AdmissionView) -> Placement | None:
        placement = super().place(tokens, view)
        assert placement is not None
        left = view.fast_free - view.demand(tokens, placement).fast
        return placement if left >= view.fast_limit // 2 else None


class OnlyWhenBusy(NormalFirst):
    def place(self, tokens: int, view: AdmissionView) -> Placement | None:
        idle = view.fast_free == view.fast_limit and view.slow_free == view.slow_limit
        return super().place(tokens, view) if idle or view.fast_free * 2 < view.fast_limit else None


class NeedsSomebody(NormalFirst):
    def admit(self, waiting: Sequence[int], view: AdmissionView) -> Any:
        assert max(waiting) > 0
        return super().admit(waiting, view)


@pytest.mark.parametrize(
    ("broken", "rule", "shown"),
    [
        (lambda: 7, "complete", "int has no admit"),
        (Short, "answers", "for 4 requests"),
        (Misspelt, "answers", "['offloaded'] for 1 requests"),
        (Sorts, "pure", "`waiting` became [1, 2]"),
        (Alternates, "pure", "first wait, then normal"),
        (AlwaysNormal, "possible", "2 tokens are placed normal"),
        (NeverOffloads, "progress", "wait for ("),
        (WaitsForRoomBeside, "progress", "wait for ("),
        (OnlyWhenBusy, "monotone", "placed with"),
        (NeedsSomebody, "raises-nothing", "ValueError: max()"),
    ],
)
def test_a_broken_rule_is_told(broken: Callable[[], Any], rule: str, shown: str) -> None:
    with pytest.raises(Violation) as caught:
        check_admission_rule(broken, examples=30)
    violation = caught.value
    assert violation.rule.name == rule, str(violation)
    assert violation.rule in RULES
    assert shown in violation.seen, str(violation)


def test_the_smallest_case_is_told() -> None:
    with pytest.raises(Violation) as caught:
        check_admission_rule(AlwaysNormal, examples=30)
    assert caught.value.example == (
        "AdmissionCase(waiting=(2,), fast_limit=1, slow_limit=2, fast_free=0, slow_free=0, "
        "fast_token=1, slow_token=1, hot_tokens=1)"
    )
