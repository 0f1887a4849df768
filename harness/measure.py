"""The one instrument: what happens inside a measuring process.

:func:`measure_round` times the variants of a case in turns; :func:`measure_profile` measures what needs a process to
itself: set-up, peak memory and losses; :func:`measure_setup` the set-up alone, once caches are filled. Each runs in a
fresh process that :mod:`harness.processes` starts.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
import torch._dynamo
from torch import Tensor

from harness import allocator, caches, environment, memory, profiles, sensors, variants
from harness.continuation import Continuation
from harness.continuation_recording import continuation
from harness.failures import describe
from harness.memory_recording import recorded_step
from harness.memory_timeline import NOT_RECORDED, MemoryTimeline, memory_timeline
from harness.names import reference_of
from harness.profiles import Case, Effort
from harness.replay_plans import ReplayPlan
from harness.timer import BlockTime, synchronize, time_block
from harness.turns import Ending, Limits, drawn_orders, take_turns
from harness.variants.availability import unavailable
from harness.variants.building import start
from harness.variants.training import Training, prepare

_T = TypeVar("_T")

_RECOMPILE_LIMIT = 64
_STEADY_STEPS = 5

_LOOK_EVERY_SECONDS = 0.01


@dataclass(frozen=True)
class Probe:
    """What a process found out about this machine: its facts, and which variants cannot run on it and why."""

    facts: Mapping[str, object]
    unavailable: Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """What one variant of a case needs: its name, and the folder of its compilers' caches (None: their own choice)."""

    variant: str
    caches: Path | None = None


@dataclass(frozen=True)
class ProfileJob:
    """One variant of a case, measured alone, and held against eager from the same state if it is to go on."""

    case: Case
    task: Task
    effort: Effort
    goes_on: bool = False


@dataclass(frozen=True)
class SetupJob:
    """One variant of a case, set up and nothing else."""

    case: Case
    task: Task
    effort: Effort


@dataclass(frozen=True)
class RoundJob:
    """Variants of a case, timed in turns. ``round`` decides in which order they are made and take turns."""

    case: Case
    tasks: tuple[Task, ...]
    effort: Effort
    round: int


@dataclass(frozen=True)
class ProfileResult:
    """Set-up seconds, peak memory and losses of a variant, and what it says of itself.

    ``setup_s`` runs from constructing the optimizer to the end of the first step in the steady state, or of those in
    the 10 ms after it; imports, moving the model to the device, and the device's own start are not part of it.
    ``first_replay_s`` is the part of it until the end of the first step that Kitsune replayed, as exactly; None where
    it replayed none, and of peers. ``caches`` is "cold" or "warm" for variants that compile, by whether their compilers
    found anything in their caches; None for others. ``losses`` are (step, loss) pairs, steps counted from 0.
    ``memory_timeline`` is of one steady step, or says why there is none; so does ``continuation``, which is None where
    nobody asked for it.
    """

    setup_s: float
    caches: str | None
    peak: memory.Peak
    losses: tuple[tuple[int, float], ...]
    status: Mapping[str, object] | None
    memory_timeline: MemoryTimeline | str = NOT_RECORDED
    first_replay_s: float | None = None
    continuation: Continuation | str | None = None


@dataclass(frozen=True)
class SetupResult:
    """Seconds of a set-up by itself, as in a :class:`ProfileResult`."""

    setup_s: float
    first_replay_s: float | None


@dataclass(frozen=True)
class RoundResult:
    """Block times of every variant that ran through, in the order of turns, and why the others did not.

    ``throttled`` are the numbers of the turns in which the GPU was; ``ended`` and ``half_width`` are those of
    :class:`harness.turns.Taken`. ``gpu`` and ``host`` say what was going on meanwhile, as :mod:`harness.sensors` does.
    ``modes`` and ``plans`` are how variants ran at the end of the round, and by what they replayed, of those that tell.
    """

    steps_per_block: Mapping[str, int]
    blocks: Mapping[str, tuple[BlockTime, ...]]
    failures: Mapping[str, str]
    throttled: tuple[int, ...] = ()
    ended: Ending = "turns"
    half_width: float = math.inf
    gpu: Mapping[str, object] = field(default_factory=dict)
    host: Mapping[str, object] = field(default_factory=dict)
    modes: Mapping[str, str] = field(default_factory=dict)
    plans: Mapping[str, ReplayPlan] = field(default_factory=dict)


def probe(kitsune_root: Path | None, note: Callable[[str], None]) -> Probe:
    """Facts of this machine, and what cannot run on it. Imports the Kitsune under test."""
    note("finding out what this machine can do")
    facts = environment.facts()
    device = torch.device(str(facts["device_type"]))
    torch.zeros(1, device=device)
    reasons = {name: unavailable(variant, device, kitsune_root) for name, variant in variants.VARIANTS.items()}
    return Probe(facts, {name: reason for name, reason in reasons.items() if reason is not None})


def measure_profile(job: ProfileJob, note: Callable[[str], None]) -> ProfileResult:
    """Trains one variant from its beginning and measures what does not need comparing in turns.

    Raises:
        Exception: whatever the variant raises.
    """
    variant = variants.get(job.task.variant)
    device = begin_device(job.case)
    cold = caches.is_cold(job.task.caches)
    losses = _Losses(job.case.loss_steps)
    training, setup = _set_up(job, device, losses.step, note)
    note(f"running {variant.name} in its steady state")
    gc.collect()
    memory.reset_peak(device)
    for _ in range(max(_STEADY_STEPS, job.case.loss_steps - losses.steps)):
        losses.step(training)
    synchronize(device)
    peak, curve, status = memory.peak(device), losses.values(), training.status()
    note(f"recording the memory of a step of {variant.name}")
    # Last, as a step that fails may take the device with it.
    recorded = recorded_step(lambda: training.run(1), device)
    note(f"holding {variant.name} against eager from the same state")
    went_on = _continuation(job, training, device) if job.goes_on else None
    compiled = variant.compile_mode is not None or variant.is_kitsune
    return ProfileResult(
        setup.setup_s,
        ("cold" if cold else "warm") if compiled else None,
        peak,
        curve,
        status,
        recorded if isinstance(recorded, str) else memory_timeline(recorded),
        setup.first_replay_s,
        went_on,
    )


def _continuation(job: ProfileJob, training: Training, device: torch.device) -> Continuation | str:
    variant = variants.get(job.task.variant)
    untrained = prepare(variant, job.case.model, job.case.batch, device)
    return continuation(training, untrained, job.case.loss_steps)


def measure_setup(job: SetupJob, note: Callable[[str], None]) -> SetupResult:
    """Sets a variant up with whatever it finds in its caches.

    Raises:
        Exception: whatever the variant raises.
    """
    return _set_up(job, begin_device(job.case), lambda training: training.run(1), note)[1]


def _set_up(
    job: ProfileJob | SetupJob, device: torch.device, step: Callable[[Training], object], note: Callable[[str], None]
) -> tuple[Training, SetupResult]:
    """A training in its steady state, and the seconds from constructing its optimizer to there.

    The device is waited for once on the way, after the first replay.
    """
    variant = variants.get(job.task.variant)
    caches.use(job.task.caches)
    note(f"preparing {variant.name}")
    ingredients = prepare(variant, job.case.model, job.case.batch, device)
    synchronize(device)
    note(f"setting up {variant.name}")
    begin = time.perf_counter()
    training = start(variant, ingredients)
    first_replay_s = None
    for _ in settling(training, step, job.effort.settle_seconds):
        if first_replay_s is None and training.has_replayed:
            synchronize(device)
            first_replay_s = time.perf_counter() - begin
    synchronize(device)
    return training, SetupResult(time.perf_counter() - begin, first_replay_s)


def measure_round(job: RoundJob, note: Callable[[str], None]) -> RoundResult:
    """Times the variants in turns until their ratios to eager are known narrowly enough or the budget is spent.

    A variant that raises leaves the round; what it raised is in the result. A turn in which the GPU was throttled is
    marked and, a bounded number of times, repeated. The orders of the turns follow from the case and the round.
    """
    device = begin_device(job.case)
    os.environ["TORCH_WARM_POOL"] = "0"  # all is compiled already; Inductor's idle workers would take cores
    failures: dict[str, str] = {}
    ready: dict[str, tuple[Training, float]] = {}
    for task in order_of_making(job):
        note(task.variant)
        with _excluded_if_failing(task.variant, failures, device):
            ready[task.variant] = _make_ready(job, task, device)
    if not ready:
        return RoundResult({}, {}, failures)
    trainings = {name: training for name, (training, _) in ready.items()}
    steps = {name: steps_per_block(seconds, job.effort) for name, (_, seconds) in ready.items()}
    gc.collect()
    gc.freeze()

    def block(name: str) -> BlockTime | None:
        note(name)
        with _excluded_if_failing(name, failures, device):
            return timed_block(trainings[name].run, steps[name], device)
        return None

    gpu, host = sensors.watch(device.type), sensors.HostWatch()
    taken = take_turns(
        list(trainings),
        block,
        pairs=[(name, reference_of(name)) for name in trainings if name != reference_of(name)],
        limits=limits(job.effort),
        is_throttled=gpu.is_throttled,
        rng=random.Random(f"{job.case.name} {job.round}"),
    )
    timed = {name: trainings[name] for name in taken.blocks}
    return RoundResult(
        {name: steps[name] for name in timed},
        taken.blocks,
        failures,
        taken.throttled,
        taken.ended,
        taken.half_width,
        gpu.summary(),
        host.summary(),
        _told(timed, lambda training: training.mode_in_use()),
        _told(timed, lambda training: training.plan_in_use()),
    )


def order_of_making(job: RoundJob) -> list[Task]:
    """Drawn for the case; reversed in the next round, so that of each two rounds neither of a pair is favoured.

    It matters: on an H200 the first of several equal steps, 20 us long, took 1% to 5% longer than those made later.
    """
    orders = drawn_orders(job.tasks, random.Random(job.case.name))
    return next(islice(orders, job.round, None))


def limits(effort: Effort) -> Limits:
    """When a round of this effort ends."""
    return Limits(effort.turns, effort.timed_seconds, effort.narrow_within, effort.throttle_retries)


def begin_device(case: Case) -> torch.device:
    """Starts the device and sets the switches that are the same for all variants."""
    device = torch.device(case.device_type)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT  # variants in one process share their models' code
    allocator.keep_freed_memory()
    torch.zeros(1, device=device)
    synchronize(device)
    return device


def _make_ready(job: RoundJob, task: Task, device: torch.device) -> tuple[Training, float]:
    """A training in its steady state, and the seconds one of its steps takes."""
    variant = variants.get(task.variant)
    caches.use(task.caches)
    training = start(variant, prepare(variant, job.case.model, job.case.batch, device))
    settle(training, lambda training: training.run(1), job.effort.settle_seconds)
    return training, warm_up(training.run, device, job.effort.warm_up_seconds)


def settle(training: Training, step: Callable[[Training], object], seconds: float) -> None:
    """Steps, at least one, until the training is in its steady state or the time is up."""
    for _ in settling(training, step, seconds):
        pass


def settling(training: Training, step: Callable[[Training], object], seconds: float) -> Iterator[None]:
    """Settles as :func:`settle` does, and yields now and then, when the training may be asked something.

    To ask whether it has settled takes longer than short steps do. So it is asked then, and in between the loop runs at
    its own pace, by which Kitsune chooses.
    """
    deadline = time.monotonic() + seconds
    step(training)
    yield
    while not training.settled and time.monotonic() < deadline:
        step(training)
        next_look = time.monotonic() + _LOOK_EVERY_SECONDS
        while time.monotonic() < min(next_look, deadline):
            step(training)
        yield


def warm_up(run: Callable[[int], object], device: torch.device, seconds: float) -> float:
    """Runs so many steps and so many more, until the last blocks agree or the time is up; the seconds per step of the
    fastest of them."""
    deadline = time.monotonic() + seconds
    times = [time_block(run, 1, device).wall_s]
    steps = max(1, math.ceil(profiles.WARM_UP_BLOCK_SECONDS / times[0]))
    while time.monotonic() < deadline and not _stable(times):
        times.append(time_block(run, steps, device).wall_s)
    return min(times[-profiles.STABLE_BLOCKS :])


def _stable(times: Sequence[float]) -> bool:
    last = times[-profiles.STABLE_BLOCKS :]
    return len(last) == profiles.STABLE_BLOCKS and max(last) <= min(last) * (1 + profiles.STABLE_WITHIN)


def steps_per_block(step_seconds: float, effort: Effort) -> int:
    """Steps per block for a variant whose steps take so long."""
    return max(1, math.ceil(effort.block_seconds / step_seconds))


def timed_block(run: Callable[[int], object], steps: int, device: torch.device) -> BlockTime:
    """One block of so many steps, behind its lead-in."""
    return time_block(run, steps, device, lead_in=profiles.lead_in_steps(device.type, steps))


def _told(trainings: Mapping[str, Training], ask: Callable[[Training], _T | None]) -> dict[str, _T]:
    """What the trainings say of themselves at present, of those that tell."""
    answers = {name: _answer(training, ask) for name, training in trainings.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def _answer(training: Training, ask: Callable[[Training], _T | None]) -> _T | None:
    try:
        return ask(training)
    except Exception:  # noqa: BLE001  # the commit under test may raise anything, and its times stand without an answer
        return None


@contextmanager
def _excluded_if_failing(variant: str, failures: dict[str, str], device: torch.device) -> Iterator[None]:
    """What a variant raises takes that variant out of the round and is kept for the record; the others go on.

    Unless the device is lost to this process with it: then the process ends here, and the round is tried without it.
    """
    try:
        yield
    except Exception as error:
        if not _works(device):
            raise
        failures[variant] = describe(error)


def _works(device: torch.device) -> bool:
    """Whether the device still answers: after some errors CUDA refuses everything for the rest of the process."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


class _Losses:
    """Takes steps and keeps some of their losses, without ever waiting for the device."""

    def __init__(self, steps: int) -> None:
        self.steps = 0
        self._every = max(1, steps // profiles.CURVE_POINTS)
        self._last = steps - 1
        self._kept: list[tuple[int, Tensor]] = []

    def step(self, training: Training) -> None:
        loss = training.run(1)
        if self.steps <= self._last and (self.steps % self._every == 0 or self.steps == self._last):
            self._kept.append((self.steps, loss.clone()))
        self.steps += 1

    def values(self) -> tuple[tuple[int, float], ...]:
        return tuple((step, loss.item()) for step, loss in self._kept)


def median_step_seconds(blocks: Sequence[BlockTime]) -> float:
    """The time per step of a typical block."""
    return statistics.median(block.seconds for block in blocks)
