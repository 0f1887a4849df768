"""Which results are compared: the machine, the commits, and the runs of a commit that belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.revisions import matching
from harness.store import Damage, History, Phases, Profile, Round, Run, Skip, Store

ENVIRONMENT_FACTS = ("device", "driver", "cuda", "cudnn", "torch", "triton", "python", "cpu", "cores", "threads")
"""Machine facts that change what is measured: rounds are pooled only where all of these agree."""

MACHINE_FACTS = ("boot_id", "gpu_uuid")
"""Facts that tell machines of one kind apart: their hosts may be faster or slower, so changes take more to be believed.
A machine that was started again counts as another; results of earlier versions say nothing of it."""


class ComparisonError(Exception):
    """The comparison asked for cannot be formed. The message is one line that says why and what there is instead."""


@dataclass(frozen=True, order=True)
class Case:
    """A model at a batch size on a device type."""

    name: str
    model: str
    batch: int
    device: str


@dataclass(frozen=True)
class Measurement:
    """The runs of one commit that may be pooled, and what they measured.

    ``left_out`` are runs of the same commit in another environment than the newest one. ``phases`` are the newest that
    were told apart, and failures where that never succeeded.
    """

    commit: str
    runs: tuple[Run, ...]
    left_out: tuple[Run, ...]
    rounds: Mapping[Case, Sequence[Round]]
    profiles: Mapping[tuple[Case, str], Profile]
    skips: Mapping[tuple[Case, str], Skip]
    all_profiles: tuple[Profile, ...]
    phases: Mapping[tuple[Case, str], Phases]

    @property
    def facts(self) -> Mapping[str, object]:
        """Machine facts of the newest run."""
        return self.runs[-1].facts

    def variants(self, case: Case) -> tuple[str, ...]:
        """The variants timed in a case, in the order in which they first appear."""
        return tuple(dict.fromkeys(variant for entry in self.rounds.get(case, ()) for variant in entry.blocks))

    def every_profile(self, case: Case, variant: str) -> tuple[Profile, ...]:
        """The profiles of a variant in all pooled runs, where ``profiles`` has the newest run's."""
        return tuple(entry for entry in self.all_profiles if (_case(entry), entry.variant) == (case, variant))

    def pairs(self, case: Case, variant: str, reference: str) -> list[list[tuple[float, float]]]:
        """Seconds per step of two variants, turn by turn, of each round that timed both."""
        return [
            list(zip(entry.blocks[variant].seconds, entry.blocks[reference].seconds, strict=True))
            for entry in self.rounds_of_both(case, variant, reference)
        ]

    def rounds_of_both(self, case: Case, variant: str, reference: str) -> list[Round]:
        """The rounds that timed both of two variants."""
        return [entry for entry in self.rounds.get(case, ()) if variant in entry.blocks and reference in entry.blocks]


def measurement(history: History, commit: str, runs: Sequence[Run] | None = None) -> Measurement:
    """What the runs of a commit measured, those of the newest run's environment alone.

    Args:
        runs: the runs to choose from, earliest first, at least one; None for all runs of the commit.
    """
    candidates = history.runs(commit) if runs is None else runs
    pooled = tuple(run for run in candidates if not changed_facts(run.facts, candidates[-1].facts))
    names = {run.run for run in pooled}
    rounds: dict[Case, list[Round]] = {}
    for entry in history.rounds(commit):
        if entry.run in names:
            rounds.setdefault(_case(entry), []).append(entry)
    all_profiles = tuple(entry for entry in history.profiles(commit) if entry.run in names)
    profiles = {(_case(entry), entry.variant): entry for entry in all_profiles}
    timed = {(case, variant) for case, entries in rounds.items() for entry in entries for variant in entry.blocks}
    skips = {(_case(entry), entry.variant): entry for entry in history.skips(commit) if entry.run in names}
    divisions = [entry for entry in history.phases(commit) if entry.run in names]
    failed_first = sorted(divisions, key=lambda entry: entry.failure is None)
    return Measurement(
        commit=commit,
        runs=pooled,
        left_out=tuple(run for run in candidates if run not in pooled),
        rounds=rounds,
        profiles=profiles,
        skips={key: skip for key, skip in skips.items() if key not in timed or _is_loss(skip, pooled[-1])},
        all_profiles=all_profiles,
        phases={(_case(entry), entry.variant): entry for entry in failed_first},
    )


def _is_loss(skip: Skip, newest: Run) -> bool:
    """Whether a variant that was timed in some run was then tried in vain, by the newest one."""
    return skip.run == newest.run and skip.status != "left out"


def changed_facts(one: Mapping[str, object], other: Mapping[str, object]) -> tuple[str, ...]:
    """Names of the environment facts in which two runs differ."""
    return tuple(name for name in ENVIRONMENT_FACTS if one.get(name) != other.get(name))


def on_one_machine(*measurements: Measurement) -> bool:
    """Whether all runs of the measurements are known to be of one machine, started once."""
    identities = {tuple(run.facts.get(name) for name in MACHINE_FACTS) for entry in measurements for run in entry.runs}
    return len(identities) == 1 and identities.pop()[0] is not None


def choose_machine(store: Store, name: str | None, here: str) -> str:
    """The machine asked for; without one, this machine (``here``) if it has results, else the one measured last.

    Raises:
        ComparisonError: there are no results, or none of the machine asked for.
    """
    machines = store.machines()
    if not machines:
        raise ComparisonError(
            f"no results in {store.root}: measure with `python -m {__package__}.run`, or give another --results"
        )
    if name is not None:
        if name not in machines:
            raise ComparisonError(f"no results of machine {name!r} in {store.root}; there are: {', '.join(machines)}")
        return name
    if here in machines:
        return here
    latest = {}
    for machine in machines:
        history = store.load(machine)
        started = [run.started for commit in history.commits for run in history.runs(commit)]
        if started:
            latest[machine] = max(started)
    return max(latest, key=lambda machine: latest[machine]) if latest else machines[0]


def choose_commits(history: History, base: str | None, head: str | None, folder: Path) -> tuple[str | None, str]:
    """Full hashes of the commits to compare.

    Without ``head`` it is the newest measured commit. Without ``base`` it is the measured commit before ``head``, or
    None where there is none; commits of which damage has left no timings are passed over for both. For a state of the
    working tree ``base`` is the commit under it, where that is measured. Other states of the working tree are chosen
    only by name.

    Args:
        folder: where to ask git what a revision means.

    Raises:
        ComparisonError: nothing is readable, or a revision names no measured commit, or several.
    """
    if not history.commits:
        raise ComparisonError(_nothing_readable(history))
    committed = history.without_snapshots().commits or history.commits
    if head is None:
        chosen_head = _newest(history, committed) or committed[-1]
    else:
        chosen_head = measured_commit(head, history, folder)
    if base is not None:
        return measured_commit(base, history, folder), chosen_head
    under = history.runs(chosen_head)[-1].snapshot_of
    if under in history.commits:
        return under, chosen_head
    before = [commit for commit in history.commits[: history.commits.index(chosen_head)] if commit in committed]
    return _newest(history, before), chosen_head


def without_timings(history: History, commit: str) -> str:
    """The line that says that a commit has none, and why where that is known."""
    told = f"commit {commit[:8]} has no readable timings"
    damage = _damage(history, commit)
    return f"{told}: measure it again" if damage is None else f"{told}: {damage}; measure it again"


def _damage(history: History, commit: str) -> str | None:
    """What is wrong with the file of a commit: the first problem, and how many there are."""
    damage = history.damage_of(commit)
    if not damage:
        return None
    more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
    return f"{_sentence(damage[0])}{more}"


def _is_spoilt(history: History, commit: str) -> bool:
    """Whether damage has left no timings of a measured commit."""
    return bool(history.damage_of(commit)) and not history.rounds(commit)


def _newest(history: History, commits: Sequence[str]) -> str | None:
    """The newest of these commits, oldest first, that is not spoilt."""
    return next((commit for commit in reversed(commits) if not _is_spoilt(history, commit)), None)


def choose_measurements(history: History, base: str | None, head: str) -> tuple[Measurement | None, Measurement]:
    """The measurements of the commits; a commit against itself is its newest run against the runs before it,
    of those that timed something: others have only divided steps, or found nothing that could run.

    Raises:
        ComparisonError: a commit is to be compared with itself, but was measured only once.
    """
    if base is None:
        return None, measurement(history, head)
    if base != head:
        return measurement(history, base), measurement(history, head)
    timed = {entry.run for entry in history.rounds(head)}
    runs = [run for run in history.runs(head) if run.run in timed]
    if len(runs) < 2:
        raise ComparisonError(f"commit {head[:8]} was measured once; measure it again to compare it with itself")
    return measurement(history, head, runs[:-1]), measurement(history, head, runs[-1:])


def measured_commit(revision: str, history: History, folder: Path) -> str:
    """The full hash of the measured commit that a revision names.

    Raises:
        ComparisonError: it names no measured commit, or several.
    """
    found = matching(revision, history.commits, folder)
    if len(found) == 1:
        return found[0]
    shorts = [commit[:8] for commit in (found or history.commits)]
    listed = ", ".join(["…", *shorts[-10:]] if len(shorts) > 10 else shorts)
    if found:
        raise ComparisonError(f"{revision!r} fits several measured commits: {listed}; give more characters")
    spoilt = [_damage(history, commit) for commit in matching(revision, history.unreadable, folder)]
    damage = "".join(f"; damaged: {told}" for told in spoilt)
    raise ComparisonError(
        f"{revision!r} is not measured on {history.machine}; measured, oldest first: {listed}{damage}"
    )


def _nothing_readable(history: History) -> str:
    if not history.damage:
        return f"no run is recorded for machine {history.machine}"
    return f"nothing readable for machine {history.machine}: {_sentence(history.damage[0])}"


def _sentence(damage: Damage) -> str:
    place = str(damage.path) if damage.line is None else f"{damage.path}, line {damage.line}"
    return f"{place}: {damage.problem}"


def _case(entry: Round | Profile | Phases | Skip) -> Case:
    return Case(entry.case, entry.model, entry.batch, entry.device)
