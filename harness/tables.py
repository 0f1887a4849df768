"""The tables of a comparison, built once for every medium: cells with a text, a tone, and what to sort by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from harness import formats
from harness.metrics import samples_of, word
from harness.names import is_diagnostic, is_kitsune, label
from harness.rows import (
    LISTED_CHANGES,
    SHOWN_POINTS,
    Commit,
    Comparison,
    Contrast,
    EnvironmentChange,
    Parity,
    Row,
    Summary,
)
from harness.selection import Case
from harness.stats import Estimate, Verdict
from harness.store import Damage
from harness.variants import VARIANTS


class Tone(Enum):
    """What a cell says at a glance."""

    PLAIN = "plain"
    STRONG = "strong"
    GOOD = "good"
    BAD = "bad"
    FAINT = "faint"


class Medium(Enum):
    """Where a table is shown: as text, a line a row, or on a page, whose cells have room for a second line."""

    TEXT = "text"
    PAGE = "page"


@dataclass(frozen=True)
class Cell:
    """A cell. ``key`` is what to sort by where the text does not do; ``detail`` is a second line if there is room;
    ``words`` stand in for a text that is an identifier, where readers rather want words. ``link`` is an address that a
    page leads to from it: of http or https, or a path relative to the page.
    """

    text: str
    key: float | None = None
    tone: Tone = Tone.PLAIN
    detail: str | None = None
    words: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Column:
    """A column. ``meaning`` explains the heading; ``only`` limits it to one medium; one that is ``needless_if_same`` is
    left out where all its cells agree.
    """

    heading: str
    meaning: str
    numeric: bool = False
    only: Medium | None = None
    needless_if_same: bool = False


@dataclass(frozen=True)
class Subject:
    """What a row is about: a page filters by it, links to it, and tells how to measure it again."""

    case: Case
    variant: str


@dataclass(frozen=True)
class Table:
    """A table; every row has a cell for each column, and where rows are about variants of cases, a subject."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    subjects: tuple[Subject, ...] = ()

    def on(self, medium: Medium) -> Table:
        """The table with the columns that this medium shows."""
        return self._of([index for index in range(len(self.columns)) if self._is_shown(index, medium)])

    def without(self, heading: str) -> Table:
        """The table without the column of this heading."""
        return self._of([index for index, column in enumerate(self.columns) if column.heading != heading])

    def _of(self, kept: Sequence[int]) -> Table:
        columns = tuple(self.columns[index] for index in kept)
        return Table(columns, tuple(tuple(row[index] for index in kept) for row in self.rows), self.subjects)

    def _is_shown(self, index: int, medium: Medium) -> bool:
        column = self.columns[index]
        if column.needless_if_same and len({row[index].text for row in self.rows}) < 2:
            return False
        return column.only in (None, medium)


BEST_PEER_MARK = " *"

CASE_COLUMNS = (
    Column("model", "the workload"),
    Column("batch", "samples per step", numeric=True),
    Column("device", "where it ran", needless_if_same=True),
)
LOSS_COLUMN = Column(
    "loss",
    "distance in loss from eager fp32, or else eager in the same precision, as a share of its progress",
    numeric=True,
)
_VARIANT_COLUMNS = (
    Column("precision", "fp32: PyTorch's defaults; tf32: matrix products in TF32 too; amp: bfloat16 autocast"),
    Column("variant", "what was measured"),
)
_VERDICT_TONES = {
    Verdict.FASTER: Tone.GOOD,
    Verdict.SLOWER: Tone.BAD,
    Verdict.SAME: Tone.PLAIN,
    Verdict.INCONCLUSIVE: Tone.FAINT,
}


def variant_table(comparison: Comparison) -> Table:
    """Every measured variant at the newer commit."""
    columns = (
        *CASE_COLUMNS,
        *_VARIANT_COLUMNS,
        Column("time", "seconds per training step, the median over rounds", numeric=True),
        Column("over eager", "speed-up: eager's time in the same precision divided by this one's", numeric=True),
        Column("verdict", "whether the whole interval lies beyond the margin", only=Medium.TEXT),
        Column(
            "mode",
            "how Kitsune ran: eager where replay is impossible or not faster; × in how many rounds, if they differ",
            only=Medium.TEXT,
        ),
        Column(
            "over best peer",
            "speed-up over the fastest variant in the same precision that is not Kitsune's (marked *)",
            numeric=True,
        ),
        Column("peer verdict", "the same judgement against the best peer", only=Medium.TEXT),
        Column("memory", "peak bytes allocated to tensors and reserved; on a CPU, peak resident memory", numeric=True),
        Column(
            "set-up",
            "seconds before the first step at full speed: compiling, capturing, trying plans; with empty caches",
            numeric=True,
            only=Medium.PAGE,
        ),
        Column("break-even", "steps after which that is earned back against eager", numeric=True, only=Medium.PAGE),
        Column(
            "first replay",
            "seconds of the set-up until the end of the first step that Kitsune replayed",
            numeric=True,
            only=Medium.PAGE,
        ),
        Column(
            "set-up, warm",
            "set-up in a process that finds what an earlier one has left in the caches",
            numeric=True,
            only=Medium.PAGE,
        ),
        Column("break-even, warm", "steps after which that is earned back", numeric=True, only=Medium.PAGE),
        Column(
            "first replay, warm",
            "seconds of the set-up with such caches until the end of the first step that Kitsune replayed",
            numeric=True,
            only=Medium.PAGE,
        ),
        LOSS_COLUMN,
    )
    best_peers = {(row.case, row.best_peer) for row in comparison.rows}
    return Table(
        columns,
        tuple(_variant_cells(row, (row.case, row.variant) in best_peers) for row in comparison.rows),
        tuple(Subject(row.case, row.variant) for row in comparison.rows),
    )


def change_table(comparison: Comparison) -> Table:
    """Each of Kitsune's forms between the two commits, regressions first."""
    columns = (
        *CASE_COLUMNS,
        *_VARIANT_COLUMNS,
        Column("change of time", "after against before, with its 95% interval: positive is slower", numeric=True),
        Column(
            "verdict",
            "whether the whole interval lies beyond the margin, not by chance among so many rows",
        ),
        Column("margin", "what does not matter here: at least that of the comparison, twice the noise", numeric=True),
        Column("before", "time at the older commit as a multiple of the control's in the same processes", numeric=True),
        Column("after", "the same at the newer commit", numeric=True),
        Column(
            "control",
            "the peer that leaves least of the change, of all that may wait for the same, host or device: the interval "
            "stands against each of them",
        ),
    )
    lost = [
        (
            *case_cells(entry.case),
            Cell(entry.skip.precision),
            Cell(entry.skip.variant, tone=Tone.STRONG, words=label(entry.skip.variant)),
            Cell(formats.ABSENT),
            Cell("lost", tone=Tone.BAD, detail=entry.skip.reason),
            Cell(formats.ABSENT),
            Cell("measured"),
            Cell(entry.skip.status),
            Cell(formats.ABSENT),
        )
        for entry in comparison.lost
    ]
    judged = sorted(comparison.changes, key=lambda change: change.verdict is not Verdict.SLOWER)
    changed = [
        (
            *case_cells(entry.case),
            Cell(entry.precision),
            Cell(entry.variant, tone=Tone.STRONG, words=label(entry.variant)),
            Cell(formats.change(entry.ratio), entry.ratio.ratio),
            verdict_cell(entry.verdict),
            Cell(formats.share(entry.margin), entry.margin),
            Cell(formats.ratio_with_interval(entry.base), entry.base.ratio),
            Cell(formats.ratio_with_interval(entry.head), entry.head.ratio),
            Cell(entry.control, words=label(entry.control)),
        )
        for entry in judged
    ]
    subjects = [Subject(entry.case, entry.skip.variant) for entry in comparison.lost]
    subjects += [Subject(entry.case, entry.variant) for entry in judged]
    return Table(columns, (*lost, *changed), tuple(subjects))


def contrast_table(contrasts: Sequence[Contrast], base: str, head: str) -> Table:
    """Metrics on two sides, what became worse first.

    Args:
        base: what to call the side of base.
        head: what to call that of head.
    """
    columns = (
        *CASE_COLUMNS,
        *_VARIANT_COLUMNS,
        Column("metric", "what is compared", needless_if_same=True),
        Column(base, "the value on this side", numeric=True),
        Column(head, "the value on this side", numeric=True),
        Column("change", f"{head} against {base}, with its 95% interval: positive takes more", numeric=True),
        Column("verdict", "whether the whole interval lies beyond the margin, not by chance among so many rows"),
        Column("margin", "what does not matter here: at least that of the metric, twice the noise", numeric=True),
    )
    judged = sorted(contrasts, key=lambda contrast: contrast.verdict is not Verdict.SLOWER)
    rows = [
        (
            *case_cells(entry.case),
            Cell(entry.precision),
            Cell(entry.variant, tone=variant_tone(entry.variant), words=label(entry.variant)),
            Cell(entry.metric),
            Cell(_in_unit(entry.base, entry.unit), entry.base),
            Cell(_in_unit(entry.head, entry.unit), entry.head),
            Cell(formats.change(entry.ratio, samples_of(entry.metric)), entry.ratio.ratio),
            Cell(word(entry.metric, entry.verdict), tone=_VERDICT_TONES[entry.verdict]),
            Cell(formats.share(entry.margin), entry.margin),
        )
        for entry in judged
    ]
    return Table(columns, tuple(rows), tuple(Subject(entry.case, entry.variant) for entry in judged))


def skip_table(comparison: Comparison) -> Table:
    """What was not measured, one row for each reason."""
    columns = (
        Column("status", "failed: tried, and it broke; skipped: cannot run here; left out: not part of the profile"),
        Column("variants", "which variants this concerns"),
        Column("cases", "in which cases"),
        Column("reason", "as the measurement gave it"),
    )
    rows = [
        (
            Cell(group.status, tone=Tone.BAD if group.status == "failed" else Tone.FAINT),
            Cell(", ".join(group.variants)),
            Cell(_case_names(group.cases, comparison)),
            Cell(group.reason),
        )
        for group in comparison.skips
    ]
    return Table(columns, tuple(rows))


def damage_table(damage: Sequence[Damage]) -> Table:
    """What could not be read, one row for each file: how much of it, and the first problem."""
    columns = (
        Column("file", "the damaged file"),
        Column("skipped", "how much of it was left out"),
        Column("first problem", "where the trouble begins"),
    )
    files: dict[str, list[tuple[int | None, str]]] = {}
    for entry in damage:
        files.setdefault(str(entry.path), []).append((entry.line, entry.problem))
    rows = [(Cell(path), *_damage_cells(problems)) for path, problems in files.items()]
    return Table(columns, tuple(rows))


def commit_table(comparison: Comparison) -> Table:
    """The last measured commits, the latest first, and where the environment changed."""
    columns = (
        Column("commit", "the first characters of its hash"),
        Column("subject", "the first line of its message, where git knows it"),
        Column("date", "when it was made"),
        Column("measured", "when its last run began, in UTC"),
        Column("environment", "what changed in it since the measured commit before"),
    )
    changed = {entry.commit.sha: _environment_words(entry) for entry in comparison.environment_changes}
    rows = [
        (
            _commit_cell(commit),
            Cell(commit.subject or formats.ABSENT),
            Cell(commit.date or formats.ABSENT),
            Cell(f"{commit.measured:%Y-%m-%d %H:%M}"),
            Cell(changed.get(commit.sha, "")),
        )
        for commit in reversed(comparison.commits[-SHOWN_POINTS:])
    ]
    return Table(columns, tuple(rows))


def sample_table(comparison: Comparison) -> Table:
    """How the single samples of each variant at the newer commit spread."""
    columns = (
        *CASE_COLUMNS,
        *_VARIANT_COLUMNS,
        Column("rounds", "fresh processes that timed it", numeric=True),
        Column("blocks", "timed blocks in all of them", numeric=True),
        Column("time", "seconds per training step, the median over rounds", numeric=True),
        Column("least", "the fastest block", numeric=True),
        Column("middle half", "a quarter of the blocks is faster, a quarter slower", numeric=True),
        Column("most", "the slowest block", numeric=True),
    )
    rows = [
        (
            *case_cells(entry.case),
            Cell(entry.precision),
            Cell(entry.variant, tone=variant_tone(entry.variant), words=label(entry.variant)),
            Cell(str(sum(times is not None for times in entry.rounds))),
            Cell(str(len(entry.seconds))),
            Cell(formats.seconds(entry.typical_seconds), entry.typical_seconds),
            Cell(formats.seconds(min(entry.seconds)), min(entry.seconds)),
            Cell(" to ".join(map(formats.seconds, entry.quartiles)), entry.quartiles[1] - entry.quartiles[0]),
            Cell(formats.seconds(max(entry.seconds)), max(entry.seconds)),
        )
        for entry in comparison.samples
    ]
    return Table(columns, tuple(rows), tuple(Subject(entry.case, entry.variant) for entry in comparison.samples))


def level_table(comparison: Comparison) -> Table:
    """Where the level of Kitsune's forms changed over the history: the latest changes, the last one first."""
    columns = (
        *CASE_COLUMNS,
        *_VARIANT_COLUMNS,
        Column(
            "change of time",
            "the level after it against the one before: the least that a control leaves of it",
            numeric=True,
        ),
        Column("verdict", "in which direction; only changes of at least 2% that are hardly chance are listed"),
        Column("first at", "the commit since which it most likely is so"),
        Column("after", "the last commit that surely was at the old level"),
        Column("up to", "the last commit at which, with 95% confidence, it can have changed"),
        Column("without value", "commits in that range where this was not measured", numeric=True),
    )
    position = {commit.sha: index for index, commit in enumerate(comparison.commits)}
    found = sorted(
        ((series, change) for series in comparison.history for change in series.changes),
        key=lambda entry: -position[entry[1].first.sha],
    )[:LISTED_CHANGES]
    rows = [
        (
            *case_cells(series.case),
            Cell(series.precision),
            Cell(series.variant, words=label(series.variant)),
            Cell(formats.percent_change(change.ratio), change.ratio),
            Cell("slower", tone=Tone.BAD) if change.is_worse else Cell("faster", tone=Tone.GOOD),
            _commit_cell(change.first, position[change.first.sha], detail=change.first.subject),
            _commit_cell(change.before, position[change.before.sha]),
            _commit_cell(change.latest, position[change.latest.sha]),
            Cell(str(change.missing), change.missing),
        )
        for series, change in found
    ]
    return Table(columns, tuple(rows), tuple(Subject(series.case, series.variant) for series, _ in found))


def level_title(comparison: Comparison) -> str:
    """The title of that table, which says how many changes it leaves out, and where they are found."""
    number = sum(len(series.changes) for series in comparison.history)
    title = "Changes of level"
    return title if number <= LISTED_CHANGES else f"{title}: the last {LISTED_CHANGES} of {number:,}; JSON has all"


def environment_table(comparison: Comparison) -> Table:
    """Where the history's environment changed: what happens there is not known to be the code's doing."""
    columns = (
        Column("commit", "the first measured in the new environment"),
        Column("before", "the last measured in the old one"),
        Column("what changed", "facts of the machine and its software that change what is measured"),
    )
    rows = [
        (
            _commit_cell(entry.commit, detail=entry.commit.subject),
            _commit_cell(entry.before),
            Cell(_environment_words(entry)),
        )
        for entry in comparison.environment_changes
    ]
    return Table(columns, tuple(rows))


def summary_table(summaries: Sequence[Summary]) -> Table:
    """Geometric means of Kitsune's speed-ups, one row for each variant and device."""
    columns = (
        Column("variant", "one of Kitsune's forms"),
        Column("precision", "as in the table of variants"),
        Column("device", "where it ran"),
        Column(
            "over eager",
            "geometric mean of the speed-ups over eager in the same precision; its interval is for these very cases",
            numeric=True,
        ),
        Column("over best peer", "geometric mean of those over the best peer of each case", numeric=True),
        Column("cases", "how many cases the means are over", numeric=True),
    )
    rows = [
        (
            Cell(summary.variant, tone=Tone.STRONG, words=label(summary.variant)),
            Cell(summary.precision),
            Cell(summary.device),
            _mean_cell(summary.over_eager),
            _mean_cell(summary.over_peer),
            Cell(str(summary.cases), summary.cases),
        )
        for summary in summaries
    ]
    return Table(columns, tuple(rows))


def recipe_table(comparison: Comparison) -> Table:
    """How each measured variant is set up, as today's harness describes it."""
    columns = (
        Column("variant", "as it stands in the results"),
        Column("what it is", "in words"),
        Column("layout", "of convolutional models on the device"),
        Column("optimizer", "which implementation of Adam"),
        Column("torch.compile", "the mode it is given"),
        Column("streams", "the most that Kitsune is allowed, where that is not its default", numeric=True),
        Column("fusion", "whether Kitsune may fuse operators, where that is not its default"),
        Column("loss deferred", "whether Kitsune's drop-in loop defers the loss, where that is not its default"),
    )
    pairs = dict.fromkeys((row.variant, row.case.device) for row in comparison.rows)
    known = [(VARIANTS[variant], device) for variant, device in pairs if variant in VARIANTS]
    rows = [
        (
            Cell(variant.name),
            Cell(variant.title),
            Cell("channels last" if variant.uses_channels_last(device) else "default", detail=f"on {device}"),
            Cell("fused" if variant.fused else "default"),
            Cell(variant.compile_mode or formats.ABSENT),
            Cell(formats.ABSENT if variant.num_streams is None else str(variant.num_streams), variant.num_streams),
            Cell(_SWITCH[variant.enable_fusion]),
            Cell(_SWITCH[variant.defer_loss]),
        )
        for variant, device in known
    ]
    return Table(columns, tuple(rows))


def facts_table(comparison: Comparison) -> Table:
    """The machine and its software at the newer commit."""
    columns = (Column("fact", "as the measurement recorded it"), Column("value", "at the newest run"))
    return Table(columns, tuple((Cell(name), Cell(_fact(value))) for name, value in comparison.facts.items()))


def variant_tone(variant: str) -> Tone:
    """Kitsune stands out among its peers; with something switched off it stands back."""
    if is_diagnostic(variant):
        return Tone.FAINT
    return Tone.STRONG if is_kitsune(variant) else Tone.PLAIN


def verdict_cell(judged: Verdict | None) -> Cell:
    """A verdict in words and colour; empty where nothing was judged."""
    return Cell("") if judged is None else Cell(judged.value, tone=_VERDICT_TONES[judged])


def _variant_cells(row: Row, is_best_peer: bool) -> tuple[Cell, ...]:
    mark = BEST_PEER_MARK if is_best_peer else ""
    return (
        *case_cells(row.case),
        Cell(row.precision),
        Cell(row.variant + mark, tone=variant_tone(row.variant), words=label(row.variant) + mark, detail=mode_of(row)),
        Cell(formats.seconds(row.seconds), row.seconds),
        speedup_cell(row.ratio, row.verdict),
        verdict_cell(row.verdict),
        Cell(mode_of(row) or ""),
        speedup_cell(row.peer_ratio, row.peer_verdict, row.best_peer),
        verdict_cell(row.peer_verdict),
        memory_cell(row),
        Cell(formats.seconds(row.setup_s), row.setup_s),
        Cell(formats.steps(row.break_even_steps), row.break_even_steps),
        Cell(formats.seconds(row.first_replay_s), row.first_replay_s),
        Cell(formats.seconds(row.warm_setup_s), row.warm_setup_s),
        Cell(formats.steps(row.warm_break_even_steps), row.warm_break_even_steps),
        Cell(formats.seconds(row.warm_first_replay_s), row.warm_first_replay_s),
        loss_cell(row),
    )


def memory_cell(row: Row) -> Cell:
    """A row's peak memory."""
    memory = row.rss_bytes if row.allocated_bytes is None else row.allocated_bytes
    return Cell(formats.size(memory), memory, detail=_memory_detail(row))


def loss_cell(row: Row) -> Cell:
    """How far a row's loss is from that of eager."""
    return Cell(formats.loss(row.loss_gap, row.parity), row.loss_gap, _PARITY_TONES[row.parity])


_SWITCH = {None: formats.ABSENT, True: "on", False: "off"}
_PARITY_TONES = {None: Tone.PLAIN, Parity.AGREES: Tone.PLAIN, Parity.DIFFERS: Tone.BAD, Parity.DIVERGED: Tone.BAD}


def case_cells(case: Case) -> tuple[Cell, Cell, Cell]:
    """The cells below :data:`CASE_COLUMNS`."""
    return Cell(case.model), Cell(str(case.batch), case.batch), Cell(case.device)


def _commit_cell(commit: Commit, key: float | None = None, detail: str | None = None) -> Cell:
    return Cell(commit.short, key, detail=detail, link=commit.url)


def _case_names(cases: Sequence[Case], comparison: Comparison) -> str:
    if len(cases) > 1 and set(cases) >= set(comparison.cases):
        return f"all {len(cases)} cases"
    return ", ".join(f"{case.name} on {case.device}" for case in cases)


def speedup_cell(estimate: Estimate | None, judged: Verdict | None = None, other: str | None = None) -> Cell:
    """A speed-up, coloured and explained by its verdict, and by which variant it is over where that varies."""
    if estimate is None:
        return Cell(formats.ABSENT)
    speedup = estimate.inverted()
    tone = Tone.PLAIN if judged is None else _VERDICT_TONES[judged]
    told = [judged.value if judged else None, f"than {label(other)}" if judged and other else None]
    if judged in (Verdict.SAME, Verdict.INCONCLUSIVE) and other:
        told[1] = f"as {label(other)}" if judged is Verdict.SAME else f"against {label(other)}"
    return Cell(formats.ratio_with_interval(speedup), speedup.ratio, tone, detail=" ".join(filter(None, told)) or None)


def _mean_cell(speedup: Estimate | None) -> Cell:
    return Cell(formats.ratio_with_interval(speedup), None if speedup is None else speedup.ratio)


def _memory_detail(row: Row) -> str | None:
    if row.allocated_bytes is None:
        return None if row.rss_bytes is None else "resident"
    return None if row.reserved_bytes is None else f"{formats.size(row.reserved_bytes)} reserved"


def mode_of(row: Row) -> str | None:
    """How Kitsune ran in the rounds, or where these do not tell in the process that was profiled; None of peers."""
    if len(row.modes) > 1:
        return formats.with_numbers(row.modes)
    if row.modes:
        return formats.one_line(next(iter(row.modes)))
    return None if row.kitsune is None else str(row.kitsune.get("mode", "unknown mode"))


def _damage_cells(problems: Sequence[tuple[int | None, str]]) -> tuple[Cell, Cell]:
    line, problem = problems[0]
    if line is None:
        return Cell("the whole file", tone=Tone.BAD), Cell(problem)
    return Cell(formats.counted(len(problems), "line"), tone=Tone.BAD), Cell(f"line {line}: {problem}")


def _in_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return formats.size(int(value))
    return formats.seconds(value) if unit == "s" else f"{formats.ratio(value)}×"


def _environment_words(entry: EnvironmentChange) -> str:
    return ", ".join(f"{name}: {_fact(old)} → {_fact(new)}" for name, (old, new) in entry.facts.items())


def _fact(value: object) -> str:
    return formats.ABSENT if value is None else str(value)
