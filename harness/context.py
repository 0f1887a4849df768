"""What a measurement is told by its surroundings: asv's variables and the harness's own. The only reader of both.

``ASV_*`` are set by asv. Of the harness's own, ``make bench`` sets all; without them a plain ``asv run`` measures the
quick profile:

- ``HARNESS_PROFILE``: "quick", "sweep" or "full".
- ``HARNESS_HEAD``: the commit that counts as HEAD (else what git says).
- ``HARNESS_PROGRESS``: a file to which progress is appended, because asv keeps a benchmark's output to itself.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from harness import environment, profiles

PROFILE_VARIABLE = "HARNESS_PROFILE"
HEAD_VARIABLE = "HARNESS_HEAD"
PROGRESS_VARIABLE = "HARNESS_PROGRESS"


class ContextError(Exception):
    """A measurement was started in surroundings in which its result would be wrong or lost."""


@dataclass(frozen=True)
class Context:
    """Where a measurement stands.

    Attributes:
        root: the working tree, from which ``harness`` and ``models`` come.
        checkout: where the commit under test is checked out, from which ``kitsune`` comes.
        commit: the full hash of the commit under test.
        at_head: whether that commit is HEAD.
        machine: the name of this machine.
        profile: which profile is measured.
        progress: the file for progress; None keeps it to the process's own output.
    """

    root: Path
    checkout: Path
    commit: str
    at_head: bool
    machine: str
    profile: profiles.Name
    progress: Path | None

    @property
    def results(self) -> Path:
        """The results folder."""
        return self.root / "results"

    @property
    def caches(self) -> Path:
        """Where compilers' caches are kept."""
        return self.root / ".asv" / "caches"


def from_environment(variables: Mapping[str, str] | None = None) -> Context:
    """The context of this process.

    Raises:
        ContextError: a variable is missing or has a value that is not allowed; the message names it.
    """
    values = os.environ if variables is None else variables
    root = Path(_required(values, "ASV_CONF_DIR"))
    commit = _required(values, "ASV_COMMIT")
    progress = values.get(PROGRESS_VARIABLE)
    return Context(
        root=root,
        checkout=Path(_required(values, "ASV_ENV_DIR")) / "project",
        commit=commit,
        at_head=commit == (values.get(HEAD_VARIABLE) or _head(root)),
        machine=environment.machine_name(),
        profile=_profile(values.get(PROFILE_VARIABLE, "quick")),
        progress=Path(progress) if progress else None,
    )


def _required(values: Mapping[str, str], name: str) -> str:
    if not values.get(name):
        raise ContextError(f"{name} is not set: benchmarks run under asv; start them with `make bench` or `asv run`")
    return values[name]


def _profile(text: str) -> profiles.Name:
    for name in get_args(profiles.Name):
        if text == name:
            return cast(profiles.Name, name)
    allowed = ", ".join(map(repr, get_args(profiles.Name)))
    raise ContextError(f"{PROFILE_VARIABLE} is {text!r}; allowed: {allowed}")


def _head(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ContextError(f"{' '.join(command)} failed ({error}); asv needs a git checkout") from error
