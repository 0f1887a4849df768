"""What a measurement is told by its surroundings: asv's variables and the harness's own. The only reader of both.

``ASV_*`` are set by asv. Of the harness's own, ``make bench`` sets all; without them a plain ``asv run`` measures the
quick profile:

- ``HARNESS_PROFILE``: "quick", "sweep" or "full".
- ``HARNESS_HEAD``: the commit that counts as HEAD (else what git says).
- ``HARNESS_PROGRESS``: a file to which progress is appended, because asv keeps a benchmark's output to itself.
- ``HARNESS_UNTIL``: "rounds" (the profile's number of them) or "conclusive" (more, where a verdict is not).
- ``HARNESS_MOST_ROUNDS``: how many rounds there may be then, or at all.
- ``HARNESS_NARROW_WITHIN``: the half-width of a ratio's interval, such as 0.005, at which a round ends early.
- ``HARNESS_TIMED_SECONDS``: how many seconds of a round may be timed.
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
UNTIL_VARIABLE = "HARNESS_UNTIL"
MOST_ROUNDS_VARIABLE = "HARNESS_MOST_ROUNDS"
NARROW_WITHIN_VARIABLE = "HARNESS_NARROW_WITHIN"
TIMED_SECONDS_VARIABLE = "HARNESS_TIMED_SECONDS"


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
        sampling: how long to go on, where that is not the profile's choice.
    """

    root: Path
    checkout: Path
    commit: str
    at_head: bool
    machine: str
    profile: profiles.Name
    progress: Path | None
    sampling: profiles.Sampling = profiles.AS_THE_PROFILE_SAYS

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
        sampling=_sampling(values),
    )


def _required(values: Mapping[str, str], name: str) -> str:
    if not values.get(name):
        raise ContextError(f"{name} is not set: benchmarks run under asv; start them with `make bench` or `asv run`")
    return values[name]


def _sampling(values: Mapping[str, str]) -> profiles.Sampling:
    until = values.get(UNTIL_VARIABLE, "rounds")
    if until not in get_args(profiles.Until):
        allowed = ", ".join(map(repr, get_args(profiles.Until)))
        raise ContextError(f"{UNTIL_VARIABLE} is {until!r}; allowed: {allowed}")
    rounds = values.get(MOST_ROUNDS_VARIABLE)
    if rounds and (not rounds.isdigit() or int(rounds) < 1):
        raise ContextError(f"{MOST_ROUNDS_VARIABLE} is {rounds!r}; expected a whole number from 1")
    return profiles.Sampling(
        until=cast(profiles.Until, until),
        most_rounds=int(rounds) if rounds else None,
        narrow_within=_number(values, NARROW_WITHIN_VARIABLE, "a number from 0, such as 0.005"),
        timed_seconds=_number(values, TIMED_SECONDS_VARIABLE, "seconds, from 0"),
    )


def _number(values: Mapping[str, str], name: str, expected: str) -> float | None:
    if not values.get(name):
        return None
    try:
        number = float(values[name])
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ContextError(f"{name} is {values[name]!r}; expected {expected}")
    return number


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
