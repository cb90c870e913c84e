"""Stands between the kernel and an arbiter, and tells of answers that the kernel puts up with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pulse.kernel.lanes import on_offer
from pulse.ports import Arbiter
from pulse.testing.checking import where
from pulse.types import Operation, Pace, StepCosts

__all__ = ["Witness"]


class Witness:
    """An `Arbiter` that answers as `arbiter` does.

    The kernel goes on without an arbiter that raises, and takes an answer that was not on offer
    for none; whoever wrote it wants to know. tell: called with the name of the rule that was
    broken (``raises-nothing`` or ``answers``) and with what was seen.
    """

    def __init__(self, arbiter: Arbiter, tell: Callable[[str, str], None]) -> None:
        self._arbiter = arbiter
        self._tell = tell

    def choose(
        self, waiting: Sequence[Operation], in_flight: Sequence[Operation]
    ) -> Operation | Sequence[Operation] | None:
        """What `arbiter` chooses."""
        chosen = self._ask("choose", self._arbiter.choose, waiting, in_flight)
        if chosen is None:
            return None
        single = isinstance(chosen, Operation)
        if not single and not isinstance(chosen, Sequence):
            self._tell("answers", f"choose answered {chosen!r}")
        elif (group := [chosen] if single else list(chosen)) and not on_offer(group, waiting):
            offered = ", ".join(map(_named, waiting))
            given = ", ".join(map(_named, group))
            self._tell("answers", f"choose answered {given}, where {offered} waited")
        return chosen  # type: ignore[no-any-return]

    def pace(self, costs: StepCosts) -> Pace:
        """What `arbiter` wants."""
        pace = self._ask("pace", self._arbiter.pace, costs)
        if not isinstance(pace, Pace) or pace.cohorts < 1:
            self._tell("answers", f"pace answered {pace!r}")
        return pace  # type: ignore[no-any-return]

    def _ask(self, method: str, ask: Callable[..., Any], *question: Any) -> Any:
        try:
            return ask(*question)
        except Exception as error:
            self._tell("raises-nothing", f"{method} raised {where(error)}")
            raise


def _named(one: Any) -> str:
    if not isinstance(one, Operation):
        return repr(one)
    layer = "" if one.layer < 0 else f" {one.layer}"
    return f"{one.kind}{layer} of {one.cohort} (operation {one.id})"
