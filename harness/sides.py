"""Two sides that are no two commits: variants of one commit, or one commit on two machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import metrics
from harness.disturbances import host_notes
from harness.revisions import describe
from harness.rows import Commit, Side, SideBySide
from harness.selection import ComparisonError, Measurement, changed_facts, choose_commits, measured_commit, measurement
from harness.store import History


def two_variants(
    history: History,
    revision: str | None,
    variants: tuple[str, str],
    *,
    folder: Path,
    chosen: Sequence[metrics.Name],
    margins: Mapping[metrics.Name, float],
) -> SideBySide:
    """Holds the second variant against the first at a commit, in every case that timed both side by side.

    Args:
        revision: the commit; None for the newest measured.
        folder: where to ask git about the revision.

    Raises:
        ComparisonError: the commit is not measured, or nothing was timed with both variants.
    """
    _, commit = choose_commits(history, None, revision, folder)
    measured = measurement(history, commit)
    timed = sorted({variant for case in measured.rounds for variant in measured.variants(case)})
    for variant in variants:
        if variant not in timed:
            raise ComparisonError(f"{variant!r} was not timed at {commit[:8]}; timed there: {', '.join(timed)}")
    contrasts = metrics.within(measured, *variants, _times_only(chosen), margins)
    if not contrasts:
        raise ComparisonError(f"no case at {commit[:8]} measured {variants[0]} and {variants[1]} side by side")
    base, head = (_side(variant, history, measured, folder) for variant in variants)
    notes = tuple(host_notes({commit[:8]: measured}))
    return SideBySide("variants", base, head, _used(chosen, margins), contrasts, notes, history.damage)


def two_machines(
    histories: tuple[History, History],
    revision: str | None,
    *,
    folder: Path,
    chosen: Sequence[metrics.Name],
    margins: Mapping[metrics.Name, float],
) -> SideBySide:
    """Holds the second machine against the first at a commit, variant by variant.

    Args:
        revision: the commit; None for the newest that both machines measured.
        folder: where to ask git about the revision.

    Raises:
        ComparisonError: there is no such commit on both, or the machines have no case and variant in common.
    """
    commit = _common_commit(histories, revision, folder)
    older, newer = (measurement(history, commit) for history in histories)
    contrasts = metrics.across(older, newer, chosen, margins, lambda variant: True)
    names = [history.machine for history in histories]
    if not contrasts:
        raise ComparisonError(
            f"{names[0]} and {names[1]} have no case, variant and metric in common at {commit[:8]}:"
            " cases are of a device type, and CPU and GPU have none in common"
        )
    differing = changed_facts(older.facts, newer.facts)
    told = ", ".join(f"{name}: {older.facts.get(name)} → {newer.facts.get(name)}" for name in differing)
    notes = [f"the machines differ in {told}"] if differing else []
    notes += host_notes(dict(zip(names, (older, newer), strict=True)))
    base, head = (
        _side(history.machine, history, side, folder) for history, side in zip(histories, (older, newer), strict=True)
    )
    return SideBySide(
        kind="machines",
        base=base,
        head=head,
        margins=_used(chosen, margins),
        contrasts=contrasts,
        notes=tuple(notes),
        damage=tuple(dict.fromkeys(entry for history in histories for entry in history.damage)),
    )


def _times_only(chosen: Sequence[metrics.Name]) -> list[metrics.Name]:
    """Within a process a ratio of times is the only way to compare them."""
    return list(dict.fromkeys("time" if metric == "ratio" else metric for metric in chosen))


def _used(chosen: Sequence[metrics.Name], margins: Mapping[metrics.Name, float]) -> dict[str, float]:
    return {metric: margins[metric] for metric in chosen}


def _side(label: str, history: History, measured: Measurement, folder: Path) -> Side:
    text = describe([measured.commit], folder).get(measured.commit)
    subject, date = (text.subject, text.date) if text else (None, None)
    commit = Commit(measured.commit, subject, date, measured.runs[-1].started)
    return Side(label, history.machine, measured.facts, commit)


def _common_commit(histories: tuple[History, History], revision: str | None, folder: Path) -> str:
    first, second = histories
    if revision is not None:
        commits = [measured_commit(revision, history, folder) for history in histories]
        if commits[0] != commits[1]:
            raise ComparisonError(
                f"{revision!r} is {commits[0][:8]} on {first.machine} and {commits[1][:8]} on {second.machine}"
            )
        return commits[0]
    common = [commit for commit in second.without_snapshots().commits if commit in first.commits]
    if not common:
        raise ComparisonError(f"{first.machine} and {second.machine} have measured no commit in common")
    return common[-1]
