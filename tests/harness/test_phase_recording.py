"""Phases of real steps, profiled in processes of their own."""

import gzip
import json

import pytest
import torch

from harness import variants
from harness.measure import Task
from harness.phase_recording import PhasesJob, PhasesResult, measure_phases
from harness.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, STEP, WHOLE
from harness.processes import Launcher
from harness.profiles import PHASE_STEPS, Case, effort
from harness.variants.building import start
from harness.variants.training import prepare

CASE = Case("mlp", 4, "cpu", 12)
LOOP = [DATA, FORWARD, BACKWARD, OPTIMIZER, OTHER]


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher()


def divided(launcher: Launcher, case: Case, variant: str) -> PhasesResult:
    job = PhasesJob(case, Task(variant), effort("check", case.device_type))
    return launcher.run(measure_phases, job, timeout_s=240)


def test_the_phases_of_a_loop_are_told_apart(launcher: Launcher) -> None:
    result = divided(launcher, CASE, "eager_fp32")
    assert list(result.times.phases_s) == LOOP
    assert (result.times.clock, result.times.host_gap_s) == ("wall", None)
    for phase, times in result.times.phases_s.items():
        assert len(times) == PHASE_STEPS, phase
        assert all(time > 0 for time in times), phase
    assert result.trace.content is not None
    events = json.loads(gzip.decompress(result.trace.content))["traceEvents"]
    assert sum(event["name"] == STEP for event in events) == 2
    assert result.trace.shortened is None
    assert any(event["name"] == "aten::linear" for event in events)


def test_a_step_in_one_call_is_one_phase(launcher: Launcher) -> None:
    assert list(divided(launcher, CASE, "kitsune_trainstep_fp32").times.phases_s) == [WHOLE, OTHER]


def test_kitsune_s_loop_has_the_phases_of_any_other(launcher: Launcher) -> None:
    assert list(divided(launcher, CASE, "kitsune_dropin_fp32").times.phases_s) == LOOP


@pytest.mark.parametrize("variant", ["eager_fp32", "kitsune_dropin_fp32", "kitsune_trainstep_fp32"])
def test_a_step_in_phases_trains_as_any_other(variant: str) -> None:
    cpu = torch.device("cpu")
    described = variants.get(variant)
    plain, phased = (start(described, prepare(described, "mlp", 4, cpu)) for _ in range(2))
    seen: list[str] = []

    def mark(phase: str) -> torch.autograd.profiler.record_function:
        seen.append(phase)
        return torch.autograd.profiler.record_function(phase)

    losses = [(plain.run(1).item(), phased.run_in_phases(mark).item()) for _ in range(12)]
    assert all(one == pytest.approx(other, rel=1e-6) for one, other in losses)
    assert set(seen) == ({WHOLE} if "trainstep" in variant else {DATA, FORWARD, BACKWARD, OPTIMIZER})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "phases"),
    [
        ("eager_fp32", {DATA, FORWARD, BACKWARD, OPTIMIZER}),
        ("kitsune_dropin_fp32", {DATA, FORWARD, BACKWARD, OPTIMIZER}),
        ("handcaptured_fp32", {WHOLE}),
    ],
)
def test_the_device_s_time_is_told_apart(variant: str, phases: set[str]) -> None:
    result = divided(Launcher("spawn"), Case("mlp", 64, "cuda", 12), variant)
    times = result.times
    assert times.clock == "device"
    assert phases <= set(times.phases_s) <= phases | {OTHER}
    assert times.host_gap_s is not None
    for phase in phases - {DATA}:
        assert all(time > 0 for time in times.phases_s[phase]), phase
    assert DATA not in phases or not any(times.phases_s[DATA]), "batches lie on the device"
    if variant == "eager_fp32":
        assert sum(times.host_gap_s) > 0, "a small eager step is bound by the host"
    assert result.trace.content is not None
