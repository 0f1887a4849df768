"""A training that is interrupted from the keyboard, wherever it is, goes on as plain PyTorch would."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time

import pytest
import torch

from tests.kitsune.training import FORMS, Net, Training, adam

NUM_PLACES = 12
"""Times after which the interrupt comes, evenly over the first steps, in which everything is captured."""

pytestmark = pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is not signal.default_int_handler, reason="interrupts are not Python's here"
)


def started(form: str) -> Training:
    torch.manual_seed(7)
    model = Net(batch_norm=True, dropout=0.5)
    return Training(form, model, adam(model))


def run_until_interrupted(training: Training, seconds: float) -> bool:
    """Whether Ctrl-C, which comes after so many seconds, was heard: Python ignores exceptions in some callbacks."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        training.run(5)
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.support("Failure", "Ctrl-C while a step is captured or replayed", "replayed")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("form", FORMS)
def test_a_training_goes_on_after_an_interrupt(form: str) -> None:
    """From a checkpoint, as an interrupted step may be done or not, or in part."""
    start = time.perf_counter()
    training = started(form)
    training.run(5)
    whole = time.perf_counter() - start
    saved = copy.deepcopy((training.model.state_dict(), training.plain.state_dict()))
    random = torch.get_rng_state()

    def resume(training: Training) -> list[float]:
        training.model.load_state_dict(saved[0])
        training.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        torch.set_rng_state(random)
        return training.run(8, start=5)

    expected = resume(started("eager"))
    heard, replays = 0, []
    for place in range(NUM_PLACES):
        interrupted = started(form)
        heard += run_until_interrupted(interrupted, whole * (place + 0.5) / NUM_PLACES)
        assert resume(interrupted) == expected, f"interrupted after {place + 0.5} of {NUM_PLACES} parts"
        replays.append(interrupted.status().replays)
    assert heard > NUM_PLACES / 2
    assert sum(count > 0 for count in replays) > NUM_PLACES / 2, "most of them do not replay any more"
