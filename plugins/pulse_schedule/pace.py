"""How many offload cohorts, and whether to predict: a small model, corrected by what happens.

With nothing but offloaded sequences, one cohort leaves the compute lane idle while it waits. Two
or more fill each other's gaps, but each costs a pass over the weights; a prediction hides a recall
behind the layer before it, but what was wrong is recalled twice. Which is best depends on the
timing, so each choice is modelled from observed costs, and those that look good are tried and
measured. PulseInfer leaves this case open ("all requests are long").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pulse.types import Pace, StepCosts

__all__ = ["Pacer", "modelled"]

MOST_COHORTS = 4
SETTLE = 4
"""Steps after a change whose times say nothing yet."""
REVIEW = 12
"""Steps of each cohort between two choices."""
SHORT = 0.04
"""How much slower than the best a pace may seem before its trial is cut short."""
LASTING = 40
"""Choices after which a measurement is not trusted any more."""
GAIN = 0.03
"""What another pace must promise to be tried."""
OPTIMISM = 0.9
"""Share of predictions that are taken to be right before any was made."""
SAMPLED = 12
"""Layers of a model that are simulated; more would take the event loop's time."""


class Pacer:
    """Chooses a pace at step boundaries; never slower for long than the best that was tried."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._sequences = 0
        self._changed = 0
        self._reviewed = 0
        self._review = 0
        self._measured: dict[Pace, tuple[float, int]] = {}
        self._models: dict[Pace, float] = {}
        self._pending: list[Pace] = []

    def pace(self, costs: StepCosts) -> Pace:
        """The pace from here on."""
        if costs.others:
            # Somebody else fills the gaps, and does not cost a pass more than it is worth.
            self._pace, self._sequences = Pace(), 0
            return self._pace
        if costs.sequences != self._sequences:
            self._restart(costs)
        steps = (costs.steps - self._changed) / self._pace.cohorts
        first = not self._review
        if steps < (2 if first else SETTLE) or math.isnan(costs.step_s):
            return self._pace
        if self._pending:  # few at a time: the loop is others' too
            for _ in range(4 if first else 1):
                if self._pending:
                    candidate = self._pending.pop()
                    self._models[candidate] = modelled(costs, candidate)
        due = first or costs.steps - self._reviewed >= REVIEW * self._pace.cohorts
        if not self._pending and (due or self._worse(costs)):
            self._choose(costs)
        return self._pace

    def _worse(self, costs: StepCosts) -> bool:
        """Whether a pace that is being tried falls short already."""
        if self._pace in self._measured or not self._measured:
            return False
        best = min(seconds for seconds, _ in self._measured.values())
        return costs.step_s > best * (1 + SHORT)

    def _restart(self, costs: StepCosts) -> None:
        self._sequences, self._review = costs.sequences, 0
        self._measured.clear()
        self._models.clear()
        self._pace = Pace(min(self._pace.cohorts, max(1, costs.sequences)), self._pace.predict)
        self._changed = self._reviewed = costs.steps
        self._pending = list(_candidates(costs.sequences))

    def _choose(self, costs: StepCosts) -> None:
        self._review += 1
        self._reviewed = costs.steps
        self._pending = list(_candidates(costs.sequences))
        here = costs.step_s
        self._measured[self._pace] = (here, self._review)
        model = self._models.get(self._pace)
        if not model:
            return
        bias = here / model
        best, promised = self._pace, here * (1 - GAIN)
        for candidate, expected in self._models.items():
            value = self._value(candidate, expected * bias)
            if candidate != self._pace and value < promised:
                best, promised = candidate, value
        if best != self._pace:
            self._pace, self._changed = best, costs.steps

    def _value(self, pace: Pace, expected: float) -> float:
        measured, when = self._measured.get(pace, (math.nan, -LASTING))
        if self._review - when >= LASTING:
            return expected
        # Going back to what was better before needs no promise of a gain.
        return measured * (1 - GAIN)


def _candidates(sequences: int) -> Iterator[Pace]:
    for cohorts in range(1, min(MOST_COHORTS, sequences) + 1):
        yield Pace(cohorts, False)
        yield Pace(cohorts, True)


def modelled(costs: StepCosts, pace: Pace) -> float:
    """Seconds per step at `pace`: some layers of three steps, simulated.

    One server computes, one link recalls; cohorts take turns by readiness.
    """
    hit = OPTIMISM if math.isnan(costs.hit) else costs.hit
    size = costs.sequences / pace.cohorts
    compute = costs.pass_s + costs.sequence_s * size
    recalls = [recall * size for recall in _sampled(costs.recall_s)]
    layers = len(recalls)
    ready = [0.0] * pace.cohorts
    landed = [0.0] * pace.cohorts  # what was predicted for the layer to come
    done = [0] * pace.cohorts
    server = link = first = 0.0
    for turn in range(3 * layers * pace.cohorts):
        who = min(range(pace.cohorts), key=lambda one: (max(ready[one], server), ready[one]))
        server = max(ready[who], server) + compute
        done[who] += 1
        layer = done[who] % layers
        if pace.predict and layer:
            link = max(server, landed[who], link) + (1 - hit) * recalls[layer]
            ready[who] = link
        else:
            link = max(server, link) + recalls[layer]
            ready[who] = link
        if pace.predict and layer + 1 < layers:
            link += recalls[layer + 1]
            landed[who] = link
        if turn + 1 == layers * pace.cohorts:
            first = server
    return (server - first) / 2 * len(costs.recall_s) / layers


def _sampled(recalls: Sequence[float]) -> list[float]:
    """Some of the layers in their order, with the mean of all."""
    if len(recalls) <= SAMPLED:
        return list(recalls)
    some = [recalls[i * len(recalls) // SAMPLED] for i in range(SAMPLED)]
    scale = sum(recalls) / len(recalls) / (sum(some) / SAMPLED or 1.0)
    return [recall * scale for recall in some]
