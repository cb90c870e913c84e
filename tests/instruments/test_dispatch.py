"""Events reach who overrides them; an instrument that raises is logged, removed and no trouble."""

from __future__ import annotations

import logging

import pytest

from pulse.kernel.instruments import EVENTS, Instruments
from pulse.ports import Instrument


class Tokens(Instrument):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def token(self, request: str, index: int) -> None:
        self.seen.append((request, index))


class Broken(Tokens):
    def request_ended(self, request: str, reason: str) -> None:
        raise RuntimeError("drawn")


def test_what_nobody_overrides_has_no_handler() -> None:
    instruments = Instruments([Tokens(), Instrument()])
    assert {event for event in EVENTS if instruments._handlers[event]} == {"token"}


def test_every_event_has_a_name_and_no_more() -> None:
    assert all(callable(getattr(Instrument, event)) for event in EVENTS)
    with pytest.raises(KeyError):
        Instruments().emit("tokens", "a", 0)


def test_one_that_raises_is_logged_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    first, broken, last = Tokens(), Broken(), Tokens()
    instruments = Instruments([first, broken, last])
    instruments.emit("token", "a", 0)
    with caplog.at_level(logging.ERROR, "pulse"):
        instruments.emit("request_ended", "a", "stop")
    (record,) = caplog.records
    assert "Broken" in record.getMessage() and "request_ended" in record.getMessage()
    assert record.exc_info is not None and "drawn" in str(record.exc_info[1])
    caplog.clear()
    instruments.emit("request_ended", "b", "stop")
    instruments.emit("token", "b", 1)
    assert caplog.records == []
    assert broken.seen == [("a", 0)]
    assert first.seen == last.seen == [("a", 0), ("b", 1)]


def test_one_that_raises_does_not_keep_the_next_from_hearing() -> None:
    heard: list[str] = []

    class Ends(Instrument):
        def request_ended(self, request: str, reason: str) -> None:
            heard.append(request)

    instruments = Instruments([Broken(), Ends(), Broken(), Ends()])
    instruments.emit("request_ended", "a", "stop")
    assert heard == ["a", "a"]


def test_what_is_removed_hears_no_more() -> None:
    tokens = Tokens()
    instruments = Instruments([tokens])
    instruments.remove(tokens)
    instruments.remove(tokens)
    instruments.emit("token", "a", 0)
    assert tokens.seen == []
