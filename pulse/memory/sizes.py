"""Byte sizes as people write them, and the tier descriptions that carry them."""

from __future__ import annotations

import os
import re

from pulse.errors import ConfigError

__all__ = ["format_bytes", "host_memory", "parse_bytes"]

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "t": 1000**4,
    "tb": 1000**4,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


def parse_bytes(text: str | int, name: str) -> int:
    """Bytes of ``"64MiB"``, ``"1.5 GB"`` or a plain number. Raises ConfigError naming `name`."""
    if isinstance(text, int) and not isinstance(text, bool):
        value = float(text)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"{name}={text!r} is not a size; write it like 64MiB, 2GiB or 1.5GB")
        value = float(match[1]) * _UNITS[match[2].lower()]
    if value < 1:
        raise ConfigError(f"{name}={text!r} must be at least one byte")
    return int(value)


def format_bytes(count: float) -> str:
    """``12.3 MiB`` for people; exact numbers belong in JSON."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def host_memory() -> int:
    """Bytes of the machine's memory; where the system does not say, 16 GiB are assumed."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 16 << 30
