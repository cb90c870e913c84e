"""Which cohort gets which colour: the same in every view, run after run."""

from __future__ import annotations

import re

from pulse.types import Operation, Work

__all__ = ["alone", "colour", "label"]

_NUMBER = re.compile(r"(\d+)$", re.ASCII)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def colour(operation: Operation) -> int:
    """A small number: 0 prefill, 1 normal, 2 a request's own, from 3 on offload cohorts.

    All prefills share one, for there they are told apart by request, of which there is no end; so
    do write-backs in decode, which belong to no cohort.
    """
    if operation.work is Work.PREFILL:
        return 0
    if operation.work is Work.NORMAL:
        return 1
    if alone(operation):
        return 2
    number = _NUMBER.search(operation.cohort)
    # The kernel numbers from the second cohort on. A name may end in any number of digits, of
    # which the last tell neighbours apart.
    return 2 + max(1, int(number[1][-6:]) if number else 1)


def alone(operation: Operation) -> bool:
    """Whether an operation of decode belongs to a request, not to a cohort."""
    return operation.work is not Work.PREFILL and operation.cohort in operation.requests


def label(operation: Operation) -> str:
    """The cohort of `operation` in letters alone: ``prefill``, ``normal``, ``offload A``, …"""
    number = colour(operation) - 3
    if number < 0:
        return str(operation.work)
    letters = ""
    while number >= 0:
        number, digit = divmod(number, len(_LETTERS))
        letters = _LETTERS[digit] + letters
        number -= 1
    return f"{operation.work} {letters}"
