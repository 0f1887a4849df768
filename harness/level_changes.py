"""Change points of a series over commits: between which commits, in which environment, for better or worse."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from harness.changepoints import ChangePoint, find_changes
from harness.rows import Commit, EnvironmentChange, LevelChange
from harness.selection import ENVIRONMENT_FACTS, changed_facts

Finder = Callable[[Sequence[float]], Sequence[ChangePoint]]


def environments_of(facts: Mapping[str, Mapping[str, object]]) -> dict[str, int]:
    """For each commit a number: that of another one if their values are comparable.

    Args:
        facts: those of the machine at each commit, by its hash.
    """
    known: dict[tuple[object, ...], int] = {}
    return {
        commit: known.setdefault(tuple(told.get(name) for name in ENVIRONMENT_FACTS), len(known))
        for commit, told in facts.items()
    }


def level_changes(
    commits: Sequence[Commit],
    ratios: Sequence[float],
    environments: Mapping[str, int],
    position: Mapping[str, int],
    *,
    lower_is_better: bool = True,
    find: Finder = find_changes,
) -> tuple[LevelChange, ...]:
    """Where the level of a series changed, in the order of the commits.

    Values of different environments are judged apart, each with those of its own, whichever was measured in between.

    Args:
        commits: those at which the series was measured, in their order.
        ratios: its values at these.
        environments: see `environments_of`.
        position: the place of each measured commit of the machine in their order, by its hash.
        lower_is_better: whether the series' ratios are of times, and not of speeds.
        find: finds the changes among the values of one environment.
    """
    changes = [
        _named(change, [commits[index] for index in members], position, lower_is_better)
        for members in apart([commit.sha for commit in commits], environments)
        for change in find([ratios[index] for index in members])
    ]
    return tuple(sorted(changes, key=lambda change: position[change.first.sha]))


def apart(commits: Sequence[str], environments: Mapping[str, int]) -> list[list[int]]:
    """The indices of the commits of each environment."""
    numbers = [environments[commit] for commit in commits]
    return [[index for index, of_one in enumerate(numbers) if of_one == number] for number in dict.fromkeys(numbers)]


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
