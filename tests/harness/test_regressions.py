from dataclasses import replace
from pathlib import Path

import pytest

from harness.comparison import compare
from harness.regressions import regressions
from harness.rows import Comparison, Contrast, LevelChange, Lost
from harness.stats import Estimate, Verdict
from harness.store import Skip, Store
from tests.harness import sample


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root, slowdown=1.12)
    return compare(Store(root).load(sample.GPU_MACHINE), folder=root)


def test_what_became_slower_is_told_with_what_is_allowed(slower: Comparison) -> None:
    (found,) = regressions(slower)
    change = next(entry for entry in slower.changes if entry.verdict is Verdict.SLOWER)
    assert (found.case, found.variant, found.metric) == (change.case, "kitsune_trainstep_amp", "time")
    assert (found.before, found.after) == (slower.base, slower.head)
    assert found.limit == pytest.approx(1 + change.margin)
    assert found.beyond == pytest.approx(change.ratio.low - 1 - change.margin)
    assert found.command == slower.commands_since_base()[change.case, change.variant]
    assert not found.is_level


def test_there_are_as_many_as_the_comparison_counts(slower: Comparison) -> None:
    case = slower.cases[0]
    skip = Skip("run", case.name, case.model, case.batch, case.device, "kitsune_dropin_amp", "amp", "failed", "broke")
    contrast = Contrast(
        case=case,
        variant="kitsune_dropin_fp32",
        base_variant="kitsune_dropin_fp32",
        precision="fp32",
        metric="memory",
        unit="bytes",
        base=100.0,
        head=110.0,
        ratio=Estimate(1.1, 0.0, float("inf"), 1, 1),
        margin=0.03,
        verdict=Verdict.SLOWER,
    )
    worse = replace(slower, lost=(Lost(case, skip),), contrasts=(contrast, replace(contrast, verdict=Verdict.SAME)))
    found = regressions(worse)
    assert len(found) == worse.regressions == 3
    assert [entry.metric for entry in found] == ["time", "time", "memory"], "what was lost, then by size"
    assert (found[0].ratio, found[0].beyond, found[0].reason) == (None, None, "failed: broke")
    assert found[2].beyond == pytest.approx(0.07), "of single values, the value itself"


def test_a_level_that_became_worse_is_measured_again_on_both_sides(slower: Comparison) -> None:
    series = next(entry for entry in slower.history if entry.variant == "kitsune_trainstep_fp32")
    before, first = (point.commit for point in series.points[-2:])
    change = LevelChange(before, first, first, missing=0, ratio=1.1, p_value=0.003, is_worse=True)
    better = replace(change, ratio=0.9, is_worse=False)
    found = regressions(replace(slower, history=(replace(series, changes=(better, change)),)))
    assert [entry.is_level for entry in found] == [False, True]
    level = found[1]
    assert (level.before, level.after, level.p_value, level.limit) == (before, first, 0.003, 1.02)
    assert level.command == (
        f"python -m harness.run {before.sha[:12]} {first.sha[:12]} --profile quick --case {series.case.name}"
        " --variant eager_fp32 --variant handcaptured_fp32 --variant kitsune_trainstep_fp32"
    )


def test_without_an_older_commit_nothing_became_worse(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    alone = compare(Store(tmp_path).load(sample.GPU_MACHINE, [sample.COMMITS[0]]), folder=tmp_path)
    assert regressions(alone) == ()
