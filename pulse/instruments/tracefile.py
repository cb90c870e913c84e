"""Reads back the operations of a trace file, believing nothing of what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pulse.errors import ConfigError
from pulse.instruments.trace import SCHEMA
from pulse.types import LaneName, Operation, Work

__all__ = ["read_operations"]


def read_operations(path: str | Path) -> list[Operation]:
    """The operations of a file that `ChromeTrace` wrote, also of those that never started.

    Raises ConfigError, which names the file, where it is not such a file.
    """
    operations = []
    for number, event in enumerate(_events(path)):
        if not isinstance(event, dict):
            raise _damaged(path, number)
        if event.get("ph") != "X" and event.get("cat") != "never_ran":
            continue
        try:
            operations.append(_operation(event))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _damaged(path, number) from error
    return operations


def _events(path: str | Path) -> list[Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace file {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or a null byte in the name
        raise ConfigError(f"trace file {str(path)!r} is not a text file: {error}") from error
    if not text.strip():
        raise ConfigError(f"trace file {str(path)!r} is empty; was the run cut short?")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"trace file {str(path)!r} is damaged or was not closed: {error}; record it again"
        ) from error
    other = data.get("otherData") if isinstance(data, dict) else None
    if not isinstance(other, dict) or other.get("schema") != SCHEMA:
        raise ConfigError(
            f"trace file {str(path)!r} is not a trace of pulse ({SCHEMA}); "
            "make one with `pulse generate --trace FILE`"
        )
    events = data.get("traceEvents")
    if not isinstance(events, list):
        raise ConfigError(f"trace file {str(path)!r} is damaged: it has no list of events")
    return events


def _damaged(path: str | Path, number: int) -> ConfigError:
    return ConfigError(f"trace file {str(path)!r} is damaged: event {number} is not as written")


def _operation(event: dict[str, Any]) -> Operation:
    args = event["args"]
    at = _seconds(event["ts"])
    ran = event["ph"] == "X"
    submitted = args["submitted_us"]
    if ran and _seconds(event["dur"]) < 0:
        raise ValueError("a negative duration")
    # Rounded as it was written: an end is the very time at which the next begins.
    ended = round(event["ts"] + event["dur"], 3) / 1e6 if ran else at
    return Operation(
        id=_whole(args["id"]),
        kind=_text(args["kind"]),
        lane=LaneName(args["lane"]),
        work=Work(args["work"]),
        cohort=_text(args["cohort"]),
        layer=_whole(args["layer"]),
        requests=tuple(map(_text, _list(args["requests"]))),
        shares=tuple(map(_whole, _list(args["shares"]))),
        bytes=_whole(args["bytes"]),
        blocks=_whole(args["blocks"]),
        cause=_whole(args["cause"]),
        leader=_whole(args["leader"]),
        submitted=math.nan if submitted is None else _seconds(submitted),
        started=at if ran else math.nan,
        ended=ended,
        status=_text(args["status"]),
    )


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a time")
    return value / 1e6


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value
