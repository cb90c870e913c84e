"""Admission rules: threshold."""

from __future__ import annotations

from collections.abc import Sequence

from pulse import Build, Placement, Plugin, hookimpl
from pulse.errors import ConfigError
from pulse.ports import AdmissionView

__all__ = ["Threshold", "pulse_admission_rules"]


class Threshold:
    """Requests up to a fixed number of tokens are normal, longer ones are offloaded.

    The fixed thresholds that PulseInfer compares with (section "IOAA").
    """

    def __init__(self, tokens: int = 4096) -> None:
        self.tokens = tokens

    def admit(self, waiting: Sequence[int], view: AdmissionView) -> list[Placement]:
        """A placement by length alone; the engine lets wait what does not fit yet."""
        return [
            Placement.NORMAL if tokens <= self.tokens else Placement.OFFLOAD for tokens in waiting
        ]


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
