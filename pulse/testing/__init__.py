"""Test doubles that are part of the product: a model, a cache and tiers without tensors."""

from __future__ import annotations

from pulse.testing.loop import Deadlock, InlineWorker, VirtualLoop, run
from pulse.testing.null import (
    NullCache,
    NullExecutor,
    NullPolicy,
    NullStore,
    NullTransfer,
    null_reference,
)

__all__ = [
    "Deadlock",
    "InlineWorker",
    "NullCache",
    "NullExecutor",
    "NullPolicy",
    "NullStore",
    "NullTransfer",
    "VirtualLoop",
    "null_reference",
    "run",
]
