"""The fast tier in a torch device's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pulse.errors import StoreError, TransferError
from pulse.hookspecs import StoreShape

__all__ = ["DeviceStore"]


class DeviceStore:
    """A `BlockStore` that is one torch tensor; transfers go through host buffers.

    tensor: uint8 ``[slots * units, unit_bytes]`` on the device.
    Raises StoreError when the device has no room.
    """

    def __init__(self, shape: StoreShape, device: str) -> None:
        self.kind = "device"
        self.description = f"{device} memory"
        self.slots, self.planes, self.units = shape.slots, shape.planes, shape.units
        self.unit_bytes, self.limit_bytes = shape.unit_bytes, shape.limit_bytes
        self.used_bytes = self.peak_bytes = 0
        try:
            self.tensor = torch.empty(
                (shape.planes * shape.slots * shape.units, shape.unit_bytes),
                dtype=torch.uint8,
                device=device,
            )
        except RuntimeError as error:
            raise StoreError(
                f"{device} has no room for a fast tier of {shape.limit_bytes} bytes: {error}; "
                "give a smaller fast_tier"
            ) from error
        self._free = np.ones(shape.slots, np.bool_)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, all planes together."""
        return self.planes * self.units * self.unit_bytes

    def allocate(self, count: int) -> np.ndarray:
        """The lowest free slots, int64. Raises StoreError."""
        free = np.flatnonzero(self._free)[:count]
        if len(free) < count:
            raise StoreError(f"{count} slots asked for, {len(free)} are free in {self.description}")
        self.reserve(count * self.slot_bytes)
        self._free[free] = False
        return free

    def free(self, slots: Any) -> None:
        """Give slots back. Raises StoreError for one that is not allocated."""
        slots = np.asarray(slots, np.int64)
        known = bool(((slots >= 0) & (slots < self.slots)).all())
        if not known or len(np.unique(slots)) < len(slots) or self._free[slots].any():
            raise StoreError(f"a slot among {slots.tolist()[:8]} is not allocated or named twice")
        self._free[slots] = True
        self.release(len(slots) * self.slot_bytes)

    def reserve(self, count: int) -> None:
        """Count bytes kept beside the slots. Raises StoreError over the limit."""
        if self.used_bytes + count > self.limit_bytes:
            raise StoreError(
                f"{count} bytes do not fit: {self.used_bytes} of {self.limit_bytes} are used in "
                f"{self.description}"
            )
        self.used_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, count: int) -> None:
        """Count them no more."""
        self.used_bytes -= count

    def read(self, units: Any, out: Any) -> int:
        """Units to a host buffer, one gather on the device. Raises TransferError."""
        rows = self.tensor.index_select(0, self._index(units))
        torch.from_numpy(out).view(torch.uint8).reshape(rows.shape).copy_(rows)
        return min(1, len(rows))

    def write(self, units: Any, data: Any) -> int:
        """A host buffer to units, one scatter on the device. Raises TransferError."""
        index = self._index(units)
        rows = torch.from_numpy(data).view(torch.uint8).reshape(len(index), self.unit_bytes)
        self.tensor.index_copy_(0, index, rows.to(self.tensor.device))
        return min(1, len(rows))

    def close(self) -> None:
        """Drop the tensor. Idempotent."""
        self.tensor = self.tensor[:0]

    def _index(self, units: Any) -> torch.Tensor:
        ids = np.asarray(units, np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self.tensor)):
            raise TransferError(f"a unit in {ids.min()}…{ids.max()} is not in {self.description}")
        return torch.from_numpy(ids).to(self.tensor.device)
