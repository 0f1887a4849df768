from datetime import datetime, timezone
from pathlib import Path

import pytest

from harness.breakdown import breakdowns
from harness.selection import Measurement, measurement
from harness.stats import Verdict, paired_ratio
from harness.store import Store
from harness.stream_gains import StreamGain, stream_gains
from harness.timelines import timeline
from tests.harness import sample

MARGIN = 0.03


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root, sweep=True)
    return measurement(Store(root).load(sample.GPU_MACHINE), sample.COMMITS[2])


@pytest.fixture(scope="module")
def gains(measured: Measurement) -> tuple[StreamGain, ...]:
    plans = [timeline(case, variant, entry.kitsune) for (case, variant), entry in measured.profiles.items()]
    return stream_gains(breakdowns(measured), plans, MARGIN)


def test_every_pair_is_there_model_by_model_in_the_order_of_batch_sizes(gains: tuple[StreamGain, ...]) -> None:
    amp = [(gain.case.model, gain.case.batch) for gain in gains if gain.precision == "amp"]
    assert amp == [(model, batch) for model in ("mlp", "lenet", "resnet18") for batch in (8, 64, 128, 512)]
    fp32 = [(gain.case.model, gain.case.batch) for gain in gains if gain.precision == "fp32"]
    assert fp32 == [("mlp", 64), ("lenet", 64), ("resnet18", 128)], "the sweep is in one precision"


def test_a_gain_is_that_of_the_paired_rounds(gains: tuple[StreamGain, ...], measured: Measurement) -> None:
    for gain in gains:
        one_stream = f"kitsune_trainstep_one_stream_{gain.precision}"
        assert gain.variant == f"kitsune_trainstep_{gain.precision}"
        ratio = paired_ratio(measured.pairs(gain.case, one_stream, gain.variant))
        assert gain.gain.ratio == pytest.approx(ratio.ratio)
        assert (gain.gain.low, gain.gain.high) == (pytest.approx(ratio.low), pytest.approx(ratio.high))
        assert gain.one_stream_seconds / gain.chosen_seconds == pytest.approx(ratio.ratio, rel=0.05)


def test_the_verdict_is_on_the_chosen_plan(gains: tuple[StreamGain, ...]) -> None:
    verdicts = {(gain.case.name, gain.precision): gain.verdict for gain in gains}
    assert verdicts["lenet-b8", "amp"] is Verdict.FASTER
    assert verdicts["lenet-b512", "amp"] is Verdict.SAME


def test_the_plan_is_told_where_it_is_known(gains: tuple[StreamGain, ...]) -> None:
    plans = {(gain.case.name, gain.precision): (gain.num_streams, gain.strategy) for gain in gains}
    assert plans["mlp-b64", "amp"] == (2, "list")
    assert plans["mlp-b64", "fp32"] == (1, "list")
    assert plans["mlp-b8", "amp"] == (None, None)


def test_without_a_pair_there_is_no_gain(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    measured = measurement(Store(tmp_path).load(sample.CPU_MACHINE), sample.COMMITS[2])
    assert breakdowns(measured)
    assert stream_gains(breakdowns(measured), (), MARGIN) == ()


def test_times_of_different_rounds_are_no_pair(tmp_path: Path) -> None:
    """Both variants have times, but no round timed both."""
    case = sample.case_fields("mlp", 64, "cuda")
    facts = {"device": "x"}
    started = datetime(2026, 1, 1, tzinfo=timezone.utc)
    records = [sample.run_record("run", sample.COMMITS[0], facts, started=started)]
    for index, name in enumerate(("kitsune_trainstep_fp32", "kitsune_trainstep_one_stream_fp32")):
        records.append(sample.round_record("run", index, case, {name: [1e-3]}))
    Store(tmp_path).append("machine", sample.COMMITS[0], records)
    found = breakdowns(measurement(Store(tmp_path).load("machine"), sample.COMMITS[0]))
    assert stream_gains(found, (), MARGIN) == ()
