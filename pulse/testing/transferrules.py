"""The rules of a transfer engine, which `pulse.testing.transfers` checks."""

from __future__ import annotations

from pulse.testing.checking import COMPLETE, RAISES_NOTHING, Rule

__all__ = [
    "ARRIVES",
    "CANCEL",
    "CLOSED",
    "CLOSES",
    "CONCURRENT",
    "EAGER",
    "ENDS",
    "FAILS",
    "NEIGHBOURS",
    "OFF_LOOP",
    "REPORT",
    "RULES",
    "SWALLOW",
]

ARRIVES = Rule(
    "arrives",
    "every unit arrives bit for bit at its target, and no other unit of either store changes",
    "copy source_units[i] to target_units[i] for every i < plan.units, and nothing more",
)
REPORT = Rule(
    "report",
    "the awaited value is a TransferReport: the plan's bytes, 1 to plan.units pieces (0 for an "
    "empty plan), and the seconds it took",
    "return TransferReport(plan.bytes, pieces, seconds)",
)
CONCURRENT = Rule(
    "concurrent",
    "many plans can be under way at once, in both directions",
    "keep no buffer or cursor that two plans share, or queue the plans",
)
ENDS = Rule(
    "ends",
    "every transfer ends",
    "complete the awaitable from the thread that moved the bytes (call_soon_threadsafe)",
)
OFF_LOOP = Rule(
    "off-the-loop",
    "bytes are moved elsewhere than on the event loop's thread",
    "read and write the stores on a worker thread; pulse.Worker is one",
)
CANCEL = Rule(
    "cancel",
    "a cancelled transfer ends only when no byte of its plan can move any more",
    "wait for the work that is under way before CancelledError goes on; a pulse.Worker's landings "
    "cannot be cancelled and do just that",
)
SWALLOW = Rule(
    "cancellation-goes-on",
    "whoever is cancelled while awaiting a transfer gets CancelledError",
    "raise CancelledError again once the work has ended",
)
NEIGHBOURS = Rule(
    "neighbours",
    "a plan that fails or is cancelled changes nothing for the others, at the same time or later",
    "keep flags and errors per plan",
)
FAILS = Rule(
    "fails",
    "a store that raises fails the awaited transfer with TransferError, after which no byte of "
    "the plan moves",
    "stop and wait for all threads of the plan, then raise TransferError from what was raised",
)
CLOSES = Rule(
    "closes",
    "close waits for what is under way, ends the engine's threads, and may be called twice",
    "refuse new plans, await the ones that run, then join the threads",
)
CLOSED = Rule(
    "closed",
    "after close, a transfer raises a PulseError (EngineClosed, TransferError)",
    "remember that the engine is closed, and raise EngineClosed",
)
EAGER = Rule(
    "eager",
    "where eager is True, recall starts at once, on any thread, and returns a future of the loop",
    "submit in recall itself and return the future; or set eager = False",
)

RULES = (
    *(COMPLETE, ARRIVES, REPORT, CONCURRENT, ENDS, OFF_LOOP, CANCEL, SWALLOW, NEIGHBOURS, FAILS),
    *(CLOSES, CLOSED, EAGER, RAISES_NOTHING),
)
"""The rules of this kit."""
