"""The working tree as a commit."""

from pathlib import Path

import pytest

from harness.worktree import Snapshot, WorktreeError, head_under, snapshot
from tests.harness.repository import git

PATHS = ("kitsune",)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "kitsune").mkdir(parents=True)
    (folder / "kitsune" / "step.py").write_text("one\n")
    (folder / "kitsune" / "old.py").write_text("old\n")
    (folder / "README").write_text("one\n")
    (folder / ".gitignore").write_text("*.pyc\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_an_unchanged_tree_is_head(tree: Path) -> None:
    head = git(tree, "rev-parse", "HEAD")
    (tree / "README").write_text("two\n")
    found = snapshot(tree, PATHS)
    assert found == Snapshot(head, head)
    assert not found.is_changed


def test_changed_new_and_removed_files_are_in_it_and_ignored_ones_are_not(tree: Path) -> None:
    (tree / "kitsune" / "step.py").write_text("two\n")
    (tree / "kitsune" / "new.py").write_text("new\n")
    (tree / "kitsune" / "new.pyc").write_text("ignored\n")
    (tree / "kitsune" / "old.py").unlink()
    (tree / "README").write_text("two\n")

    found = snapshot(tree, PATHS)

    assert found.is_changed
    assert git(tree, "ls-tree", "-r", "--name-only", found.commit).split() == [
        ".gitignore", "README", "kitsune/new.py", "kitsune/step.py",
    ]  # fmt: skip
    assert git(tree, "show", f"{found.commit}:kitsune/step.py") == "two"
    assert git(tree, "show", f"{found.commit}:README") == "one"
    assert git(tree, "rev-parse", f"{found.commit}^") == found.head == git(tree, "rev-parse", "HEAD")


def test_the_same_content_is_the_same_snapshot(tree: Path) -> None:
    (tree / "kitsune" / "step.py").write_text("two\n")
    first = snapshot(tree, PATHS)
    (tree / "kitsune" / "step.py").write_text("three\n")
    assert snapshot(tree, PATHS) != first
    (tree / "kitsune" / "step.py").write_text("two\n")
    assert snapshot(tree, PATHS) == first


def test_nothing_of_the_user_s_is_touched(tree: Path) -> None:
    (tree / "kitsune" / "step.py").write_text("two\n")
    git(tree, "add", "kitsune/step.py")
    (tree / "kitsune" / "step.py").write_text("three\n")
    before = git(tree, "status", "--porcelain"), git(tree, "diff"), git(tree, "branch", "--all")
    assert git(tree, "show", f"{snapshot(tree, PATHS).commit}:kitsune/step.py") == "three"
    assert (git(tree, "status", "--porcelain"), git(tree, "diff"), git(tree, "branch", "--all")) == before


def test_a_snapshot_is_told_from_other_commits(tree: Path) -> None:
    (tree / "kitsune" / "step.py").write_text("two\n")
    found = snapshot(tree, PATHS)
    assert head_under(tree, found.commit) == found.head
    assert head_under(tree, found.head) is None
    assert head_under(tree, "a" * 40) is None


def test_outside_of_a_checkout_git_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(WorktreeError, match=r"rev-parse failed in .*not a git repository"):
        snapshot(tmp_path, PATHS)
