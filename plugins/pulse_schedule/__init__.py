"""Arbiters of the compute lane: irq, fair, lockstep, prefetch-one."""

from __future__ import annotations

from pulse import Build, Plugin, hookimpl
from pulse.errors import ConfigError
from pulse_schedule.baselines import Lockstep, PrefetchOne
from pulse_schedule.irq import IRQ, Fair

__all__ = ["IRQ", "Fair", "Lockstep", "PrefetchOne", "pulse_arbiters"]


def _patience(build: Build, name: str, default: int) -> int:
    if not build.argument:
        return default
    if not build.argument.isdecimal() or int(build.argument) < 1:
        raise ConfigError(
            f"{name}:{build.argument} needs a patience of at least 1 grant, like {name}:64"
        )
    return int(build.argument)


def _bare(build: Build, name: str) -> None:
    if build.argument:
        raise ConfigError(f"{name}:{build.argument} is unknown: {name} takes no argument")


def _lockstep(build: Build) -> Lockstep:
    _bare(build, "lockstep")
    return Lockstep()


def _prefetch_one(build: Build) -> PrefetchOne:
    _bare(build, "prefetch-one")
    return PrefetchOne()


@hookimpl
def pulse_arbiters() -> list[Plugin]:
    """The arbiters of this package."""
    return [
        Plugin(
            "irq",
            lambda build: IRQ(_patience(build, "irq", 64)),
            "landed offload cohorts first, then normal layers, then prefill",
        ),
        Plugin(
            "fair",
            lambda build: Fair(_patience(build, "fair", 16)),
            "priorities first, then the earliest deadline, then as irq",
        ),
        Plugin("lockstep", _lockstep, "a baseline: recalls stop all computation"),
        Plugin("prefetch-one", _prefetch_one, "a baseline: recalls one layer ahead, and waits"),
    ]
