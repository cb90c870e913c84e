"""``pulse check``: what can be named, and the exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pulse import Build, Plugin, Plugins
from pulse.cli.app import main
from pulse.errors import ConfigError
from pulse.testing.subjects import find, resolve
from pulse_admit import Threshold

PLUGIN = """
from pulse import Placement, Plugin


class Normal:
    def admit(self, waiting, view):
        return [Placement.NORMAL] * len(waiting)


class Impatient(Normal):
    def admit(self, waiting, view):
        return [self.place(tokens, view) for tokens in waiting]

    def place(self, tokens, view):
        normal = view.demand(tokens, Placement.NORMAL).fast <= view.fast_limit
        return Placement.NORMAL if normal else Placement.OFFLOAD


def patient():
    return Impatient()


class Half:
    def select(self, layer, query, view):
        return []


plugin = Plugin("impatient", lambda build: Impatient())
an_object = Impatient()
nothing = 7


def fails(build):
    raise OSError("no such device")
"""


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Runs ``pulse check`` where `kit_plugin` lies: exit code, output, errors."""
    (tmp_path / "kit_plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delitem(sys.modules, "kit_plugin", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pulse", "check", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ("threshold:100",),
        ("sink-window", "--kind", "select"),
        ("host", "--seed", "3"),
        ("staged",),
        ("kit_plugin:Impatient",),
        ("kit_plugin:patient",),
        ("kit_plugin:plugin",),
        ("kit_plugin:an_object", "--kind", "admit"),
    ],
)
def test_what_conforms_exits_with_0(command: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = command(*arguments, "--examples", "5")
    assert (code, err) == (0, "")
    assert out.rstrip().endswith(f"{arguments[0]!r} conforms")
    assert "complete" in out and "raises-nothing" in out


def test_what_breaks_a_rule_exits_with_1(command: Any) -> None:
    code, out, err = command("kit_plugin:Normal", "--examples", "30")
    assert (code, err) == (1, "")
    assert out == (
        "admission rule 'kit_plugin:Normal' breaks the rule 'possible': no request is placed where "
        "it can never fit, if it can fit elsewhere\n"
        "  smallest example: AdmissionCase(waiting=(2,), fast_limit=1, slow_limit=2, fast_free=0, "
        "slow_free=0, fast_token=1, slow_token=1, hot_tokens=1)\n"
        "  seen: 2 tokens are placed normal, which needs Demand(fast=2, slow=0) of 1, 2\n"
        "  what to do: compare view.demand(tokens, placement) with view.fast_limit and "
        "view.slow_limit\n"
    )


def test_a_missing_method_of_a_named_kind_exits_with_1(command: Any) -> None:
    code, out, _ = command("kit_plugin:Half", "--kind", "select")
    assert code == 1
    assert "'complete'" in out and "Half has no digest_bytes, open, close, observe" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("soloheads",), "no plugin is called 'soloheads'; did you mean solohead"),
        (("zzz",), "What is not registered is written module:attribute"),
        (("no_such_module:Thing",), "cannot import 'no_such_module': ModuleNotFoundError"),
        (
            ("kit_plugin:Imptient",),
            "there is no 'Imptient' in 'kit_plugin'; did you mean",
        ),
        (("kit_plugin:Half",), "fulfils no port; for a selection policy it lacks digest_bytes"),
        (("kit_plugin:nothing",), "fulfils no port of BlockStore, TransferEngine"),
        (("kit_plugin:fails",), "makes nothing from an empty Build (OSError: no such device)"),
        (("kit_plugin:fails", "--kind", "store"), "cannot be made here: OSError: no such device"),
        (("kit_plugin:nothing", "--kind", "admit"), "neither the wanted admission rule nor a"),
        (("null",), "say which with --kind"),
        (("torch",), "there is no check for model executor 'torch' yet"),
        (("host", "--kind", "tier"), "kind='tier' must be one of store, transfer"),
        (("threshold", "--kind", "select"), "no select plugin is called 'threshold'"),
        (("threshold:x",), "needs a whole number of tokens"),
        (("host", "--bound", "3"), "block store 'host' is no arbiter: leave out --bound and"),
        (("host", "--conserving"), "block store 'host' is no arbiter: leave out --bound and"),
        (("host", "--examples", "0"), "Invalid value for '--examples'"),
    ],
)
def test_bad_input_exits_with_2(command: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = command(*arguments)
    assert code == 2, out + err
    assert message in " ".join(err.split())
    assert not out


def test_arbiters_go_to_the_kit_of_schedulers(command: Any) -> None:
    code, out, err = command("irq:8", "--examples", "5")
    assert (code, err) == (0, "") and out.endswith("arbiter 'irq:8' conforms\n")
    code, out, _ = command("irq:8", "--examples", "300", "--bound", "3", "--conserving")
    assert code == 1 and "breaks the rule 'ageing'" in out
    code, out, _ = command("kits.test_scheduler:Dice", "--examples", "300")
    assert code == 1 and "breaks the rule 'deterministic'" in out
    assert "Workload(requests=(Arrival(" in out and "compute " in out


def test_the_command_as_a_stranger_runs_it(tmp_path: Path) -> None:
    (tmp_path / "kit_plugin.py").write_text(PLUGIN)
    command = [Path(sys.executable).parent / "pulse", "check", "kit_plugin:Normal"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "breaks the rule 'possible'" in done.stdout


def test_without_hypothesis_the_fix_is_named() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; sys.argv = ['pulse', 'check', 'host']\n"
    code += "import pulse.testing; from pulse.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'pulse-llm[testing]'" in done.stderr
    assert "PluginUnavailable" in done.stderr


# -- what may be given ---------------------------------------------------------------------------


def test_arguments_reach_factories() -> None:
    assert resolve("threshold:7", "admit").factory(Build()).tokens == 7
    assert resolve(Threshold, "admit").factory(Build()).tokens == 4096
    assert resolve(lambda build: build.argument, "admit").factory(Build("x")) == "x"
    assert resolve(lambda: 5, "admit").factory(Build()) == 5
    mine = Plugin("mine", lambda build: Threshold(9))
    assert resolve(mine, "admit").factory(Build()).tokens == 9


def test_objects_are_taken_as_they_are() -> None:
    rule = Threshold()
    subject = resolve(rule, "admit")
    assert subject.factory(Build()) is rule
    assert not subject.fresh
    assert resolve(subject, "admit") is subject


def test_registered_plugins_of_others_are_found() -> None:
    plugins = Plugins()

    class Stranger:
        pass

    assert find("irq", None, plugins).kind == "schedule"
    assert find("staged", None, plugins).label == "transfer engine 'staged'"
    with pytest.raises(ConfigError, match="is the name of a"):
        find("null", None, plugins)
