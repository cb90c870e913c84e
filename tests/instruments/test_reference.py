"""docs/reference/instruments.md names every event, metric and attribute, and none that is not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from pulse.cli.trace import SCHEMA
from pulse.instruments import OpenTelemetrySpans, PrometheusMetrics, Stats, __all__, otel
from pulse.instruments.metrics import METRICS
from pulse.kernel.instruments import EVENTS
from pulse.ports import Instrument

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "reference" / "instruments.md").read_text(encoding="utf-8")


def rows(section: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    (body,) = re.findall(
        rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE
    )
    table = re.search(r"^\|.*?(?=\n\n|\Z)", body, re.DOTALL | re.MULTILINE)
    assert table is not None
    lines = table[0].split("\n")[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_events() -> None:
    found = []
    for event in EVENTS:
        parameters = inspect.signature(getattr(Instrument, event)).parameters.values()
        told = ", ".join(f"{p.name}: {p.annotation}" for p in parameters if p.name != "self")
        found.append(f"`{event}({told})`".replace("|", r"\|"))
    assert [row[0] for row in rows("Events")] == found


def test_metrics() -> None:
    told = [tuple(row[:3]) for row in rows("`PrometheusMetrics(registry=None)`")]
    assert told == [
        (
            f"`{metric.name}`",
            metric.type,
            ", ".join(f"`{label}`" for label in metric.labels) or "-",
        )
        for metric in METRICS
    ]
    names = "|".join(metric.name for metric in METRICS)
    for name in re.findall(r"\bpulse_\w+", TEXT):
        assert re.fullmatch(rf"({names})(_bucket)?", name), name


def test_attributes() -> None:
    told = {row[0].strip("`"): row[1] for row in rows("`OpenTelemetrySpans(tracer_provider=None)`")}
    assert told == otel.ATTRIBUTES


def test_the_rest() -> None:
    assert f"`{SCHEMA}`" in TEXT
    for name in __all__:
        assert name in TEXT or name == "LaneStats", name
    public = [n for n in (*vars(Stats), *Stats.__annotations__) if not n.startswith("_")]
    told = re.split(r"^## `Stats\(\)`", TEXT, flags=re.MULTILINE)[1]
    for name in public:
        known = name in EVENTS or name in ("first", "last")
        assert known or name in told, name


def test_what_is_overridden_is_an_event() -> None:
    for kind in (PrometheusMetrics, OpenTelemetrySpans, Stats):
        events = {name for name in vars(kind) if not name.startswith("_")}
        known = {*EVENTS, "close", "exposition", "elapsed_s", "idle_s"}
        defaults = {*Stats.__annotations__}
        assert events <= known | defaults


def test_the_snippet_is_python() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    compile(code, "snippet", "exec")
