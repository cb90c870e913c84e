"""The conformance kit of selection policies."""

from __future__ import annotations

import gc
import marshal
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pulse.hookspecs import Build
from pulse.ports import SelectionPolicy
from pulse.testing.arrays import Arrays, find_arrays
from pulse.testing.checking import (
    COMPLETE,
    RAISES_NOTHING,
    Broken,
    Checked,
    Property,
    Rule,
    attributes,
    require,
    search,
    told,
)
from pulse.testing.policyrules import (
    ARGUMENTS,
    BUDGET,
    COPIES,
    DETERMINISTIC,
    DIGESTS,
    EXHAUSTIVE,
    FORGETS,
    MIDDLE,
    NEIGHBOURS,
    RULES,
    SHAPE,
)
from pulse.testing.subjects import Subject, resolve
from pulse.types import Geometry, KVConfig, SelectionView

__all__ = ["RULES", "check_selection_policy"]

SLACK_BYTES = 1024
"""Bytes of arrays per sequence that may be kept beside the digests: counters, a choice of head."""

_BYTES = {"float32": 4, "bfloat16": 2}

Selections = dict[tuple[int, int, str], list[list[int]]]
"""By round, layer and sequence: per group the selected blocks in order, -1 left out."""


@dataclass(frozen=True)
class PolicyCase:
    """A model, a budget, and sequences that decode together.

    windowed: per layer, whether it has a sliding window. blocks: sealed blocks per sequence.
    """

    kv_heads: int
    group: int
    head_dim: int
    windowed: tuple[bool, ...]
    dtype: str
    block: int
    sink: int
    top_k: int
    blocks: tuple[int, ...]
    seed: int

    @property
    def geometry(self) -> Geometry:
        """The model's shape."""
        windows = tuple(64 if windowed else None for windowed in self.windowed)
        q_heads = self.kv_heads * self.group
        return Geometry(
            *(len(windows), q_heads, self.kv_heads, self.head_dim, 1 << 20, 256, self.dtype),
            *(_BYTES[self.dtype], windows, "kit"),
        )

    @property
    def kv(self) -> KVConfig:
        """Sink, one local block and `top_k` middle blocks."""
        block = self.block
        budget = (self.sink + 1 + self.top_k) * block
        return KVConfig(block, budget, self.sink * block, block, 4 * block)

    @property
    def names(self) -> tuple[str, ...]:
        """The sequences."""
        return tuple(f"sequence-{number}" for number in range(len(self.blocks)))

    @property
    def build(self) -> Build:
        """What a factory is given."""
        return Build(device="cpu", geometry=self.geometry, kv=self.kv)


@st.composite
def _cases(draw: Any, given: Geometry | None) -> PolicyCase:
    counts = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(tuple)
    later = st.lists(st.booleans(), max_size=2).map(lambda more: (False, *more))
    rest = {
        "block": draw(st.sampled_from([4, 16])),
        "sink": draw(st.integers(0, 2)),
        "top_k": draw(st.integers(1, 6)),
        "blocks": draw(counts),
        "seed": draw(st.integers(0, 1 << 16)),
    }
    if given is not None:
        windowed = tuple(window is not None for window in given.windows)
        group = given.q_heads // given.kv_heads
        return PolicyCase(*(given.kv_heads, group, given.head_dim, windowed, given.dtype), **rest)
    return PolicyCase(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([4, 8])),
        windowed=draw(later),
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16"])),
        **rest,
    )


def check_selection_policy(
    policy: Any,
    *,
    examples: int = 60,
    seed: int | None = None,
    arrays: Arrays | str | None = None,
) -> list[Checked]:
    """Check that a selection policy keeps the contract of `pulse.ports.SelectionPolicy`.

    policy: a registered name (``"solohead:4"``), ``"module:attribute"``, a `pulse.Plugin`, a class
        or function that makes one (given a `Build` with geometry, kv and device if it asks for
        one), or an object. An object with an attribute `geometry` is tried on that geometry only.
    examples: examples per property, at most. seed: draws others; the same each time by default.
    arrays: what queries and keys are: ``"torch"`` (CPU tensors, float32 and bfloat16; the default
        where torch is installed), ``"null"`` (nested lists), or an object like
        `pulse.testing.arrays.Arrays`.

    Returns the rules that hold. Raises `Violation` with the smallest example that breaks one, and
    ConfigError for what cannot be checked at all.
    """
    subject = resolve(policy, "select")
    found = find_arrays(arrays)
    geometry = None
    if not subject.fresh:
        geometry = getattr(subject.factory(Build()), "geometry", None)
    kit = _Kit(subject, found)
    cases = _cases(geometry if isinstance(geometry, Geometry) else None)
    return search(subject.label, kit.properties(cases), examples=examples, seed=seed)


class _Kit:
    def __init__(self, subject: Subject, arrays: Arrays) -> None:
        self.subject, self.arrays = subject, arrays

    def properties(self, cases: st.SearchStrategy[PolicyCase]) -> list[Property]:
        """In the order in which a policy is mended."""
        shape = (SHAPE, MIDDLE, BUDGET, EXHAUSTIVE, ARGUMENTS, RAISES_NOTHING)
        return [
            Property((COMPLETE,), cases, self.new, 0.1),
            Property(shape, cases, self.run_once),
            Property((DETERMINISTIC,), cases, self.again, 0.5),
            Property((NEIGHBOURS,), cases, self.alone),
            Property((COPIES,), cases, self.spoilt, 0.5),
            Property((FORGETS,), cases, self.forgotten, 0.3),
            Property((DIGESTS,), cases, self.digests, 0.2),
        ]

    def new(self, case: PolicyCase) -> None:
        """What a policy says of itself."""
        policy = self.subject.probe(case.build)
        attributes(policy, SelectionPolicy, per_head=bool, exhaustive=bool, late=bool)

    def run_once(self, case: PolicyCase) -> None:
        """All selections are as the port says."""
        run = _Run(self.subject.factory(case.build), case, self.arrays)
        with run.opened(case.names):
            run.steps()

    def again(self, case: PolicyCase) -> None:
        """Another policy, the same calls."""
        once, twice = (self._selections(case, case.names) for _ in range(2))
        _compare(once, twice, DETERMINISTIC, "the second time")

    def alone(self, case: PolicyCase) -> str | None:
        """Each sequence without the others."""
        if len(case.names) == 1:
            return "there was one sequence"
        together = self._selections(case, case.names)
        for name in case.names:
            mine = {key: value for key, value in together.items() if key[2] == name}
            _compare(mine, self._selections(case, (name,)), NEIGHBOURS, f"{name} alone")
        return None

    def spoilt(self, case: PolicyCase) -> None:
        """The memory of the keys is overwritten after each update."""
        kept = self._selections(case, case.names)
        _compare(kept, self._selections(case, case.names, spoil=True), COPIES, "keys overwritten")

    def forgotten(self, case: PolicyCase) -> None:
        """Sequences come and go; then the first ones come again."""
        fresh = self._selections(case, case.names)
        policy = self.subject.factory(case.build)
        sizes = []
        for turn in range(4):
            run = _Run(policy, case, self.arrays, salt=turn + 1)
            with run.opened(case.names, prefix=f"{turn}-" if turn else ""):
                run.steps()
            if turn:  # the first may fill caches that are every sequence's
                sizes.append(sum(1 for _ in _reachable(policy)))
        grown = sizes[-1] - sizes[0]
        require(grown < 2, FORGETS, f"{grown} more objects are kept after 2 more rounds of close")
        run = _Run(policy, case, self.arrays)
        with run.opened(case.names):
            _compare(fresh, run.steps(), FORGETS, "after others of the same name")

    def digests(self, case: PolicyCase) -> None:
        """What is said, and what a sequence of many blocks really keeps."""
        policy = self.subject.factory(case.build)
        said = [policy.digest_bytes(blocks) for blocks in (0, 1, 7, 48)]
        good = all(isinstance(count, int) and count >= 0 for count in said)
        require(good and said == sorted(said), DIGESTS, f"{said} for 0, 1, 7, 48 blocks")
        run = _Run(policy, case, self.arrays)
        blocks, name = 48, case.names[0]
        before = self.arrays.stored(_reachable(policy))
        policy.open(name, blocks)
        try:
            for layer in case.geometry.growing:
                run.observe(layer, name)
                run.update(layer, name, case.sink, blocks - case.sink, 0)
            kept = self.arrays.stored(_reachable(policy)) - before
        finally:
            policy.close(name)
        seen = f"{kept} bytes of arrays for {blocks} blocks, digest_bytes says {said[-1]}"
        require(kept <= said[-1] + SLACK_BYTES, DIGESTS, seen)

    def _selections(
        self, case: PolicyCase, names: Sequence[str], *, spoil: bool = False
    ) -> Selections:
        run = _Run(self.subject.factory(case.build), case, self.arrays, spoil=spoil)
        with run.opened(names):
            return run.steps()


class _Run:
    """One policy through prefill and two decode steps, as the kernel calls it."""

    def __init__(
        self, policy: Any, case: PolicyCase, arrays: Arrays, *, spoil: bool = False, salt: int = 0
    ) -> None:
        self.policy, self.case, self.arrays = policy, case, arrays
        self.spoil, self.salt = spoil, salt
        self.blocks: dict[str, int] = {}
        self.prefix = ""

    def opened(self, names: Sequence[str], prefix: str = "") -> _Opened:
        """A context in which the sequences are open; all are closed twice at its end."""
        self.prefix = prefix
        number = dict(zip(self.case.names, self.case.blocks, strict=True))
        self.blocks = {name: number[name] for name in names}
        return _Opened(self.policy, {prefix + name: n + 2 for name, n in self.blocks.items()})

    def steps(self) -> Selections:
        """Prefill all, then select in every layer, seal a block, select again."""
        selections: Selections = {}
        for layer in self.case.geometry.growing:
            for name, blocks in self.blocks.items():
                self.observe(layer, name)
                half = self.case.sink + max(0, blocks - self.case.sink) // 2
                self.update(layer, name, self.case.sink, half - self.case.sink, 0)
                self.update(layer, name, half, blocks - half, 0)
        for turn in (0, 1):
            for layer in self.case.geometry.growing:
                self._select(layer, turn, selections)
                for name, blocks in self.blocks.items():
                    if blocks + turn >= self.case.sink:
                        self.update(layer, name, blocks + turn, 1, turn + 1)
        return selections

    def observe(self, layer: int, name: str) -> None:
        """The mass of a prompt's last queries, for late policies."""
        if self.policy.late:
            mass = self._floats((self.case.kv_heads,), layer, name, 7, low=0.0, dtype="float32")
            with self._unchanged("observe", mass=mass):
                self.policy.observe(layer, self.prefix + name, mass)

    def update(self, layer: int, name: str, first: int, count: int, turn: int) -> None:
        """Keys of `count` blocks from `first` on."""
        if count <= 0:
            return
        shape = (count, self.case.kv_heads, self.case.block, self.case.head_dim)
        keys = self._floats(shape, layer, name, 100 + first + 1000 * turn)
        with self._unchanged("update", keys=keys):
            self.policy.update(layer, self.prefix + name, first, keys)
        if self.spoil:
            self.arrays.spoil(keys)

    def _select(self, layer: int, turn: int, selections: Selections) -> None:
        case, names = self.case, tuple(self.blocks)
        middle = tuple(
            (min(case.sink, blocks + turn), blocks + turn) for blocks in self.blocks.values()
        )
        if not any(high > low for low, high in middle):
            return  # nobody is asked then
        heads, most = case.kv_heads * case.group, max(high - low for low, high in middle)
        top_k = most if self.policy.exhaustive else case.top_k
        view = SelectionView(tuple(self.prefix + name for name in names), middle, top_k)
        shape = (heads, case.head_dim)
        query = self.arrays.stack([self._floats(shape, layer, name, 50 + turn) for name in names])
        with self._unchanged("select", query=query):
            found = self.policy.select(layer, query, view)
        chosen = self._checked(self.arrays.tolist(found), view)
        for name, groups in zip(names, chosen, strict=True):
            selections[turn, layer, name] = groups

    def _checked(self, found: Any, view: SelectionView) -> list[list[list[int]]]:
        groups = self.case.kv_heads if self.policy.per_head else 1
        want = f"[{len(view.sequences)} sequences, {groups} groups, blocks]"
        good = isinstance(found, list | tuple) and len(found) == len(view.sequences)
        require(good, SHAPE, f"{found!r} instead of {want}")
        for row in found:
            good = isinstance(row, list | tuple) and len(row) == groups
            good = good and all(isinstance(group, list | tuple) for group in row)
            require(good, SHAPE, f"{found!r} instead of {want}")
            integers = all(type(block) is int for group in row for block in group)
            require(integers, SHAPE, f"not all are integers in {row!r}")
        for row, (low, high) in zip(found, view.middle, strict=True):
            for group in row:
                wrong = [block for block in group if block != -1 and not low <= block < high]
                require(not wrong, MIDDLE, f"block {wrong[:1]}, the middle is {low} to {high - 1}")
                seen = f"{len(group)} blocks in a row, top_k is {view.top_k}"
                require(len(group) <= view.top_k, BUDGET, seen)
                missing = set(range(low, high)) - set(group) if self.policy.exhaustive else ()
                require(not missing, EXHAUSTIVE, f"blocks {sorted(missing)} are missing")
        return [[sorted({b for b in group if b >= 0}) for group in row] for row in found]

    def _seed(self, layer: int, name: str, what: int) -> int:
        number = self.case.names.index(name)
        return ((self.case.seed * 31 + self.salt) * 31 + number * 7919 + layer) * 4001 + what

    def _floats(self, shape: Sequence[int], layer: int, name: str, what: int, **more: Any) -> Any:
        return self.arrays.floats(
            shape, self._seed(layer, name, what), **{"dtype": self.case.dtype, **more}
        )

    def _unchanged(self, method: str, **arguments: Any) -> _Unchanged:
        return _Unchanged(self.arrays, method, arguments)


class _Opened:
    """Opens sequences, and closes them twice at the end."""

    def __init__(self, policy: Any, sequences: dict[str, int]) -> None:
        self.policy, self.sequences = policy, sequences

    def __enter__(self) -> None:
        for name, blocks in self.sequences.items():
            self.policy.open(name, blocks)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for _ in range(2):
            for name in self.sequences:
                try:
                    self.policy.close(name)
                except Exception as late:
                    if error is None:
                        raise Broken(FORGETS, f"close: {told(late)}") from late


class _Unchanged:
    """The body leaves the arguments as they are."""

    def __init__(self, arrays: Arrays, method: str, arguments: dict[str, Any]) -> None:
        self.arrays, self.method, self.arguments = arrays, method, arguments
        self.before: dict[str, bytes] = {}

    def __enter__(self) -> None:
        self.before = {name: self._bytes(value) for name, value in self.arguments.items()}

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            for name, value in self.arguments.items():
                same = self._bytes(value) == self.before[name]
                require(same, ARGUMENTS, f"{self.method} wrote to {name}")

    def _bytes(self, value: Any) -> bytes:
        # Version 2: later ones write of what is referred to twice in another way.
        return marshal.dumps(self.arrays.tolist(value), 2)


def _compare(want: Selections, got: Selections, rule: Rule, when: str) -> None:
    for key, groups in want.items():
        turn, layer, name = key
        other = got.get(key, groups)  # alone, a sequence without a middle is not asked about
        seen = f"{name}, layer {layer}, step {turn + 1}: {groups}, but {other} ({when})"
        require(groups == other, rule, seen)


_SKIPPED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


def _reachable(root: Any) -> Iterator[Any]:
    """Everything that an object keeps alive, apart from code."""
    seen: set[int] = set()
    queue = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (*_SKIPPED, types.FrameType)):
            continue
        seen.add(id(item))
        yield item
        queue.extend(gc.get_referents(item))
