"""The timer, judged with the only durations that are known beforehand: those of sleeping."""

import gc
import time

import pytest
import torch

from harness.timer import BlockTime, time_block

CPU = torch.device("cpu")
_NAP = 0.02


def test_it_measures_a_known_sleep_per_step() -> None:
    block = time_block(lambda steps: time.sleep(_NAP * steps), 3, CPU)
    assert _NAP <= block.wall_s < 10 * _NAP
    assert block.device_s is None


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


@pytest.mark.gpu
def test_device_time_is_that_of_the_device() -> None:
    cycles = 20_000_000  # some 10 ms on any GPU
    block = time_block(lambda steps: torch.cuda._sleep(cycles * steps), 2, torch.device("cuda"))
    assert block.device_s is not None
    assert 1e-3 < block.device_s <= block.wall_s * 1.01


@pytest.mark.gpu
def test_twice_the_busy_wait_takes_twice_the_device_time() -> None:
    """On either clock; a wait of some 10 ms is far above what launching costs."""
    cycles, device = 20_000_000, torch.device("cuda")

    def waiting(times: int) -> BlockTime:
        return time_block(lambda steps: torch.cuda._sleep(times * cycles * steps), 2, device)

    one, two = waiting(1), waiting(2)
    assert one.device_s is not None
    assert two.device_s is not None
    assert two.device_s / one.device_s == pytest.approx(2, rel=0.1)
    assert two.wall_s / one.wall_s == pytest.approx(2, rel=0.2)


def test_a_longer_sleep_takes_longer_in_proportion() -> None:
    one, three = (
        min(time_block(lambda steps, n=n: time.sleep(n * _NAP), 1, CPU).wall_s for _ in range(5)) for n in (1, 3)
    )
    assert three / one == pytest.approx(3, rel=0.3)
