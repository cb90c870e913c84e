"""What steps of offload cohorts cost, measured as they run, for the arbiter's choice of pace."""

from __future__ import annotations

import math

from pulse.types import StepCosts

__all__ = ["Costs"]

FADING = 0.125
"""Weight of the newest of many observations; the first ones are averaged."""


class _Mean:
    """A mean that forgets."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = math.nan

    def add(self, value: float) -> None:
        self.count += 1
        if self.count == 1:
            self.value = value
        else:
            self.value += max(FADING, 1 / self.count) * (value - self.value)


class Costs:
    """Observations of one engine. Seconds."""

    def __init__(self, layers: int) -> None:
        self.steps = 0
        self._layers = layers
        self._sequences = 0
        self._computes: dict[int, _Mean] = {}
        self._recalls: dict[int, _Mean] = {}
        self._hit = _Mean()
        self._step = _Mean()

    def computed(self, sequences: int, seconds: float) -> None:
        """A layer of so many sequences."""
        self._computes.setdefault(sequences, _Mean()).add(seconds)

    def recalled(self, layer: int, seconds: float) -> None:
        """A recall of a layer, per sequence."""
        self._recalls.setdefault(layer, _Mean()).add(seconds)

    def corrected(self, predicted: int, corrected: int) -> None:
        """Units recalled on a prediction, and those that were missing all the same."""
        self._hit.add(max(0.0, 1 - corrected / predicted))

    def stepped(self, seconds: float) -> None:
        """A step of an offload cohort."""
        self.steps += 1
        self._step.add(seconds)

    def repaced(self) -> None:
        """The pace has changed: what a step took no longer holds."""
        self._step = _Mean()

    def view(self, sequences: int, *, others: bool) -> StepCosts:
        """What an arbiter is shown."""
        if sequences != self._sequences:
            self._sequences, self._step = sequences, _Mean()
        pass_s, sequence_s = self._split()
        known = [mean.value for mean in self._recalls.values()]
        typical = sum(known) / len(known) if known else 0.0
        recalls = tuple(
            self._recalls[layer].value if layer in self._recalls else typical
            for layer in range(self._layers)
        )
        hit = self._hit.value if self._hit.count else math.nan
        return StepCosts(
            self.steps, sequences, others, pass_s, sequence_s, recalls, hit, self._step.value
        )

    def _split(self) -> tuple[float, float]:
        # With a single size seen, all is counted per sequence: trying smaller cohorts once tells
        # what a pass over the weights costs, where the contrary guess would never try.
        sizes = sorted(self._computes)
        if not sizes:
            return 0.0, 0.0
        small, large = sizes[0], sizes[-1]
        high = self._computes[large].value
        if small == large:
            return 0.0, high / large
        slope = (high - self._computes[small].value) / (large - small)
        slope = min(max(slope, 0.0), high / large)
        return high - slope * large, slope
