"""Test doubles and conformance kits that are part of the product.

A model, a cache and tiers without tensors, an event loop on virtual time, and ``check_…``
functions that try a plugin against its contract. The kits need hypothesis, which is imported when
one of them is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pulse.testing.faults import FaultyTransfer
from pulse.testing.loop import Deadlock, InlineWorker, Livelock, VirtualLoop, run
from pulse.testing.modelled import ModelledExecutor, ModelledTransfer, ModelledWorker, Timing
from pulse.testing.null import NullExecutor, NullPolicy, ScatteredPolicy, null_reference
from pulse.testing.nullcache import NullCache
from pulse.testing.nulltiers import NullStore, NullTransfer

if TYPE_CHECKING:
    from pulse.testing.admissions import check_admission_rule
    from pulse.testing.checking import Checked, Rule, Violation
    from pulse.testing.policies import check_selection_policy
    from pulse.testing.scheduler import check_scheduler, check_simulation
    from pulse.testing.simulation import Simulation, simulate
    from pulse.testing.stores import check_block_store
    from pulse.testing.transfers import check_transfer_engine
    from pulse.testing.workload import (
        Arrival,
        Fault,
        Timings,
        Workload,
        arrivals,
        lane_timings,
        workloads,
    )

__all__ = [
    "Arrival",
    "Checked",
    "Deadlock",
    "Fault",
    "FaultyTransfer",
    "InlineWorker",
    "Livelock",
    "ModelledExecutor",
    "ModelledTransfer",
    "ModelledWorker",
    "NullCache",
    "NullExecutor",
    "NullPolicy",
    "NullStore",
    "NullTransfer",
    "Rule",
    "ScatteredPolicy",
    "Simulation",
    "Timing",
    "Timings",
    "Violation",
    "VirtualLoop",
    "Workload",
    "arrivals",
    "check_admission_rule",
    "check_block_store",
    "check_scheduler",
    "check_selection_policy",
    "check_simulation",
    "check_transfer_engine",
    "lane_timings",
    "null_reference",
    "run",
    "simulate",
    "workloads",
]

_KITS = {
    "Arrival": "workload",
    "Checked": "checking",
    "Fault": "workload",
    "Rule": "checking",
    "Simulation": "simulation",
    "Timings": "workload",
    "Violation": "checking",
    "Workload": "workload",
    "arrivals": "workload",
    "check_admission_rule": "admissions",
    "check_block_store": "stores",
    "check_scheduler": "scheduler",
    "check_selection_policy": "policies",
    "check_simulation": "scheduler",
    "check_transfer_engine": "transfers",
    "lane_timings": "workload",
    "simulate": "simulation",
    "workloads": "workload",
}


def __getattr__(name: str) -> Any:
    if name not in _KITS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pulse.testing.{_KITS[name]}"), name)
