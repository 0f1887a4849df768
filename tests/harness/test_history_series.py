"""Changes of level over invented histories in which machines change as well as the code, and over real ones."""

import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from harness.comparison import compare
from harness.rows import Series
from harness.store import Store
from tests.harness import sample

RESULTS = Path(__file__).parents[2] / "results"
NUM_COMMITS, CHANGED = 12, 6
"""From the seventh commit on something is different."""

EAGER, CAPTURED, DROPIN, STEP = (
    "eager_fp32", "handcaptured_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32",
)  # fmt: skip
TIMES = {EAGER: 2e-3, CAPTURED: 2.9e-4, DROPIN: 9e-4, STEP: 2e-4}
SHORT = TIMES | {STEP: 5e-5}


def series(
    root: Path, before: Mapping[str, float], after: Mapping[str, float], device: str = "cuda"
) -> dict[str, Series]:
    """The series of a history whose true times change once."""
    for number in range(NUM_COMMITS):
        commit = f"{number + 1:040x}"
        simulator = sample.Simulator(random.Random(number), sample.Noise(process=0.002, block=0.004))
        started = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=number)
        case = sample.case_fields("mlp", 64, device)
        seconds = before if number < CHANGED else after
        records = [sample.run_record("r", commit, {"device": "x"}, started=started)]
        records += [sample.round_record("r", index, case, simulator.blocks(seconds)) for index in range(3)]
        Store(root).append("machine", commit, records)
    found = compare(Store(root).load("machine"), folder=root).history
    return {entry.variant: entry for entry in found}


def slowed(times: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds * factors.get(name, 1.0) for name, seconds in times.items()}


def ratios(entry: Series) -> Sequence[float]:
    return [change.ratio for change in entry.changes]


@pytest.mark.parametrize("factor", [0.6, 1.7])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("times", [TIMES, SHORT])
def test_another_host_is_no_change_of_the_code(
    tmp_path: Path, times: Mapping[str, float], factor: float, share: float
) -> None:
    """Whatever share of the time of a drop-in loop, or of a step shorter than all peers, is the host's."""
    partly = 1 + share * (factor - 1)
    factors = {EAGER: factor, DROPIN: partly} | ({STEP: partly} if times is SHORT else {})
    found = series(tmp_path, times, slowed(times, factors))
    assert {entry.control for entry in found.values()} == {CAPTURED}
    assert [entry.changes for entry in found.values()] == [(), ()]


def test_a_step_of_the_device_has_changed_whatever_the_host(tmp_path: Path) -> None:
    found = series(tmp_path, TIMES, slowed(TIMES, {EAGER: 0.8, DROPIN: 0.8, STEP: 0.9}))
    assert ratios(found[STEP]) == pytest.approx([0.9], rel=0.01)
    assert found[STEP].changes[0].first.sha == f"{CHANGED + 1:040x}"
    assert ratios(found[DROPIN]) == []


def test_of_another_step_the_least_that_a_control_leaves_is_told(tmp_path: Path) -> None:
    found = series(tmp_path, SHORT, slowed(SHORT, {EAGER: 0.8, STEP: 0.4, DROPIN: 0.7}))
    assert ratios(found[STEP]) == pytest.approx([0.5], rel=0.02)
    assert ratios(found[DROPIN]) == pytest.approx([0.7 / 0.8], rel=0.02)


@pytest.mark.parametrize(("eager", "expected"), [(1.5, []), (1.0, [0.7])])
def test_where_nothing_was_captured_by_hand_the_seconds_must_agree(
    tmp_path: Path, eager: float, expected: list[float]
) -> None:
    times = {name: seconds for name, seconds in TIMES.items() if name != CAPTURED}
    step = 1.0 if eager > 1 else 0.7
    found = series(tmp_path, times, slowed(times, {EAGER: eager, STEP: step}))
    assert found[STEP].control == EAGER
    assert ratios(found[STEP]) == pytest.approx(expected, rel=0.03)


def test_on_a_cpu_all_wait_for_the_host(tmp_path: Path) -> None:
    times = {EAGER: 2e-3, DROPIN: 9e-4}
    found = series(tmp_path, times, slowed(times, {EAGER: 1.5, DROPIN: 1.5 * 1.1}), "cpu")
    assert ratios(found[DROPIN]) == pytest.approx([1.1], rel=0.02)


def test_on_real_machines_what_is_told_is_in_the_seconds() -> None:
    """The hosts of the newer commits take up to twice as long, which ratios to eager would call faster."""
    history = compare(Store(RESULTS).load("nvidia-h200"), "e6f48508", "1add5dc3", folder=RESULTS).history
    found = [(entry, change) for entry in history for change in entry.changes]
    assert not any("dropin" in entry.variant for entry, _ in found)
    for entry, change in found:
        seconds = {point.commit.sha: point.seconds for point in entry.points}
        moved = seconds[change.latest.sha] / seconds[change.before.sha]
        assert (moved > 1) == change.is_worse
        assert abs(1 - moved) > 0.02
    told = {(entry.case.name, entry.variant, change.first.short) for entry, change in found}
    assert ("resnet18-b128", STEP, "ad91e553") in told
    assert ("lenet-b64", "kitsune_trainstep_amp", "3db23909") in told
