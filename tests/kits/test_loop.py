"""The virtual loop where a program is stuck: it says who waits, and what it left is cleaned up."""

from __future__ import annotations

import asyncio
import gc
import importlib
import pkgutil
from types import ModuleType

import pytest

import pulse.testing
from pulse.testing import Deadlock, Livelock, run


async def spin() -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def forgotten() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(("stuck", "error"), [(spin, Livelock), (forgotten, Deadlock)])
def test_what_is_stuck_is_cancelled_and_cleans_up(stuck: object, error: type[Exception]) -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await stuck()  # type: ignore[operator]
        finally:
            await asyncio.sleep(1)
            cleaned.append("main")

    with pytest.raises(error, match="main") as info:
        run(main(), seed=1)
    assert cleaned == ["main"]
    assert str(info.value).count("\n") == 1  # one task, and none that only cleans up


async def stubborn() -> None:
    while True:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            continue


async def ends_badly() -> None:
    try:
        await forgotten()
    finally:
        await forgotten()


@pytest.mark.parametrize("stuck", [stubborn, ends_badly])
def test_what_cannot_be_cancelled_is_abandoned_without_noise(
    stuck: object, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Deadlock):
        run(stuck())  # type: ignore[operator]
    gc.collect()  # what is destroyed while it is pending is logged
    assert not caplog.records


def test_no_public_name_is_hidden_by_a_module() -> None:
    for module in pkgutil.iter_modules(pulse.testing.__path__):
        importlib.import_module(f"pulse.testing.{module.name}")
    named = {name: getattr(pulse.testing, name) for name in pulse.testing.__all__}
    assert not [name for name, value in named.items() if isinstance(value, ModuleType)]
