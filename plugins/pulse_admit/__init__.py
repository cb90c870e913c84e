"""Admission rules: threshold."""

from __future__ import annotations

from collections.abc import Sequence

from pulse import Build, Placement, Plugin, hookimpl
from pulse.errors import ConfigError
from pulse.ports import AdmissionView

__all__ = ["Threshold", "pulse_admission_rules"]


class Threshold:
    """Requests up to a fixed number of tokens are normal, longer ones are offloaded.

    One that could never fit where its length puts it goes where it can. The fixed thresholds that
    PulseInfer compares with (section "IOAA").
    """

    def __init__(self, tokens: int = 4096) -> None:
        self.tokens = tokens

    def admit(self, waiting: Sequence[int], view: AdmissionView) -> list[Placement]:
        """A placement by length; the engine lets wait what does not fit yet."""
        # The longest of each kind speaks for the rest: asking about every request would cost the
        # loop more than it is worth where thousands wait.
        longest = {self._wished(tokens): tokens for tokens in sorted({*waiting})}
        doubtful = {
            placement
            for placement, tokens in longest.items()
            if not _possible(tokens, placement, view)
        }
        return [
            self._wished(tokens)
            if self._wished(tokens) not in doubtful
            else _placed(tokens, self._wished(tokens), view)
            for tokens in waiting
        ]

    def _wished(self, tokens: int) -> Placement:
        return Placement.NORMAL if tokens <= self.tokens else Placement.OFFLOAD


def _placed(tokens: int, wished: Placement, view: AdmissionView) -> Placement:
    other = Placement.OFFLOAD if wished is Placement.NORMAL else Placement.NORMAL
    elsewhere = not _possible(tokens, wished, view) and _possible(tokens, other, view)
    return other if elsewhere else wished


def _possible(tokens: int, placement: Placement, view: AdmissionView) -> bool:
    demand = view.demand(tokens, placement)
    return demand.fast <= view.fast_limit and demand.slow <= view.slow_limit


def _threshold(build: Build) -> Threshold:
    if not build.argument:
        return Threshold()
    try:
        tokens = int(build.argument)
    except ValueError:
        tokens = -1
    if tokens < 0:
        raise ConfigError(f"threshold:{build.argument} needs a whole number of tokens, 0 or more")
    return Threshold(tokens)


@hookimpl
def pulse_admission_rules() -> list[Plugin]:
    """The rules of this package."""
    return [
        Plugin(
            "threshold",
            _threshold,
            "offload requests of more than N tokens (threshold:N, 4096 by default)",
        )
    ]
