import math
import random
from datetime import datetime, timedelta, timezone

from harness.level_changes import environment_changes, environments_of, level_changes
from harness.rows import Commit, LevelChange

COMMITS = [
    Commit(f"{number:040x}", None, None, datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=number))
    for number in range(60)
]
POSITION = {commit.sha: place for place, commit in enumerate(COMMITS)}


def points(levels: list[float], commits: list[Commit]) -> list[tuple[Commit, float]]:
    rng = random.Random(0)
    return [(commit, level * math.exp(rng.gauss(0, 0.005))) for commit, level in zip(commits, levels, strict=True)]


def changes(
    series: list[tuple[Commit, float]], torch: list[str] | None = None, *, lower_is_better: bool = True
) -> list[LevelChange]:
    versions = torch or ["2.13"] * len(COMMITS)
    facts = environments_of({commit.sha: {"torch": version} for commit, version in zip(COMMITS, versions, strict=True)})
    commits, ratios = [commit for commit, _ in series], [ratio for _, ratio in series]
    return list(level_changes(commits, ratios, facts, POSITION, lower_is_better=lower_is_better))


def test_a_change_lies_between_two_commits() -> None:
    (change,) = changes(points([1.0] * 30 + [1.1] * 30, COMMITS))
    assert (change.before, change.first, change.latest) == (COMMITS[29], COMMITS[30], COMMITS[30])
    assert change.missing == 0
    assert change.is_worse


def test_in_a_series_of_speeds_more_is_better() -> None:
    (change,) = changes(points([1.0] * 30 + [1.1] * 30, COMMITS), lower_is_better=False)
    assert not change.is_worse


def test_commits_without_a_value_widen_the_range() -> None:
    measured = COMMITS[:28] + COMMITS[33:]
    (change,) = changes(points([1.0] * 28 + [0.9] * 27, measured))
    assert (change.before, change.latest) == (COMMITS[27], COMMITS[33])
    assert change.missing == 5
    assert not change.is_worse


def test_a_step_with_the_environment_is_no_change_of_the_code() -> None:
    stepped = points([1.0] * 30 + [1.1] * 30, COMMITS)
    assert changes(stepped, ["2.12"] * 30 + ["2.13"] * 30) == []


def test_environments_that_alternate_are_judged_apart() -> None:
    levels = [(1.0 if place % 2 else 1.3) * (1.1 if place >= 30 else 1.0) for place in range(60)]
    torch = ["2.12" if place % 2 else "2.13" for place in range(60)]
    even, odd = changes(points(levels, COMMITS), torch)
    assert (even.before, even.first) == (COMMITS[28], COMMITS[30])
    assert (odd.before, odd.first) == (COMMITS[29], COMMITS[31])


def test_changes_of_the_environment_are_named() -> None:
    facts = {
        commit.sha: {"torch": "2.12" if place < 2 else "2.13", "driver": "580", "os": str(place)}
        for place, commit in enumerate(COMMITS[:4])
    }
    (change,) = environment_changes(COMMITS[:4], facts)
    assert (change.before, change.commit) == (COMMITS[1], COMMITS[2])
    assert change.facts == {"torch": ("2.12", "2.13")}
