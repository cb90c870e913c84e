"""The rules of a selection policy, which `pulse.testing.policies` checks."""

from __future__ import annotations

from pulse.testing.checking import COMPLETE, RAISES_NOTHING, Rule

__all__ = [
    "ARGUMENTS",
    "BUDGET",
    "COPIES",
    "DETERMINISTIC",
    "DIGESTS",
    "EXHAUSTIVE",
    "FORGETS",
    "MIDDLE",
    "NEIGHBOURS",
    "RULES",
    "SHAPE",
]

SHAPE = Rule(
    "shape",
    "select returns integers [sequences, groups, width]; groups is kv_heads if per_head, else 1",
    "return one row per sequence of view.sequences and group, padded with -1",
)
MIDDLE = Rule(
    "middle",
    "selected blocks lie in the sequence's view.middle, low <= block < high; -1 stands for none",
    "add `low` to positions within the middle, and drop or pad what is at `high` or above",
)
BUDGET = Rule(
    "budget",
    "a row is at most view.top_k wide",
    "cut each row to the best view.top_k blocks",
)
EXHAUSTIVE = Rule(
    "exhaustive",
    "where exhaustive is True, every block of the middle is selected",
    "return all of range(low, high), or set exhaustive = False",
)
DETERMINISTIC = Rule(
    "deterministic",
    "the same calls lead to the same selections",
    "draw nothing from global random state, and order nothing by hash or id",
)
NEIGHBOURS = Rule(
    "neighbours",
    "a sequence's selection does not depend on the other sequences, in its cohort or before it",
    "key all state by sequence and score each sequence by itself",
)
COPIES = Rule(
    "copies-keys",
    "keys are copied or digested in update: the memory behind them is reused afterwards",
    "clone what update keeps of `keys`, views included",
)
ARGUMENTS = Rule(
    "arguments",
    "query, keys and mass are not written to",
    "work on copies; the keys are attention's own",
)
FORGETS = Rule(
    "forgets",
    "after close nothing of a sequence is kept, a second close does nothing, and a sequence of "
    "the same name starts afresh",
    "drop every entry of the sequence in close, with pop(sequence, None)",
)
DIGESTS = Rule(
    "digest-bytes",
    "digest_bytes is a whole number of bytes that does not shrink with more blocks, and covers "
    "the arrays that are kept for a sequence",
    "count each array that open and update keep: elements times bytes, all layers together",
)

RULES = (
    *(COMPLETE, SHAPE, MIDDLE, BUDGET, EXHAUSTIVE, ARGUMENTS, DETERMINISTIC, NEIGHBOURS, COPIES),
    *(FORGETS, DIGESTS, RAISES_NOTHING),
)
"""The rules of this kit."""
