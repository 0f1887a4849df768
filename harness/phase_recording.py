"""Profiles some steps of a variant to tell their phases apart. Runs in a process of its own, started for nothing else:
what a profiler costs never reaches a time that is judged.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from harness import caches, variants
from harness.measure import Task, begin_device, settle, warm_up
from harness.phases import STEP, Clock, KeptTrace, PhaseTimes, annotation, kept_trace, phase_times
from harness.profiles import PHASE_LEAD_IN_STEPS, PHASE_STEPS, Case, Effort
from harness.timer import synchronize
from harness.variants.building import start
from harness.variants.training import Training, prepare


@dataclass(frozen=True)
class PhasesJob:
    """One variant of a case, profiled alone."""

    case: Case
    task: Task
    effort: Effort


@dataclass(frozen=True)
class PhasesResult:
    """How long the phases of some steady steps took, and the trace of the last of these."""

    times: PhaseTimes
    trace: KeptTrace


def measure_phases(job: PhasesJob, note: Callable[[str], None]) -> PhasesResult:
    """Trains one variant into its steady state and profiles it there.

    Raises:
        Exception: whatever the variant raises.
        TraceError: the profiler saw too little.
    """
    variant = variants.get(job.task.variant)
    device = begin_device(job.case)
    caches.use(job.task.caches)
    note(f"setting up {variant.name}")
    training = start(variant, prepare(variant, job.case.model, job.case.batch, device))
    settle(training, lambda training: training.run(1), job.effort.settle_seconds)
    warm_up(training.run, device, job.effort.warm_up_seconds)
    note(f"profiling {variant.name}")
    trace = _profiled(training, device)
    note(f"reading the trace of {variant.name}")
    clock: Clock = "device" if device.type == "cuda" else "wall"
    return PhasesResult(phase_times(trace, clock, PHASE_LEAD_IN_STEPS), kept_trace(trace))


def _profiled(training: Training, device: torch.device) -> dict[str, object]:
    """The trace of the steps: some that let the host get ahead of the device, those that count, one to end them."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(PHASE_LEAD_IN_STEPS + PHASE_STEPS + 1):
            with record_function(STEP):
                training.run_in_phases(lambda phase: record_function(annotation(phase)))
        synchronize(device)
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        document: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return document
