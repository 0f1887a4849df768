"""Arms: copies of one training in one process, some of them slowed down by a known share of their step.

They are timed by the instrument that times everything else, in turns with a copy that serves as their control.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import measure, variants
from harness.profiles import Case, Effort
from harness.timer import BlockTime, synchronize
from harness.turns import take_turns
from harness.variants.building import start
from harness.variants.training import Training, prepare

CONTROL = "control"

_CALIBRATION_CYCLES = 10_000_000


@dataclass(frozen=True)
class ArmsJob:
    """One process: the case and the variant of which each arm is a copy, and by which share each is slowed down."""

    case: Case
    variant: str
    slowdowns: tuple[float, ...]
    effort: Effort
    seed: str


@dataclass(frozen=True)
class ArmsResult:
    """The blocks of the control and of each arm, entry i of all of them taken in the same turn, in seconds per step."""

    control: tuple[float, ...]
    arms: tuple[tuple[float, ...], ...]


class Delayed:
    """A training whose every step takes longer by a fixed time, wherever it waits.

    A kernel keeps the device busy and a loop the host, each for as long. In a loop that is bound by the device the
    host's wait falls where it is ahead, in one that is bound by the host the device's falls where it is idle: the step
    takes longer by one of the two. Steps that take no longer have the kernel and the loop as well: what these take by
    themselves is in all.

    Args:
        cycles_per_second: of the device's busy kernel; None on the CPU.

    Attributes:
        delay_s: seconds a step; none at first.
    """

    def __init__(self, training: Training, cycles_per_second: float | None) -> None:
        self.delay_s = 0.0
        self._training = training
        self._cycles_per_second = cycles_per_second

    def run(self, steps: int) -> Tensor:
        """So many steps, at least one; the loss of the last."""
        for _ in range(steps):
            loss = self._training.run(1)
            if self._cycles_per_second is not None:
                torch.cuda._sleep(int(self.delay_s * self._cycles_per_second))
            busy_wait(self.delay_s)
        return loss


def busy_wait(seconds: float) -> None:
    """Keeps this thread busy for so long; it gives way to nobody."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def measure_arms(job: ArmsJob, note: Callable[[str], None]) -> ArmsResult:
    """Times the arms of one process.

    Raises:
        Exception: whatever the variant raises.
    """
    device = measure.begin_device(job.case)
    rate = _cycles_per_second(device)
    rng = random.Random(job.seed)
    names = [CONTROL, *(f"arm {index}" for index in range(len(job.slowdowns)))]
    shares = dict(zip(names, (0.0, *job.slowdowns), strict=True))
    arms: dict[str, Delayed] = {}
    steps: dict[str, int] = {}
    for name in rng.sample(names, len(names)):
        note(f"preparing {name}")
        variant = variants.get(job.variant)
        training = start(variant, prepare(variant, job.case.model, job.case.batch, device))
        measure.settle(training, lambda training: training.run(1), job.effort.settle_seconds)
        arms[name] = Delayed(training, rate)
        seconds = measure.warm_up(arms[name].run, device, job.effort.warm_up_seconds)
        arms[name].delay_s = shares[name] * seconds
        steps[name] = measure.steps_per_block(seconds, job.effort)
    gc.collect()
    gc.freeze()

    def block(name: str) -> BlockTime:
        note(name)
        return measure.timed_block(arms[name].run, steps[name], device)

    taken = take_turns(
        names,
        block,
        pairs=[(name, CONTROL) for name in names[1:]],
        limits=measure.limits(job.effort),
        is_throttled=lambda: False,
        rng=rng,
    )
    times = {name: tuple(entry.seconds for entry in taken.blocks[name]) for name in names}
    return ArmsResult(times[CONTROL], tuple(times[name] for name in names[1:]))


def _cycles_per_second(device: torch.device) -> float | None:
    """How fast the busy kernel counts; None on the CPU, which has none."""
    if device.type != "cuda":
        return None
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    first.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    last.record()
    synchronize(device)
    seconds: float = first.elapsed_time(last) / 1e3
    return _CALIBRATION_CYCLES / seconds
