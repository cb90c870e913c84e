"""Arrays of one library, as conformance kits hand them to plugins without knowing the library."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pulse.hookspecs import Build, Plugin, hookimpl
from pulse.plugins import Plugins

__all__ = ["Arrays", "ListArrays", "find_arrays", "pulse_arrays"]


class Arrays(Protocol):
    """Makes and reads the arrays that plugins of one kind exchange.

    What `floats` returns can be sliced along its first axis.
    """

    def floats(
        self,
        shape: Sequence[int],
        seed: int,
        *,
        low: float = -1.0,
        high: float = 1.0,
        dtype: str = "float32",
    ) -> Any:
        """Even random numbers in ``[low, high]``, the same for the same seed."""

    def integers(self, values: Sequence[int]) -> Any:
        """Unit ids, ``[len(values)]`` int64."""

    def buffer(self, rows: Sequence[bytes], width: int) -> Any:
        """A writable byte buffer ``[len(rows), width]`` with these rows."""

    def rows(self, buffer: Any) -> list[bytes]:
        """The rows of such a buffer."""

    def tolist(self, array: Any) -> Any:
        """Nested lists of Python numbers."""

    def stack(self, arrays: Sequence[Any]) -> Any:
        """Arrays of `floats` of one shape along a new first axis."""

    def spoil(self, array: Any) -> None:
        """Overwrite an array of `floats` in place with other numbers."""

    def stored(self, objects: Iterable[Any]) -> int:
        """Bytes of the memory behind the arrays among `objects`, shared memory counted once."""


class ListArrays:
    """`Arrays` as plain lists, for plugins without a tensor library."""

    def floats(
        self,
        shape: Sequence[int],
        seed: int,
        *,
        low: float = -1.0,
        high: float = 1.0,
        dtype: str = "float32",
    ) -> Any:
        """Nested lists; the dtype is Python's."""
        return _nested(list(shape), random.Random(seed), low, high)

    def integers(self, values: Sequence[int]) -> list[int]:
        """A list."""
        return list(values)

    def buffer(self, rows: Sequence[bytes], width: int) -> list[Any]:
        """A list of rows."""
        return list(rows)

    def rows(self, buffer: Any) -> list[bytes]:
        """Rows of bytes, or of the tuples of integers that a null store gives back."""
        return [bytes(row) for row in buffer]

    def tolist(self, array: Any) -> Any:
        """The list itself."""
        return array

    def stack(self, arrays: Sequence[Any]) -> list[Any]:
        """A list of them."""
        return list(arrays)

    def spoil(self, array: Any) -> None:
        """Every number becomes another."""
        for at, value in enumerate(array):
            if isinstance(value, list):
                self.spoil(value)
            else:
                array[at] = -3.0 * value + 1.0

    def stored(self, objects: Iterable[Any]) -> int:
        """Lists say nothing of bytes."""
        return 0


def _nested(shape: list[int], source: random.Random, low: float, high: float) -> Any:
    if not shape:
        return source.uniform(low, high)
    return [_nested(shape[1:], source, low, high) for _ in range(shape[0])]


def find_arrays(choice: Arrays | str | None = None) -> Arrays:
    """`choice` itself, the arrays plugin of that name, or torch's where torch is installed.

    Raises PluginNotFound, PluginUnavailable.
    """
    if choice is not None and not isinstance(choice, str):
        return choice
    plugins = Plugins()
    if choice is None:
        usable = {
            item.plugin.name
            for item in plugins.all()
            if item.kind == "arrays" and item.problem is None
        }
        choice = "torch" if "torch" in usable else "null"
    arrays: Arrays = plugins.resolve("arrays", choice, Build())
    return arrays


@hookimpl
def pulse_arrays() -> list[Plugin]:
    """Lists."""
    return [Plugin("null", lambda _: ListArrays(), "plain lists, for kits of null plugins")]
