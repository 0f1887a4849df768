import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from harness import render
from harness.comparison import compare
from harness.rows import Comparison, Parity, Row
from harness.selection import ComparisonError, choose_machine
from harness.selftest import outcome
from harness.selftest.outcome import JudgedRow
from harness.stats import Verdict
from harness.store import Store
from tests.harness import sample
from tests.harness.repository import git
from tests.harness.sample import COMMITS, GPU_MACHINE

OLD, NEW = "1" * 40, "2" * 40
CASE = sample.case_fields("mlp", 64, "cpu")
FACTS = {"device": "x", "torch": "2.13.0", "boot_id": "first"}


def write(
    root: Path,
    commit: str,
    seconds: Mapping[str, float],
    *,
    run: str = "r",
    day: int = 1,
    rounds: int = 5,
    facts: Mapping[str, object] | None = None,
    extra: tuple[Mapping[str, object], ...] = (),
    noise: sample.Noise | None = None,
) -> None:
    """One run of one case with true times and noise (GPU-like unless told), different for every run."""
    simulator = sample.Simulator(random.Random(f"{commit}{run}"), noise or sample.Noise())
    started = datetime(2026, 1, day, tzinfo=timezone.utc)
    records = [sample.run_record(run, commit, FACTS | dict(facts or {}), started=started)]
    records += [sample.round_record(run, k, CASE, simulator.blocks(seconds)) for k in range(rounds)]
    records += [dict(record) for record in extra]
    Store(root).append("machine", commit, records)


def compared(root: Path, base: str | None = None, head: str | None = None) -> Comparison:
    return compare(Store(root).load("machine"), base, head, folder=root)


def row_of(comparison: Comparison, variant: str) -> Row:
    return next(row for row in comparison.rows if row.variant == variant)


TIMES = {
    "eager_fp32": 1e-3, "compile_fp32": 6e-4, "eager_amp": 2e-3, "kitsune_dropin_fp32": 5e-4,
    "kitsune_trainstep_amp": 4e-3,
}  # fmt: skip


def test_variants_are_held_against_eager_and_the_best_peer_of_their_precision(tmp_path: Path) -> None:
    write(tmp_path, NEW, TIMES)

    comparison = compared(tmp_path)

    assert comparison.base is None
    assert comparison.changes == ()
    assert [row.variant for row in comparison.rows] == [
        "eager_fp32", "compile_fp32", "kitsune_dropin_fp32", "eager_amp", "kitsune_trainstep_amp",
    ]  # fmt: skip
    eager, compiled = row_of(comparison, "eager_fp32"), row_of(comparison, "compile_fp32")
    dropin, step = row_of(comparison, "kitsune_dropin_fp32"), row_of(comparison, "kitsune_trainstep_amp")
    assert eager.ratio is eager.verdict is eager.best_peer is None
    assert compiled.best_peer is None
    assert compiled.reference == dropin.reference == "eager_fp32"
    assert dropin.ratio is not None
    assert dropin.peer_ratio is not None
    assert dropin.ratio.ratio == pytest.approx(0.5, rel=0.03)
    assert dropin.peer_ratio.ratio == pytest.approx(5 / 6, rel=0.03)
    assert (dropin.best_peer, dropin.verdict, dropin.peer_verdict) == ("compile_fp32", Verdict.FASTER, Verdict.FASTER)
    assert (step.reference, step.best_peer, step.verdict) == ("eager_amp", "eager_amp", Verdict.SLOWER)
    assert dropin.seconds == pytest.approx(5e-4, rel=0.1)
    assert comparison.against_eager == {
        Verdict.FASTER: 1, Verdict.SAME: 0, Verdict.SLOWER: 1, Verdict.INCONCLUSIVE: 0,
    }  # fmt: skip


def test_summaries_are_geometric_means_over_cases(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path)
    comparison = compare(Store(tmp_path).load(GPU_MACHINE), folder=tmp_path)

    step = next(summary for summary in comparison.summaries if summary.variant == "kitsune_trainstep_amp")

    ratios = [row.ratio.ratio for row in comparison.rows if row.variant == step.variant and row.ratio]
    assert step.cases == 3
    assert step.over_eager.ratio == pytest.approx(math.prod(ratios) ** (-1 / 3))
    assert step.over_eager.low < step.over_eager.ratio < step.over_eager.high
    assert step.over_peer is not None
    assert step.over_peer.ratio < 1


def test_summaries_are_over_the_cases_that_all_variants_share(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, sweep=True)
    comparison = compare(Store(tmp_path).load(GPU_MACHINE), folder=tmp_path)
    assert len(comparison.cases) == 12
    assert {summary.cases for summary in comparison.summaries} == {3}
    assert len(comparison.summaries) == 6
    step = next(summary for summary in comparison.summaries if summary.variant == "kitsune_trainstep_amp")
    ratios = [row.ratio.ratio for row in comparison.rows if row.variant == step.variant and row.ratio and row.rounds]
    assert len(ratios) == 12
    shared = [
        row.ratio.ratio
        for row in comparison.rows
        if row.variant == step.variant and row.ratio and row.case.batch == (128 if row.case.model == "resnet18" else 64)
    ]
    assert step.over_eager.ratio == pytest.approx(math.prod(shared) ** (-1 / 3))


def test_without_arguments_the_newest_commit_is_held_against_the_one_before(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path)
    comparison = compare(Store(tmp_path).load(GPU_MACHINE), folder=tmp_path)

    assert comparison.head.sha == COMMITS[2]
    assert comparison.base is not None
    assert comparison.base.sha == COMMITS[1]
    assert [commit.sha for commit in comparison.commits] == list(COMMITS)


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        (COMMITS[0][:7], None, (0, 2)),
        (COMMITS[0], COMMITS[1][:4], (0, 1)),
        (COMMITS[2][:8].upper(), COMMITS[0], (2, 0)),
    ],
)
def test_commits_are_chosen_by_prefix(tmp_path: Path, base: str, head: str | None, expected: tuple[int, int]) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    comparison = compare(Store(tmp_path).load(GPU_MACHINE), base, head, folder=tmp_path)
    assert comparison.base is not None
    assert (comparison.base.sha, comparison.head.sha) == (COMMITS[expected[0]], COMMITS[expected[1]])


def test_a_planted_slowdown_is_a_regression_and_nothing_else_is(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, seed=1, slowdown=1.12)
    comparison = compare(Store(tmp_path).load(GPU_MACHINE), folder=tmp_path)

    slower = [change for change in comparison.changes if change.verdict is Verdict.SLOWER]

    assert [(change.case.model, change.variant) for change in slower] == [("lenet", "kitsune_trainstep_amp")]
    assert slower[0].ratio.low <= 1.12 <= slower[0].ratio.high
    assert comparison.regressions == 1


@pytest.mark.parametrize("seed", range(12))
def test_the_same_code_at_two_commits_is_no_regression(tmp_path: Path, seed: int) -> None:
    """12 histories of 12 rows: no false alarm. tests/harness/test_error_rates.py has the rates over many more."""
    sample.write_gpu_history(tmp_path, seed=seed)
    comparison = compare(Store(tmp_path).load(GPU_MACHINE), folder=tmp_path)
    assert len(comparison.changes) == 12
    assert comparison.regressions == 0


def test_a_slow_machine_is_no_regression(tmp_path: Path) -> None:
    write(tmp_path, OLD, TIMES, day=1)
    write(tmp_path, NEW, {variant: 1.4 * time for variant, time in TIMES.items()}, day=2)

    comparison = compared(tmp_path)

    assert len(comparison.changes) == 2
    assert comparison.regressions == 0
    assert row_of(comparison, "kitsune_dropin_fp32").seconds == pytest.approx(7e-4, rel=0.1)


def test_changes_name_the_machines_that_they_may_come_from(tmp_path: Path) -> None:
    """The host, which eager waits for, is another one at the newer commit; what the drop-in loop waits for is open."""
    times = {"eager_fp32": 1e-3, "compile_fp32": 2e-4, "kitsune_dropin_fp32": 5e-4}
    write(tmp_path, OLD, times, day=1)
    write(tmp_path, NEW, times | {"eager_fp32": 1.5e-3}, day=2, facts={"boot_id": "second"})

    comparison = compared(tmp_path)

    (change,) = comparison.changes
    assert change.verdict is Verdict.INCONCLUSIVE
    assert change.is_torn
    assert any("were measured on different machines of one kind" in note for note in comparison.notes)
    assert any("1 row(s) are inconclusive where controls differ by up to 5" in note for note in comparison.notes)

    unjudged = compare(Store(tmp_path).load("machine"), folder=tmp_path, judges_ratios=False)

    assert unjudged.changes == ()
    assert unjudged.notes == ("the commits were measured on different machines of one kind",)


def test_without_a_word_on_machines_they_may_be_two(tmp_path: Path) -> None:
    for commit, day in ((OLD, 1), (NEW, 2)):
        write(tmp_path, commit, TIMES, day=day, facts={"boot_id": None})
    comparison = compared(tmp_path)
    assert any("may have been measured on different machines" in note for note in comparison.notes)
    assert not any("controls differ" in note for note in comparison.notes)


def test_a_commit_against_itself_is_its_newest_run_against_the_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path, NEW, TIMES, run="one")
    with pytest.raises(ComparisonError, match="measured once; measure it again"):
        compared(tmp_path, NEW, NEW)

    write(tmp_path, NEW, TIMES, run="two", day=2)
    assert compared(tmp_path, NEW, NEW).regressions == 0

    write(tmp_path, NEW, TIMES | {"kitsune_dropin_fp32": 6e-4}, run="three", day=3)
    assert compared(tmp_path, NEW, NEW).regressions == 1


def test_runs_of_a_commit_are_pooled_only_within_one_environment(tmp_path: Path) -> None:
    write(tmp_path, NEW, TIMES, run="old torch", facts={"torch": "2.11.0"})
    write(tmp_path, NEW, TIMES, run="one", day=2)
    write(tmp_path, NEW, TIMES, run="two", day=3)

    comparison = compared(tmp_path)

    assert row_of(comparison, "eager_fp32").rounds == 10
    assert any("1 earlier run(s)" in note and "torch" in note for note in comparison.notes)


def test_a_changed_environment_between_commits_is_noted(tmp_path: Path) -> None:
    write(tmp_path, OLD, TIMES, facts={"torch": "2.11.0"})
    write(tmp_path, NEW, TIMES, day=2)
    assert any("torch: 2.11.0 → 2.13.0" in note for note in compared(tmp_path).notes)


def test_a_kitsune_variant_that_can_no_longer_be_measured_is_a_regression(tmp_path: Path) -> None:
    write(tmp_path, OLD, TIMES)
    left = {variant: time for variant, time in TIMES.items() if variant not in ("kitsune_dropin_fp32", "compile_fp32")}
    skips = tuple(
        sample.skip_record("r", CASE, variant, "it broke", "failed")
        for variant in ("kitsune_dropin_fp32", "compile_fp32")
    )
    write(tmp_path, NEW, left, day=2, extra=skips)

    comparison = compared(tmp_path)

    assert [entry.skip.variant for entry in comparison.lost] == ["kitsune_dropin_fp32"]
    assert comparison.regressions == 1
    assert [(group.status, group.variants) for group in comparison.skips] == [
        ("failed", ("kitsune_dropin_fp32", "compile_fp32"))
    ]


def test_a_base_that_comes_after_head_is_told(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    commits = []
    for name in ("older", "newer"):
        git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", name)
        commits.append(git(tmp_path, "rev-parse", "HEAD"))
        write(tmp_path, commits[-1], TIMES)
    older, newer = commits
    (note,) = compared(tmp_path, newer, older).notes
    assert note.startswith(f"BASE ({newer[:8]}) is newer than HEAD ({older[:8]})")
    assert compared(tmp_path, older, newer).notes == compared(tmp_path).notes == ()


def test_what_only_tells_what_something_contributes_is_judged_nowhere(tmp_path: Path) -> None:
    """Kitsune on one stream, or unfused, is timed and compared with eager, but is not what users run."""
    diagnostics = {"kitsune_trainstep_one_stream_amp": 3e-3, "kitsune_trainstep_unfused_amp": 3e-3}
    write(tmp_path, OLD, TIMES | diagnostics)
    slower = {"kitsune_trainstep_one_stream_amp": 6e-3}
    broken = sample.skip_record("r", CASE, "kitsune_trainstep_unfused_amp", "it broke", "failed")
    curve = sample.profile_record("r", CASE, "kitsune_trainstep_one_stream_amp", random.Random(0))
    write(tmp_path, NEW, TIMES | slower, day=2, extra=(broken, curve))

    comparison = compared(tmp_path)

    assert comparison.regressions == 0
    assert (len(comparison.changes), comparison.lost) == (2, ())
    row = row_of(comparison, "kitsune_trainstep_one_stream_amp")
    assert row.is_kitsune
    assert row.verdict is Verdict.SLOWER
    assert row.best_peer is row.peer_ratio is None
    users = ["kitsune_dropin_fp32", "kitsune_trainstep_amp"]
    assert sum(comparison.against_eager.values()) == sum(comparison.against_peers.values()) == 2
    assert [summary.variant for summary in comparison.summaries] == users
    assert [series.variant for series in comparison.history] == users
    assert comparison.losses == ()
    assert [entry.variant for entry in comparison.compared_rows_of(row.case) if entry.is_kitsune] == users


@pytest.mark.parametrize(("status", "lost"), [("left out", 0), ("skipped", 1), ("failed", 1)])
def test_what_the_profile_left_out_is_not_lost(tmp_path: Path, status: str, lost: int) -> None:
    write(tmp_path, OLD, TIMES)
    skip = sample.skip_record("r", CASE, "kitsune_dropin_fp32", "why", status)
    write(tmp_path, NEW, {"eager_fp32": 1e-3}, day=2, extra=(skip,))
    comparison = compared(tmp_path)
    assert len(comparison.lost) == comparison.regressions == lost
    assert [(group.status, group.reason) for group in comparison.skips] == [(status, "why")]


@pytest.mark.parametrize(("status", "shown"), [("left out", 0), ("failed", 1)])
def test_what_was_timed_before_is_shown_only_if_it_then_broke(tmp_path: Path, status: str, shown: int) -> None:
    write(tmp_path, NEW, TIMES, run="one")
    skip = sample.skip_record("two", CASE, "kitsune_dropin_fp32", "why", status)
    write(tmp_path, NEW, {"eager_fp32": 1e-3}, run="two", day=2, extra=(skip,))
    assert len(compared(tmp_path).skips) == shown


def test_a_skip_that_a_later_run_overtook_is_not_shown(tmp_path: Path) -> None:
    skip = sample.skip_record("one", CASE, "compile_fp32", "not part of the quick profile")
    write(tmp_path, NEW, {"eager_fp32": 1e-3}, run="one", extra=(skip,))
    assert len(compared(tmp_path).skips) == 1
    write(tmp_path, NEW, TIMES, run="two", day=2)
    assert compared(tmp_path).skips == ()


def test_losses_are_held_against_eager_fp32(tmp_path: Path) -> None:
    curves = {
        "eager_fp32": [[0, 2.3], [10, 0.3]],
        "compile_fp32": [[0, 2.3], [10, 0.32]],
        "kitsune_dropin_fp32": [[0, 2.3], [10, 0.9]],
        "eager_amp": [[0, 2.3], [10, None]],
    }
    rng = random.Random(0)
    profiles = tuple(
        sample.profile_record("r", CASE, variant, rng) | {"losses": curve} for variant, curve in curves.items()
    )
    write(tmp_path, NEW, TIMES, extra=profiles)

    comparison = compared(tmp_path)

    parities = {row.variant: row.parity for row in comparison.rows}
    assert parities == {
        "eager_fp32": Parity.AGREES, "compile_fp32": Parity.AGREES, "kitsune_dropin_fp32": Parity.DIFFERS,
        "eager_amp": Parity.DIVERGED, "kitsune_trainstep_amp": None,
    }  # fmt: skip
    assert row_of(comparison, "kitsune_dropin_fp32").loss_gap == pytest.approx(0.3)
    assert len(comparison.losses) == 4


def test_break_even_is_given_only_where_the_verdict_is_clear(tmp_path: Path) -> None:
    times = {"eager_fp32": 1e-3, "compile_fp32": 1e-3, "kitsune_dropin_fp32": 5e-4, "kitsune_trainstep_fp32": 2e-3}
    rng = random.Random(0)
    setups = {"eager_fp32": 0.0, "compile_fp32": 20.0, "kitsune_dropin_fp32": 1.0, "kitsune_trainstep_fp32": 1.0}
    profiles = tuple(
        sample.profile_record("r", CASE, variant, rng) | {"setup_s": setup} for variant, setup in setups.items()
    )
    write(tmp_path, NEW, times, extra=profiles)

    steps = {row.variant: row.break_even_steps for row in compared(tmp_path).rows}

    assert steps["eager_fp32"] is steps["compile_fp32"] is None
    assert steps["kitsune_dropin_fp32"] == pytest.approx(2000, rel=0.1)
    assert steps["kitsune_trainstep_fp32"] == math.inf


def test_set_up_with_warm_caches_is_earned_back_by_itself(tmp_path: Path) -> None:
    times = {"eager_fp32": 1e-3, "compile_fp32": 8e-4, "kitsune_dropin_fp32": 5e-4}
    rng = random.Random(0)
    told = {
        "eager_fp32": {"setup_s": 0.0, "caches": None, "setup_again_s": None},
        "compile_fp32": {"setup_s": 2.0, "caches": "warm", "setup_again_s": None},
        "kitsune_dropin_fp32": {
            "setup_s": 4.0, "caches": "cold", "setup_again_s": 1.0, "first_replay_s": 3.0, "first_replay_again_s": 0.5,
        },
    }  # fmt: skip
    write(tmp_path, NEW, times, extra=[sample.profile_record("r", CASE, name, rng) | told[name] for name in told])

    rows = {row.variant: row for row in compared(tmp_path).rows}

    assert (rows["eager_fp32"].setup_s, rows["eager_fp32"].warm_setup_s) == (0.0, None)
    assert (rows["compile_fp32"].setup_s, rows["compile_fp32"].warm_setup_s) == (None, 2.0)
    assert rows["compile_fp32"].break_even_steps is None
    assert rows["compile_fp32"].warm_break_even_steps == pytest.approx(10_000, rel=0.2)
    assert (rows["kitsune_dropin_fp32"].setup_s, rows["kitsune_dropin_fp32"].warm_setup_s) == (4.0, 1.0)
    assert (rows["kitsune_dropin_fp32"].first_replay_s, rows["kitsune_dropin_fp32"].warm_first_replay_s) == (3.0, 0.5)
    assert (rows["compile_fp32"].first_replay_s, rows["compile_fp32"].warm_first_replay_s) == (None, None)
    assert rows["kitsune_dropin_fp32"].break_even_steps == pytest.approx(8000, rel=0.1)
    assert rows["kitsune_dropin_fp32"].warm_break_even_steps == pytest.approx(2000, rel=0.1)


def test_a_first_replay_belongs_to_the_set_up_that_it_is_part_of(tmp_path: Path) -> None:
    profile = sample.profile_record("r", CASE, "kitsune_dropin_fp32", random.Random(0))
    seconds = {"setup_s": 1.0, "setup_again_s": None, "first_replay_s": 0.5, "first_replay_again_s": None}
    write(tmp_path, NEW, TIMES, extra=[profile | seconds | {"caches": "warm"}])
    row = row_of(compared(tmp_path), "kitsune_dropin_fp32")
    assert (row.setup_s, row.first_replay_s) == (None, None)
    assert (row.warm_setup_s, row.warm_first_replay_s) == (1.0, 0.5)


def test_what_earlier_versions_called_warm_is_not_believed(tmp_path: Path) -> None:
    """Peers of all cases had their caches in common: these were warm once any case had been compiled."""
    profile = sample.profile_record("r", CASE, "compile_fp32", random.Random(0))
    write(tmp_path, NEW, TIMES, extra=[profile | {"setup_s": 2.0, "caches": "warm"}])
    row = row_of(compared(tmp_path), "compile_fp32")
    assert (row.setup_s, row.warm_setup_s) == (2.0, None)


def test_history_follows_kitsune_over_the_commits(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path)
    comparison = compare(Store(tmp_path).load(GPU_MACHINE), folder=tmp_path)

    lengths = {(series.case.model, series.variant): len(series.points) for series in comparison.history}

    assert len(lengths) == 18
    assert lengths["mlp", "kitsune_dropin_fp32"] == 3
    assert lengths["mlp", "kitsune_trainstep_fp32"] == 2  # the first commit has no TrainStep


def test_a_noisy_benchmark_has_a_wider_margin(tmp_path: Path) -> None:
    times = {"eager_fp32": 1e-3, "kitsune_dropin_fp32": 5e-4}
    for day, commit in enumerate((OLD, NEW), start=1):
        write(tmp_path / "quiet", commit, times, day=day)
        write(tmp_path / "noisy", commit, times, day=day, noise=sample.Noise(process=0.03))

    (quiet,), (noisy,) = (compared(tmp_path / name).changes for name in ("quiet", "noisy"))

    assert quiet.margin == 0.03
    assert 0.04 < noisy.margin <= 0.1
    assert row_of(compared(tmp_path / "noisy"), "kitsune_dropin_fp32").margin > 0.03


def test_a_restless_history_widens_a_margin_within_bounds(tmp_path: Path) -> None:
    noise = sample.Noise(process=0.015)
    for day in range(1, 12):
        seconds = {"eager_fp32": 1e-3, "kitsune_dropin_fp32": 5e-4 * (1.05 if day % 2 else 1)}
        for name in ("long", "short") if day >= 10 else ("long",):
            write(tmp_path / name, f"{day:040x}", seconds, day=day, noise=noise)

    (long,), (short,) = (compared(tmp_path / name).changes for name in ("long", "short"))

    assert short.margin < long.margin <= 0.1
    assert long.margin <= 1.05 * 2 * short.margin


@pytest.mark.parametrize(
    ("old", "new", "told"), [(5, 4, "0 of 1 rows falsely flagged"), (3, 4, "4 rounds of each commit, not for 3")]
)
def test_error_rates_are_told_for_the_fewest_rounds_that_verdicts_rest_on(
    old: int, new: int, told: str, tmp_path: Path
) -> None:
    write(tmp_path, OLD, TIMES, rounds=old)
    write(tmp_path, NEW, TIMES, day=2, rounds=new)
    method = {"margin": 0.03, "commit": None, "effort": {}, "cases": [], "variants": [], "slowdowns": [0.0]}
    begun = outcome.begun(tmp_path / "machine", datetime(2026, 1, 1, tzinfo=timezone.utc), FACTS, method)
    row = JudgedRow("mlp-b64", "eager_fp32", 0.0, 1.0, 0.99, 1.01, 0.03, 4, {outcome.HARNESS: "same"})
    outcome.write(replace(begun, rows=(row,)))
    notes = [note for note in compared(tmp_path).notes if "error rates" in note]
    assert len(notes) == 1
    assert told in notes[0]


def test_one_round_gives_ratios_without_verdicts(tmp_path: Path) -> None:
    write(tmp_path, NEW, TIMES, rounds=1)
    assert compared(tmp_path).against_eager[Verdict.INCONCLUSIVE] == 2


@pytest.mark.parametrize(
    ("base", "words"),
    [("nonsense", "'nonsense' is not measured on machine"), ("111", "not measured"), ("f" * 40, "not measured")],
)
def test_an_unknown_revision_is_told_what_is_measured(tmp_path: Path, base: str, words: str) -> None:
    write(tmp_path, OLD, TIMES)
    with pytest.raises(ComparisonError, match=words) as caught:
        compared(tmp_path, base)
    assert "oldest first: 11111111" in str(caught.value)


def test_an_ambiguous_prefix_is_told_what_it_fits(tmp_path: Path) -> None:
    for commit in ("abcd1" + "0" * 35, "abcd2" + "0" * 35):
        write(tmp_path, commit, TIMES)
    with pytest.raises(ComparisonError, match="abcd1000, abcd2000; give more"):
        compared(tmp_path, "abcd")


def test_a_commit_without_timings_cannot_be_compared(tmp_path: Path) -> None:
    write(tmp_path, NEW, TIMES, rounds=0)
    with pytest.raises(ComparisonError, match="no readable timings"):
        compared(tmp_path)


def test_the_machine_is_this_one_or_the_latest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ComparisonError, match=r"no results in .*--results"):
        choose_machine(store, None, "here")
    sample.write_gpu_history(tmp_path, rounds=1)
    sample.write_cpu_history(tmp_path, rounds=1)

    assert choose_machine(store, None, sample.GPU_MACHINE) == sample.GPU_MACHINE
    assert choose_machine(store, None, "elsewhere") == sample.CPU_MACHINE
    assert choose_machine(store, sample.GPU_MACHINE, sample.CPU_MACHINE) == sample.GPU_MACHINE
    with pytest.raises(ComparisonError, match=f"there are: {sample.GPU_MACHINE}, {sample.CPU_MACHINE}"):
        choose_machine(store, "elsewhere", sample.CPU_MACHINE)


def test_a_lasting_change_of_level_is_told_with_its_commits(tmp_path: Path) -> None:
    for day in range(1, 25):
        seconds = {"eager_fp32": 1e-3, "kitsune_dropin_fp32": 5e-4 * (1.08 if day > 14 else 1)}
        facts = {"driver": "580" if day < 20 else "581"}
        write(tmp_path, f"{day:040x}", seconds, day=day, rounds=2, facts=facts)

    comparison = compared(tmp_path)

    (series,) = comparison.history
    (change,) = series.changes
    assert int(change.first.sha, 16) == 15
    assert change.is_worse
    (environment,) = comparison.environment_changes
    assert (int(environment.commit.sha, 16), environment.facts) == (20, {"driver": ("580", "581")})
    shown = render.text(comparison)
    assert "Changes of level" in shown
    assert "driver: 580 → 581" in shown
    assert json.loads(render.json_document(comparison))["level_changes"][0]["first"] == change.first.sha
    assert "Changes of the environment" in render.markdown(comparison)
