"""Torch tensors and numpy buffers for the conformance kits of `pulse.testing`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TorchArrays"]


class TorchArrays:
    """`pulse.testing.arrays.Arrays`: floats are CPU tensors, unit ids and buffers numpy arrays."""

    def floats(
        self,
        shape: Sequence[int],
        seed: int,
        *,
        low: float = -1.0,
        high: float = 1.0,
        dtype: str = "float32",
    ) -> Tensor:
        """A tensor of that dtype, drawn in float32."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(tuple(shape), generator=generator)
        return drawn.mul(high - low).add(low).to(getattr(torch, dtype))

    def integers(self, values: Sequence[int]) -> NDArray[np.int64]:
        """An int64 array."""
        return np.array(values, dtype=np.int64)

    def buffer(self, rows: Sequence[bytes], width: int) -> NDArray[np.uint8]:
        """A uint8 array."""
        flat = np.frombuffer(b"".join(rows), dtype=np.uint8)
        return flat.reshape(len(rows), width).copy()

    def rows(self, buffer: Any) -> list[bytes]:
        """The rows of the array."""
        return [row.tobytes() for row in buffer]

    def tolist(self, array: Any) -> Any:
        """Of a tensor, an array or a list."""
        return array.tolist() if hasattr(array, "tolist") else array

    def stack(self, arrays: Sequence[Any]) -> Tensor:
        """A tensor with one more dimension."""
        return torch.stack(list(arrays))

    def spoil(self, array: Any) -> None:
        """Every number becomes another."""
        array.mul_(-3.0).add_(1.0)

    def stored(self, objects: Iterable[Any]) -> int:
        """Bytes of the distinct storages of tensors and of arrays' outermost owners."""
        sizes = {}
        for item in objects:
            if isinstance(item, Tensor):
                storage = item.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            elif isinstance(item, np.ndarray):
                while isinstance(item.base, np.ndarray):
                    item = item.base
                sizes[item.ctypes.data] = item.nbytes
        return sum(sizes.values())
