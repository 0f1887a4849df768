"""One model's training step with Kitsune against eager PyTorch, without asv: for tests of other projects.

The instrument and the statistics are those of the benchmarks: fresh processes, blocks in turns, paired ratios.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from harness import context, profiles, variants
from harness.conclusive import MARGIN
from harness.measure import RoundJob, RoundResult, Task, measure_round, probe
from harness.own_models import OwnModel, encoded
from harness.processes import Launcher
from harness.stats import Estimate, Verdict, noise_margin, paired_ratio, round_noise, typical_seconds, verdict
from harness.workloads import own_model

Form = Literal["trainstep", "dropin"]
Precision = Literal["fp32", "amp"]

_PROBE_SECONDS = 300.0


class StepError(Exception):
    """A step that could not be measured; the message has the failing process's own words."""


@dataclass(frozen=True)
class StepComparison:
    """A step's times in seconds, of all blocks, and what they say.

    ``ratio`` is Kitsune's time over eager's, with its 95% interval over processes; ``verdict`` is its judgement.
    """

    case: str
    eager_s: tuple[float, ...]
    kitsune_s: tuple[float, ...]
    ratio: Estimate
    verdict: Verdict


@dataclass(frozen=True)
class _OwnRound:
    """A round of a user's model: what its process must know of the model besides the job."""

    job: RoundJob
    model: OwnModel
    root: Path


def compare_step(
    source: str,
    *,
    batch_size: int | None = None,
    form: Form = "trainstep",
    precision: Precision = "fp32",
    rounds: int = 3,
    margin: float = MARGIN,
) -> StepComparison:
    """Times a model's step with Kitsune and without.

    Args:
        source: ``FILE.py:FUNCTION`` or an entry point, as for ``--workload``.
        batch_size: None takes the model's default for the device.
        form: the whole step in one call, or the plain loop with the optimizer wrapped.
        precision: float32, or bfloat16 autocast on both sides.
        rounds: fresh processes; from two on there is an interval.
        margin: the relative difference that does not matter; noise may widen it.

    Raises:
        WorkloadError: the model cannot be used.
        StepError: one of the two sides cannot run here, or failed.
        ValueError: the number of rounds or the margin is none.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    root = Path.cwd()
    model = own_model(source, root)
    device_type: profiles.DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    case = _case(model, device_type, batch_size)
    names = (f"eager_{precision}", f"kitsune_{form}_{precision}")
    launcher = Launcher()
    unavailable = launcher.run(probe, None, timeout_s=_PROBE_SECONDS).unavailable
    for name in names:
        if name in unavailable:
            raise StepError(f"{name} cannot run here: {unavailable[name]}")
    effort = replace(profiles.effort(profiles.DEFAULT, device_type), rounds=rounds)
    tasks = tuple(Task(variants.get(name).name) for name in names)
    results = []
    for number in range(rounds):
        job = _OwnRound(RoundJob(case, tasks, effort, number), model, root)
        results.append(launcher.run(_measure, job, timeout_s=effort.process_seconds))
    return _judged(case.name, results, names, margin)


def _case(model: OwnModel, device_type: profiles.DeviceType, batch_size: int | None) -> profiles.Case:
    batch = batch_size or model.default.get(device_type)
    if batch is None:
        raise StepError(f"{model.source} has no default batch size for {device_type}: give batch_size")
    return profiles.Case(model.name, batch, device_type, loss_steps=1, default=True)


def _measure(own: _OwnRound, note: Callable[[str], None]) -> RoundResult:
    """Runs in a process of its own, which knows the model by the variables that asv's would have."""
    os.environ[context.WORKLOADS_VARIABLE] = encoded([own.model])
    os.environ["ASV_CONF_DIR"] = str(own.root)
    return measure_round(own.job, note)


def _judged(case: str, results: list[RoundResult], names: tuple[str, str], margin: float) -> StepComparison:
    for result in results:
        for name, reason in result.failures.items():
            raise StepError(f"{name} failed: {reason}")
    eager, kitsune = ([[block.seconds for block in result.blocks[name]] for result in results] for name in names)
    pairs = [list(zip(ours, theirs, strict=True)) for ours, theirs in zip(kitsune, eager, strict=True)]
    ratio = paired_ratio(pairs)
    return StepComparison(
        case=case,
        eager_s=tuple(seconds for times in eager for seconds in times),
        kitsune_s=tuple(seconds for times in kitsune for seconds in times),
        ratio=ratio,
        verdict=verdict(ratio, noise_margin(round_noise(pairs), margin)),
    )


def typical(seconds: tuple[float, ...]) -> float:
    """The time to quote of all blocks."""
    return typical_seconds([seconds])
