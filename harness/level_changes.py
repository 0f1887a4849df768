"""Change points of a series over commits: between which commits, in which environment, for better or worse."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from harness.changepoints import ChangePoint, find_changes
from harness.rows import Commit, EnvironmentChange, LevelChange
from harness.selection import ENVIRONMENT_FACTS, changed_facts

Environment = tuple[object, ...]
"""The facts that change what is measured, in the order of :data:`harness.selection.ENVIRONMENT_FACTS`."""


def environment_of(facts: Mapping[str, object]) -> Environment:
    """What makes values of two commits comparable."""
    return tuple(facts.get(name) for name in ENVIRONMENT_FACTS)


def level_changes(
    commits: Sequence[Commit],
    ratios: Sequence[float],
    environments: Mapping[str, Environment],
    position: Mapping[str, int],
    *,
    lower_is_better: bool = True,
) -> tuple[LevelChange, ...]:
    """Where the level of a series changed, in the order of the commits.

    Values of different environments are judged apart, each with those of its own, whichever was measured in between.

    Args:
        commits: those at which the series was measured, in their order.
        ratios: its values at these.
        environments: that of each commit, by its hash.
        position: the place of each measured commit of the machine in their order, by its hash.
        lower_is_better: whether the series' ratios are of times, and not of speeds.
    """
    apart: dict[Environment, list[int]] = {}
    for index, commit in enumerate(commits):
        apart.setdefault(environments[commit.sha], []).append(index)
    changes = [
        _named(change, [commits[index] for index in members], position, lower_is_better)
        for members in apart.values()
        for change in find_changes([ratios[index] for index in members])
    ]
    return tuple(sorted(changes, key=lambda change: position[change.first.sha]))


def environment_changes(
    commits: Sequence[Commit], facts: Mapping[str, Mapping[str, object]]
) -> tuple[EnvironmentChange, ...]:
    """The commits that were measured in another environment than the measured commit before them.

    Args:
        commits: in their order.
        facts: the machine's facts at each of them, by its hash.
    """
    changes = []
    for before, commit in itertools.pairwise(commits):
        old, new = facts[before.sha], facts[commit.sha]
        differing = changed_facts(old, new)
        if differing:
            told = {name: (old.get(name), new.get(name)) for name in differing}
            changes.append(EnvironmentChange(before, commit, told))
    return tuple(changes)


def _named(
    change: ChangePoint, commits: Sequence[Commit], position: Mapping[str, int], lower_is_better: bool
) -> LevelChange:
    """The change between commits, and how many in its range have no value in this series."""
    before, latest = commits[change.earliest - 1], commits[change.latest]
    between = position[latest.sha] - position[before.sha]
    return LevelChange(
        before=before,
        first=commits[change.position],
        latest=latest,
        missing=between - (change.latest - change.earliest + 1),
        ratio=change.ratio,
        p_value=change.p_value,
        is_worse=(change.ratio > 1) == lower_is_better,
    )
