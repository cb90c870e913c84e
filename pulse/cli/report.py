"""What a finished request is reported as: one JSON object, and a panel for people."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table

import pulse
from pulse.engine.assembly import Parts
from pulse.instruments import Stats
from pulse.memory.sizes import format_bytes
from pulse.ports import BlockStore
from pulse.types import Completion

__all__ = ["SCHEMA", "panel", "report"]

SCHEMA = "pulse.generate/1"


def report(completion: Completion, stats: Stats, parts: Parts) -> dict[str, Any]:
    """The object that ``--json`` prints; documented in ``docs/reference/json.md``."""
    usage = completion.usage
    return {
        "schema": SCHEMA,
        "version": pulse.__version__,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": str(completion.finish_reason),
        "placement": str(completion.placement),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timing": {
            "ttft_s": _number(completion.ttft_s),
            "tpot_s": _number(completion.tpot_s),
            "decode_tok_s": _rate(1, completion.tpot_s),
            "prefill_tok_s": _rate(usage.prompt_tokens, completion.prefill_s),
        },
        "tiers": {"fast": _tier(parts.fast), "slow": _tier(parts.slow)},
        "recall": {
            "bytes": stats.recall_bytes,
            "blocks": stats.recall_blocks,
            "selected_blocks": stats.selected,
            "missed_blocks": stats.missed,
        },
        "write_back": {"bytes": stats.write_back_bytes, "blocks": stats.write_back_blocks},
        "lanes": {
            name: {
                "busy_s": lane.busy_s,
                "idle_s": stats.idle_s(name),
                "operations": lane.operations,
            }
            for name, lane in stats.lanes.items()
        },
    }


def _tier(store: BlockStore) -> dict[str, Any]:
    return {
        "kind": store.kind,
        "description": store.description,
        "limit_bytes": store.limit_bytes,
        "peak_bytes": store.peak_bytes,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if math.isfinite(seconds) and seconds > 0 else None


def panel(data: dict[str, Any], title: str) -> RenderableType:
    """Where the bytes were, what was recalled, how busy each lane was."""
    return Panel(Group(_summary(data), _tiers(data), _lanes(data)), title=title, expand=False)


def _summary(data: dict[str, Any]) -> Table:
    timing, usage, recall = data["timing"], data["usage"], data["recall"]
    table = Table.grid(padding=(0, 2))
    table.add_row("tokens", f"{usage['prompt_tokens']:,} in, {usage['completion_tokens']:,} out")
    table.add_row("placement", data["placement"])
    table.add_row("TTFT", _with(timing["ttft_s"], "s"))
    table.add_row("decode", _with(timing["decode_tok_s"], "tok/s"))
    if recall["selected_blocks"]:
        share = recall["missed_blocks"] / recall["selected_blocks"]
        table.add_row(
            "decode reads",
            f"{recall['selected_blocks']:,} blocks, {share:.1%} of them had to be recalled",
        )
    table.add_row("recalled", f"{format_bytes(recall['bytes'])} in {recall['blocks']:,} blocks")
    back = data["write_back"]
    table.add_row("written back", f"{format_bytes(back['bytes'])} in {back['blocks']:,} blocks")
    return table


def _with(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2f} {unit}"


def _tiers(data: dict[str, Any]) -> Table:
    table = Table("tier", "where", "peak", "limit", box=None, header_style="bold")
    for name, tier in data["tiers"].items():
        table.add_row(
            name,
            tier["description"],
            format_bytes(tier["peak_bytes"]),
            format_bytes(tier["limit_bytes"]),
        )
    return table


def _lanes(data: dict[str, Any]) -> Table:
    table = Table("lane", "busy", "", "operations", box=None, header_style="bold")
    for name, lane in data["lanes"].items():
        total = lane["busy_s"] + lane["idle_s"]
        share = lane["busy_s"] / total if total else 0.0
        bar = "█" * round(20 * share)
        table.add_row(name, f"{share:.0%}", f"[cyan]{bar:<20}[/]", f"{lane['operations']:,}")
    return table
