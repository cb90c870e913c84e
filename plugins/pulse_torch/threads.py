"""How many threads compute."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

__all__ = ["default_threads"]

_TORCH = torch.get_num_threads()  # read once: an engine that is given `threads` changes it


def default_threads(cores: Collection[int] | None = None) -> int:
    """torch's own number, but one core is left to the event loop and to transfers.

    Compute threads wait for one another several times a layer: when one of them has to share its
    core, all are held up, and so is whoever it shares with.

    cores: those that the engine keeps to, if it does; then others are free already.
    """
    if cores is not None:
        return min(_TORCH, len(cores))
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(_TORCH, usable - 1))
