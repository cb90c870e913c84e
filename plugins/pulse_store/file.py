"""The file of a disk tier: made, probed for direct I/O, filled with room, and nameless."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pulse.errors import StoreError
from pulse_store.arena import reserve

__all__ = ["File", "open_file"]

try:
    import fcntl
except ImportError:  # pragma: no cover - no direct I/O there
    fcntl = None  # type: ignore[assignment]

WASTE = 4
"""Direct I/O is used when padding adds at most a fourth (1 / WASTE) to a unit."""
ALIGNMENTS = (512, 4096)


@dataclass(frozen=True, slots=True)
class File:
    """An open file for `count` units, `stride` bytes apart.

    reason: why it is not accessed with O_DIRECT; empty if it is.
    """

    fd: int
    stride: int
    reason: str


def open_file(path: Path, count: int, unit_bytes: int, *, direct: bool) -> File:
    """A new file at `path` with room for `count` units; the name is removed right away.

    A file without a name goes with its last descriptor, so nothing is left after a crash. Raises
    StoreError when the file exists, cannot be made, or the disk has no room for it.
    """
    fd = _create(path)
    try:
        alignment, reason = _probe(fd, unit_bytes) if direct else (0, "not asked for")
        stride = _round_up(unit_bytes, alignment or 8)
        _make_room(fd, count * stride)
    except OSError as error:
        os.close(fd)
        raise StoreError(
            f"cannot make room for {count * _round_up(unit_bytes, 8)} bytes in {path}: "
            f"{_reason(error)}; free space there, give the disk tier fewer bytes, "
            "or choose another directory"
        ) from error
    return File(fd, stride, reason)


def _create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError as error:
        if path.is_dir():
            fix = f"is a directory; name a file in it, such as {path / 'pulse.kv'}"
        else:
            fix = "exists already and is not overwritten; delete it or choose another name"
        raise StoreError(f"cannot create {path}: it {fix}") from error
    except OSError as error:
        raise StoreError(
            f"cannot create {path}: {_reason(error)}; "
            "choose a file in an existing directory that you may write to"
        ) from error
    path.unlink()
    return fd


def _probe(fd: int, unit_bytes: int) -> tuple[int, str]:
    """The alignment that direct I/O needs, O_DIRECT being set; or 0 and why it is not used."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag or fcntl is None:
        return 0, "no O_DIRECT on this system"
    allowed = [size for size in ALIGNMENTS if _waste(unit_bytes, size) * WASTE <= unit_bytes]
    if not allowed:
        return 0, f"units of {unit_bytes} bytes are too small for O_DIRECT"
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag)
    except OSError as error:
        return 0, f"the file system refuses O_DIRECT ({_reason(error)})"
    for alignment in allowed:
        if _accepts(fd, alignment):
            return alignment, ""
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return 0, f"the device takes no direct I/O in blocks of {allowed[-1]} bytes"


def _accepts(fd: int, alignment: int) -> bool:
    # An offset and a buffer that are aligned to no more than what is tried.
    block: Any = reserve(2 * alignment)[alignment:]
    try:
        os.pwrite(fd, block, alignment)
        return os.preadv(fd, [block], alignment) == alignment
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise


def _make_room(fd: int, size: int) -> None:
    """Reserve the blocks now, so that a full disk is found here and not in mid-generation."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # macOS
        os.ftruncate(fd, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.ftruncate(fd, size)


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to


def _waste(size: int, alignment: int) -> int:
    return _round_up(size, alignment) - size


def _reason(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "unknown")
    return f"{error.strerror or error} ({name})"
