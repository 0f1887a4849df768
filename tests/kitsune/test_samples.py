"""Times of the same work, and the signs that something else disturbed them."""

from __future__ import annotations

import threading
import time

import pytest

from kitsune.timing.samples import Samples, involuntary_switches


def samples(seconds: list[float], num_switches: int = 0) -> Samples:
    made = Samples()
    for place, one in enumerate(seconds):
        made.add(one, num_switches if place == 0 else 0)
    return made


@pytest.mark.parametrize(
    ("seconds", "num_switches", "disturbed"),
    [
        ([], 0, False),
        ([1e-3] * 4, 0, False),
        ([1e-3, 1.2e-3, 1.1e-3, 1.0e-3], 0, False),
        ([1e-3, 9.0, 1e-3, 1e-3], 0, False),  # one of them is no matter to a median
        ([1e-3, 1.5e-3, 1.4e-3, 1.6e-3], 0, True),
        ([1e-3] * 4, 1, False),  # as happens on any host
        ([1e-3] * 4, 2, True),
        ([1.0] * 4, 4, False),  # seldom, in four seconds
        ([1.0] * 4, 400, True),
    ],
)
def test_signs_of_disturbance(seconds: list[float], num_switches: int, disturbed: bool) -> None:
    assert samples(seconds, num_switches).were_disturbed() == disturbed


def test_the_median_of_them() -> None:
    made = samples([3.0, 1.0, 2.0])
    assert (len(made), made.median()) == (3, 2.0)


def test_the_switches_are_this_threads() -> None:
    """A thread that sleeps gives its processor away by itself; others take it from one while it wakes, now and then."""
    seen: list[int] = []

    def sleep() -> None:
        for _ in range(20):
            before = involuntary_switches()
            time.sleep(0.002)
            seen.append(involuntary_switches() - before)

    thread = threading.Thread(target=sleep)
    thread.start()
    thread.join()
    assert min(seen) == 0
    assert involuntary_switches() >= 0
