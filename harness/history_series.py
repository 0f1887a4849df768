"""Kitsune's forms over the measured commits, each against a control, with the changes of level that stand.

What waits for the host and what waits for the device change apart from machine to machine (:mod:`harness.controls`). So
a series is held against a step captured by hand, which waits for the device. A change of its level is reported where
its times are about as long as that one's before and after; else it must be found in the series against eager, which
waits for the host, as well. Where nothing was captured by hand, eager is the control, and on a GPU the change must be
found in the seconds themselves as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import overload

from harness.change_index import ChangeIndex
from harness.changepoints import LEAST_RUN
from harness.controls import UNLIKE, is_captured
from harness.history_index import Value, Values, series_values
from harness.level_changes import apart, environments_of, level_changes
from harness.names import order, precision_of, reference_of
from harness.rows import Commit, LevelChange, Point, Series
from harness.selection import Case
from harness.stats import repeat_noise
from harness.store import History

_Finder = Callable[[Values, Sequence[float]], tuple[LevelChange, ...]]


def history_series(history: History, commits: Mapping[str, Commit]) -> tuple[Series, ...]:
    """The series of all cases, those of a variant together.

    Args:
        commits: all of the history, by their hashes.
    """
    environments = environments_of({commit: history.runs(commit)[-1].facts for commit in history.commits})
    position = {commit: place for place, commit in enumerate(history.commits)}

    held_against = [
        (case, variant, held, _control(held))
        for (case, variant), held in sorted(series_values(history).items(), key=lambda item: order(item[0][1]))
    ]
    index = ChangeIndex(history.folder)
    index.search(_stretches([held[control] for _, _, held, control in held_against], environments))

    def changes(values: Values, numbers: Sequence[float]) -> tuple[LevelChange, ...]:
        at = [commits[commit] for commit in values.commits]
        return level_changes(at, numbers, environments, position, find=index.find)

    series = []
    for case, variant, held, control in held_against:
        values = held[control]
        series.append(
            Series(
                case=case,
                variant=variant,
                precision=precision_of(variant),
                control=control,
                points=_Points(values, commits),
                changes=_standing(case, variant, control, held, changes, position),
                noise=repeat_noise(values.ratios),
            )
        )
    index.save()
    return tuple(series)


def _stretches(series: Sequence[Values], environments: Mapping[str, int]) -> list[list[float]]:
    """The ratios of all series, those of each environment apart."""
    stretches = []
    for values in series:
        ratios = values.ratios
        stretches += [[ratios[index] for index in members] for members in apart(values.commits, environments)]
    return stretches


def _control(held: Mapping[str, Values]) -> str:
    """The peer captured by hand that was timed at the most commits, unless eager was at more than twice as many."""
    return max(sorted(held, key=order), key=lambda peer: len(held[peer]) * (2 if is_captured(peer) else 1))


def _standing(
    case: Case,
    variant: str,
    control: str,
    held: Mapping[str, Values],
    changes: _Finder,
    position: Mapping[str, int],
) -> tuple[LevelChange, ...]:
    """The changes of level that no difference between machines explains."""
    values = held[control]
    found = changes(values, values.ratios)
    if case.device == "cpu":
        return found
    level = dict(zip(values.commits, values.ratios, strict=True))
    alike = [change for change in found if is_captured(control) and _is_alike(change, level)]
    if len(alike) == len(found):
        return found
    if not is_captured(control):
        others = changes(values, values.seconds)
    elif (eager := held.get(reference_of(variant))) is not None:
        others = changes(eager, eager.ratios)
    else:
        others = ()
    standing = [[change] if change in alike else _confirmed(change, others, position) for change in found]
    return tuple(itertools.chain.from_iterable(standing))


def _is_alike(change: LevelChange, level: Mapping[str, float]) -> bool:
    """Whether times are about as long as the control's on both sides of a change."""
    return all(abs(math.log(level[commit.sha])) < UNLIKE for commit in (change.before, change.latest))


def _confirmed(change: LevelChange, others: Sequence[LevelChange], position: Mapping[str, int]) -> list[LevelChange]:
    """The change, if there is one in the same direction at the same place, give or take a shortest level: the smaller
    of both, as a list.
    """
    met = [
        other
        for other in others
        if other.is_worse == change.is_worse
        and abs(position[other.first.sha] - position[change.first.sha]) <= LEAST_RUN
    ]
    if not met:
        return []
    ratio = min((change.ratio, *(other.ratio for other in met)), key=lambda ratio: abs(math.log(ratio)))
    return [replace(change, ratio=ratio, p_value=max(change.p_value, *(other.p_value for other in met)))]


class _Points(Sequence[Point]):
    """The points of values, which are made as they are looked at."""

    def __init__(self, values: Sequence[Value], commits: Mapping[str, Commit]) -> None:
        self._values = values
        self._commits = commits

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> Point: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Point]: ...

    def __getitem__(self, index: int | slice) -> Point | Sequence[Point]:
        if isinstance(index, slice):
            return _Points(self._values[index], self._commits)
        value = self._values[index]
        return Point(self._commits[value.commit], value.ratio, value.seconds)
