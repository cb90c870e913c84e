"""Block stores that need no accelerator: host memory and one file on disk.

`pulse_store.host.HostStore` and `pulse_store.disk.DiskStore` implement `pulse.ports.BlockStore`.
Units, output rows and pieces are numpy arrays; compiled loops (numba, without the GIL) move them.
"""

from __future__ import annotations

from typing import Any

from pulse import Build, Plugin, hookimpl

__all__ = ["pulse_block_stores"]


def _host(build: Build) -> Any:
    from pulse_store.host import HostStore

    shape = build.shape
    assert shape is not None
    return HostStore(shape.slots, shape.planes, shape.units, shape.unit_bytes, shape.limit_bytes)


def _disk(build: Build) -> Any:
    from pulse_store.disk import DiskStore

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
