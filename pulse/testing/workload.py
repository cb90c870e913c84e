"""Workloads for schedulers, and Hypothesis strategies that draw them.

A workload is all that happens to an engine from outside: who comes when and leaves when, how large
the tiers are, how long things take, which transfers go wrong. It says everything about a run but
the arbiter; the same one always runs the same way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import strategies as st

from pulse.types import KVConfig

__all__ = [
    "Arrival",
    "Fault",
    "Timings",
    "Workload",
    "arrivals",
    "crowds",
    "lane_timings",
    "smaller",
    "workloads",
]


LONGEST = 20.0
"""Times the median that nothing takes longer than: only faults are late (`TIMEOUT_S`)."""


class _Terse:
    """A dataclass whose text leaves out what is as usual."""

    def __repr__(self) -> str:
        said = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)  # type: ignore[arg-type]
            if getattr(self, one.name) != one.default
        ]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Arrival(_Terse):
    """A request: when it comes (seconds), its prompt and new tokens, how urgent it is.

    leaves: seconds after its arrival at which its owner cancels it; None if never.
    """

    at: float = 0.0
    prompt: int = 1
    tokens: int = 1
    priority: int = 0
    deadline_s: float | None = None
    leaves: float | None = None


@dataclass(frozen=True, repr=False)
class Fault(_Terse):
    """What goes wrong with the `at`-th transfer that serves a request, both counted from 0.

    how: it ``fails`` before or ``fails-after`` it moved, it is ``corrupt`` (it fails with a
    ChecksumError) or ``late`` (it takes three times the timeout).
    """

    request: int = 0
    at: int = 0
    how: str = "fails"


@dataclass(frozen=True, repr=False)
class Timings(_Terse):
    """How long things take, in seconds: medians, and how far single draws are from them.

    compute_s, transfer_s: medians of a computation and of a transfer. tail: sigma of the
    log-normal factor, cut off at `LONGEST`; transfers of a lane may then overtake each other. 0
    makes all alike.
    """

    compute_s: float = 0.001
    transfer_s: float = 0.001
    tail: float = 0.0

    def draws(self, median: float, seed: int) -> Callable[..., float]:
        """A function that draws durations around `median`."""
        source = random.Random(seed)
        if not self.tail:
            return lambda *_: median
        return lambda *_: median * min(LONGEST, source.lognormvariate(0.0, self.tail))


@dataclass(frozen=True, repr=False)
class Workload(_Terse):
    """All that happens to an engine on the null model.

    requests: who comes. normal_tokens: requests of at most so many tokens are normal, the others
    offloaded. spare_blocks: blocks that the fast tier holds beyond the largest request's;
    None for plenty. layers, sparse: of the model, and whether offloaded sequences read a selection
    or all. eager: whether the compute worker submits recalls itself. wrong: whether predictions
    are. seed: order of what is ready at the same time, and the draws of `timings`.
    """

    requests: tuple[Arrival, ...] = (Arrival(),)
    normal_tokens: int = 24
    spare_blocks: int | None = None
    layers: int = 2
    sparse: bool = False
    eager: bool = False
    wrong: bool = False
    faults: tuple[Fault, ...] = ()
    timings: Timings = Timings()
    seed: int = 0

    @property
    def config(self) -> KVConfig:
        """Small blocks and windows, so that little is needed for much to happen."""
        return KVConfig(block=4, budget=24, sink=4, local=8, chunk=16)

    @property
    def fast_slots(self) -> int:
        """Slots of the fast tier."""
        if self.spare_blocks is None:
            return 2_000 * self.layers
        largest = max(one.prompt + one.tokens for one in self.requests)
        least = self.config.sink_blocks + 3  # what an offloaded sequence holds at least
        return (max(self.config.blocks(largest), least) + self.spare_blocks) * self.layers


def smaller(workload: Workload) -> Iterator[Workload]:
    """Workloads that are a step simpler, the largest steps first."""
    requests, faults = workload.requests, workload.faults
    for index in range(len(requests) - 1, -1, -1):
        if len(requests) > 1:
            yield replace(
                workload,
                requests=requests[:index] + requests[index + 1 :],
                faults=tuple(
                    replace(fault, request=fault.request - (fault.request > index))
                    for fault in faults
                    if fault.request != index
                ),
            )
    for index in range(len(faults)):
        yield replace(workload, faults=faults[:index] + faults[index + 1 :])
    plain = Workload()
    for one in fields(workload):
        usual = getattr(plain, one.name)
        if one.name not in ("requests", "faults") and getattr(workload, one.name) != usual:
            yield replace(workload, **{one.name: usual})
    for index, arrival in enumerate(requests):
        for simpler in _smaller(arrival):
            yield replace(workload, requests=(*requests[:index], simpler, *requests[index + 1 :]))
    for index, fault in enumerate(faults):
        for at in {0, fault.at // 2, fault.at - 1} - {fault.at, -1}:
            moved = replace(fault, at=at)
            yield replace(workload, faults=(*faults[:index], moved, *faults[index + 1 :]))


def _smaller(arrival: Arrival) -> Iterator[Arrival]:
    plain = Arrival()
    for name in ("at", "priority", "deadline_s", "leaves"):
        if getattr(arrival, name) != getattr(plain, name):
            yield replace(arrival, **{name: getattr(plain, name)})
    for name in ("prompt", "tokens"):
        value = getattr(arrival, name)
        for less in (1, value // 2, value - 1):
            if 1 <= less < value:
                yield replace(arrival, **{name: less})


def lane_timings() -> st.SearchStrategy[Timings]:
    """How long computations and transfers take: alike, one much longer, or all over the place."""
    return st.builds(
        Timings,
        compute_s=st.sampled_from([0.001, 0.0, 0.02]),
        transfer_s=st.sampled_from([0.001, 0.0, 0.0005, 0.003, 0.02]),
        tail=st.sampled_from([0.0, 0.5, 1.5]),
    )


def arrivals() -> st.SearchStrategy[Arrival]:
    """A request, short or long, patient or not."""
    times = st.sampled_from([0.0, 0.0005, 0.001, 0.004, 0.02, 0.1])
    return st.builds(
        Arrival,
        at=times,
        prompt=st.integers(1, 8) | st.integers(1, 60),
        tokens=st.integers(1, 6) | st.integers(1, 30) | st.integers(40, 60),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        deadline_s=st.none() | st.sampled_from([0.01, 0.1]),
        leaves=st.none() | st.none() | times,
    )


def crowds(most: int = 5) -> st.SearchStrategy[tuple[Arrival, ...]]:
    """A short and a long request that decode side by side for long, and others beside them.

    What an arbiter prefers shows only where three or more want the lane: of two, the one that did
    not have it is next. See `workloads`, which sees to it that the two are in different cohorts.
    """
    short = st.builds(Arrival, prompt=st.integers(1, 4), tokens=st.integers(20, 50))
    long = st.builds(Arrival, prompt=st.integers(55, 70), tokens=st.integers(20, 50))
    reading = st.builds(Arrival, prompt=st.integers(60, 160), tokens=st.integers(1, 4))
    others = st.lists(arrivals() | reading, min_size=min(1, most - 2), max_size=most - 2)
    return st.tuples(short, long, others).map(lambda drawn: (*drawn[:2], *drawn[2]))


def workloads(*, most: int = 5, faults: bool = True, **fixed: Any) -> st.SearchStrategy[Workload]:
    """Workloads of at most `most` requests, a fifth of them crowded (see `crowds`).

    fixed: fields that are not drawn, or drawn from the strategy that is given.
    """
    fault = st.builds(
        Fault,
        request=st.integers(0, most - 1),
        at=st.integers(0, 3) | st.integers(0, 40),
        how=st.sampled_from(["fails", "fails-after", "corrupt", "late"]),
    )
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "requests": st.lists(arrivals(), min_size=1, max_size=most).map(tuple),
        "normal_tokens": st.sampled_from([24, 0, 8, 10_000]),
        "spare_blocks": st.none() | st.integers(0, 8),
        "layers": st.integers(1, 3),
        "sparse": st.booleans(),
        "eager": st.booleans(),
        "wrong": st.booleans(),
        "faults": st.just(()) | (st.lists(fault, max_size=3).map(tuple) if faults else st.just(())),
        "timings": lane_timings(),
        "seed": st.integers(0, 1_000),
    }
    given = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in fixed.items()
    }
    plain = st.builds(Workload, **{**drawn, **given})
    if most < 2:
        return plain
    crowded: dict[str, st.SearchStrategy[Any]] = {
        "requests": crowds(most),
        "normal_tokens": st.just(54),
        "spare_blocks": st.none() | st.integers(20, 60),
        "timings": st.builds(
            Timings,
            compute_s=st.just(0.001),
            transfer_s=st.sampled_from([0.0, 0.0005, 0.001, 0.003]),
            tail=st.sampled_from([0.0, 0.5]),
        ),
    }
    rest = st.builds(Workload, **{**drawn, **crowded, **given})
    return st.integers(0, 4).flatmap(lambda which: plain if which else rest)
