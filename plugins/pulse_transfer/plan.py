"""Checks of a transfer plan, before anything of it moves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulse.errors import TransferError
from pulse.ports import BlockStore
from pulse.types import TransferPlan

__all__ = ["Units", "check_plan", "compatible", "total_units"]

Units = NDArray[np.int64]


def compatible(source: BlockStore, target: BlockStore) -> bool:
    """Whether these are two different stores, cut into units of the same size."""
    return source is not target and source.unit_bytes == target.unit_bytes


def check_plan(plan: TransferPlan) -> tuple[Units, Units]:
    """The plan's units as int64 arrays of equal length. Raises TransferError.

    Refused are stores that do not fit each other, units out of range and units that occur twice
    in the target. Costs some microseconds per thousand units.
    """
    if not compatible(plan.source, plan.target):
        raise TransferError(
            f"cannot move units from {_name(plan.source)} to {_name(plan.target)}: "
            "an engine needs two different stores with units of the same size"
        )
    if plan.unit_bytes != plan.source.unit_bytes:
        raise TransferError(
            f"the plan's units have {plan.unit_bytes} bytes, the stores' {plan.source.unit_bytes}"
        )
    source = _integers(plan.source_units, plan.source, plan.units)
    target = _integers(plan.target_units, plan.target, plan.units)
    if source.size:
        _in_range(int(source.min()), int(source.max()), plan.source)
        ordered = np.sort(target)
        _in_range(int(ordered[0]), int(ordered[-1]), plan.target)
        _distinct(ordered)
    return source, target


def total_units(store: BlockStore) -> int | None:
    """How many unit ids a store has, if it tells; it refuses ids out of range by itself too."""
    units = getattr(store, "units", None)
    return store.planes * store.slots * units if isinstance(units, int) else None


def _integers(units: Any, store: BlockStore, count: int) -> Units:
    ids = np.asarray(units)
    if not ids.size and not count:
        return np.empty(0, dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TransferError(
            f"units must be a list of integers, not {ids.dtype} of shape {ids.shape}"
        )
    if ids.size != count:
        raise TransferError(f"the plan has {count} units but names {ids.size} of {_name(store)}")
    return ids.astype(np.int64, copy=False)


def _in_range(lowest: int, highest: int, store: BlockStore) -> None:
    total = total_units(store)
    if lowest < 0 or (total is not None and highest >= total):
        wrong = lowest if lowest < 0 else highest
        raise TransferError(f"unit {wrong} is not one of the {total} units of {_name(store)}")


def _distinct(ordered: Units) -> None:
    repeated = ordered[1:] == ordered[:-1]
    if repeated.any():
        raise TransferError(
            f"unit {ordered[1:][repeated][0]} occurs twice in the target: "
            "which of its copies would win is not defined"
        )


def _name(store: Any) -> str:
    return str(getattr(store, "description", type(store).__name__))
