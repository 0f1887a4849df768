"""A device that its tasks share."""

import pytest

from kitsune.plan import Cost
from kitsune.schedule.sharing import SharedDevice


def test_tasks_share_the_device_while_both_run() -> None:
    device = SharedDevice()
    device.start(0, Cost(4.0, 0.75))
    assert device.next_end_us() == 4.0
    device.run_until(1.0)
    device.start(1, Cost(1.0, 0.75))
    assert device.next_end_us() == pytest.approx(2.5)
    assert device.end_next() == 1
    assert (device.now_us, device.load) == pytest.approx((2.5, 0.75))
    assert device.next_end_us() == pytest.approx(4.5)
    assert device.end_next() == 0
    assert (device.load, device.next_end_us()) == (0.0, float("inf"))


def test_of_tasks_that_end_together_the_lower_index_comes_first() -> None:
    device = SharedDevice()
    for task in (2, 0, 1):
        device.start(task, Cost(0.0, 0.1))
    assert [device.end_next() for _ in range(3)] == [0, 1, 2]
