"""What a measurement is told by its surroundings: asv's variables and the harness's own. The only reader of both.

``ASV_*`` are set by asv. Of the harness's own, ``python -m harness.run`` sets what it needs; without them a plain
``asv run`` measures the quick profile whole:

- ``HARNESS_PROFILE``: "quick", "sweep", "full", "zoo" or "check".
- ``HARNESS_HEAD``: the commit that counts as HEAD (else what git says).
- ``HARNESS_CASES``, ``HARNESS_VARIANTS``: names, separated by spaces, of the cases and variants to measure, whether the
  profile has them or not; empty leaves the choice to the profile.
- ``HARNESS_WORKLOADS``: the user's own models, measured instead of the harness's, as ``--workload`` gives them.
- ``HARNESS_RESUME``: "1" measures only what earlier runs of the profile in the same environment have not.
- ``HARNESS_PHASES``: "1" also tells the phases of a step apart.
- ``HARNESS_RESULTS``: the folder for raw samples (else ``results/`` beside asv's configuration).
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

from harness import environment, profiles, project, variants
from harness.own_models import OwnModel, decoded
from harness.worktree import head_under

PROFILE_VARIABLE = "HARNESS_PROFILE"
HEAD_VARIABLE = "HARNESS_HEAD"
CASES_VARIABLE = "HARNESS_CASES"
VARIANTS_VARIABLE = "HARNESS_VARIANTS"
WORKLOADS_VARIABLE = "HARNESS_WORKLOADS"
RESUME_VARIABLE = "HARNESS_RESUME"
PHASES_VARIABLE = "HARNESS_PHASES"
RESULTS_VARIABLE = "HARNESS_RESULTS"
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
        root: the folder from which ``harness`` and ``models`` must come: Kitsune's working tree, or where the harness
            is installed.
        checkout: where the commit under test is checked out.
        commit: the full hash of the commit under test.
        at_head: whether that commit is HEAD.
        machine: the name of this machine.
        profile: which profile is measured.
        progress: the file for progress; None keeps it to the process's own output.
        sampling: how long to go on, where that is not the profile's choice.
        selection: which cases and variants are measured, where that is not left to the profile.
        own: the user's own models, which are measured instead of the harness's.
        resume: whether what earlier runs measured is left out.
        phases: whether the phases of a step are told apart besides.
        results_folder: where raw samples go; None is the usual place.
        home: the folder of asv's configuration, where everything that is written lies; None is the root.
        is_kitsune: whether the commits are Kitsune's, so that ``kitsune`` must come from the checkout.
        snapshot_of: the commit under the working tree whose state is measured; None for a commit of the history.
    """

    root: Path
    checkout: Path
    commit: str
    at_head: bool
    machine: str
    profile: profiles.Name
    progress: Path | None
    sampling: profiles.Sampling = profiles.AS_THE_PROFILE_SAYS
    selection: profiles.Selection = profiles.EVERYTHING
    own: tuple[OwnModel, ...] = ()
    resume: bool = False
    phases: bool = False
    results_folder: Path | None = None
    home: Path | None = None
    is_kitsune: bool = True
    snapshot_of: str | None = None

    @property
    def results(self) -> Path:
        """The results folder."""
        return self.results_folder or (self.home or self.root) / "results"

    @property
    def caches(self) -> Path:
        """Where compilers' caches are kept."""
        return (self.home or self.root) / ".asv" / "caches"

    @property
    def kitsune_root(self) -> Path | None:
        """The folder from which ``kitsune`` must come; None accepts the one that is installed."""
        return self.checkout if self.is_kitsune else None

    @property
    def workload_root(self) -> Path:
        """The folder that the files of the user's own models are relative to: what differs from commit to commit comes
        from the commit.
        """
        return self.root if self.is_kitsune else self.checkout

    def cases(self, device_type: profiles.DeviceType) -> tuple[profiles.Case, ...]:
        """The cases to measure on a kind of device."""
        return profiles.selected_cases(self.profile, device_type, self.selection)

    def left_out(self, case: profiles.Case, variant: variants.Variant) -> str | None:
        """Why a variant of one of these cases is not measured; None if it is."""
        return profiles.selected_out(self.profile, case, variant, self.selection, at_head=self.at_head)


def from_environment(variables: Mapping[str, str] | None = None) -> Context:
    """The context of this process.

    Raises:
        ContextError: a variable is missing or has a value that is not allowed; the message names it.
    """
    values = os.environ if variables is None else variables
    home = Path(_required(values, "ASV_CONF_DIR"))
    measured = project.of_configuration(home)
    commit = _required(values, "ASV_COMMIT")
    progress, results = values.get(PROGRESS_VARIABLE), values.get(RESULTS_VARIABLE)
    return Context(
        root=measured.root if measured.is_kitsune else project.installed_in(),
        checkout=Path(_required(values, "ASV_ENV_DIR")) / "project",
        commit=commit,
        at_head=commit == (values.get(HEAD_VARIABLE) or _head(measured.root)),
        machine=environment.machine_name(),
        profile=_profile(values.get(PROFILE_VARIABLE, profiles.DEFAULT)),
        progress=Path(progress) if progress else None,
        sampling=_sampling(values),
        selection=_selection(values),
        own=own_models(values),
        resume=values.get(RESUME_VARIABLE) == "1",
        phases=values.get(PHASES_VARIABLE) == "1",
        results_folder=Path(results) if results else None,
        home=None if measured.is_kitsune else home,
        is_kitsune=measured.is_kitsune,
        snapshot_of=head_under(measured.root, commit),
    )


def check_checkout(surroundings: Context) -> None:
    """Makes sure that the commit under test is what is checked out: another run of asv may have moved it.

    Raises:
        ContextError: it is not.
    """
    found = _head(surroundings.checkout)
    if found != surroundings.commit:
        raise ContextError(
            f"{surroundings.checkout} is at {found[:8]}, and {surroundings.commit[:8]} is to be measured: another run"
            " of asv is at work in this checkout; run one at a time, or in clones of their own"
        )


def measures_zoo(variables: Mapping[str, str] | None = None) -> bool:
    """Whether some of the zoo's cases are to be measured: by its profile, or by name."""
    values = os.environ if variables is None else variables
    named = values.get(CASES_VARIABLE, "").split()
    if not named:
        return values.get(PROFILE_VARIABLE) == "zoo"
    return not {case.name for case in profiles.ZOO}.isdisjoint(named)


def own_models(variables: Mapping[str, str] | None = None) -> tuple[OwnModel, ...]:
    """The user's own models.

    Raises:
        ContextError: the variable is damaged.
    """
    values = os.environ if variables is None else variables
    try:
        return decoded(values.get(WORKLOADS_VARIABLE, ""))
    except ValueError as error:
        raise ContextError(f"{WORKLOADS_VARIABLE}: {error}") from error


def workload_root(variables: Mapping[str, str] | None = None) -> Path:
    """See :attr:`Context.workload_root`.

    Raises:
        ContextError: this is no process of asv's.
    """
    values = os.environ if variables is None else variables
    home = Path(_required(values, "ASV_CONF_DIR"))
    measured = project.of_configuration(home)
    return measured.root if measured.is_kitsune else Path(_required(values, "ASV_ENV_DIR")) / "project"


def _required(values: Mapping[str, str], name: str) -> str:
    if not values.get(name):
        raise ContextError(
            f"{name} is not set: benchmarks run under asv; start them with `python -m {__package__}.run` or `asv run`"
        )
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


def _selection(values: Mapping[str, str]) -> profiles.Selection:
    selection = profiles.Selection(
        tuple(values.get(CASES_VARIABLE, "").split()),
        tuple(values.get(VARIANTS_VARIABLE, "").split()),
        tuple(case for model in own_models(values) for case in model.cases()),
    )
    try:
        profiles.check_selection(selection)
    except ValueError as error:
        raise ContextError(f"{CASES_VARIABLE} and {VARIANTS_VARIABLE}: {error}") from error
    return selection


def _head(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ContextError(f"{' '.join(command)} failed ({error}); asv needs a git checkout") from error
