"""What became worse, by whichever judgement: since the older commit, or lastingly over the history."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.changepoints import LEAST_STEP
from harness.names import reference_of
from harness.rows import Change, Commit, Comparison, Contrast
from harness.selection import Case
from harness.stats import Estimate, Verdict, margin_band

TIME = "time"


@dataclass(frozen=True)
class Regression:
    """One of Kitsune's forms in one case, worse by one metric.

    It got worse between ``before`` and ``after``. ``ratio`` is the new value over the old, with an interval unless it
    is a change of level (``p_value``); None where there is nothing to measure any more, for a ``reason``. ``limit`` is
    what the ratio was held against, 1 plus the margin. ``commands`` measure it again.
    """

    case: Case
    variant: str
    precision: str
    metric: str
    before: Commit
    after: Commit
    ratio: Estimate | None
    limit: float | None
    p_value: float | None
    reason: str | None
    command: str

    @property
    def is_level(self) -> bool:
        """Whether it is a change of level over the history, and not one between the two commits that are compared."""
        return self.p_value is not None

    @property
    def beyond(self) -> float | None:
        """By how much the ratio surely exceeds its limit: its interval's lower end, if it has one."""
        if self.ratio is None or self.limit is None:
            return None
        return (self.ratio.low if self.ratio.has_interval else self.ratio.ratio) - self.limit


def regressions(comparison: Comparison) -> tuple[Regression, ...]:
    """All regressions, those since the older commit first: what was lost, then by size."""
    found = [*_since_base(comparison), *_levels(comparison)]
    return tuple(sorted(found, key=lambda entry: (entry.is_level, -_size(entry))))


def _size(entry: Regression) -> float:
    return math.inf if entry.ratio is None else entry.ratio.ratio


def _since_base(comparison: Comparison) -> Iterator[Regression]:
    if comparison.base is None:
        return
    commands = comparison.commands_since_base()
    for lost in comparison.lost:
        yield Regression(
            case=lost.case,
            variant=lost.skip.variant,
            precision=lost.skip.precision,
            metric=TIME,
            before=comparison.base,
            after=comparison.head,
            ratio=None,
            limit=None,
            p_value=None,
            reason=f"{lost.skip.status}: {lost.skip.reason}",
            command=commands[lost.case, lost.skip.variant],
        )
    judged: list[Change | Contrast] = [*comparison.changes, *comparison.contrasts]
    for entry in judged:
        if entry.verdict is Verdict.SLOWER:
            yield Regression(
                case=entry.case,
                variant=entry.variant,
                precision=entry.precision,
                metric=entry.metric if isinstance(entry, Contrast) else TIME,
                before=comparison.base,
                after=comparison.head,
                ratio=entry.ratio,
                limit=margin_band(entry.margin)[1],
                p_value=None,
                reason=None,
                command=commands[entry.case, entry.variant],
            )


def _levels(comparison: Comparison) -> Iterator[Regression]:
    for series in comparison.history:
        for change in series.changes:
            if not change.is_worse:
                continue
            variants = [reference_of(series.variant), series.control, series.variant]
            yield Regression(
                case=series.case,
                variant=series.variant,
                precision=series.precision,
                metric=TIME,
                before=change.before,
                after=change.first,
                ratio=Estimate(change.ratio, 0.0, math.inf, 1, 0),
                limit=1 + LEAST_STEP,
                p_value=change.p_value,
                reason=None,
                command=comparison.reproduction.command([change.before.sha, change.first.sha], series.case, variants),
            )
