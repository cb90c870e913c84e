"""docs/reference/testing.md names every kit, parameter and rule, and its snippet runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import pulse.testing
from pulse.testing import admissions, policies, scheduler, stores, transfers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reference" / "testing.md").read_text(encoding="utf-8")

KITS = {
    "check_block_store": stores,
    "check_transfer_engine": transfers,
    "check_selection_policy": policies,
    "check_admission_rule": admissions,
    "check_scheduler": scheduler,
}


def section(name: str) -> str:
    """What is said under the heading of a kit."""
    return TEXT.split(f"## `{name}(")[1].split("\n## ")[0]


@pytest.mark.parametrize(("name", "kit"), KITS.items(), ids=list(KITS))
def test_the_reference_has_the_rules_and_signatures(name: str, kit: ModuleType) -> None:
    told = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", section(name), flags=re.MULTILINE)
    assert told == [(rule.name, rule.text) for rule in kit.RULES]
    names = [rule.name for rule in kit.RULES]
    assert len(set(names)) == len(names)
    assert all(rule.fix for rule in kit.RULES)
    parameters = []
    for parameter in inspect.signature(getattr(kit, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            parameters.append(f"{parameter.name}={parameter.default!r}")
        else:
            parameters += [parameter.name, "*"]
    assert f"## `{name}({', '.join(parameters)})`" in TEXT


def test_every_public_name_is_told() -> None:
    for name in pulse.testing.__all__:
        assert getattr(pulse.testing, name)
        assert f"`{name}" in TEXT or f" {name}" in TEXT, name
    with pytest.raises(AttributeError, match="nothing"):
        _ = pulse.testing.nothing


def test_the_snippet_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(code, "testing.md", "exec"), {"__name__": "snippet"})
