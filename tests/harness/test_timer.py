"""The timer, judged with durations that are known beforehand: those of sleeping, and of a busy GPU as the host waits
for it.

Whatever else runs on a machine can only add to a duration. So it is the shortest of several that must be right, and
there are as many as it takes, up to a bound: a machine at work needs more of them, a timer that adds anything has none.
"""

import gc
import time
from collections.abc import Callable

import pytest
import torch

from harness.timer import BlockTime, time_block

CPU = torch.device("cpu")
_WITHIN = 0.02
_MOST_REPEATS = 150


def shortest(seconds: Callable[[], float], expected: float) -> float:
    """The least of so many measurements that one is close to what is expected, or of all there may be."""
    least = seconds()
    for _ in range(_MOST_REPEATS):
        if least <= expected * (1 + _WITHIN):
            break
        least = min(least, seconds())
    return least


@pytest.mark.parametrize(("nap_s", "steps", "lead_in"), [(0.02, 1, 0), (0.02, 3, 0), (0.06, 1, 0), (0.02, 2, 1)])
def test_it_measures_a_known_sleep_per_step(nap_s: float, steps: int, lead_in: int) -> None:
    """Without the lead-in, which would make a step of the last one last half as long again."""

    def seconds() -> float:
        return time_block(lambda steps: time.sleep(nap_s * steps), steps, CPU, lead_in=lead_in).wall_s

    assert nap_s <= shortest(seconds, nap_s) <= nap_s * (1 + _WITHIN)


def test_without_a_device_there_is_no_time_of_one() -> None:
    assert time_block(lambda steps: None, 1, CPU).device_s is None


def test_the_collector_waits_and_is_then_as_it_was() -> None:
    seen: list[bool] = []
    time_block(lambda steps: seen.append(gc.isenabled()), 1, CPU)
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        time_block(lambda steps: None, 1, CPU)
        assert not gc.isenabled()
    finally:
        gc.enable()


_CYCLES = 40_000_000  # some 20 ms on any GPU: far above what launching costs


def busy(steps: int) -> None:
    for _ in range(steps):
        torch.cuda._sleep(_CYCLES)


def waited_s() -> float:
    """How long the host waits for one step of the busy GPU, from idle to idle."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    busy(1)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


@pytest.mark.gpu
@pytest.mark.parametrize("clock", [lambda block: block.device_s, lambda block: block.wall_s], ids=["device", "wall"])
@pytest.mark.parametrize(("steps", "lead_in"), [(1, 0), (3, 0), (2, 1)])
def test_it_measures_a_known_busy_wait_of_the_device_per_step(
    clock: Callable[[BlockTime], float], steps: int, lead_in: int
) -> None:
    """By the device's events without the lead-in, by the wall clock with it; a step lasts as long either way."""
    device = torch.device("cuda")
    known_s = min(waited_s() for _ in range(10))
    assert known_s > 1e-3
    found_s = shortest(lambda: clock(time_block(busy, steps, device, lead_in=lead_in)), known_s)
    assert found_s == pytest.approx(known_s, rel=_WITHIN)
