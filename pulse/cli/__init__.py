"""The command line: ``pulse generate | demo | trace | check | plugins | doctor``."""

from __future__ import annotations

from pulse.cli.app import main

__all__ = ["main"]
