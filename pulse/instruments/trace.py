"""Chrome trace format: open the file in Perfetto or chrome://tracing. Lanes are tracks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from pulse.errors import ConfigError
from pulse.ports import Instrument
from pulse.types import LaneName, Operation, TransferReport

__all__ = ["ChromeTrace"]

_TRACKS = {lane: track for track, lane in enumerate(LaneName, start=1)}


class ChromeTrace(Instrument):
    """Writes every operation as it ends. Call `close` (or use ``with``) to end the file.

    Raises ConfigError when the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file: IO[str] = self.path.open("w")
        except OSError as error:
            raise ConfigError(
                f"trace file {str(path)!r} cannot be written: {error.strerror}"
            ) from error
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._first = True
        for lane, track in _TRACKS.items():
            self._write(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": 1,
                    "tid": track,
                    "args": {"name": f"{lane} lane"},
                }
            )

    def operation_ended(self, operation: Operation, report: TransferReport | None) -> None:
        """One complete event per operation that ran."""
        if operation.started != operation.started:  # NaN: it never ran
            return
        self._write(
            {
                "ph": "X",
                "name": _name(operation),
                "cat": operation.work,
                "pid": 1,
                "tid": _TRACKS[operation.lane],
                "ts": operation.started * 1e6,
                "dur": (operation.ended - operation.started) * 1e6,
                "args": {
                    "id": operation.id,
                    "cohort": operation.cohort,
                    "layer": operation.layer,
                    "requests": operation.requests,
                    "bytes": operation.bytes,
                    "pieces": report.pieces if report else 0,
                    "waited_us": (operation.started - operation.submitted) * 1e6,
                    "status": operation.status,
                },
            }
        )

    def close(self) -> None:
        """End the file. Idempotent."""
        if not self._file.closed:
            self._file.write("\n]}\n")
            self._file.close()

    def __enter__(self) -> ChromeTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event))
        self._first = False


def _name(operation: Operation) -> str:
    where = f" {operation.layer}" if operation.layer >= 0 else ""
    return f"{operation.kind}{where} ({operation.cohort})"
