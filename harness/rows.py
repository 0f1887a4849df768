"""What a comparison consists of: the typed rows that the tables and the report show."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from harness.breakdown import Breakdown
from harness.continuation import Continuation
from harness.fusions import StepFusions, UnreadableFusions
from harness.memory_timeline import MemoryTimeline
from harness.names import is_diagnostic, is_kitsune, is_product, reference_of
from harness.profiles import ZOO_MODELS
from harness.samples import Samples
from harness.selection import Case
from harness.stats import Estimate, Verdict
from harness.step_phases import NoPhases, StepPhases
from harness.store import Damage, Skip
from harness.stream_gains import StreamGain
from harness.timelines import NoTimeline, Timeline

Tally = Mapping[Verdict, int]
"""How often each verdict was given, zeros included."""


SHOWN_POINTS = 200
"""How many measured commits charts of the history show: the last ones. All are judged."""

LISTED_POINTS = 100
"""Of how many of these its tables hold the numbers, which take more room than points."""

LISTED_CHANGES = 100
"""How many lasting changes of level are listed in one place: a long history has thousands. JSON has them all."""


class Parity(Enum):
    """Whether a variant's loss agrees with the baseline's after the same steps on the same data."""

    AGREES = "agrees"
    DIFFERS = "differs"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Commit:
    """A measured commit. ``subject`` and ``date`` are None where git does not know it; ``measured`` is in UTC.
    ``url`` is its page on the web, of http or https, where there is one.
    """

    sha: str
    subject: str | None
    date: str | None
    measured: datetime
    url: str | None = None

    @property
    def short(self) -> str:
        """The first eight characters of the hash, as asv names its files."""
        return self.sha[:8]


@dataclass(frozen=True)
class Row:
    """One variant of one case at the newer commit.

    ``ratio`` is its time over that of eager in the same precision, ``peer_ratio`` (of Kitsune as users run it) over
    that of the fastest variant in the same precision that is not Kitsune's; both below 1 where the variant is faster.
    ``margin`` and ``peer_margin`` are what the two verdicts were given by: the comparison's margin, wider where the
    row's noise asks for it. ``seconds`` is judged; ``wall_seconds`` is from idle to idle, by the wall clock.
    ``modes`` counts how its rounds ran, of those that tell. Set-up, memory and loss are None without a profile.
    ``setup_s`` is with empty caches of compilers, ``warm_setup_s`` with those that an earlier process has filled; None
    where it was not measured. ``break_even_steps`` and ``warm_break_even_steps`` are infinite where the variant never
    earns that set-up back, None where it is not clearly faster or slower than eager. ``first_replay_s`` and
    ``warm_first_replay_s`` are the part of each until the end of the first step that Kitsune replayed; None where it
    replayed none, and of peers. ``loss_gap`` is from eager in float32, or where that was not measured in the same
    precision. ``continuation`` is how it went on from a given state beside eager, where that was asked for, or else
    ``continuation_missing`` says why it could not.
    """

    case: Case
    variant: str
    precision: str
    seconds: float
    wall_seconds: float
    rounds: int
    reference: str | None
    ratio: Estimate | None
    margin: float
    verdict: Verdict | None
    best_peer: str | None
    peer_ratio: Estimate | None
    peer_margin: float
    peer_verdict: Verdict | None
    setup_s: float | None
    warm_setup_s: float | None
    break_even_steps: float | None
    warm_break_even_steps: float | None
    first_replay_s: float | None
    warm_first_replay_s: float | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    rss_bytes: int | None
    loss_gap: float | None
    parity: Parity | None
    kitsune: Mapping[str, object] | None
    inactive_split_bytes: int | None = None
    continuation: Continuation | None = None
    continuation_missing: str | None = None
    modes: Mapping[str, int] = field(default_factory=dict)

    @property
    def fragmentation_bytes(self) -> int | None:
        """What torch holds of the device's memory at the peak and no tensor uses; None where it does not count."""
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def is_kitsune(self) -> bool:
        """Whether Kitsune runs this variant."""
        return is_kitsune(self.variant)

    @property
    def is_product(self) -> bool:
        """Whether this is Kitsune as users run it: what is judged."""
        return is_product(self.variant)

    @property
    def is_of_zoo(self) -> bool:
        """Whether its model is one of the zoo's."""
        return self.case.model in ZOO_MODELS


@dataclass(frozen=True)
class Change:
    """One of Kitsune's forms, as users run it, between two commits.

    ``base`` and ``head`` are its time as a multiple of that of the control, a peer in the same precision, measured in
    the same processes: what slows the whole machine cancels. ``ratio`` is head over base, with an interval that stands
    against all ``controls`` (:mod:`harness.controls`), which differ by the factor ``apart`` in what they make of the
    change; ``control`` is the one that leaves least of it. ``margin`` is what it is judged by: the comparison's, or a
    wider one where the noise of this benchmark asks for it.
    """

    case: Case
    variant: str
    precision: str
    control: str
    controls: tuple[str, ...]
    base: Estimate
    head: Estimate
    ratio: Estimate
    apart: float
    margin: float
    verdict: Verdict

    @property
    def is_torn(self) -> bool:
        """Whether it is inconclusive, and controls differ by more than the margin."""
        return self.verdict is Verdict.INCONCLUSIVE and self.apart > 1 + self.margin


@dataclass(frozen=True)
class Lost:
    """One of Kitsune's forms that was measured at base and could not be measured at head."""

    case: Case
    skip: Skip


@dataclass(frozen=True)
class Contrast:
    """One metric of one case on two sides.

    ``base`` and ``head`` are in ``unit``. ``ratio`` is head over base, below 1 where head took less, ``margin`` what it
    is judged by: the metric's, or a wider one where the noise of this row asks for it. On the side of base stands
    ``base_variant``, on that of head ``variant``: one and the same, unless two variants are compared. Of memory on a
    GPU ``second_ratio`` is what a second reading says: the most that one recorded step had allocated, head over base.
    """

    case: Case
    variant: str
    base_variant: str
    precision: str
    metric: str
    unit: str
    base: float
    head: float
    ratio: Estimate
    margin: float
    verdict: Verdict
    second_ratio: float | None = None


@dataclass(frozen=True)
class SkipGroup:
    """Variants not measured for one and the same reason, and the cases this concerns."""

    status: str
    reason: str
    variants: tuple[str, ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Summary:
    """Geometric means of the speed-ups of one of Kitsune's forms over the cases of a device, and how many these are.

    Their intervals are about how exactly the cases were measured, not about other cases.
    """

    variant: str
    precision: str
    device: str
    over_eager: Estimate
    over_peer: Estimate | None
    cases: int


@dataclass(frozen=True)
class Point:
    """A variant at one commit of the history: its time as a multiple of its control's, and its seconds per step."""

    commit: Commit
    ratio: Estimate
    seconds: float


@dataclass(frozen=True)
class LevelChange:
    """A change of a series' level that lasted, at the latest, from ``latest`` on and, most likely, from ``first``.

    ``before`` is the last commit that was surely measured at the old level: with 95% confidence the change lies after
    it and not after ``latest``. In that range ``missing`` measured commits have no value of the series. ``ratio`` is
    the new level over the old one, the least of what confirms it.
    """

    before: Commit
    first: Commit
    latest: Commit
    missing: int
    ratio: float
    p_value: float
    is_worse: bool


@dataclass(frozen=True)
class EnvironmentChange:
    """A commit measured in another environment than the one before it: the facts that differ, old and new."""

    before: Commit
    commit: Commit
    facts: Mapping[str, tuple[object, object]]


@dataclass(frozen=True)
class Series:
    """One of Kitsune's forms over the measured commits, oldest first; commits without it or its control are absent.

    ``points`` are made as they are looked at: there may be many. ``noise`` is by how much measurements one after the
    other differ (:func:`harness.stats.repeat_noise`).
    """

    case: Case
    variant: str
    precision: str
    control: str
    points: Sequence[Point]
    changes: tuple[LevelChange, ...]
    noise: float | None

    @property
    def recent(self) -> Sequence[Point]:
        """The points that pages show: a browser has no use for thousands in each of hundreds of series."""
        return self.points[-SHOWN_POINTS:]


@dataclass(frozen=True)
class LossCurve:
    """The losses at head of one of the variants of a case that charts hold against each other."""

    case: Case
    variant: str
    precision: str
    losses: tuple[tuple[int, float | None], ...]


@dataclass(frozen=True)
class StepMemory:
    """The memory of one steady step at head of one of the variants; without a ``timeline``, ``missing`` says why."""

    case: Case
    variant: str
    timeline: MemoryTimeline | None
    missing: str | None


@dataclass(frozen=True)
class Reproduction:
    """What measuring something again needs beside its commit, case and variants: the profile of the newest run at head,
    and where the user's own models among the workloads are built from.
    """

    profile: str = "quick"
    workloads: Mapping[str, object] = field(default_factory=dict)

    def command(self, commits: Iterable[str], case: Case, variants: Iterable[str]) -> str:
        """The command that measures these variants of a case at these commits, side by side."""
        words = [*_RUN, *(commit[:12] for commit in commits), "--profile", self.profile, "--case", case.name]
        words += [word for variant in dict.fromkeys(variants) for word in ("--variant", variant)]
        if case.model in self.workloads:
            words += ["--workload", str(self.workloads[case.model])]
        return shlex.join(words)


_RUN = ("python", "-m", f"{__package__}.run")


@dataclass(frozen=True)
class Comparison:
    """Everything there is to say about two commits (or one, where ``base`` is None) on one machine.

    ``summaries`` are over the cases that are not of the zoo, if there are any; ``zoo_summaries`` over those that are.
    ``margins`` are those of the metrics among the ``contrasts``. ``memory_growth`` are the forms that take more memory
    at ``head``, where that is not among these metrics: they are no regressions.
    """

    machine: str
    facts: Mapping[str, object]
    commits: tuple[Commit, ...]
    head: Commit
    base: Commit | None
    margin: float
    rows: tuple[Row, ...]
    changes: tuple[Change, ...]
    lost: tuple[Lost, ...]
    summaries: tuple[Summary, ...]
    skips: tuple[SkipGroup, ...]
    history: tuple[Series, ...]
    environment_changes: tuple[EnvironmentChange, ...]
    losses: tuple[LossCurve, ...]
    samples: tuple[Samples, ...]
    breakdowns: tuple[Breakdown, ...]
    timelines: tuple[Timeline | NoTimeline, ...]
    stream_gains: tuple[StreamGain, ...]
    fusions: tuple[StepFusions | UnreadableFusions, ...]
    notes: tuple[str, ...]
    damage: tuple[Damage, ...]
    contrasts: tuple[Contrast, ...] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    reproduction: Reproduction = Reproduction()
    phases: tuple[StepPhases | NoPhases, ...] = ()
    step_memory: tuple[StepMemory, ...] = ()
    memory_growth: tuple[Contrast, ...] = ()
    zoo_summaries: tuple[Summary, ...] = ()

    @property
    def regressions(self) -> int:
        """What became worse by more than the margin: forms of Kitsune, case by case, in time as a multiple of their
        control or in another metric that was asked for; and those that can no longer be measured.
        """
        return len(self.lost) + self.judgements.count(Verdict.SLOWER)

    @property
    def judgements(self) -> list[Verdict]:
        """The verdicts on everything that was measured on both sides."""
        return [change.verdict for change in self.changes] + [contrast.verdict for contrast in self.contrasts]

    @property
    def against_eager(self) -> Tally:
        """How many rows of Kitsune as users run it are faster than eager, the same, …."""
        return _tally(row.verdict for row in self.rows if row.is_product)

    @property
    def against_peers(self) -> Tally:
        """The same against the best peer of each."""
        return _tally(row.peer_verdict for row in self.rows)

    @property
    def since_base(self) -> Tally:
        """How many of Kitsune's forms changed since base in which direction, without those that were lost."""
        return _tally(change.verdict for change in self.changes)

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases measured at head, in the order of the results."""
        return tuple(dict.fromkeys(row.case for row in self.rows))

    def rows_of(self, case: Case) -> tuple[Row, ...]:
        """The variants of a case."""
        return tuple(row for row in self.rows if row.case == case)

    def commands(self) -> dict[tuple[Case, str], str]:
        """For each row the command that measures it again at head, beside what it is held against."""
        return {
            (row.case, row.variant): self.reproduction.command(
                [self.head.sha], row.case, [*filter(None, (row.reference, row.best_peer)), row.variant]
            )
            for row in self.rows
        }

    def commands_since_base(self) -> dict[tuple[Case, str], str]:
        """For each change, contrast and loss the command that measures both commits again, beside what it is held
        against.
        """
        if self.base is None:
            return {}
        others: dict[tuple[Case, str], list[str]] = {}
        for change in self.changes:
            others.setdefault((change.case, change.variant), []).append(change.control)
        for contrast in self.contrasts:
            others.setdefault((contrast.case, contrast.variant), [])
        for lost in self.lost:
            others.setdefault((lost.case, lost.skip.variant), []).append(reference_of(lost.skip.variant))
        commits = dict.fromkeys((self.base.sha, self.head.sha))
        return {
            (case, variant): self.reproduction.command(commits, case, [*beside, variant])
            for (case, variant), beside in others.items()
        }

    def compared_rows_of(self, case: Case) -> tuple[Row, ...]:
        """The variants of a case that charts hold against each other: the peers, and Kitsune as users run it."""
        return tuple(row for row in self.rows_of(case) if not is_diagnostic(row.variant))


@dataclass(frozen=True)
class Side:
    """What stands on one side of two: a machine with its facts, a commit, and in words what tells it from the other."""

    label: str
    machine: str
    facts: Mapping[str, object]
    commit: Commit


@dataclass(frozen=True)
class SideBySide:
    """Two variants of a commit, or two machines, held against each other: ``kind`` is "variants" or "machines"."""

    kind: str
    base: Side
    head: Side
    margins: Mapping[str, float]
    contrasts: tuple[Contrast, ...]
    notes: tuple[str, ...]
    damage: tuple[Damage, ...]

    @property
    def regressions(self) -> int:
        """In how many rows the side of head takes more than that of base, by more than the margin."""
        return sum(entry.verdict is Verdict.SLOWER for entry in self.contrasts)


def _tally(verdicts: Iterable[Verdict | None]) -> Tally:
    counts = Counter(verdicts)
    return {verdict: counts[verdict] for verdict in Verdict}
