"""The engine's parameters, checked once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pulse.errors import ConfigError
from pulse.memory.sizes import parse_bytes
from pulse.types import KVConfig

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Checked parameters; `pulse.Engine` documents them."""

    model: str
    executor: Any
    select: Any
    transfer: Any
    admit: Any
    schedule: Any
    kv: KVConfig
    fast_bytes: int
    slow_kind: Any
    slow_bytes: int | None
    dtype: str
    device: str
    threads: int | None
    cores: frozenset[int] | None
    max_waiting: int
    transfer_timeout_s: float | None

    @classmethod
    def make(
        cls,
        *,
        model: Any,
        fast_tier: str | int,
        slow_tier: Any,
        slow_limit: str | int | None,
        dtype: str,
        device: str,
        threads: int | None,
        cores: Iterable[int] | None,
        max_waiting: int,
        transfer_timeout_s: float | None,
        kv: KVConfig,
        **plugins: Any,
    ) -> EngineConfig:
        """Check and convert what the user gave. Raises ConfigError."""
        if dtype not in ("auto", "bfloat16", "float32"):
            raise ConfigError(f"dtype={dtype!r} is unknown; use auto, bfloat16 or float32")
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ConfigError(f"threads={threads!r} must be a whole number of at least 1")
        if not isinstance(max_waiting, int) or max_waiting < 1:
            raise ConfigError(f"max_waiting={max_waiting!r} must be a whole number of at least 1")
        if transfer_timeout_s is not None and not 0 < transfer_timeout_s < math.inf:
            raise ConfigError(
                f"transfer_timeout_s={transfer_timeout_s!r} must be seconds above 0, or None"
            )
        return cls(
            model=str(model),
            fast_bytes=parse_bytes(fast_tier, "fast_tier"),
            slow_kind=slow_tier,
            slow_bytes=None if slow_limit is None else parse_bytes(slow_limit, "slow_limit"),
            dtype=dtype,
            device=device,
            threads=threads,
            cores=None if cores is None else _cores(cores),
            max_waiting=max_waiting,
            transfer_timeout_s=transfer_timeout_s,
            kv=kv,
            **plugins,
        )


def _cores(cores: Iterable[int]) -> frozenset[int]:
    """Cores that this process may use, at least one. Raises ConfigError."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system cannot keep threads to cores: leave cores out")
    chosen, allowed = frozenset[Any](cores), os.sched_getaffinity(0)
    if not chosen:
        raise ConfigError("cores is empty: name at least one, or leave it out")
    for wrong in chosen - allowed:
        raise ConfigError(
            f"cores={cores!r}: this process may not use {wrong!r}; its cores are "
            f"{', '.join(map(str, sorted(allowed)))}"
        )
    return chosen
