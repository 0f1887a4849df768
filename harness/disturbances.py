"""What else the host did while a commit was timed, where that was much."""

from __future__ import annotations

from collections.abc import Mapping

from harness.selection import Measurement

MUCH = 0.25
"""The share of the host's processors from which on it is told that others had it."""


def host_notes(sides: Mapping[str, Measurement]) -> list[str]:
    """A note on each side in whose rounds other processes, or other guests of the same machine, had much of the host.

    Args:
        sides: what is compared, by what it is called.
    """
    notes = []
    for name, measured in sides.items():
        shares = [entry.taken for rounds in measured.rounds.values() for entry in rounds]
        disturbed = [share for share in shares if share >= MUCH]
        if disturbed:
            notes.append(
                f"others had up to {max(disturbed):.0%} of the host's processors in {len(disturbed)} of {len(shares)}"
                f" rounds of {name}: times there are partly their doing"
            )
    return notes
