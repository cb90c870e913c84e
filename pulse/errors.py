"""The error tree. Every error names the offending value and the fix.

PulseError
├── ConfigError                 a value given to the engine or the command line is unusable
│   ├── PluginNotFound          no plugin of that kind and name (the nearest names are given)
│   ├── PluginUnavailable       the plugin exists but cannot be loaded here (the fix is given)
│   ├── BudgetError             the budget is below sink + local window + one block
│   └── CapacityError           a tier is too small for a single request
├── ModelError                  a model cannot be loaded
│   ├── ModelNotFound           no such file, directory or repository
│   ├── ModelFormatError        a damaged or truncated file, a missing or mismatched tensor
│   └── UnsupportedModel        an architecture or quantisation this executor does not know
├── RequestError                one request is at fault; its neighbours go on
│   ├── PromptError             an empty prompt, or one over the model's limit
│   ├── SamplingError           an unusable sampling parameter
│   ├── Overloaded              too many requests wait already; try again later
│   └── RequestFailed           the request was accepted and failed; ``__cause__`` says why
├── TransferError               a recall or a write-back failed
│   ├── ChecksumError           a block read from disk is not the block that was written
│   └── TransferTimeout         a transfer did not end in time
├── StoreError                  a tier cannot be created, or has no room left
├── SelectionError              a selection policy returned blocks it may not select
└── EngineClosed                the engine is closed, or not open yet

An error that the user can mend before anything has run (`ConfigError`, `ModelError`,
`RequestError`, `StoreError`) ends the command line with exit code 2.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CapacityError",
    "ChecksumError",
    "ConfigError",
    "EngineClosed",
    "ModelError",
    "ModelFormatError",
    "ModelNotFound",
    "Overloaded",
    "PluginNotFound",
    "PluginUnavailable",
    "PromptError",
    "PulseError",
    "RequestError",
    "RequestFailed",
    "SamplingError",
    "SelectionError",
    "StoreError",
    "TransferError",
    "TransferTimeout",
    "UnsupportedModel",
]


class PulseError(Exception):
    """Base of every error that pulse raises on purpose."""


class ConfigError(PulseError, ValueError):
    """A value given to the engine or the command line is unusable."""


class PluginNotFound(ConfigError):
    """No plugin of that kind has that name."""


class PluginUnavailable(ConfigError):
    """The plugin exists but cannot be loaded on this machine."""


class BudgetError(ConfigError):
    """The budget is below sink + local window + one block."""


class CapacityError(ConfigError):
    """A tier is too small for a single request."""


class ModelError(PulseError):
    """A model cannot be loaded."""


class ModelNotFound(ModelError):
    """No such file, directory or repository."""


class ModelFormatError(ModelError):
    """A damaged or truncated file, a missing or mismatched tensor."""


class UnsupportedModel(ModelError):
    """An architecture or quantisation that the executor does not know."""


class RequestError(PulseError):
    """One request is at fault; its neighbours go on."""


class PromptError(RequestError, ValueError):
    """An empty prompt, or one that is over the model's limit."""


class SamplingError(RequestError, ValueError):
    """An unusable sampling parameter."""


class Overloaded(RequestError):
    """Too many requests wait already; the service should answer "try again later" (HTTP 503)."""


class RequestFailed(RequestError):
    """The request was accepted and failed; ``__cause__`` says why."""


class TransferError(PulseError):
    """A recall or a write-back failed."""


class ChecksumError(TransferError):
    """A block read from disk is not the block that was written."""


class TransferTimeout(TransferError):
    """A transfer did not end in time; its slots stay quarantined until it does."""


class StoreError(PulseError):
    """A tier cannot be created, or has no room left."""


class SelectionError(PulseError):
    """A selection policy returned blocks it may not select."""


class EngineClosed(PulseError, RuntimeError):
    """The engine is closed, or not open yet."""
