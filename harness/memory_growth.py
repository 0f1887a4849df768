"""What takes more memory than at the older commit, where a comparison judges no memory: it is told all the same."""

from __future__ import annotations

from collections.abc import Callable

from harness import formats, metrics
from harness.rows import Comparison, Contrast
from harness.selection import Measurement
from harness.stats import Verdict

_NAMED = 3


def memory_growth(
    older: Measurement, newer: Measurement, margin: float, wanted: Callable[[str], bool]
) -> tuple[Contrast, ...]:
    """The rows that ``--metric memory`` would call "more", the largest change first.

    Args:
        margin: that of memory.
        wanted: which variants, by name.
    """
    found = metrics.across(older, newer, ["memory"], {"memory": margin}, wanted)
    grown = [entry for entry in found if entry.verdict is Verdict.SLOWER]
    return tuple(sorted(grown, key=lambda entry: -entry.ratio.ratio))


def sentence(comparison: Comparison) -> str | None:
    """How many rows take more, the first ones by name, and how to see them all; None where there are none."""
    grown = comparison.memory_growth
    if not grown or comparison.base is None:
        return None
    named = [
        f"{entry.case.name} {entry.variant} {formats.percent_change(entry.ratio.ratio)}" for entry in grown[:_NAMED]
    ]
    more = ["…"] if len(grown) > _NAMED else []
    rows = "1 row takes" if len(grown) == 1 else f"{len(grown)} rows take"
    then = "in earlier runs" if comparison.base == comparison.head else f"at {comparison.base.short}"
    return f"memory: {rows} more than {then} ({', '.join([*named, *more])}); --metric memory judges it"
