from datetime import datetime, timezone
from pathlib import Path

import pytest

from harness.breakdown import breakdowns
from harness.replay_plans import ReplayPlan
from harness.selection import Measurement, measurement
from harness.stats import Verdict, paired_ratio
from harness.store import Store
from harness.stream_gains import StreamGain, largest_gain, stream_gains
from tests.harness import sample

MARGIN = 0.03


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    root = tmp_path_factory.mktemp("results")
    sample.write_gpu_history(root, sweep=True)
    return measurement(Store(root).load(sample.GPU_MACHINE), sample.COMMITS[2])


@pytest.fixture(scope="module")
def gains(measured: Measurement) -> tuple[StreamGain, ...]:
    return stream_gains(measured, breakdowns(measured), MARGIN)


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


def test_the_plans_are_those_of_the_rounds(gains: tuple[StreamGain, ...]) -> None:
    in_order, on_streams = ReplayPlan("in order", 1, fused=True), ReplayPlan("list", 2, fused=True)
    plans = {(gain.case.name, gain.precision): gain.plans for gain in gains}
    assert plans["lenet-b64", "fp32"] == (in_order, on_streams, on_streams, in_order, on_streams)
    assert plans["lenet-b512", "amp"] == (in_order,) * 5
    assert plans["mlp-b64", "amp"] == (None,) * 5


def test_the_profiled_plan_is_told_where_it_is_known(gains: tuple[StreamGain, ...]) -> None:
    plans = {(gain.case.name, gain.precision): gain.profiled_plan for gain in gains}
    assert plans["mlp-b64", "amp"] == ReplayPlan("list", 2, fused=True)
    assert plans["mlp-b64", "fp32"] == ReplayPlan("list", 1, fused=True)
    assert plans["mlp-b8", "amp"] is None


def gain_of(root: Path, *rounds: dict[str, object] | None) -> StreamGain:
    """What streams gain in one case, fp32: the plans of each round by form of ``TrainStep``."""
    case = sample.case_fields("mlp", 64, "cuda")
    started = datetime(2026, 1, 1, tzinfo=timezone.utc)
    records = [sample.run_record("run", sample.COMMITS[0], {"device": "x"}, started=started)]
    times = {"kitsune_trainstep_one_stream_fp32": [2e-3] * 3, "kitsune_trainstep_fp32": [1e-3] * 3}
    for index, plans in enumerate(rounds):
        told = None if plans is None else {f"kitsune_{form}_fp32": plan for form, plan in plans.items()}
        records.append(sample.round_record("run", index, case, times, told))
    Store(root).append("machine", sample.COMMITS[0], records)
    measured = measurement(Store(root).load("machine"), sample.COMMITS[0])
    (gain,) = stream_gains(measured, breakdowns(measured), MARGIN)
    return gain


IN_ORDER, ON_STREAMS = sample.plan_fields("in order"), sample.plan_fields("list", 2)
SAME: dict[str, object] = {"trainstep_one_stream": IN_ORDER, "trainstep": IN_ORDER}


def test_the_very_same_plan_in_all_rounds_is_no_gain(tmp_path: Path) -> None:
    gain = gain_of(tmp_path, SAME, SAME, SAME)
    assert (gain.is_same_plan, gain.verdict) == (True, Verdict.FASTER)
    assert largest_gain([gain]) is None


@pytest.mark.parametrize(
    "other",
    [
        None,
        {"trainstep": IN_ORDER},
        {"trainstep_one_stream": IN_ORDER},
        {"trainstep_one_stream": IN_ORDER, "trainstep": ON_STREAMS},
        {"trainstep_one_stream": sample.plan_fields("in order", fused=False), "trainstep": IN_ORDER},
    ],
)
def test_where_a_round_differs_or_does_not_tell_nothing_is_said(
    tmp_path: Path, other: dict[str, object] | None
) -> None:
    gain = gain_of(tmp_path, SAME, SAME, other)
    assert not gain.is_same_plan
    assert largest_gain([gain]) == 64


def test_without_a_pair_there_is_no_gain(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    measured = measurement(Store(tmp_path).load(sample.CPU_MACHINE), sample.COMMITS[2])
    assert breakdowns(measured)
    assert stream_gains(measured, breakdowns(measured), MARGIN) == ()


def test_times_of_different_rounds_are_no_pair(tmp_path: Path) -> None:
    """Both variants have times, but no round timed both."""
    case = sample.case_fields("mlp", 64, "cuda")
    facts = {"device": "x"}
    started = datetime(2026, 1, 1, tzinfo=timezone.utc)
    records = [sample.run_record("run", sample.COMMITS[0], facts, started=started)]
    for index, name in enumerate(("kitsune_trainstep_fp32", "kitsune_trainstep_one_stream_fp32")):
        records.append(sample.round_record("run", index, case, {name: [1e-3]}))
    Store(tmp_path).append("machine", sample.COMMITS[0], records)
    measured = measurement(Store(tmp_path).load("machine"), sample.COMMITS[0])
    assert stream_gains(measured, breakdowns(measured), MARGIN) == ()
