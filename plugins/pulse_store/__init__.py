"""Block stores that need no accelerator: host memory and one file on disk.

`pulse_store.host.HostStore` and `pulse_store.disk.DiskStore` implement `pulse.ports.BlockStore`.
Units, output rows and pieces are numpy arrays; compiled loops (numba, without the GIL) move them.
"""

from __future__ import annotations

from typing import Any

from pulse import Build, Plugin, hookimpl
from pulse.errors import ConfigError

__all__ = ["pulse_block_stores", "pulse_diagnostics"]


def _host(build: Build) -> Any:
    from pulse_store.host import HostStore

    shape = build.shape
    assert shape is not None
    return HostStore(shape.slots, shape.planes, shape.units, shape.unit_bytes, shape.limit_bytes)


def _disk(build: Build) -> Any:
    from pulse_store.disk import DiskStore

    if not build.argument:
        raise ConfigError("slow_tier='disk' needs a file to create: write it as disk:PATH")
    shape = build.shape
    assert shape is not None
    return DiskStore(
        build.argument, shape.slots, shape.planes, shape.units, shape.unit_bytes, shape.limit_bytes
    )


@hookimpl
def pulse_block_stores() -> list[Plugin]:
    """The stores of this package."""
    needs = ("numpy", "numba")
    return [
        Plugin("host", _host, "the machine's memory", needs),
        Plugin("disk", _disk, "a file (disk:PATH), O_DIRECT where it can be had", needs),
    ]


@hookimpl
def pulse_diagnostics() -> list[tuple[str, bool, str]]:
    """Whether a disk tier in the current directory bypasses the page cache."""
    import tempfile
    from pathlib import Path

    from pulse.errors import StoreError
    from pulse_store.disk import DiskStore

    name = "disk tier here"
    with tempfile.TemporaryDirectory(prefix=".pulse-", dir=Path.cwd()) as folder:
        try:
            store = DiskStore(Path(folder) / "probe", 4, 1, 1, 4096)
        except StoreError as error:
            return [(name, False, str(error))]
        mode = store.description.rpartition(", ")[2]
        store.close()
    return [(name, True, f"--slow-tier disk:PATH works ({mode})")]
