"""How a conformance kit looks for a counterexample, and how it tells of one.

A kit is a list of `Property`s: a Hypothesis strategy that draws examples, and a check that calls
`require` with the `Rule`s it is about. `search` runs them in turn and raises a `Violation` with
the smallest example that breaks a rule.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pulse.errors import ConfigError, PluginUnavailable

try:
    import hypothesis
    from hypothesis.errors import HypothesisException
    from hypothesis.strategies import SearchStrategy
except ModuleNotFoundError as error:
    raise PluginUnavailable(
        "conformance kits need hypothesis, which is not installed; pip install 'pulse-llm[testing]'"
    ) from error

__all__ = [
    "COMPLETE",
    "RAISES_NOTHING",
    "Broken",
    "Checked",
    "Property",
    "Rule",
    "Stuck",
    "Violation",
    "attributes",
    "refuses",
    "require",
    "search",
    "told",
    "where",
]

SHRINKING_S = 20.0
"""Seconds after which an example is small enough: a kit of slow checks must end, too."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One sentence of a contract.

    name: short, for tests and tables. text: what always holds. fix: what to do where it does not.
    """

    name: str
    text: str
    fix: str


@dataclass(frozen=True, slots=True)
class Checked:
    """A rule that held for all examples; `remark` says why it was not put to the test, if so."""

    rule: Rule
    remark: str = ""


COMPLETE = Rule(
    "complete",
    "the object has every method and attribute of its port",
    "add what is missing; pulse.ports has the port",
)
RAISES_NOTHING = Rule(
    "raises-nothing",
    "a call that the contract allows raises nothing",
    "handle this case; `seen` tells what was raised, and where",
)


class Violation(AssertionError):
    """A plugin breaks its contract.

    subject: what was checked. rule: the `Rule` that does not hold. example: the smallest example
    found that shows it, as text. seen: what happened instead.
    """

    def __init__(self, subject: str, rule: Rule, example: str, seen: str = "") -> None:
        self.subject, self.rule, self.example, self.seen = subject, rule, example, seen
        lines = [
            f"{subject} breaks the rule {rule.name!r}: {rule.text}",
            f"  smallest example: {_indented(example)}",
            *([f"  seen: {_indented(seen)}"] if seen else []),
            f"  what to do: {rule.fix}",
        ]
        super().__init__("\n".join(lines))


class Broken(Exception):
    """Raised inside a check: this example breaks a rule. `search` makes it a `Violation`.

    story: tells the example better than its repr, where a check sets it.
    """

    def __init__(self, rule: Rule, seen: str = "") -> None:
        super().__init__(rule, seen)
        self.rule, self.seen = rule, seen
        self.story = ""


class Stuck(Broken):
    """This example never ends, so no smaller one is tried: each would cost the same wait."""


@dataclass(frozen=True)
class Property:
    """Rules of a contract and how to test them.

    check: called with an example; raises `Broken`, or returns why the example tells nothing.
    share: the part of a kit's examples that this property gets, as some cost more than others.
    shrinks: False where `check` makes a broken example smaller by itself.
    """

    rules: tuple[Rule, ...]
    examples: SearchStrategy[Any]
    check: Callable[[Any], str | None]
    share: float = 1.0
    shrinks: bool = True


def require(condition: object, rule: Rule, seen: str = "") -> None:
    """Raise `Broken` with that rule unless `condition` is true."""
    if not condition:
        raise Broken(rule, seen)


@contextmanager
def refuses(error: type[Exception], rule: Rule, what: str) -> Iterator[None]:
    """The body, which does `what`, must raise `error`, or the rule is broken."""
    try:
        yield
    except error:
        return
    except Exception as other:
        raise Broken(rule, f"{what} raised {told(other)} instead of {error.__name__}") from other
    raise Broken(rule, f"{what} raised nothing instead of {error.__name__}")


def attributes(plugin: Any, port: type, **types: type) -> None:
    """`plugin` has every method of `port`, and attributes of the given types, or is `Broken`."""
    lacking = [name for name in methods(port) if not callable(getattr(plugin, name, None))]
    require(not lacking, COMPLETE, f"{type(plugin).__name__} has no {', '.join(lacking)}")
    for name, kind in types.items():
        value = getattr(plugin, name, None)
        require(
            isinstance(value, kind), COMPLETE, f"{name} is {value!r}, not of type {kind.__name__}"
        )


def methods(port: type) -> list[str]:
    """The names of a port's methods."""
    return [name for name, value in vars(port).items() if name[0] != "_" and callable(value)]


def search(
    subject: str, properties: Sequence[Property], *, examples: int, seed: int | None
) -> list[Checked]:
    """Check all properties in order; the rules that hold, with a remark where nothing was told.

    examples: examples per property, at most. seed: draws others; the same each time by default.
    Raises Violation, and ConfigError for a number of examples below 1.
    """
    if examples < 1:
        raise ConfigError(f"examples={examples} must be at least 1")
    checked: dict[str, Checked] = {}
    for one in properties:
        remark = _search(subject, one, max(1, round(examples * one.share)), seed)
        for rule in one.rules:
            if rule.name not in checked or checked[rule.name].remark:
                checked[rule.name] = Checked(rule, remark)
    return list(checked.values())


def _search(subject: str, one: Property, examples: int, seed: int | None) -> str:
    trial = _Trial(one)

    def holds(example: Any) -> None:
        trial(example)

    test = hypothesis.given(one.examples)(holds)
    if seed is not None:
        test = hypothesis.seed(seed)(test)
    test = hypothesis.settings(
        database=None,
        deadline=None,
        derandomize=seed is None,
        max_examples=examples,
        phases=(hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if one.shrinks else ())),
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )(test)
    try:
        test()
    except Exception:
        if trial.found is None:
            raise
    if trial.found is not None:
        found = trial.found
        violation = Violation(subject, found.rule, found.story or trial.example, found.seen)
        raise violation from found.__cause__
    return trial.remark


class _Trial:
    """Runs a check on examples and keeps the last that was broken, which is the smallest."""

    def __init__(self, one: Property) -> None:
        self.one = one
        self.found: Broken | None = None
        self.example = ""
        self._reasons: list[str | None] = []
        self._until = float("inf")

    def __call__(self, example: Any) -> None:
        if self.found is not None and self._settled():
            if repr(example) == self.example:
                raise self.found
            hypothesis.reject()
        try:
            self._reasons.append(self.one.check(example))
        except (HypothesisException, ConfigError):
            raise
        except Broken as broken:
            self._keep(example, broken)
            raise
        except Exception as error:
            raised = Broken(RAISES_NOTHING, where(error))
            raised.story = getattr(error, "story", "")
            raised.__cause__ = error
            self._keep(example, raised)
            raise raised from error

    @property
    def remark(self) -> str:
        """Why no example told anything; empty if one did."""
        if None in self._reasons or not self._reasons:
            return ""
        return str(self._reasons[0])

    def _settled(self) -> bool:
        return isinstance(self.found, Stuck) or time.monotonic() > self._until

    def _keep(self, example: Any, broken: Broken) -> None:
        if self.found is None:
            self._until = time.monotonic() + SHRINKING_S
        elif broken.rule is not self.found.rule:
            hypothesis.reject()  # another rule; the first found is the one to make small
        self.found, self.example = broken, repr(example)


def told(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def where(error: BaseException) -> str:
    """An error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{told(error)} ({frames[-1].filename}:{frames[-1].lineno})"


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
