"""The engine's parameters, checked once."""

from __future__ import annotations

import math
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
            max_waiting=max_waiting,
            transfer_timeout_s=transfer_timeout_s,
            kv=kv,
            **plugins,
        )
