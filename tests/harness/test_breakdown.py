import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from harness.breakdown import Breakdown, Stage, breakdowns
from harness.selection import measurement
from harness.store import Store
from tests.harness import sample

COMMIT = sample.COMMITS[0]
SECONDS = {
    "eager_fp32": 8e-3,
    "kitsune_dropin_unfused_fp32": 4e-3,
    "kitsune_trainstep_unfused_fp32": 2e-3,
    "kitsune_trainstep_one_stream_fp32": 1.6e-3,
    "kitsune_trainstep_fp32": 1.28e-3,
}


def measured_breakdown(root: Path, seconds: dict[str, float], status: dict[str, Any] | None = None) -> Breakdown:
    """The fp32 breakdown of one case of which two rounds gave these times without noise."""
    case = sample.case_fields("mlp", 64, "cuda")
    records = [sample.run_record("run", COMMIT, {"device": "x"}, started=datetime(2026, 1, 1, tzinfo=timezone.utc))]
    for index, drift in enumerate((1.0, 1.5)):
        blocks = {variant: [drift * time] * 3 for variant, time in seconds.items()}
        records.append(sample.round_record("run", index, case, blocks))
    profile = sample.profile_record("run", case, "kitsune_trainstep_fp32", sample.random.Random(0))
    records.append(profile | {"kitsune": status or {"mode": "replay"}})
    records.append(sample.skip_record("run", case, "kitsune_trainstep_amp", "no autocast here"))
    Store(root).append("machine", COMMIT, records)
    found = breakdowns(measurement(Store(root).load("machine"), COMMIT))
    assert [breakdown.precision for breakdown in found] == ["fp32", "amp"]
    assert found[1].stages[2].missing == "skipped: no autocast here"
    for stage in found[1].stages[3:]:
        assert stage.missing == "there is no time without it to compare with (not measured)"
    return found[0]


def test_each_stage_is_compared_with_eager_and_with_the_one_before(tmp_path: Path) -> None:
    stages = measured_breakdown(tmp_path, SECONDS).stages
    assert [stage.stage for stage in stages] == list(Stage)
    assert [stage.variant for stage in stages] == list(SECONDS)
    assert [stage.seconds for stage in stages] == pytest.approx([1.25 * time for time in SECONDS.values()])
    assert [stage.speedup and stage.speedup.ratio for stage in stages] == [None, *map(pytest.approx, (2, 4, 5, 6.25))]
    assert [stage.gain and stage.gain.ratio for stage in stages] == [None, *map(pytest.approx, (2, 2, 1.25, 1.25))]
    assert stages[3].gain is not None
    assert stages[3].gain.has_interval
    assert not any(stage.missing for stage in stages)
    assert [stage.adds for stage in stages] == [(stage,) for stage in Stage]


def without(*words: str) -> dict[str, float]:
    return {variant: time for variant, time in SECONDS.items() if not any(word in variant for word in words)}


def test_a_gap_is_named_and_the_next_stage_compared_with_the_last_known_one(tmp_path: Path) -> None:
    _, dropin, whole, _, streams = measured_breakdown(tmp_path, without("dropin")).stages
    assert (dropin.seconds, dropin.missing, dropin.gain) == (None, "not measured", None)
    assert whole.gain is not None
    assert whole.gain.ratio == pytest.approx(4)
    assert whole.adds == (Stage.CAPTURED, Stage.WHOLE)
    assert streams.gain is not None
    assert streams.adds == (Stage.STREAMS,)


@pytest.mark.parametrize(
    ("absent", "whole", "rest"),
    [
        (("dropin", "unfused"), "capture, optimizer, fusion", ["operators fused", "streams"]),
        (("dropin", "unfused", "one_stream"), "capture, optimizer, fusion, streams", ["operators fused", "streams"]),
        (("dropin", "one_stream"), "capture, optimizer", ["operators fused", "fusion, streams"]),
    ],
)
def test_a_stage_is_called_by_everything_that_it_adds(
    tmp_path: Path, absent: tuple[str, ...], whole: str, rest: list[str]
) -> None:
    stages = measured_breakdown(tmp_path, without(*absent)).stages
    named = [stage.added for stage in stages]
    assert named == ["eager", "forward and backward captured", whole, *rest]


def test_without_the_forms_that_do_without_the_default_is_the_whole_step(tmp_path: Path) -> None:
    """As on a CPU, or where an earlier version of the harness measured."""
    seconds = without("one_stream", "unfused") | {"kitsune_dropin_fp32": 4e-3}
    _, captured, whole, fusion, streams = measured_breakdown(tmp_path, seconds).stages
    assert captured.variant == "kitsune_dropin_fp32"
    assert captured.adds == (Stage.CAPTURED, Stage.FUSION, Stage.STREAMS)
    assert whole.variant == streams.variant == "kitsune_trainstep_fp32"
    assert whole.seconds == pytest.approx(1.25 * 1.28e-3)
    assert whole.gain is not None
    assert whole.gain.ratio == pytest.approx(4 / 1.28)
    for stage in (fusion, streams):
        assert (stage.seconds, stage.speedup, stage.gain) == (None, None, None)
        assert stage.missing == "there is no time without it to compare with (not measured)"


def test_without_an_unfused_time_the_fused_step_is_the_whole_one(tmp_path: Path) -> None:
    *_, whole, fusion, streams = measured_breakdown(tmp_path, without("unfused")).stages
    assert (whole.variant, whole.seconds) == ("kitsune_trainstep_one_stream_fp32", pytest.approx(2e-3))
    assert fusion.missing == "there is no time without it to compare with (not measured)"
    assert streams.gain is not None
    assert streams.gain.ratio == pytest.approx(1.25)


def test_without_a_fused_time_on_one_stream_the_gap_is_named(tmp_path: Path) -> None:
    *_, fusion, streams = measured_breakdown(tmp_path, without("one_stream")).stages
    assert (fusion.seconds, fusion.missing) == (None, "not measured")
    assert streams.gain is not None
    assert streams.gain.ratio == pytest.approx(2 / 1.28)


def test_without_the_default_one_stream_is_the_last_stage(tmp_path: Path) -> None:
    *_, fusion, streams = measured_breakdown(tmp_path, without("trainstep_fp32")).stages
    assert (fusion.variant, fusion.seconds) == ("kitsune_trainstep_one_stream_fp32", pytest.approx(2e-3))
    assert (streams.seconds, streams.missing) == (None, "not measured")


def test_on_a_cpu_the_reason_is_that_of_the_variant(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    found = breakdowns(measurement(Store(tmp_path).load(sample.CPU_MACHINE), COMMIT))
    assert {part.stages[1].adds for part in found} == {(Stage.CAPTURED,)}
    assert {part.stages[3].missing for part in found} == {
        "there is no time without it to compare with (skipped: without CUDA nothing is fused)"
    }
    assert {part.stages[4].missing for part in found} == {
        "there is no time without it to compare with (skipped: without CUDA there are no streams to choose from)"
    }


def test_the_loop_that_defers_its_loss_is_no_stage(tmp_path: Path) -> None:
    """It has part of what later stages add, in another way."""
    stages = measured_breakdown(tmp_path, SECONDS | {"kitsune_deferred_fp32": 3e-3}).stages
    assert [stage.variant for stage in stages] == list(SECONDS)


def test_without_eager_nothing_is_over_eager(tmp_path: Path) -> None:
    stages = measured_breakdown(tmp_path, without("eager")).stages
    assert [stage.speedup for stage in stages] == [None] * 5
    assert [stage.gain is None for stage in stages] == [True, True, False, False, False]


def test_a_stage_that_fell_back_says_so(tmp_path: Path) -> None:
    assert measured_breakdown(tmp_path, SECONDS, {"mode": "eager"}).stages[4].mode == "eager"


def test_stages_multiply_to_the_whole(tmp_path: Path) -> None:
    """With noise too: each round's drift cancels, so the gains of the stages give the last one's speed-up."""
    sample.write_gpu_history(tmp_path)
    store = Store(tmp_path)
    for breakdown in breakdowns(measurement(store.load(sample.GPU_MACHINE), sample.COMMITS[2])):
        stages = [stage for stage in breakdown.stages if stage.gain is not None]
        product = math.prod(stage.gain.ratio for stage in stages if stage.gain is not None)
        assert stages[-1].speedup is not None
        assert product == pytest.approx(stages[-1].speedup.ratio, rel=0.02)
