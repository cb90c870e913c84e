"""Plugins: found by name, and what is wrong with one is told to whoever asks for it."""

from __future__ import annotations

import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from pulse import Build, Plugin, Plugins, hookimpl
from pulse.errors import ConfigError, PluginNotFound, PluginUnavailable
from pulse.plugins import KINDS
from pulse.ports import AdmissionRule, Arbiter
from pulse.testing.null import NullExecutor, NullPolicy
from pulse.testing.nulltiers import NullTransfer
from pulse_admit import Threshold
from pulse_schedule import IRQ, Lockstep

FIRST_PARTY = {
    ("admit", "threshold", "pulse_admit"),
    ("executor", "null", "pulse"),
    ("executor", "torch", "pulse_torch"),
    ("schedule", "irq", "pulse_schedule"),
    ("schedule", "lockstep", "pulse_schedule"),
    ("select", "full", "pulse_select"),
    ("select", "headwise", "pulse_select"),
    ("select", "null", "pulse"),
    ("select", "sink-window", "pulse_select"),
    ("select", "solohead", "pulse_select"),
    ("store", "device", "pulse_torch"),
    ("store", "disk", "pulse_store"),
    ("store", "host", "pulse_store"),
    ("store", "null", "pulse"),
    ("transfer", "null", "pulse"),
    ("transfer", "staged", "pulse_transfer"),
    ("transfer", "torch-copy", "pulse_transfer"),
}

plugins = Plugins()


def module(**functions: Any) -> types.ModuleType:
    """A plugin module with these functions."""
    made = types.ModuleType("pulse_strange")
    for name, function in functions.items():
        function.__name__ = name
        setattr(made, name, hookimpl(function))
    return made


def misspelt() -> types.ModuleType:
    """A plugin module with a hook that there is not."""

    def nothing() -> list[Plugin]:
        return []

    return module(pulse_arbitrators=nothing)


def arbiters(*found: Plugin) -> types.ModuleType:
    return module(pulse_arbiters=lambda: list(found))


def test_every_first_party_plugin_is_found() -> None:
    found = {(item.kind, item.plugin.name, item.package) for item in plugins.all()}
    assert found >= FIRST_PARTY
    assert plugins.broken == {}
    keys = [(item.kind, item.plugin.name) for item in plugins.all()]
    assert keys == sorted(set(keys))
    assert {kind for kind, _ in keys} == set(KINDS)


def test_every_plugin_says_what_it_is() -> None:
    for item in plugins.all():
        assert item.plugin.summary, item.plugin.name


def test_names_make_objects() -> None:
    assert isinstance(plugins.resolve("executor", "null", Build()), NullExecutor)
    assert isinstance(plugins.resolve("transfer", "null", Build()), NullTransfer)
    assert isinstance(plugins.resolve("select", "null", Build()), NullPolicy)
    assert isinstance(plugins.resolve("schedule", "lockstep", Build()), Lockstep)
    assert isinstance(plugins.resolve("schedule", "irq", Build()), Arbiter)
    assert isinstance(plugins.resolve("admit", "threshold", Build()), AdmissionRule)


def test_objects_are_taken_as_they_are() -> None:
    arbiter = Lockstep()
    assert plugins.resolve("schedule", arbiter, Build()) is arbiter
    assert plugins.check("schedule", arbiter) is None


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        ("select", "soloheads", "solohead"),
        ("schedule", "lock-step", "lockstep"),
        ("transfer", "torchcopy", "torch-copy"),
        ("admit", "treshold:5", "threshold"),
        ("executor", "troch", "torch"),
        ("store", "hots", "host"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(kind: str, name: str, near: str) -> None:
    with pytest.raises(PluginNotFound) as caught:
        plugins.resolve(kind, name, Build())
    assert f"did you mean {near}" in str(caught.value)
    assert repr(name.partition(":")[0]) in str(caught.value)


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(PluginNotFound) as caught:
        plugins.check("schedule", "zzz")
    assert "did you mean" not in str(caught.value)
    assert "Known: fair, irq, lockstep, prefetch-one" in str(caught.value)


def test_an_unknown_kind_names_the_kinds() -> None:
    with pytest.raises(ConfigError, match="executor, store, transfer"):
        plugins.check("engine", "irq")


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "tokens"), [("threshold", 4096), ("threshold:0", 0)])
def test_the_threshold_takes_its_tokens(text: str, tokens: int) -> None:
    rule = plugins.resolve("admit", text, Build())
    assert isinstance(rule, Threshold) and rule.tokens == tokens


@pytest.mark.parametrize("text", ["lockstep:5", "prefetch-one:2", "irq:0", "fair:x"])
def test_an_arbiter_refuses_what_it_does_not_understand(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plugins.resolve("schedule", text, Build())


@pytest.mark.parametrize(
    ("text", "patience"), [("irq", 64), ("fair", 16), ("irq:8", 8), ("irq:1", 1)]
)
def test_irq_takes_its_patience(text: str, patience: int) -> None:
    arbiter = plugins.resolve("schedule", text, Build())
    assert isinstance(arbiter, IRQ) and arbiter.patience == patience


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("admit", "threshold:-1"),
        ("admit", "threshold:many"),
        ("admit", "threshold:1.5"),
        ("admit", "threshold:1:2"),
        ("schedule", "irq:0"),
        ("schedule", "irq:-3"),
        ("schedule", "irq:soon"),
        ("schedule", "irq:1.5"),
    ],
)
def test_a_bad_argument_is_repeated_with_what_is_wanted(kind: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        plugins.resolve(kind, text, Build())
    assert "needs" in str(caught.value)


# -- plugins of others ---------------------------------------------------------------------------


def test_a_stranger_uses_the_same_hooks() -> None:
    mine = Plugins()
    mine.register(arbiters(Plugin("mine", lambda build: ("made", build.argument))), "stranger")
    assert mine.resolve("schedule", "mine:7", Build()) == ("made", "7")
    assert isinstance(mine.resolve("schedule", "irq", Build()), IRQ)


def test_nothing_is_discovered_when_not_wanted() -> None:
    bare = Plugins(discover=False)
    assert bare.all() == []
    with pytest.raises(PluginNotFound, match="Known: none"):
        bare.check("schedule", "irq")


def test_a_plugin_without_its_library_says_what_to_install() -> None:
    mine = Plugins(discover=False)
    needy = Plugin("needy", lambda _: None, requires=("asyncio", "no_such_module"))
    mine.register(arbiters(needy), "stranger")
    (found,) = mine.all()
    assert found.problem is not None and "asyncio" not in found.problem
    with pytest.raises(PluginUnavailable) as caught:
        mine.resolve("schedule", "needy", Build())
    assert "pip install no_such_module" in str(caught.value)
    assert "'needy'" in str(caught.value)


def test_a_requirement_within_a_missing_package_is_no_crash() -> None:
    mine = Plugins(discover=False)
    mine.register(arbiters(Plugin("deep", lambda _: None, requires=("no_such.module",))))
    with pytest.raises(PluginUnavailable, match="no_such"):
        mine.check("schedule", "deep")


def test_an_unknown_hook_is_rejected() -> None:
    with pytest.raises(ConfigError, match="pulse_arbitrators"):
        Plugins(discover=False).register(misspelt(), "stranger")


def test_a_hook_with_another_signature_is_rejected() -> None:
    with pytest.raises(ConfigError, match="pulse_arbiters"):
        Plugins(discover=False).register(module(pulse_arbiters=lambda wrong: []), "stranger")


def test_the_same_plugin_twice_is_rejected() -> None:
    mine = Plugins(discover=False)
    once = arbiters()
    mine.register(once, "stranger")
    with pytest.raises(ConfigError, match="stranger"):
        mine.register(once, "stranger")


def test_a_rejected_plugin_does_not_stand_in_the_way_of_others() -> None:
    mine = Plugins(discover=False)
    with pytest.raises(ConfigError):
        mine.register(misspelt(), "broken")
    mine.register(arbiters(Plugin("mine", lambda _: "made")), "good")
    assert mine.resolve("schedule", "mine", Build()) == "made"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """What is installed, and two packages that cannot be loaded."""
    from pulse import plugins as where

    real = list(where.entry_points(group="pulse"))
    more = [
        EntryPoint("aaa_broken", "no_such_package.plugin", "pulse"),
        EntryPoint("zzz_broken", "pulse_schedule:no_such_attribute", "pulse"),
    ]
    monkeypatch.setattr(where, "entry_points", lambda group: [*more, *real])
    return Plugins()


def test_a_package_that_cannot_be_loaded_costs_nobody_else(broken: Plugins) -> None:
    assert set(broken.broken) == {"aaa_broken", "zzz_broken"}
    assert "ModuleNotFoundError" in broken.broken["aaa_broken"]
    found = {(item.kind, item.plugin.name, item.package) for item in broken.all()}
    assert found >= FIRST_PARTY


def test_a_broken_package_is_named_when_a_name_is_missing(broken: Plugins) -> None:
    broken.check("schedule", "irq")
    with pytest.raises(PluginNotFound) as caught:
        broken.check("schedule", "prefetch")
    assert "aaa_broken failed to load: ModuleNotFoundError" in str(caught.value)
    assert "zzz_broken failed to load: AttributeError" in str(caught.value)
