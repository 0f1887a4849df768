"""What is being tried for the first time, told to whoever watches: it may end the process, or never come to an end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

KILLED_US = 3e11
"""Kept as the time of what ended the process that tried it, or hung there: it is never tried again."""

TRIAL_SECONDS = 120.0
"""After which a trial is taken to hang; a compiler may take that long."""

PROGRAM_SECONDS = 1200.0
"""The same for code of a whole program."""

Tell = Callable[[str, Mapping[str, float], float], None]

_tell: Tell | None = None
_one_by_one = False


def watch_by(tell: Tell, *, one_by_one: bool) -> None:
    """From now on `tell` is told of each trial of this process.

    Args:
        one_by_one: whether trials that could run at the same time are to run one after the other, so that the one which
            is told of last is to blame.
    """
    global _tell, _one_by_one
    _tell, _one_by_one = tell, one_by_one


def trying(what: str, costs: Mapping[str, float], seconds: float | None = None) -> None:
    """Something is about to be tried.

    Args:
        what: in words.
        costs: entries of the `CostCache` that are to be kept if the process does not survive it.
        seconds: after which it is taken to hang; None for those of a trial.
    """
    if _tell is not None:
        _tell(what, costs, TRIAL_SECONDS if seconds is None else seconds)


def are_one_by_one() -> bool:
    """Whether nothing is to be tried while something else is."""
    return _one_by_one
