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
    "kitsune_dropin_fp32": 4e-3,
    "kitsune_trainstep_fp32": 2e-3,
    "kitsune_trainstep_streams_fp32": 1.6e-3,
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
    return found[0]


def test_each_stage_is_compared_with_eager_and_with_the_one_before(tmp_path: Path) -> None:
    stages = measured_breakdown(tmp_path, SECONDS).stages
    assert [stage.stage for stage in stages] == list(Stage)
    assert [stage.variant for stage in stages] == list(SECONDS)
    assert [stage.seconds for stage in stages] == pytest.approx([1.25 * time for time in SECONDS.values()])
    assert [stage.speedup and stage.speedup.ratio for stage in stages] == [None, *map(pytest.approx, (2, 4, 5))]
    assert [stage.gain and stage.gain.ratio for stage in stages] == [None, *map(pytest.approx, (2, 2, 1.25))]
    assert stages[3].gain is not None
    assert stages[3].gain.has_interval
    assert not any(stage.is_own or stage.missing for stage in stages)


def test_a_gap_is_named_and_the_next_stage_compared_with_the_last_known_one(tmp_path: Path) -> None:
    seconds = {
        variant: time for variant, time in SECONDS.items() if "dropin" not in variant and "streams" not in variant
    }
    eager, dropin, whole, streams = measured_breakdown(tmp_path, seconds).stages
    assert eager.seconds is not None
    assert (dropin.seconds, dropin.missing, dropin.gain) == (None, "not measured", None)
    assert whole.gain is not None
    assert whole.gain.ratio == pytest.approx(4)
    assert (streams.seconds, streams.missing) == (None, "not measured")


def test_without_eager_nothing_is_over_eager(tmp_path: Path) -> None:
    seconds = {variant: time for variant, time in SECONDS.items() if "eager" not in variant}
    stages = measured_breakdown(tmp_path, seconds).stages
    assert [stage.speedup for stage in stages] == [None] * 4
    assert [stage.gain is None for stage in stages] == [True, True, False, False]


def test_kitsunes_own_times_stand_in_for_a_variant_with_streams(tmp_path: Path) -> None:
    """Of several schedules on streams the fastest counts, whether it is in use or not."""
    seconds = {variant: time for variant, time in SECONDS.items() if "streams" not in variant}
    schedules = [
        sample.schedule_time("in order", 1, 2500.0),
        sample.schedule_time("chains", 4, 2100.0),
        sample.schedule_time("list", 2, 2000.0),
        sample.schedule_time("list", 3, None),
    ]
    _, dropin, whole, streams = measured_breakdown(tmp_path, seconds, {"schedules": schedules}).stages
    assert (whole.seconds, streams.seconds) == (pytest.approx(2.5e-3), pytest.approx(2e-3))
    assert whole.is_own
    assert streams.is_own
    assert not dropin.is_own
    assert streams.gain is not None
    assert streams.gain.ratio == pytest.approx(1.25)
    assert not streams.gain.has_interval


def test_own_times_give_way_to_measured_ones(tmp_path: Path) -> None:
    schedules = [sample.schedule_time("in order", 1, 9.0), sample.schedule_time("list", 2, 9.0)]
    assert not any(stage.is_own for stage in measured_breakdown(tmp_path, SECONDS, {"schedules": schedules}).stages)


IN_ORDER = {"num_streams": 1, "measured_us": 9.0}


@pytest.mark.parametrize(
    "schedules",
    [
        None, {}, [], [IN_ORDER], [IN_ORDER, IN_ORDER], [{"num_streams": 2, "measured_us": 9.0}], [IN_ORDER, 7],
        [IN_ORDER, {"num_streams": 2}], [IN_ORDER, {"num_streams": 2, "measured_us": None}],
        [IN_ORDER, {"num_streams": 2, "measured_us": 0}], [IN_ORDER, {"num_streams": 2, "measured_us": True}],
        [IN_ORDER, {"num_streams": 2, "measured_us": "9"}], [IN_ORDER, {"num_streams": 2, "measured_us": 1e300}],
        [IN_ORDER, {"num_streams": 0, "measured_us": 9.0}], [IN_ORDER, {"num_streams": 2.0, "measured_us": 9.0}],
    ],
)  # fmt: skip
def test_own_times_that_cannot_be_used_are_left_out(tmp_path: Path, schedules: object) -> None:
    seconds = {variant: time for variant, time in SECONDS.items() if "streams" not in variant}
    *_, whole, streams = measured_breakdown(tmp_path, seconds, {"mode": "replay", "schedules": schedules}).stages
    assert not whole.is_own
    assert streams.missing == "not measured"


def test_a_stage_that_fell_back_says_so(tmp_path: Path) -> None:
    assert measured_breakdown(tmp_path, SECONDS, {"mode": "eager"}).stages[2].mode == "eager"


def test_stages_multiply_to_the_whole(tmp_path: Path) -> None:
    """With noise too: each round's drift cancels, so the gains of the stages give the last one's speed-up."""
    sample.write_gpu_history(tmp_path)
    store = Store(tmp_path)
    for breakdown in breakdowns(measurement(store.load(sample.GPU_MACHINE), sample.COMMITS[2])):
        stages = [stage for stage in breakdown.stages if stage.gain is not None]
        product = math.prod(stage.gain.ratio for stage in stages if stage.gain is not None)
        assert stages[-1].speedup is not None
        assert product == pytest.approx(stages[-1].speedup.ratio, rel=0.02)
