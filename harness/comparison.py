"""Typed rows built from history: every number the tables and the report show is computed here or in ``stats``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.breakdown import breakdowns
from harness.commit_pages import NO_PAGES, CommitPages
from harness.conclusive import MARGIN
from harness.controls import controlled_change
from harness.disturbances import host_notes
from harness.fusions import step_fusions
from harness.history_series import history_series
from harness.level_changes import environment_changes
from harness.names import is_diagnostic, is_kitsune, is_product, order, precision_of, reference_of
from harness.revisions import describe, is_ancestor
from harness.rows import (
    Change,
    Commit,
    Comparison,
    LossCurve,
    Lost,
    Parity,
    Row,
    Series,
    SkipGroup,
    StepMemory,
    Summary,
)
from harness.samples import samples
from harness.selection import (
    MACHINE_FACTS,
    Case,
    ComparisonError,
    Measurement,
    changed_facts,
    choose_commits,
    choose_measurements,
    on_one_machine,
    without_timings,
)
from harness.selftest import outcome
from harness.stats import (
    Estimate,
    Verdict,
    benchmark_noise,
    break_even_steps,
    geometric_mean,
    judge,
    loss_gap,
    noise_margin,
    paired_ratio,
    round_noise,
    typical_seconds,
)
from harness.step_phases import step_phases
from harness.store import History, Profile
from harness.stream_gains import stream_gains
from harness.timelines import timeline
from harness.unknown_at_head import notes_on_unknown

DEFAULT_MARGIN = MARGIN
"""Relative difference in time that does not matter in any benchmark; noise may widen it for single ones."""

LOSS_TOLERANCE = 0.05
"""Share of the baseline's progress in loss by which a variant may differ and still count as training right."""

_CLEAR = (Verdict.FASTER, Verdict.SLOWER)

BASELINE = "eager_fp32"
"""The variant whose losses the others are held against; where it was not measured, eager in their own precision."""


def compare(
    history: History,
    base: str | None = None,
    head: str | None = None,
    *,
    folder: Path,
    margin: float = DEFAULT_MARGIN,
    judges_ratios: bool = True,
    pages: CommitPages = NO_PAGES,
) -> Comparison:
    """Compare variants at head with one another, and head with base.

    Args:
        base: the older revision; None for the measured commit before head, if there is one.
        head: the newer revision; None for the newest measured commit.
        folder: where to ask git about revisions and commit subjects: the results folder.
        margin: the relative difference in time that does not matter; wider for benchmarks whose noise is.
        judges_ratios: whether changes of times as multiples of a control are judged, and noted on.
        pages: where commits are shown on the web.

    Raises:
        ComparisonError: the comparison cannot be formed.
    """
    base_commit, head_commit = choose_commits(history, base, head, folder)
    older, newer = choose_measurements(history, base_commit, head_commit)
    if not newer.rounds:
        raise ComparisonError(without_timings(history, head_commit))
    commits = _commits(history, folder, pages)
    rows = _judged([row for case in newer.rounds for row in _case_rows(newer, case, margin)])
    series = history_series(history, commits)
    changes = _changes(older, newer, series, margin) if older is not None and judges_ratios else ()
    stages = breakdowns(newer)
    timelines = tuple(timeline(row.case, row.variant, row.kitsune) for row in rows if row.is_kitsune)
    return Comparison(
        machine=history.machine,
        facts=newer.facts,
        commits=tuple(commits.values()),
        head=commits[head_commit],
        base=None if base_commit is None else commits[base_commit],
        margin=margin,
        rows=rows,
        changes=changes,
        lost=() if older is None else _lost(older, newer),
        summaries=_summaries([row for row in rows if not row.is_of_zoo] or rows),
        skips=_skip_groups(newer),
        history=series,
        environment_changes=environment_changes(
            list(commits.values()), {commit: history.runs(commit)[-1].facts for commit in history.commits}
        ),
        losses=_losses(newer),
        samples=samples(newer),
        breakdowns=stages,
        timelines=timelines,
        stream_gains=stream_gains(newer, stages, margin),
        fusions=step_fusions(((row.case, row.variant, row.kitsune) for row in rows if row.is_kitsune), stages),
        notes=(
            *_notes(older, newer, changes if judges_ratios else None, folder),
            *_error_rates(history, older, newer, changes, rows, margin),
            *filter(None, (pages.problem,)),
        ),
        damage=history.damage,
        phases=step_phases(newer, history.folder),
        step_memory=_step_memory(newer),
        zoo_summaries=_summaries([row for row in rows if row.is_of_zoo]),
    )


def _commits(history: History, folder: Path, pages: CommitPages) -> dict[str, Commit]:
    """All commits; states of a working tree, which nobody else has, are shown nowhere."""
    texts = describe(history.commits, folder)
    commits = {}
    for sha in history.commits:
        text = texts.get(sha)
        measured = history.runs(sha)[-1].started
        url = None if history.is_snapshot(sha) else pages.address(sha)
        commits[sha] = Commit(sha, text.subject if text else None, text.date if text else None, measured, url)
    return commits


def _case_rows(measured: Measurement, case: Case, margin: float) -> list[Row]:
    variants = sorted(measured.variants(case), key=order)
    seconds = {variant: _seconds(measured, case, variant) for variant in variants}
    return [_row(measured, case, variant, seconds, margin) for variant in variants]


def _row(measured: Measurement, case: Case, variant: str, seconds: Mapping[str, float], margin: float) -> Row:
    precision = precision_of(variant)
    reference = _reference(variant, seconds)
    ratio = _ratio(measured, case, variant, reference)
    peer = _best_peer(measured, case, variant, seconds) if is_product(variant) else None
    peer_ratio = _ratio(measured, case, variant, peer)
    profile = measured.profiles.get((case, variant))
    cold_setup_s, warm_setup_s = (None, None) if profile is None else (profile.cold_setup_s, profile.warm_setup_s)
    gap, parity = _parity(profile, _baseline(measured, case, variant))
    return Row(
        case=case,
        variant=variant,
        precision=precision,
        seconds=seconds[variant],
        wall_seconds=_wall_seconds(measured, case, variant),
        rounds=_num_rounds(measured, case, variant),
        reference=reference,
        ratio=ratio,
        margin=_margin(measured, case, variant, reference, margin),
        verdict=None,
        best_peer=peer,
        peer_ratio=peer_ratio,
        peer_margin=_margin(measured, case, variant, peer, margin),
        peer_verdict=None,
        setup_s=cold_setup_s,
        warm_setup_s=warm_setup_s,
        break_even_steps=_break_even(measured, case, variant, cold_setup_s, seconds),
        warm_break_even_steps=_break_even(measured, case, variant, warm_setup_s, seconds),
        first_replay_s=None if profile is None else profile.cold_first_replay_s,
        warm_first_replay_s=None if profile is None else profile.warm_first_replay_s,
        allocated_bytes=None if profile is None else profile.peak_allocated_bytes,
        reserved_bytes=None if profile is None else profile.peak_reserved_bytes,
        rss_bytes=None if profile is None else profile.peak_rss_bytes,
        loss_gap=gap,
        parity=parity,
        kitsune=None if profile is None else profile.kitsune,
        inactive_split_bytes=None if profile is None else profile.inactive_split_bytes,
        continuation=None if profile is None else profile.continuation,
        continuation_missing=None if profile is None else profile.continuation_missing,
        modes=Counter(entry.modes[variant] for entry in measured.rounds[case] if variant in entry.modes),
    )


def _judged(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with their verdicts, which depend on how many there are."""
    against_eager = _verdicts([row.ratio for row in rows], [row.margin for row in rows])
    against_peers = _verdicts([row.peer_ratio for row in rows], [row.peer_margin for row in rows])
    return tuple(
        replace(
            row,
            verdict=judged,
            peer_verdict=peer_judged,
            break_even_steps=row.break_even_steps if judged in _CLEAR else None,
            warm_break_even_steps=row.warm_break_even_steps if judged in _CLEAR else None,
        )
        for row, judged, peer_judged in zip(rows, against_eager, against_peers, strict=True)
    )


def _verdicts(ratios: Sequence[Estimate | None], margins: Sequence[float]) -> list[Verdict | None]:
    known = [(ratio, margin) for ratio, margin in zip(ratios, margins, strict=True) if ratio is not None]
    judged = iter(judge([ratio for ratio, _ in known], [margin for _, margin in known]))
    return [None if ratio is None else next(judged) for ratio in ratios]


def _margin(measured: Measurement, case: Case, variant: str, reference: str | None, least: float) -> float:
    pairs = [] if reference is None else measured.pairs(case, variant, reference)
    return noise_margin(round_noise(pairs) if pairs else None, least)


def _reference(variant: str, variants: Mapping[str, float]) -> str | None:
    """Eager in the same precision, or None where the variant is that itself or eager was not measured."""
    name = reference_of(variant)
    return name if name in variants and name != variant else None


def _best_peer(measured: Measurement, case: Case, variant: str, seconds: Mapping[str, float]) -> str | None:
    """The fastest variant in the same precision that is not of Kitsune, by paired ratios to eager where possible."""
    eager = reference_of(variant)

    def slowness(peer: str) -> float:
        ratio = _ratio(measured, case, peer, eager)
        return ratio.ratio if ratio is not None else seconds[peer] / seconds.get(eager, 1.0)

    peers = [name for name in seconds if not is_kitsune(name) and precision_of(name) == precision_of(variant)]
    return min(peers, key=slowness, default=None)


def _ratio(measured: Measurement, case: Case, variant: str, reference: str | None) -> Estimate | None:
    pairs = [] if reference is None else measured.pairs(case, variant, reference)
    return paired_ratio(pairs) if pairs else None


def _num_rounds(measured: Measurement, case: Case, variant: str) -> int:
    return sum(variant in entry.blocks for entry in measured.rounds[case])


def _seconds(measured: Measurement, case: Case, variant: str) -> float:
    rounds = [entry.blocks[variant].seconds for entry in measured.rounds[case] if variant in entry.blocks]
    return typical_seconds(rounds)


def _wall_seconds(measured: Measurement, case: Case, variant: str) -> float:
    return typical_seconds([entry.blocks[variant].wall_s for entry in measured.rounds[case] if variant in entry.blocks])


def _break_even(
    measured: Measurement, case: Case, variant: str, setup_s: float | None, seconds: Mapping[str, float]
) -> float | None:
    """After how many steps such a set-up is earned back against eager, which compiles nothing."""
    eager = measured.profiles.get((case, reference_of(variant)))
    if setup_s is None or eager is None:
        return None
    return break_even_steps(setup_s, seconds[variant], eager.setup_s, seconds[eager.variant])


def _baseline(measured: Measurement, case: Case, variant: str) -> Profile | None:
    """The profile whose losses a variant's are held against."""
    profiles = (measured.profiles.get((case, name)) for name in (BASELINE, reference_of(variant)))
    return next(filter(None, profiles), None)


def _parity(profile: Profile | None, baseline: Profile | None) -> tuple[float | None, Parity | None]:
    if profile is None or baseline is None:
        return None, None
    gap = loss_gap(profile.losses, baseline.losses)
    if gap is None:
        return None, None
    if abs(gap) == float("inf"):
        return gap, Parity.DIVERGED
    return gap, Parity.AGREES if abs(gap) <= LOSS_TOLERANCE else Parity.DIFFERS


def _changes(older: Measurement, newer: Measurement, history: Sequence[Series], margin: float) -> tuple[Change, ...]:
    noise = {(series.case, series.variant): series.noise for series in history}
    changes: list[Change] = []
    for case in newer.rounds:
        for variant in sorted(filter(is_product, newer.variants(case)), key=order):
            found = controlled_change(older, newer, case, variant)
            if found is not None:
                changes.append(
                    Change(
                        case=case,
                        variant=variant,
                        precision=precision_of(variant),
                        control=found.control,
                        controls=found.controls,
                        base=found.base,
                        head=found.head,
                        ratio=found.ratio,
                        apart=found.apart,
                        margin=noise_margin(benchmark_noise(noise.get((case, variant)), found.noise), margin),
                        verdict=Verdict.INCONCLUSIVE,
                    )
                )
    judged = judge([change.ratio for change in changes], [change.margin for change in changes])
    return tuple(replace(change, verdict=found) for change, found in zip(changes, judged, strict=True))


def _lost(older: Measurement, newer: Measurement) -> tuple[Lost, ...]:
    """Kitsune's forms timed at base that could not be at head; what head's profile left out is not among them."""
    return tuple(
        Lost(case, skip)
        for case in older.rounds
        for variant in older.variants(case)
        if is_product(variant)
        and (skip := newer.skips.get((case, variant))) is not None
        and skip.status != "left out"
        and variant not in newer.variants(case)
    )


def _summaries(rows: Sequence[Row]) -> tuple[Summary, ...]:
    """Means over the cases that all of Kitsune's forms on a device share: others would not compare."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.is_product and row.ratio is not None:
            groups.setdefault((row.case.device, row.variant), []).append(row)
    summaries = []
    for (device, variant), timed in groups.items():
        shared = _shared_cases([members for (where, _), members in groups.items() if where == device])
        members = [row for row in timed if row.case in shared]
        if not members:
            continue
        eager = [row.ratio.inverted() for row in members if row.ratio is not None]
        peers = [row.peer_ratio.inverted() for row in members if row.peer_ratio is not None]
        summaries.append(
            Summary(
                variant=variant,
                precision=precision_of(variant),
                device=device,
                over_eager=geometric_mean(eager),
                over_peer=geometric_mean(peers) if len(peers) == len(eager) else None,
                cases=len(eager),
            )
        )
    return tuple(summaries)


def _shared_cases(groups: Sequence[Sequence[Row]]) -> set[Case]:
    return set.intersection(*({row.case for row in members} for members in groups))


def _skip_groups(measured: Measurement) -> tuple[SkipGroup, ...]:
    """Failures first, then skips, each in the order of the results."""
    groups: dict[tuple[str, str], list[tuple[Case, str]]] = {}
    for (case, variant), skip in measured.skips.items():
        groups.setdefault((skip.status, skip.reason), []).append((case, variant))
    ordered = sorted(groups.items(), key=lambda item: item[0][0] != "failed")
    return tuple(
        SkipGroup(
            status=status,
            reason=reason,
            variants=tuple(dict.fromkeys(variant for _, variant in members)),
            cases=tuple(dict.fromkeys(case for case, _ in members)),
        )
        for (status, reason), members in ordered
    )


def _losses(measured: Measurement) -> tuple[LossCurve, ...]:
    profiles = sorted(measured.profiles.items(), key=lambda item: order(item[0][1]))
    return tuple(
        LossCurve(case, variant, profile.precision, profile.losses)
        for (case, variant), profile in profiles
        if profile.losses and not is_diagnostic(variant)
    )


def _step_memory(measured: Measurement) -> tuple[StepMemory, ...]:
    profiles = sorted(measured.profiles.items(), key=lambda item: order(item[0][1]))
    return tuple(
        StepMemory(case, variant, profile.memory_timeline, profile.memory_timeline_missing)
        for (case, variant), profile in profiles
    )


def _error_rates(
    history: History,
    older: Measurement | None,
    newer: Measurement,
    changes: Sequence[Change],
    rows: Sequence[Row],
    margin: float,
) -> list[str]:
    """How often verdicts like these are wrong, where self-tests have measured it in this environment."""
    found, problems = outcome.load(history.folder, newer.facts, margin)
    sides = [side for side in (older, newer) if side is not None]
    rounds = [_num_rounds(side, change.case, change.variant) for change in changes for side in sides]
    rounds = rounds or [row.rounds for row in rows if row.is_product]
    told = outcome.sentence(found, margin, min(rounds)) if rounds else None
    return ([] if told is None else [told]) + problems


def _notes(
    older: Measurement | None, newer: Measurement, changes: Sequence[Change] | None, folder: Path
) -> tuple[str, ...]:
    """What a reader must know of the measurements; None for changes that are not judged."""
    notes = []
    if newer.left_out:
        differing = sorted({name for run in newer.left_out for name in changed_facts(run.facts, newer.facts)})
        notes.append(
            f"{len(newer.left_out)} earlier run(s) of {newer.commit[:8]} in another environment are left out"
            f" (they differ in {', '.join(differing)})"
        )
    turns = sum(entry.throttled for rounds in newer.rounds.values() for entry in rounds)
    if turns:
        notes.append(
            f"the GPU was throttled in {turns} turn(s) at {newer.commit[:8]}; they are left out where others exist"
        )
    notes += host_notes({side.commit[:8]: side for side in (older, newer) if side is not None})
    if older is None:
        notes.append("no earlier commit is measured on this machine, so no change can be judged")
        return tuple(notes)
    if _is_backwards(older, newer, folder):
        notes.append(
            f"BASE ({older.commit[:8]}) is newer than HEAD ({newer.commit[:8]}), from which it comes in git's history:"
            " changes are told backwards"
        )
    differing = list(changed_facts(older.facts, newer.facts))
    if differing:
        told = ", ".join(f"{name}: {older.facts.get(name)} → {newer.facts.get(name)}" for name in differing)
        notes.append(f"the environment changed between the commits ({told}); changes may be its doing")
    notes += notes_on_unknown(older, newer)
    notes += _machine_notes(older, newer, changes)
    if changes is not None and not changes:
        notes.append("no Kitsune variant was measured beside the same peer at both commits, so no change can be judged")
    return tuple(notes)


def _is_backwards(older: Measurement, newer: Measurement, folder: Path) -> bool:
    """Whether git, asked where the results and where the user are, finds head in the history of base."""
    base, head = older.commit, newer.commit
    return base != head and any(is_ancestor(head, base, place) for place in (folder, Path.cwd()))


def _machine_notes(older: Measurement, newer: Measurement, changes: Sequence[Change] | None) -> list[str]:
    """That the machines may differ, and what cannot be told for that reason."""
    if on_one_machine(older, newer) or (changes is not None and not changes):
        return []
    identities = [{name: side.facts.get(name) for name in MACHINE_FACTS} for side in (older, newer)]
    is_known = all(identity["boot_id"] is not None for identity in identities)
    told = "were measured" if is_known else "may have been measured"
    where = f"the commits {told} on different machines of one kind"
    if changes is None:
        return [where]
    notes = [f"{where}; a change stands against every control of its row"]
    torn = [change for change in changes if change.is_torn]
    if torn:
        apart = f"{max(change.apart for change in torn) - 1:.0%}"
        notes.append(
            f"{len(torn)} row(s) are inconclusive where controls differ by up to {apart} in how much has changed:"
            " host and device changed apart; measure both commits in one run"
        )
    return notes
