"""What revisions and ranges name."""

from pathlib import Path

import pytest

from harness.revisions import Range, commits_of, fork_point, has_parent, is_ancestor, parse_range
from tests.harness.repository import git


@pytest.fixture
def forked(tmp_path: Path) -> Path:
    """``main`` with commits 0, 1, 2 and ``side``, which left it at 1, with commit 3."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    for number in range(3):
        git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", str(number))
    git(tmp_path, "checkout", "--quiet", "-b", "side", "HEAD~1")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "3")
    return tmp_path


def subjects(folder: Path, revision: str) -> list[str]:
    return [git(folder, "show", "--no-patch", "--format=%s", commit) for commit in commits_of(revision, folder)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("main", None),
        ("v1.0", None),
        ("a..b", Range("a", "b", from_fork=False)),
        ("v1.0...b", Range("v1.0", "b", from_fork=True)),
        ("..b", Range("HEAD", "b", from_fork=False)),
        ("a...", Range("a", "HEAD", from_fork=True)),
    ],
)
def test_a_range_has_two_ends(text: str, expected: Range | None) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize(
    ("revision", "expected"),
    [
        ("main", ["2"]),
        ("main~2..main", ["2", "1"]),
        ("main..side", ["3"]),
        ("main...side", ["3"]),
        ("side...main", ["2"]),
        ("main..", ["3"]),
        ("nothing", []),
        ("nothing..main", []),
        ("main..nothing", []),
    ],
)
def test_commits_of_a_revision_newest_first(forked: Path, revision: str, expected: list[str]) -> None:
    assert subjects(forked, revision) == expected


def test_where_branches_parted(forked: Path) -> None:
    first, second = git(forked, "rev-parse", "main~2", "main~1").split()
    assert fork_point("main", "side", forked) == second
    assert fork_point("main", "nothing", forked) is None
    assert is_ancestor(second, "side", forked)
    assert not is_ancestor("main", "side", forked)
    assert has_parent(second, forked)
    assert not has_parent(first, forked)
