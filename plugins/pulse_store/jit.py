"""How this package compiles its loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile `function` to run without the GIL; the machine code is cached on disk.

    Numba refuses to define a cached function when no cache folder is writable (a read-only
    installation of a user without a home): then each process compiles anew.
    """
    try:
        result: F = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        result = numba.njit(nogil=True)(function)
    return result
