"""Selection policies: full, sink-window, headwise, solohead."""

from __future__ import annotations

from typing import Any

from pulse import Build, Plugin, hookimpl

__all__ = ["pulse_selection_policies"]


def _policy(name: str) -> Any:
    def make(build: Build) -> Any:
        from pulse_select import policies

        return getattr(policies, name)(build)

    return make


@hookimpl
def pulse_selection_policies() -> list[Plugin]:
    """The policies of this package."""
    needs = ("torch",)
    return [
        Plugin("full", _policy("Full"), "every block: exact attention", needs),
        Plugin("sink-window", _policy("SinkWindow"), "sink and local window only", needs),
        Plugin("headwise", _policy("HeadWise"), "min/max boxes, each KV head for itself", needs),
        Plugin("solohead", _policy("SoloHead"), "min/max boxes, one KV head for all", needs),
    ]
