"""The kit of block stores: first-party ones pass, broken ones are told what they break."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pulse.errors import ConfigError, PluginNotFound, StoreError, TransferError
from pulse.hookspecs import StoreShape
from pulse.testing import Violation, check_block_store
from pulse.testing.stores import RULES


class ByteStore:
    """A store in a few lines, which conforms; the broken ones differ from it in one place."""

    kind, description = "bytes", "a dictionary"

    def __init__(self, shape: StoreShape) -> None:
        self.slots, self.planes, self.units = shape.slots, shape.planes, shape.units
        self.unit_bytes, self.limit_bytes = shape.unit_bytes, shape.limit_bytes
        self.used_bytes = self.peak_bytes = 0
        self.idle = list(range(shape.slots))
        self.memory: dict[int, bytes] = {}

    @property
    def slot_bytes(self) -> int:
        return self.planes * self.units * self.unit_bytes

    def allocate(self, count: int) -> list[int]:
        if count > len(self.idle):
            raise StoreError("no slots")
        self.reserve(count * self.slot_bytes)
        taken, self.idle = self.idle[:count], self.idle[count:]
        return taken

    def free(self, slots: Any) -> None:
        slots = [int(slot) for slot in slots]
        bad = [s for s in slots if not 0 <= s < self.slots or s in self.idle]
        if bad or len(set(slots)) < len(slots):
            raise StoreError("not allocated")
        self.idle = sorted([*self.idle, *slots])
        self.release(len(slots) * self.slot_bytes)

    def reserve(self, count: int) -> None:
        if self.used_bytes + count > self.limit_bytes:
            raise StoreError("no room")
        self.used_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, count: int) -> None:
        self.used_bytes -= count

    def unit(self, unit: int) -> int:
        if not 0 <= unit < self.slots * self.planes * self.units:
            raise TransferError("outside")
        return unit

    def read(self, units: Any, out: Any) -> int:
        for i, unit in enumerate([self.unit(int(unit)) for unit in units]):
            out[i] = memoryview(self.memory[unit])
        return len(units)

    def write(self, units: Any, data: Any) -> int:
        for unit, row in zip([self.unit(int(unit)) for unit in units], data, strict=True):
            self.memory[unit] = bytes(row)
        return len(units)

    def close(self) -> None:
        pass


def damage(store: Any, unit: int) -> None:
    """Change the first byte of a unit in the file of a disk store."""
    with Path(f"/proc/self/fd/{store._file.fd}").open("r+b", buffering=0) as handle:
        handle.seek(unit * store._file.stride)
        old = handle.read(1)[0]
        handle.seek(unit * store._file.stride)
        handle.write(bytes([old ^ 1]))


@pytest.mark.parametrize("name", ["host", "disk", "device:cpu", "null"])
def test_first_party_stores_conform(name: str) -> None:
    checked = check_block_store(name, examples=30)
    assert {rule.name for rule in RULES} - {one.rule.name for one in checked} == {"checksum"}
    assert not [one for one in checked if one.remark]


def test_a_disk_finds_damage(tmp_path: Path) -> None:
    checked = check_block_store(f"disk:{tmp_path / 'kv'}", examples=20, damage=damage)
    assert "checksum" in {one.rule.name for one in checked}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arrays", ["torch", "null"])
def test_a_store_of_a_few_lines_conforms(arrays: str) -> None:
    check_block_store(ByteStore, examples=20, arrays=arrays)


# -- broken ones ---------------------------------------------------------------------------------


class NoRelease(ByteStore):
    release = None  # type: ignore[assignment]


class OwnLimit(ByteStore):
    def __init__(self, shape: StoreShape) -> None:
        super().__init__(shape)
        self.limit_bytes = self.slots * self.slot_bytes


class SameSlot(ByteStore):
    def allocate(self, count: int) -> list[int]:
        taken = super().allocate(count)
        return taken[:-1] + taken[:1]


class Descending(ByteStore):
    def allocate(self, count: int) -> list[int]:
        return super().allocate(count)[::-1]


class NoLimit(ByteStore):
    def reserve(self, count: int) -> None:
        self.used_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class NeverFull(ByteStore):
    def reserve(self, count: int) -> None:
        if self.used_bytes + count >= self.limit_bytes > 0:
            raise StoreError("no room")
        super().reserve(count)


class NoPeak(ByteStore):
    def reserve(self, count: int) -> None:
        super().reserve(count)
        self.peak_bytes = self.used_bytes


class FreesAnything(ByteStore):
    def free(self, slots: Any) -> None:
        self.idle = sorted({*self.idle, *(int(slot) for slot in slots)})
        self.release(len(slots) * self.slot_bytes)


class PlanesOverlap(ByteStore):
    def unit(self, unit: int) -> int:
        return super().unit(unit) % (self.slots * self.units)


class Truncates(ByteStore):
    def write(self, units: Any, data: Any) -> int:
        return super().write(units, [bytes(row)[:-1] + b"\0" for row in data])


class Wraps(ByteStore):
    def unit(self, unit: int) -> int:
        return unit % (self.slots * self.planes * self.units)


class CountsBytes(ByteStore):
    def write(self, units: Any, data: Any) -> int:
        return super().write(units, data) * self.unit_bytes


class OneThread(ByteStore):
    def read(self, units: Any, out: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise TransferError("another thread")
        return super().read(units, out)


class ClosesOnce(ByteStore):
    def close(self) -> None:
        del self.memory


class Crashes(ByteStore):
    def release(self, count: int) -> None:
        super().release(count + 0 // count)


@pytest.mark.parametrize(
    ("broken", "rule", "calls"),
    [
        (NoRelease, "complete", None),
        (OwnLimit, "shape", None),
        (SameSlot, "slots", 1),
        (Descending, "ascending", 1),
        (NoLimit, "capacity", 1),
        (NeverFull, "room", 1),
        (NoPeak, "counts", 3),
        (FreesAnything, "frees", 1),
        (PlanesOverlap, "bytes", 2),
        (Truncates, "bytes", 2),
        (Wraps, "bounds", 2),
        (CountsBytes, "pieces", 2),
        (OneThread, "threads", None),
        (ClosesOnce, "closes", None),
        (Crashes, "raises-nothing", 1),
    ],
)
def test_a_broken_store_is_told_its_rule(
    broken: Callable[..., Any], rule: str, calls: int | None
) -> None:
    with pytest.raises(Violation) as caught:
        check_block_store(broken, examples=40, arrays="null")
    violation = caught.value
    assert violation.rule.name == rule, str(violation)
    assert violation.rule in RULES
    if calls is not None:
        lines = violation.example.splitlines()
        assert lines[0].startswith("a store of slots=")
        assert len(lines) - 1 == calls, violation.example


def test_a_violation_reads_as_text() -> None:
    with pytest.raises(Violation) as caught:
        check_block_store(NoLimit, arrays="null")
    assert str(caught.value) == (
        "block store 'NoLimit' breaks the rule 'capacity': what does not fit in the slots or "
        "under limit_bytes is refused with StoreError, and nothing changes\n"
        "  smallest example: a store of slots=1, planes=1, units=1, unit_bytes=1, limit_bytes=1\n"
        "    reserve(2)\n"
        "  seen: reserve(2), when 0 of 1 are used, raised nothing instead of StoreError\n"
        "  what to do: check both before anything is taken: the free slots, and used_bytes plus "
        "the new bytes"
    )


def test_the_same_seed_finds_the_same() -> None:
    def example(seed: int | None) -> str:
        with pytest.raises(Violation) as caught:
            check_block_store(PlanesOverlap, examples=40, arrays="null", seed=seed)
        return caught.value.example

    assert example(None) == example(None)
    assert example(7) == example(7)


def test_a_store_that_does_not_find_damage_is_told() -> None:
    def change(store: Any, unit: int) -> None:
        store.memory[unit] = bytes([store.memory[unit][0] ^ 1]) + store.memory[unit][1:]

    with pytest.raises(Violation) as caught:
        check_block_store(ByteStore, arrays="null", damage=change)
    assert caught.value.rule.name == "checksum"


# -- what cannot be checked ----------------------------------------------------------------------


def test_an_object_cannot_be_checked() -> None:
    with pytest.raises(ConfigError, match=r"'ByteStore' is one object.*pass its class or a func"):
        check_block_store(ByteStore(StoreShape(1, 1, 1, 1, 1)))


def test_what_cannot_be_made_is_told() -> None:
    def fails(build: Any) -> Any:
        raise OSError("no such device")

    with pytest.raises(ConfigError, match="cannot be made here: OSError: no such device"):
        check_block_store(fails)
    with pytest.raises(PluginNotFound, match="did you mean host"):
        check_block_store("hots")
    with pytest.raises(ConfigError, match=r"needs 2 arguments \(slots, planes\)"):
        check_block_store(lambda slots, planes: None)
    with pytest.raises(ConfigError, match="examples=0 must be at least 1"):
        check_block_store("null", examples=0)
