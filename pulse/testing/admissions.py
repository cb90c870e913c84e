"""The conformance kit of admission rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from pulse.hookspecs import Build
from pulse.ports import AdmissionRule
from pulse.testing.checking import (
    COMPLETE,
    RAISES_NOTHING,
    Checked,
    Property,
    Rule,
    attributes,
    require,
    search,
)
from pulse.testing.subjects import Subject, resolve
from pulse.types import Demand, Geometry, Placement

__all__ = ["RULES", "check_admission_rule"]

ANSWERS = Rule(
    "answers",
    "there is one answer per waiting request, in order: a Placement or None",
    "return a list as long as `waiting`",
)
PURE = Rule(
    "pure",
    "the same question gets the same answer, and `waiting` is left as it is",
    "decide from `waiting` and `view` alone; copy before sorting",
)
POSSIBLE = Rule(
    "possible",
    "no request is placed where it can never fit, if it can fit elsewhere",
    "compare view.demand(tokens, placement) with view.fast_limit and view.slow_limit",
)
PROGRESS = Rule(
    "progress",
    "when the machine is empty, at least one waiting request is placed, and so is one alone",
    "never answer None to all when fast_free == fast_limit and slow_free == slow_limit",
)
MONOTONE = Rule(
    "monotone",
    "a single request that is placed is also placed when more is free",
    "ask for at least so much free memory, never for at most",
)

RULES = (COMPLETE, ANSWERS, PURE, POSSIBLE, PROGRESS, MONOTONE, RAISES_NOTHING)
"""The rules of this kit."""

_BUILD = Build(
    device="cpu", geometry=Geometry(2, 2, 1, 8, 1 << 20, 256, "float32", 4, (None, None), "kit")
)


@dataclass(frozen=True)
class AdmissionCase:
    """A machine and who waits. It is the `AdmissionView` of itself.

    waiting: tokens per request. fast_token, slow_token: bytes per token of a sequence in each
    tier. hot_tokens: tokens of an offloaded sequence that the fast tier holds.
    """

    waiting: tuple[int, ...]
    fast_limit: int
    slow_limit: int
    fast_free: int
    slow_free: int
    fast_token: int
    slow_token: int
    hot_tokens: int

    def demand(self, tokens: int, placement: Placement) -> Demand:
        """Bytes per tier for a request of `tokens` tokens in all."""
        if placement is Placement.NORMAL:
            return Demand(tokens * self.fast_token, 0)
        hot = min(tokens, self.hot_tokens) * self.fast_token
        return Demand(hot, tokens * self.slow_token)

    def possible(self, tokens: int, placement: Placement) -> bool:
        """Whether it fits in an empty machine."""
        demand = self.demand(tokens, placement)
        return demand.fast <= self.fast_limit and demand.slow <= self.slow_limit


@st.composite
def _cases(draw: Any) -> AdmissionCase:
    tokens = st.one_of(st.integers(1, 64), st.integers(1, 20_000))
    waiting = tuple(draw(st.lists(tokens, max_size=6)))
    fast_token, slow_token = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    # Limits around what somebody who waits needs are more telling than any.
    most = max(waiting, default=1)
    fast_limit = draw(st.one_of(st.integers(0, most), st.integers(0, 3 * most))) * fast_token
    slow_limit = draw(st.integers(0, 3 * most)) * slow_token
    case = AdmissionCase(
        waiting,
        *(fast_limit, slow_limit),
        *(draw(st.integers(0, fast_limit)), draw(st.integers(0, slow_limit))),
        *(fast_token, slow_token, draw(st.integers(1, max(1, most)))),
    )
    # The engine refuses at once what fits nowhere, so a rule is never asked about it.
    fitting = [t for t in waiting if any(case.possible(t, placement) for placement in Placement)]
    return replace(case, waiting=tuple(fitting))


def check_admission_rule(
    rule: Any, *, examples: int = 100, seed: int | None = None
) -> list[Checked]:
    """Check that an admission rule keeps the contract of `pulse.ports.AdmissionRule`.

    rule: a registered name (``"threshold:4096"``), ``"module:attribute"``, a `pulse.Plugin`, a
        class or function that makes one (given a `Build` with geometry and kv if it asks for
        one), or an object.
    examples: examples per property, at most. seed: draws others; the same each time by default.

    Returns the rules that hold. Raises `Violation` with the smallest example that breaks one, and
    ConfigError for what cannot be checked at all.
    """
    kit = _Kit(resolve(rule, "admit"))
    return search(kit.subject.label, kit.properties(), examples=examples, seed=seed)


class _Kit:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def properties(self) -> list[Property]:
        """In the order in which a rule is mended."""
        cases = _cases()
        more = st.tuples(cases, st.floats(0, 1), st.floats(0, 1))
        return [
            Property((COMPLETE,), st.just(None), self.new, 0.01),
            Property((ANSWERS, RAISES_NOTHING), cases, self.answers),
            Property((PURE,), cases, self.pure),
            Property((POSSIBLE,), cases, self.possible),
            Property((PROGRESS,), cases, self.progress),
            Property((MONOTONE,), more, self.monotone),
        ]

    def new(self, _: None) -> None:
        """What a rule is."""
        attributes(self.subject.probe(_BUILD), AdmissionRule)

    def _answer(self, case: AdmissionCase, rule: Any = None) -> list[Placement | None]:
        rule = self.subject.factory(_BUILD) if rule is None else rule
        found = rule.admit(list(case.waiting), case)
        seen = f"{found!r} for {len(case.waiting)} requests"
        try:
            answer = [None if item is None else Placement(item) for item in found]
        except (TypeError, ValueError):
            answer = None
        require(answer is not None and len(answer) == len(case.waiting), ANSWERS, seen)
        assert answer is not None
        return answer

    def answers(self, case: AdmissionCase) -> None:
        """One per request, whatever the view."""
        self._answer(case)
        self._answer(replace(case, fast_free=0, slow_free=0))
        self._answer(replace(case, waiting=()))

    def pure(self, case: AdmissionCase) -> None:
        """Asked twice, with something else in between, and asked of another of its kind."""
        rule = self.subject.factory(_BUILD)
        waiting = list(case.waiting)
        rule.admit(waiting, case)
        require(waiting == list(case.waiting), PURE, f"`waiting` became {waiting}")
        first = self._answer(case, rule)
        self._answer(replace(case, waiting=case.waiting[::-1]), rule)
        self._answer(replace(case, fast_free=case.fast_limit, slow_free=case.slow_limit), rule)
        for again in (self._answer(case, rule), self._answer(case)):
            require(first == again, PURE, f"first {_said(first)}, then {_said(again)}")

    def possible(self, case: AdmissionCase) -> None:
        """No answer that the engine would have to overrule."""
        for tokens, placement in zip(case.waiting, self._answer(case), strict=True):
            if placement is not None and not case.possible(tokens, placement):
                demand = case.demand(tokens, placement)
                seen = f"{tokens} tokens are placed {placement}, which needs {demand}"
                require(False, POSSIBLE, f"{seen} of {case.fast_limit}, {case.slow_limit}")

    def progress(self, case: AdmissionCase) -> str | None:
        """Somebody starts when nobody runs, whoever waits."""
        empty = replace(case, fast_free=case.fast_limit, slow_free=case.slow_limit)
        for waiting in (*((tokens,) for tokens in case.waiting), case.waiting):
            answer = self._answer(replace(empty, waiting=waiting))
            placed = any(placement is not None for placement in answer)
            seen = f"{_said(answer)} for {waiting} with everything free"
            require(placed or not waiting, PROGRESS, seen)
        return None if case.waiting else "nobody waited"

    def monotone(self, example: tuple[AdmissionCase, float, float]) -> str | None:
        """One request, then the same with more memory free."""
        case, fast, slow = example
        if not case.waiting:
            return "nobody waited"
        less = replace(case, waiting=case.waiting[:1])
        more = replace(
            less,
            fast_free=less.fast_free + int((less.fast_limit - less.fast_free) * fast),
            slow_free=less.slow_free + int((less.slow_limit - less.slow_free) * slow),
        )
        if self._answer(less)[0] is None:
            return "nobody was placed"
        seen = f"placed with {less.fast_free}, {less.slow_free} bytes free (fast, slow), not with "
        seen += f"{more.fast_free}, {more.slow_free}"
        require(self._answer(more)[0] is not None, MONOTONE, seen)
        return None


def _said(answer: list[Placement | None]) -> str:
    return ", ".join("wait" if placement is None else str(placement) for placement in answer)
