"""The timer, judged with the only durations that are known beforehand: those of sleeping."""

import gc
import time

import pytest
import torch

from harness.timer import time_block

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
