"""The kit of selection policies: first-party ones pass, broken ones are told what they break."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pulse import Build, Plugins
from pulse.errors import ConfigError
from pulse.testing import Violation, check_selection_policy
from pulse.testing.policies import RULES
from pulse.types import Geometry, SelectionView

NAMES = [
    item.plugin.name
    for item in Plugins().all()
    if item.kind == "select" and item.problem is None and item.plugin.name != "null"
]

Keys = list[list[list[list[float]]]]


def flat(numbers: Any) -> list[float]:
    """The numbers of nested lists."""
    return [x for part in numbers for x in flat(part)] if isinstance(numbers, list) else [numbers]


class Best:
    """A policy over lists that conforms: blocks whose keys' sum is nearest to the query's."""

    per_head = False
    exhaustive = False
    late = False

    def __init__(self) -> None:
        self.sums: dict[str, dict[tuple[int, int], float]] = {}

    def digest_bytes(self, blocks: int) -> int:
        return 8 * blocks

    def open(self, sequence: str, blocks: int) -> None:
        self.sums[sequence] = {}

    def close(self, sequence: str) -> None:
        self.sums.pop(sequence, None)

    def observe(self, layer: int, sequence: str, mass: Any) -> None:
        raise AssertionError("this policy is not late")

    def update(self, layer: int, sequence: str, first: int, keys: Keys) -> None:
        for block, tokens in enumerate(keys, first):
            self.sums[sequence][layer, block] = sum(flat(tokens))

    def score(self, layer: int, sequence: str, block: int, query: Any) -> float:
        return abs(self.sums[sequence][layer, block] - sum(flat(query)))

    def select(self, layer: int, query: Any, view: SelectionView) -> list[list[list[int]]]:
        chosen = []
        for sequence, mine, (low, high) in zip(view.sequences, query, view.middle, strict=True):
            blocks = sorted(range(low, high), key=lambda b: self.score(layer, sequence, b, mine))
            chosen.append([blocks[: view.top_k]])
        return chosen


class Newest:
    """The policy of the README."""

    per_head = exhaustive = late = False

    def digest_bytes(self, blocks: int) -> int:
        return 0

    def open(self, sequence: str, blocks: int) -> None: ...
    def close(self, sequence: str) -> None: ...
    def observe(self, layer: int, sequence: str, mass: Any) -> None: ...
    def update(self, layer: int, sequence: str, first: int, keys: Any) -> None: ...

    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        rows = [list(range(max(low, high - view.top_k), high)) for low, high in view.middle]
        return torch.tensor([[row + [-1] * (view.top_k - len(row))] for row in rows])


@pytest.mark.parametrize("name", NAMES)
def test_first_party_policies_conform(name: str) -> None:
    checked = check_selection_policy(name, examples=20)
    assert {one.rule for one in checked} == set(RULES)
    assert not [one for one in checked if one.remark]


@pytest.mark.parametrize(
    ("policy", "arrays"),
    [("null", None), ("null", "null"), (Best, "null"), (Newest(), None), (Newest, "torch")],
)
def test_small_policies_conform(policy: Any, arrays: str | None) -> None:
    check_selection_policy(policy, examples=15, arrays=arrays)


def test_an_object_is_tried_on_its_own_geometry() -> None:
    geometry = Geometry(3, 4, 2, 8, 4096, 256, "float32", 4, (None, 64, None), "mine")
    policy = Plugins().resolve("select", "headwise", Build(geometry=geometry, device="cpu"))
    check_selection_policy(policy, examples=15)


# -- broken ones ---------------------------------------------------------------------------------


class NotSaid(Best):
    late = None  # type: ignore[assignment]


class NoGroups(Best):
    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        return [groups[0] for groups in super().select(layer, query, view)]


class Floats(Best):
    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        return [[[float(b) for b in row[0]]] for row in super().select(layer, query, view)]


class Offsets(Best):
    """Positions within the middle instead of block ids."""

    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        found = super().select(layer, query, view)
        return [
            [[block - low for block in row[0]]]
            for row, (low, _) in zip(found, view.middle, strict=True)
        ]


class OneTooMany(Best):
    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        more = SelectionView(view.sequences, view.middle, view.top_k + 1)
        return super().select(layer, query, more)


class NotAll(Best):
    exhaustive = True

    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        return [[row[0][:3]] for row in super().select(layer, query, view)]


class Sorts(Best):
    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        for heads in query:
            for head in heads:
                head.sort()
        return super().select(layer, query, view)


class Random(Best):
    source = random.Random(0)

    def score(self, layer: int, sequence: str, block: int, query: Any) -> float:
        return self.source.random()


class FirstsQuery(Best):
    """All sequences are scored with the first one's query."""

    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        return super().select(layer, [query[0] for _ in query], view)


class OneTable(Best):
    """Sums are kept by layer and block alone, so sequences overwrite each other's."""

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[tuple[int, int], float] = {}

    def update(self, layer: int, sequence: str, first: int, keys: Keys) -> None:
        for block, tokens in enumerate(keys, first):
            self.all[layer, block] = sum(flat(tokens))

    def score(self, layer: int, sequence: str, block: int, query: Any) -> float:
        return self.all[layer, block]


class KeepsKeys(Best):
    def open(self, sequence: str, blocks: int) -> None:
        self.sums[sequence] = {}

    def update(self, layer: int, sequence: str, first: int, keys: Any) -> None:
        for block, tokens in enumerate(keys, first):
            self.sums[sequence][layer, block] = tokens

    def score(self, layer: int, sequence: str, block: int, query: Any) -> float:
        return abs(sum(flat(self.sums[sequence][layer, block])) - sum(flat(query)))


class Remembers(Best):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def close(self, sequence: str) -> None:
        super().close(sequence)
        self.seen.append(sequence + "!")


class ClosesOnce(Best):
    def close(self, sequence: str) -> None:
        del self.sums[sequence]


class Resumes(Best):
    """A sequence that is closed is kept for the next of its name."""

    def open(self, sequence: str, blocks: int) -> None:
        self.sums.setdefault(sequence, {})

    def close(self, sequence: str) -> None: ...

    def update(self, layer: int, sequence: str, first: int, keys: Keys) -> None:
        for block, tokens in enumerate(keys, first):
            self.sums[sequence].setdefault((layer, block), sum(flat(tokens)))


class Shrinks(Best):
    def digest_bytes(self, blocks: int) -> int:
        return 1000 - blocks


class Understates(Newest):
    """Keeps all keys and says that it keeps nothing."""

    def __init__(self) -> None:
        self.keys: dict[str, list[torch.Tensor]] = {}

    def open(self, sequence: str, blocks: int) -> None:
        self.keys[sequence] = []

    def close(self, sequence: str) -> None:
        self.keys.pop(sequence, None)

    def update(self, layer: int, sequence: str, first: int, keys: torch.Tensor) -> None:
        self.keys[sequence].append(keys.clone())


class NeedsAMiddle(Best):
    def select(self, layer: int, query: Any, view: SelectionView) -> Any:
        found = super().select(layer, query, view)
        return [[[row[0][0], *row[0][1:]]] for row in found]


@pytest.mark.parametrize(
    ("broken", "rule", "shown"),
    [
        (NotSaid, "complete", "late is None"),
        (NoGroups, "shape", "[[0]] instead of [1 sequences, 1 groups, blocks]"),
        (Floats, "shape", "not all are integers in [[0.0]]"),
        (Offsets, "middle", "block [0], the middle is 1 to 1"),
        (OneTooMany, "budget", "2 blocks in a row, top_k is 1"),
        (NotAll, "exhaustive", "are missing"),
        (Sorts, "arguments", "select wrote to query"),
        (Random, "deterministic", "the second time"),
        (FirstsQuery, "neighbours", "sequence-1 alone"),
        (OneTable, "neighbours", "sequence-0 alone"),
        (KeepsKeys, "copies-keys", "keys overwritten"),
        (Remembers, "forgets", "4 more objects are kept"),
        (ClosesOnce, "forgets", "close: KeyError"),
        (Resumes, "forgets", "more objects are kept"),
        (Shrinks, "digest-bytes", "[1000, 999, 993, 952]"),
        (Understates, "digest-bytes", "digest_bytes says 0"),
        (NeedsAMiddle, "raises-nothing", "IndexError"),
    ],
)
def test_a_broken_policy_is_told_its_rule(broken: Callable[[], Any], rule: str, shown: str) -> None:
    arrays = "torch" if broken is Understates else "null"
    with pytest.raises(Violation) as caught:
        check_selection_policy(broken, examples=20, arrays=arrays)
    violation = caught.value
    assert violation.rule.name == rule, str(violation)
    assert violation.rule in RULES
    assert shown in violation.seen, str(violation)
    if broken is not Random:  # which breaks its rule by chance
        assert violation.example.startswith("PolicyCase(kv_heads=1, group=1, head_dim=")
    assert "windowed=(False,), dtype='float32', block=4, sink=" in violation.example


def test_the_smallest_case_is_told() -> None:
    with pytest.raises(Violation) as caught:
        check_selection_policy(OneTooMany, arrays="null")
    assert caught.value.example == (
        "PolicyCase(kv_heads=1, group=1, head_dim=4, windowed=(False,), dtype='float32', block=4, "
        "sink=0, top_k=1, blocks=(1,), seed=0)"
    )


def test_what_is_no_policy_is_told() -> None:
    with pytest.raises(ConfigError, match="neither the wanted selection policy nor a"):
        check_selection_policy(7)


def test_half_a_policy_is_told_what_it_lacks() -> None:
    class Half:
        def select(self, *_: Any) -> None: ...

    with pytest.raises(Violation, match="Half has no digest_bytes, open") as caught:
        check_selection_policy(Half())
    assert caught.value.rule.name == "complete"
