"""The host and disk stores: slots, bytes, and what happens when a disk misbehaves."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pulse.errors import ChecksumError, StoreError, TransferError
from pulse.ports import BlockStore
from pulse_store import blocks, disk, file
from pulse_store.copy import gather_units, scatter_units
from pulse_store.disk import DiskStore
from pulse_store.host import HostStore
from pulse_store.slots import SlotAllocator

UNIT_BYTES = st.sampled_from([1, 7, 24, 1000, 1001, 4096, 12288])


def random_rows(count: int, unit_bytes: int, seed: int = 0) -> np.ndarray:
    """Bytes ``[count, unit_bytes]`` that hardly repeat."""
    return np.random.default_rng(seed).integers(0, 256, (count, unit_bytes), dtype=np.uint8)


def make(kind: str, folder: Path, *shape: int, **options: Any) -> Any:
    """A store of that kind; the disk's file gets a name of its own."""
    if kind == "host":
        return HostStore(*shape, **options)
    return DiskStore(folder / "arena.kv", *shape, direct=kind == "direct", **options)


@pytest.fixture(params=["host", "direct", "buffered"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each store; `direct` is buffered where the file system refuses O_DIRECT."""
    return str(request.param)


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Iterator[Any]:
    """10 slots, 2 planes, 3 units of 1000 bytes."""
    made = make(kind, tmp_path, 10, 2, 3, 1000)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples of a Hypothesis test: the stores leave nothing in it."""
    return tmp_path_factory.mktemp("stores")


# --- slots ---------------------------------------------------------------------------------------


class SlotModel(RuleBasedStateMachine):
    """`SlotAllocator` against a set."""

    slots = 24
    limit = 20

    def __init__(self) -> None:
        super().__init__()
        self.real = SlotAllocator(self.slots, self.limit)
        self.taken: set[int] = set()
        self.peak = 0

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        """Distinct free slots, ascending, in the lowest run that fits; all or nothing."""
        if count > self.limit - len(self.taken):
            with pytest.raises(StoreError, match="no room"):
                self.real.allocate(count)
            return
        got = self.real.allocate(count)
        assert got.dtype == np.int64
        free = [slot for slot in range(self.slots) if slot not in self.taken]
        runs = [low for low in free if all(low + i in free for i in range(count))]
        if runs:
            assert got.tolist() == list(range(runs[0], runs[0] + count)) if count else not got.size
        assert got.tolist() == sorted(set(got.tolist())) and len(got) == count
        assert set(got.tolist()) <= set(free)
        self.taken |= set(got.tolist())
        self.peak = max(self.peak, len(self.taken))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Allocated slots in any order."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True)
                           if self.taken else st.just([]))  # fmt: skip
        self.real.free(chosen)
        self.taken -= set(chosen)

    @rule(slots=st.lists(st.integers(-2, 25), min_size=1, max_size=6))
    def free_wrongly(self, slots: list[int]) -> None:
        """One wrong slot, and nothing is freed."""
        if len(set(slots)) == len(slots) and set(slots) <= self.taken:
            return
        with pytest.raises(StoreError, match="nothing is freed"):
            self.real.free(np.array(slots))

    @invariant()
    def counts(self) -> None:
        """Counted as the set counts."""
        assert self.real.used == len(self.taken)
        assert self.real.peak == self.peak


TestSlotModel = SlotModel.TestCase
TestSlotModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_scattered_room_is_taken_in_the_longest_runs() -> None:
    allocator = SlotAllocator(12)
    allocator.allocate(12)
    allocator.free([0, 2, 3, 5, 6, 7, 9, 10, 11])  # runs of 1, 2, 3 and 3
    assert allocator.allocate(7).tolist() == [2, 5, 6, 7, 9, 10, 11]


def test_slots_must_be_integers() -> None:
    allocator = SlotAllocator(4)
    allocator.allocate(4)
    for wrong in ([0.0, 1.0], [[0, 1]], [True]):
        with pytest.raises(StoreError, match="list of integers"):
            allocator.free(wrong)
    with pytest.raises(StoreError, match="0 or more"):
        allocator.allocate(-1)


def test_bytes_are_counted_and_limited(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path, 10, 2, 3, 100, limit_bytes=2450)
    assert store.limit_bytes == 2450  # four slots of 600 bytes fit
    slots = store.allocate(4)
    with pytest.raises(StoreError, match=r"600 bytes do not fit in .*: 2400 of 2450 are taken"):
        store.allocate(1)
    assert (store.used_bytes, store.peak_bytes) == (2400, 2400)
    store.free(slots[1:3])
    assert (store.used_bytes, store.peak_bytes) == (1200, 2400)
    with pytest.raises(StoreError, match="not allocated"):
        store.free(slots[1:2])
    store.close()
    whole = make(kind, tmp_path, 10, 2, 3, 100)
    assert whole.limit_bytes == 6000
    assert whole.allocate(10).tolist() == list(range(10))
    with pytest.raises(StoreError, match="do not fit"):
        whole.allocate(1)
    whole.close()


def test_reserved_bytes_share_the_limit_with_slots(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path, 10, 1, 1, 100, limit_bytes=1100)
    store.reserve(150)
    with pytest.raises(StoreError, match=r"1000 bytes do not fit in .*: 150 of 1100 are taken"):
        store.allocate(10)
    store.allocate(9)
    assert store.used_bytes == store.peak_bytes == 1050
    with pytest.raises(StoreError, match="51 bytes do not fit"):
        store.reserve(51)
    store.reserve(50)
    store.release(200)
    assert (store.used_bytes, store.peak_bytes) == (900, 1100)
    with pytest.raises(StoreError, match="cannot release 1 bytes: 0 are reserved"):
        store.release(1)
    store.allocate(1)
    with pytest.raises(StoreError, match="no room for 1 slots: 10 of 10 are taken"):
        store.allocate(1)  # there are bytes left, but no slot
    store.close()
    with pytest.raises(StoreError, match="limit_bytes=-1"):
        make(kind, tmp_path, 10, 1, 1, 100, limit_bytes=-1)


# --- bytes ---------------------------------------------------------------------------------------


def test_stores_satisfy_the_contract(store: Any, kind: str) -> None:
    assert isinstance(store, BlockStore)
    assert store.kind == ("host" if kind == "host" else "disk")
    assert (store.slots, store.planes, store.unit_bytes) == (10, 2, 1000)


@pytest.mark.parametrize("kind", ["host", "direct", "buffered"])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), unit_bytes=UNIT_BYTES, run=st.sampled_from([1, 9000, 1 << 20]))
def test_reads_return_what_was_written(
    kind: str, folder: Path, data: st.DataObject, unit_bytes: int, run: int
) -> None:
    slots, planes, units = 7, 2, 3
    total = slots * planes * units
    store = make(kind, folder, slots, planes, units, unit_bytes,
                 **({} if kind == "host" else {"run_bytes": run}))  # fmt: skip
    model: dict[int, bytes] = {}
    for seed in range(data.draw(st.integers(1, 3))):
        written = data.draw(st.lists(st.integers(0, total - 1), unique=True))
        rows = random_rows(len(written), unit_bytes, seed)
        pieces = store.write(np.array(written, dtype=np.int64), rows)
        assert (pieces == 0) == (not written) and pieces <= len(written)
        model |= {unit: row.tobytes() for unit, row in zip(written, rows, strict=True)}
    wanted = data.draw(st.lists(st.sampled_from(sorted(model)))) if model else []
    out = np.full((len(wanted), unit_bytes), 0xAA, dtype=np.uint8)
    store.read(wanted, out)
    assert [row.tobytes() for row in out] == [model[unit] for unit in wanted]
    store.close()


def test_adjacent_units_move_as_one_piece(store: Any) -> None:
    rows = random_rows(60, 1000)
    assert store.write(range(60), rows) == 1
    out = np.empty((6, 1000), dtype=np.uint8)
    assert store.read([10, 11, 12, 40, 41, 5], out) == 3
    assert (out == rows[[10, 11, 12, 40, 41, 5]]).all()


def test_a_disk_merges_units_in_any_order(tmp_path: Path) -> None:
    store = make("direct", tmp_path, 60, 1, 1, 1000)
    rows = random_rows(60, 1000)
    order = np.random.default_rng(1).permutation(60)
    assert store.write(order, rows) == 1
    out = np.empty((60, 1000), dtype=np.uint8)
    assert store.read(np.arange(60)[::-1], out) == 1
    assert (out[::-1][order] == rows).all()
    store.close()


def test_any_contiguous_buffer_will_do(store: Any) -> None:
    assert store.write([3, 4], bytes(range(250)) * 8) > 0
    out = bytearray(2000)
    store.read([3, 4], memoryview(out))
    assert bytes(out) == bytes(range(250)) * 8
    shifted = np.zeros(2003, dtype=np.uint8)[3:]  # not aligned to anything
    store.read(np.array([3, 4], dtype=np.uint8), shifted)
    assert shifted.tobytes() == bytes(out)


def test_wrong_buffers_and_units_are_refused(store: Any) -> None:
    good = np.zeros((2, 1000), dtype=np.uint8)
    store.write([0, 1], good)
    refused: list[tuple[Any, Any, str]] = [
        ([0, 60], good, "unit 60 .*there are 60 units"),
        ([-1, 0], good, "unit -1 .*there are 60 units"),
        ([0.5, 1.0], good, "list of integers"),
        ([[0, 1]], good, "list of integers"),
        ([0], good, "2000 bytes does not hold 1 unit"),
        ([0, 1], np.zeros((2, 2000), dtype=np.uint8)[:, ::2], "no contiguous byte buffer"),
        ([0, 1], 5, "no contiguous byte buffer"),
    ]
    for units, buffer, message in refused:
        for call in (store.read, store.write):
            with pytest.raises(TransferError, match=message):
                call(units, buffer)
    with pytest.raises(TransferError, match="read-only"):
        store.read([0, 1], bytes(2000))


def test_closed_stores_refuse_and_close_twice(store: Any) -> None:
    store.write([0], bytes(1000))
    store.close()
    store.close()
    with pytest.raises(TransferError, match="closed"):
        store.read([0], bytearray(1000))


@pytest.mark.parametrize("name", ["slots", "planes", "units", "unit_bytes"])
def test_shapes_are_checked(name: str, kind: str, tmp_path: Path) -> None:
    shape = {"slots": 1, "planes": 1, "units": 1, "unit_bytes": 1, name: 0}
    with pytest.raises(StoreError, match=f"{name}=0 must be at least 1"):
        make(kind, tmp_path, *shape.values())


def test_many_threads_use_one_store(store: Any) -> None:
    rows = random_rows(60, 1000)
    failures: list[BaseException] = []

    def use(first: int) -> None:
        try:
            mine = np.arange(first, 60, 6)
            for _ in range(20):
                store.write(mine, rows[mine])
                out = np.empty((mine.size, 1000), dtype=np.uint8)
                store.read(mine, out)
                assert (out == rows[mine]).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@given(unit_bytes=UNIT_BYTES, units=st.lists(st.integers(0, 19), unique=True))
@settings(max_examples=50, deadline=None)
def test_gather_and_scatter_are_indexing(unit_bytes: int, units: list[int]) -> None:
    memory, ids = random_rows(20, unit_bytes), np.array(units, dtype=np.int64)
    out = np.empty((ids.size, unit_bytes), dtype=np.uint8)
    runs = int((np.diff(ids) != 1).sum()) + 1 if units else 0
    assert gather_units(memory, ids, out) == runs
    assert (out == memory[ids]).all()
    target = np.zeros_like(memory)
    assert scatter_units(target, ids, out) == runs
    expected = np.zeros_like(memory)
    expected[ids] = memory[ids]
    assert (target == expected).all()
    assert gather_units(memory, np.array([0, 20]), np.empty((2, unit_bytes), np.uint8)) == -2


# --- memory --------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Memory that this process really has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_host_memory_is_shared_and_lazy() -> None:
    before = resident_bytes()
    store = HostStore(1 << 14, 4, 1, 1 << 14, kind="device")  # 1 GiB
    assert store.kind == "device" and store.description == "device memory"
    assert store.memory.shape == (4 << 14, 1 << 14) and store.memory.dtype == np.uint8
    store.memory[77] = 5
    assert resident_bytes() - before < 64 << 20
    out = np.empty(1 << 14, dtype=np.uint8)
    store.read([77], out)
    assert (out == 5).all()
    view = store.memory[77]
    store.close()
    assert (view == 5).all()  # the memory lives as long as someone sees it


def test_memory_that_cannot_be_reserved_is_a_store_error() -> None:
    with pytest.raises(StoreError, match=r"cannot reserve .* fewer bytes"):
        HostStore(1 << 40, 1 << 10, 1, 1 << 14)


# --- disk ----------------------------------------------------------------------------------------


def flip(store: DiskStore, unit: int, byte: int) -> None:
    """Change one byte of a unit behind the store's back."""
    with Path(f"/proc/self/fd/{store._file.fd}").open("r+b", buffering=0) as handle:
        handle.seek(unit * store._file.stride + byte)
        old = handle.read(1)[0]
        handle.seek(unit * store._file.stride + byte)
        handle.write(bytes([old ^ 0x80]))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("unit_bytes", "byte"), [(1000, 0), (1001, 1000), (4096, 2047)])
def test_a_changed_byte_is_found(direct: bool, unit_bytes: int, byte: int, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "f", 8, 1, 1, unit_bytes, direct=direct)
    rows = random_rows(8, unit_bytes)
    store.write(range(8), rows)
    flip(store, 5, byte)
    out = np.empty((8, unit_bytes), dtype=np.uint8)
    with pytest.raises(ChecksumError, match=r"unit 5 of disk .* is not what was written"):
        store.read(range(8), out)
    store.read([4, 6], out[:2])
    assert (out[:2] == rows[[4, 6]]).all()
    store.write([5], rows[5:6])
    store.read([5], out[:1])
    assert (out[0] == rows[5]).all()
    store.close()


def test_two_flipped_sign_bits_do_not_cancel() -> None:
    words = np.zeros(64, dtype=np.uint64)
    sums = {int(blocks.checksum(words))}
    words[0] ^= np.uint64(1 << 63)
    for other in range(4, 64, 4):
        words[other] ^= np.uint64(1 << 63)
        sums.add(int(blocks.checksum(words)))
    assert len(sums) == 16


def test_unwritten_and_freed_units_cannot_be_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "f", 4, 2, 2, 512)
    slots = store.allocate(2)
    store.write(range(16), random_rows(16, 512))
    out = np.empty((1, 512), dtype=np.uint8)
    store.free(slots[:1])  # slot 0: units 0 and 1 of plane 0, 8 and 9 of plane 1
    for unit in (0, 1, 8, 9):
        with pytest.raises(TransferError, match=rf"unit {unit} of disk .* never written"):
            store.read([unit], out)
    for unit in (2, 7, 10, 15):
        store.read([unit], out)
    store.close()


def test_the_file_has_no_name_and_room_from_the_start(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "arena.kv", 16, 2, 1, 4096)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(store._file.fd)
    assert status.st_size == 32 * 4096
    assert status.st_blocks * 512 >= status.st_size
    fd = store._file.fd
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_description_says_how_the_file_is_read(tmp_path: Path) -> None:
    def description(unit_bytes: int, **options: Any) -> str:
        store = DiskStore(tmp_path / "f", 4, 1, 1, unit_bytes, **options)
        store.close()
        return store.description.removeprefix(f"disk {tmp_path / 'f'}, ")

    assert description(24) == "buffered: units of 24 bytes are too small for O_DIRECT"
    assert description(4096, direct=False) == "buffered: not asked for"
    assert description(4096).startswith(("O_DIRECT", "buffered: the file system refuses"))


@pytest.mark.parametrize("refuses", ["flag", "blocks"])
def test_without_direct_io_the_file_is_buffered(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refuses == "blocks":
        monkeypatch.setattr(file, "_accepts", lambda fd, alignment: False)
    else:
        real = file.fcntl.fcntl

        def fcntl(fd: int, command: int, argument: int = 0) -> int:
            if command == file.fcntl.F_SETFL and argument & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return int(real(fd, command, argument))

        monkeypatch.setattr(file.fcntl, "fcntl", fcntl)
    store = DiskStore(tmp_path / "f", 4, 1, 1, 4096)
    assert "buffered: the " in store.description
    rows, out = random_rows(4, 4096), np.empty((4, 4096), dtype=np.uint8)
    store.write(range(4), rows)
    store.read(range(4), out)
    assert (out == rows).all()
    store.close()


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"precious")
    cases = [
        (tmp_path, "is a directory; name a file in it"),
        (tmp_path / "taken", "exists already"),
        (tmp_path / "nowhere" / "f", "ENOENT.*existing directory"),
        (tmp_path / "taken" / "f", "ENOTDIR.*existing directory"),
        (Path("/proc/self/pulse.kv"), "choose a file in an existing directory"),
    ]
    for path, message in cases:
        with pytest.raises(StoreError, match=rf"(?s)cannot create {path}.*{message}"):
            DiskStore(path, 4, 1, 1, 512)
    assert (tmp_path / "taken").read_bytes() == b"precious"


def test_an_unwritable_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> int:  # root may write anywhere, so chmod would test nothing
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(file.os, "open", refuse)
    with pytest.raises(StoreError, match=rf"cannot create {tmp_path / 'f'}.*EACCES"):
        DiskStore(tmp_path / "f", 4, 1, 1, 512)


def test_a_full_disk_is_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def full(fd: int, offset: int, size: int) -> None:
        opened.append(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file.os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=rf"16384 bytes in {tmp_path / 'f'}.*ENOSPC.*fewer bytes"):
        DiskStore(tmp_path / "f", 4, 1, 1, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_without_fallocate_the_file_is_sparse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(file.os, "posix_fallocate", refuse)
    store = DiskStore(tmp_path / "f", 4, 1, 1, 4096)
    assert os.fstat(store._file.fd).st_size == 4 * 4096
    store.close()


def test_a_file_over_the_limit_is_named(tmp_path: Path) -> None:
    script = """
        import resource, sys
        from pulse.errors import StoreError
        from pulse_store.disk import DiskStore
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            DiskStore(sys.argv[1], 1024, 1, 1, 4096)
        except StoreError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), str(tmp_path / "f")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "EFBIG" in done.stdout and str(tmp_path / "f") in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_failing_reads_and_writes_name_the_error(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "f", 8, 1, 1, 512, direct=False)
    rows, out = random_rows(8, 512), np.empty((8, 512), dtype=np.uint8)
    store.write(range(8), rows)
    os.ftruncate(store._file.fd, 4 * 512 + 100)  # the file ends within unit 4
    with pytest.raises(TransferError, match=r"cannot read unit 4 .*\(EIO\)"):
        store.read([1, 4], out[:2])
    kept, reading = os.dup(store._file.fd), os.open(f"/proc/self/fd/{store._file.fd}", os.O_RDONLY)
    os.dup2(reading, store._file.fd)  # a descriptor that cannot be written through
    with pytest.raises(TransferError, match=r"cannot write unit 1 .*\(EBADF\)"):
        store.write([1], rows[:1])
    os.dup2(kept, store._file.fd)
    with pytest.raises(TransferError, match=r"unit 1 .* never written"):  # old, new or both
        store.read([1], out[:1])
    store.read([2], out[:1])
    assert (out[0] == rows[2]).all()
    os.close(kept)
    os.close(reading)
    store.close()


def test_a_full_device_is_named(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "f", 8, 1, 1, 512, direct=False)
    full = os.open("/dev/full", os.O_RDWR)
    kept = os.dup(store._file.fd)
    os.dup2(full, store._file.fd)
    with pytest.raises(TransferError, match=r"cannot write unit 0 .*\(ENOSPC\)"):
        store.write([0], bytes(512))
    os.dup2(kept, store._file.fd)
    os.close(kept)
    os.close(full)
    store.close()


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    # The limit cuts the write short after 10,000 bytes; going on there is what is refused.
    script = """
        import resource, sys
        from pulse.errors import TransferError
        from pulse_store.disk import DiskStore
        store = DiskStore(sys.argv[1], 8, 1, 1, 4096, direct=False)
        store.write(range(8), bytes(8 * 4096))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
        try:
            store.write(range(8), bytes(8 * 4096))
        except TransferError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), str(tmp_path / "f")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "cannot write unit 0" in done.stdout and "(EFBIG)" in done.stdout


def test_closing_waits_for_a_read_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path / "f", 8, 1, 1, 512)
    rows, out = random_rows(1, 512), np.empty((1, 512), dtype=np.uint8)
    store.write([3], rows)
    inside, go_on, events = threading.Event(), threading.Event(), []
    real = disk.read_blocks

    def slow(*arguments: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        result = real(*arguments)
        events.append("read")
        return result

    monkeypatch.setattr(disk, "read_blocks", slow)
    reader = threading.Thread(target=store.read, args=([3], out))
    reader.start()
    assert inside.wait(30)
    closer = threading.Thread(target=lambda: (store.close(), events.append("closed")))
    closer.start()
    go_on.set()
    reader.join()
    closer.join()
    assert events == ["read", "closed"]
    assert (out == rows).all()


def test_nothing_is_left_when_the_process_dies(tmp_path: Path) -> None:
    script = """
        import os, sys
        from pulse_store.disk import DiskStore
        store = DiskStore(sys.argv[1], 8, 1, 1, 4096)
        store.write(range(8), bytes(8 * 4096))
        os._exit(9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "f")],
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 9
    assert list(tmp_path.iterdir()) == []
