"""pulse: decode long contexts when the KV cache does not fit in fast memory.

`Engine` is what a service embeds, `pulse.ports` is what a plugin implements, `pulse.hookimpl` and
`Plugin` are how it is found. Importing pulse imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from pulse.engine.engine import Engine
from pulse.engine.request import Stream
from pulse.hookspecs import Build, Plugin, StoreShape, hookimpl
from pulse.kernel.worker import Landing, Worker
from pulse.plugins import Plugins
from pulse.ports import Instrument
from pulse.types import (
    Completion,
    FinishReason,
    KVConfig,
    Placement,
    SamplingParams,
    Token,
    Usage,
)

try:
    __version__ = version("pulse-llm")
except PackageNotFoundError:  # running from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Build",
    "Completion",
    "Engine",
    "FinishReason",
    "Instrument",
    "KVConfig",
    "Landing",
    "Placement",
    "Plugin",
    "Plugins",
    "SamplingParams",
    "StoreShape",
    "Stream",
    "Token",
    "Usage",
    "Worker",
    "__version__",
    "hookimpl",
]
