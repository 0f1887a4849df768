"""Which rows of a comparison are shown: what is judged, counted and failed on stays the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from harness.rows import Comparison, LevelChange, SideBySide
from harness.stats import Verdict

Only = Literal["regressed", "changed", "inconclusive"]

_KEPT = {
    "regressed": (Verdict.SLOWER,),
    "changed": (Verdict.SLOWER, Verdict.FASTER),
    "inconclusive": (Verdict.INCONCLUSIVE,),
}


def narrowed(comparison: Comparison, only: Only) -> Comparison:
    """The comparison with the changes that have one of these verdicts, and of its variants those that it takes to see
    why: what changed and what it is held against. What was lost has regressed; changes of level are never unclear.
    """
    verdicts = _KEPT[only]
    changes = tuple(change for change in comparison.changes if change.verdict in verdicts)
    contrasts = tuple(contrast for contrast in comparison.contrasts if contrast.verdict in verdicts)
    lost = () if only == "inconclusive" else comparison.lost
    wanted = {(change.case, name) for change in changes for name in (change.variant, change.control)}
    wanted |= {(contrast.case, contrast.variant) for contrast in contrasts}
    wanted |= {
        (row.case, row.reference) for row in comparison.rows if (row.case, row.variant) in wanted and row.reference
    }
    rows = tuple(row for row in comparison.rows if (row.case, row.variant) in wanted)
    history = tuple(
        replace(series, changes=tuple(change for change in series.changes if _direction(change) in verdicts))
        for series in comparison.history
    )
    phases = tuple(entry for entry in comparison.phases if (entry.case, entry.variant) in wanted)
    return replace(
        comparison, rows=rows, changes=changes, contrasts=contrasts, lost=lost, history=history, phases=phases
    )


def _direction(change: LevelChange) -> Verdict:
    return Verdict.SLOWER if change.is_worse else Verdict.FASTER


def narrowed_sides(sides: SideBySide, only: Only) -> SideBySide:
    """The rows that have one of these verdicts."""
    return replace(sides, contrasts=tuple(entry for entry in sides.contrasts if entry.verdict in _KEPT[only]))
