"""What git knows about measured commits: their order, their subjects, and which one a revision names.

Every function works without git and outside a checkout; it then knows nothing and says so by what it returns.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CommitText:
    """What a reader recognises a commit by: its subject line and its date (YYYY-MM-DD)."""

    subject: str
    date: str


def history_order(commits: Iterable[str], folder: Path) -> dict[str, int]:
    """Position of each of the commits in git's history, ancestors first; commits unknown to git are absent.

    Args:
        commits: full commit hashes.
        folder: a folder inside the checkout to ask; outside any checkout the result is empty.
    """
    wanted = set(commits)
    listed = _git(["rev-list", "--topo-order", "--reverse", "--ignore-missing", "--stdin"], folder, sorted(wanted))
    ancestry = [] if listed is None else listed.split()
    return {commit: position for position, commit in enumerate(entry for entry in ancestry if entry in wanted)}


def describe(commits: Sequence[str], folder: Path) -> dict[str, CommitText]:
    """Subject and date of each of the commits that git knows."""
    options = ["--no-walk=unsorted", "--ignore-missing", "--format=%H%x00%cs%x00%s", "--stdin"]
    listed = _git(["log", *options], folder, commits)
    entries = [] if listed is None else [line.split("\0", 2) for line in listed.splitlines()]
    return {commit: CommitText(subject, date) for commit, date, subject in entries if commit in commits}


@dataclass(frozen=True)
class Range:
    """Two ends of history as git writes them: ``older..newer``, or ``older...newer`` from where the two parted."""

    older: str
    newer: str
    from_fork: bool


def parse_range(text: str) -> Range | None:
    """The range that a text is, an end left out being HEAD; None if it is none."""
    for dots in ("...", ".."):
        older, found, newer = text.partition(dots)
        if found:
            return Range(older or "HEAD", newer or "HEAD", dots == "...")
    return None


def fork_point(one: str, other: str, folder: Path) -> str | None:
    """The full hash of the best common ancestor of two revisions; None where git knows of none."""
    answer = _git(["merge-base", "--end-of-options", one, other], folder)
    return None if answer is None else answer.split()[0]


def commits_of(revision: str, folder: Path) -> tuple[str, ...]:
    """Full hashes of the commits that a revision or range names, newest first, along first parents; none if git knows
    none. A range ``A..B`` is every commit after A up to B, ``A...B`` every commit since B's branch left A.
    """
    found = parse_range(revision)
    if found is None:
        resolved = _resolve(revision, folder)
        return () if resolved is None else (resolved,)
    older = fork_point(found.older, found.newer, folder) if found.from_fork else _resolve(found.older, folder)
    newer = _resolve(found.newer, folder)
    if older is None or newer is None:
        return ()
    listed = _git(["rev-list", "--first-parent", newer, f"^{older}"], folder)
    return () if listed is None else tuple(listed.split())


def is_ancestor(older: str, newer: str, folder: Path) -> bool:
    """Whether git finds one commit in the history of another."""
    return _git(["merge-base", "--is-ancestor", "--end-of-options", older, newer], folder) is not None


def has_parent(commit: str, folder: Path) -> bool:
    """Whether git knows a commit before this one: not in a root or at the end of a shallow clone."""
    return _resolve(f"{commit}^", folder) is not None


def matching(revision: str, measured: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The measured commits that a revision names: none, one, or several where a hash prefix is ambiguous.

    A revision is anything git understands (a branch, a tag, ``HEAD~2``) or the beginning of a measured commit's hash
    (four characters or more), which also works where git does not know the commit.
    """
    for place in (folder, Path.cwd()):
        resolved = _resolve(revision, place)
        if resolved is not None and resolved in measured:
            return (resolved,)
    if len(revision) < 4:
        return ()
    return tuple(commit for commit in measured if commit.startswith(revision.lower()))


def _resolve(revision: str, folder: Path) -> str | None:
    answer = _git(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"], folder)
    return None if answer is None else answer.strip()


def _git(arguments: Sequence[str], folder: Path, names: Iterable[str] = ()) -> str | None:
    """Output of a git command in a folder, or None where there is no git, no checkout, or no such revision.

    ``names`` are written to its standard input, one a line: there is no limit to how many.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            input="".join(f"{name}\n" for name in names),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except (OSError, ValueError):
        return None
    return done.stdout if done.returncode == 0 else None
