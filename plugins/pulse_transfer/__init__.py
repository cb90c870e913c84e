"""Transfer engines that work between any two block stores.

`pulse_transfer.staged.StagedTransfer` moves many units at a time through a staging buffer,
`pulse_transfer.torch_copy.TorchCopyTransfer` one unit at a time with torch (the baseline).
"""

from __future__ import annotations

from typing import Any

from pulse import Build, Plugin, hookimpl

__all__ = ["pulse_transfer_engines"]


def _staged(build: Build) -> Any:
    from pulse_transfer.staged import StagedTransfer

    return StagedTransfer(cores=build.cores)


def _torch_copy(build: Build) -> Any:
    from pulse_transfer.torch_copy import TorchCopyTransfer

    return TorchCopyTransfer(build.cores)


@hookimpl
def pulse_transfer_engines() -> list[Plugin]:
    """The engines of this package."""
    return [
        Plugin("staged", _staged, "gather to a staging buffer, scatter from it", ("numpy",)),
        Plugin("torch-copy", _torch_copy, "the baseline: a copy per block", ("numpy", "torch")),
    ]
