"""The container: metadata and the tensor table of a GGUF file.

The `gguf` library's own reader makes one numpy view per metadata element, which takes seconds for
a vocabulary; this one decodes arrays directly and checks every extent, so that a truncated file is
an error and not a bus error later. Block formats are the library's business.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pulse.errors import ModelFormatError, ModelNotFound

__all__ = ["GgufFile", "GgufTensor", "open_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `shape` is in torch's order; `data` the mapped bytes, uint8 ``[rows, bytes]``.

    kind: the block format, or None with `data` empty for one that this `gguf` does not know.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType | None
    kind_id: int
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file; tensor data stays mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def open_gguf(path: Path) -> GgufFile:
    """Parse a file. Raises ModelNotFound, and ModelFormatError for a damaged or truncated one."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelNotFound(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} is not a GGUF file: {error}") from error
    try:
        return _parse(path, mapped)
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelFormatError(f"{path} is damaged or truncated: {error}") from error


def _parse(path: Path, mapped: mmap.mmap) -> GgufFile:
    if mapped[:4] != _MAGIC:
        raise ModelFormatError(f"{path} is not a GGUF file: it starts with {mapped[:4]!r}")
    cursor = _Cursor(mapped, 4)
    version, tensors, pairs = cursor.scalars("IQQ")
    if version not in _VERSIONS:
        raise ModelFormatError(
            f"{path} has GGUF version {version}; versions 2 and 3, little-endian, can be read"
        )
    metadata = {}
    for _ in range(pairs):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.scalars("I"))
    table = [_entry(cursor) for _ in range(tensors)]
    alignment = int(metadata.get("general.alignment", _ALIGNMENT))
    if alignment < 1:
        raise ModelFormatError(f"{path}: general.alignment={alignment} must be at least 1")
    base = -(-cursor.at // alignment) * alignment
    data = np.frombuffer(mapped, dtype=np.uint8)
    return GgufFile(path, metadata, {entry[0]: _tensor(path, data, base, entry) for entry in table})


_Entry = tuple[str, tuple[int, ...], int, int]


def _entry(cursor: _Cursor) -> _Entry:
    """(name, shape, kind id, offset) of the next tensor."""
    name = cursor.string()
    (dimensions,) = cursor.scalars("I")
    shape = cursor.scalars(f"{dimensions}Q")
    kind, offset = cursor.scalars("IQ")
    return name, shape[::-1], kind, offset


def _tensor(path: Path, data: npt.NDArray[np.uint8], base: int, entry: _Entry) -> GgufTensor:
    name, shape, kind_id, offset = entry
    try:
        kind = GGMLQuantizationType(kind_id)
    except ValueError:
        return GgufTensor(name, shape, None, kind_id, data[:0])
    block, block_bytes = GGML_QUANT_SIZES[kind]
    columns = shape[-1] if shape else 1
    if columns % block:
        raise ModelFormatError(
            f"{path}: tensor {name} has rows of {columns}, which are not whole {kind.name} blocks "
            f"of {block}"
        )
    rows, row_bytes = math.prod(shape[:-1]), columns // block * block_bytes
    start, size = base + offset, rows * row_bytes
    if start + size > len(data):
        raise ModelFormatError(
            f"{path} is truncated: tensor {name} ends at byte {start + size}, the file at "
            f"{len(data)}"
        )
    return GgufTensor(name, shape, kind, kind_id, data[start : start + size].reshape(rows, -1))


class _Cursor:
    """Reads little-endian values in order; past the end is a struct.error."""

    def __init__(self, buffer: mmap.mmap, at: int) -> None:
        self._buffer = buffer
        self.at = at

    def scalars(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        values = struct.unpack_from(layout, self._buffer, self.at)
        self.at += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._buffer, self.at)
        start = self.at + 8
        if start + length > len(self._buffer):
            raise struct.error(f"a string of {length} bytes at byte {start} ends after the file")
        self.at = start + length
        return self._buffer[start : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalars(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise struct.error(f"metadata of unknown type {kind} at byte {self.at}")
        element, count = self.scalars("IQ")
        if element in _SCALARS:
            return list(self.scalars(f"{count}{_SCALARS[element]}"))
        return [self.value(element) for _ in range(count)]
