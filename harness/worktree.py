"""The working tree as a commit: what is not committed yet is measured, kept and compared like everything else.

A snapshot is a commit object on top of HEAD that no branch holds. The same content on the same HEAD is the same
snapshot, so that measuring it can be taken up again; index and working tree of the user are not touched.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_REFERENCE = "refs/harness/worktree"
"""Keeps the last snapshot from git's garbage collection."""

_IDENTITY = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "working tree"), ("EMAIL", "worktree@localhost"))
}


class WorktreeError(Exception):
    """The working tree cannot be made a commit; the message has git's own words."""


@dataclass(frozen=True)
class Snapshot:
    """The working tree as a commit: its full hash, and that of HEAD under it. Both agree where nothing was changed."""

    commit: str
    head: str

    @property
    def is_changed(self) -> bool:
        """Whether there is something that HEAD does not have."""
        return self.commit != self.head


def snapshot(root: Path, paths: Sequence[str]) -> Snapshot:
    """The present state of these paths on top of HEAD, with what is new and without what git ignores.

    Args:
        root: the checkout.
        paths: relative to it; everything else is as in HEAD.

    Raises:
        WorktreeError: git refuses.
    """
    head = _git(root, "rev-parse", "--verify", "HEAD^{commit}")
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        _git(root, "read-tree", head, variables=index)
        _git(root, "add", "--all", "--", *paths, variables=index)
        tree = _git(root, "write-tree", variables=index)
    if tree == _git(root, "rev-parse", f"{head}^{{tree}}"):
        return Snapshot(head, head)
    moment = _git(root, "show", "--no-patch", "--format=%ct +0000", head)
    dated = {**_IDENTITY, "GIT_AUTHOR_DATE": moment, "GIT_COMMITTER_DATE": moment}
    message = f"Working tree on {head[:8]}"
    commit = _git(root, "commit-tree", tree, "-p", head, "-m", message, variables=dated)
    _git(root, "update-ref", _REFERENCE, commit)
    return Snapshot(commit, head)


def head_under(root: Path, commit: str) -> str | None:
    """The commit that a snapshot was made on; None for any other commit, and for one that git does not know."""
    try:
        email, _, parents = _git(root, "show", "--no-patch", "--format=%ae %P", commit).partition(" ")
    except WorktreeError:
        return None
    return parents if email == _IDENTITY["GIT_AUTHOR_EMAIL"] else None


def _git(root: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    command = ["git", "-C", str(root), "-c", "commit.gpgsign=false", *arguments]
    try:
        done = subprocess.run(
            command, env={**os.environ, **(variables or {})}, capture_output=True, encoding="utf-8", check=False
        )
    except OSError as error:
        raise WorktreeError(f"git cannot be run ({error}); the working tree of a git checkout is measured") from error
    if done.returncode != 0:
        raise WorktreeError(f"git {arguments[0]} failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip()
