"""What is done beside the training, and what waits for it, also when a process ends or is forked meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitsune import background
from kitsune.background import Background, is_quiet, refuse_recording, wait_until_quiet
from kitsune.timing import device_us, timer
from tests.kitsune.training import Training, compare, net_and_adam

SECONDS = 60.0


def test_what_is_done_is_counted_and_kept() -> None:
    before, ends = set(threading.enumerate()), [threading.Event() for _ in range(5)]
    jobs: list[Callable[[], int]] = [lambda place=place: ends[place].wait(SECONDS) * place for place in range(5)]  # type: ignore[misc]
    beside = Background(jobs, 2, lambda: None)
    for count, one in enumerate(ends):
        assert (is_quiet(), beside.num_done, beside.num_jobs) == (False, count, 5)
        one.set()
        deadline = time.monotonic() + SECONDS
        while beside.num_done == count and time.monotonic() < deadline:
            time.sleep(0.001)
    wait_until_quiet()
    assert is_quiet()
    assert beside.results() == [0, 1, 2, 3, 4]
    assert set(threading.enumerate()) <= before


def test_no_more_at_a_time_than_allowed() -> None:
    running, most = set[int](), list[int]()

    def job() -> None:
        running.add(threading.get_ident())
        most.append(len(running))
        time.sleep(0.002)
        running.discard(threading.get_ident())

    Background([job] * 20, 3, lambda: None).results()
    assert max(most) <= 3
    assert is_quiet()


def test_a_job_that_raises_is_over() -> None:
    def fail() -> bool:
        raise ValueError("no")

    beside = Background([fail, lambda: True], 1, lambda: None)
    wait_until_quiet()
    with pytest.raises(ValueError, match="no"):
        beside.results()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_where_it_cannot_begin_nothing_is_left(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, stopped = background.ThreadPoolExecutor.submit, threading.Event()

    def fails(pool: background.ThreadPoolExecutor, *args: object) -> object:
        if stopped.is_set() or len(pool._threads) == 2:
            raise error
        return submit(pool, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(background.ThreadPoolExecutor, "submit", fails)
    with pytest.raises(type(error)):
        Background([partial(stopped.wait, SECONDS)] * 5, 5, stopped.set)
    assert stopped.is_set()
    assert is_quiet()


def test_nothing_is_recorded_meanwhile(noise: Callable[[bool], None]) -> None:
    """Steps run as plain PyTorch, and are captured afterwards; no time of theirs decides anything."""
    training = Training("train_step", *net_and_adam(), mode="auto")
    noise(True)
    training.run(30)
    status = training.status()
    assert (status.replays, status.setup_seconds, status.eager_seconds) == (0, 0.0, None)
    assert status.mode == "measuring"
    noise(False)
    training.run(30, start=30)
    assert training.status().replays > 0


@pytest.mark.parametrize("form", ["train_step", "drop_in"])
def test_with_replay_asked_for_the_reason_is_told(form: str, noise: Callable[[bool], None]) -> None:
    training = Training(form, *net_and_adam(), mode="replay")
    noise(True)
    training.run(5)
    status = training.status()
    assert (status.mode, status.replays) == ("eager", 0)
    assert "kernels are being compiled" in status.reason
    noise(False)
    training.run(5, start=5)
    assert (training.status().mode, training.status().replays) == ("replay", 5)


def test_what_is_recorded_is_replayed_meanwhile(noise: Callable[[bool], None]) -> None:
    training = Training("drop_in", *net_and_adam(), mode="replay")
    training.run(5)
    replays = training.status().replays
    noise(True)
    training.run(5, start=5)
    assert training.status().replays == replays + 5


def without_bias(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """From the tenth step on one parameter gets no gradient, for which an update of its own is captured."""
    training.optimizer.zero_grad()
    loss = functional.cross_entropy(training.model(x), y)
    loss.backward()
    if training.memo["step"] >= 10:
        training.model.last.bias.grad = None
    training.optimizer.step()
    return loss.detach()


def with_another_loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """From the tenth step on the loss is another one, with which the backward pass is captured anew."""
    training.optimizer.zero_grad()
    loss = functional.cross_entropy(training.model(x), y)
    if training.memo["step"] >= 10:
        loss = loss * 2
    loss.backward()
    training.optimizer.step()
    return loss.detach()


@pytest.mark.parametrize(("loop", "part"), [(without_bias, "update"), (with_another_loss, "loss")])
def test_what_else_a_loop_needs_is_recorded_afterwards(
    loop: Callable[..., Tensor], part: str, noise: Callable[[bool], None]
) -> None:
    covered = list[bool]()

    def edit(training: Training, index: int) -> None:
        training.memo["step"] = index
        if training.form == "eager":
            return
        if index in (10, 20):
            noise(index == 10)
        covered.append(part in training.status().covered)

    training = compare("drop_in", loop=loop, steps=30, edit=edit, defer_loss=part == "loss")
    assert covered[10]
    assert not any(covered[11:21])
    assert part in training.status().covered


def test_the_timer_waits(noise: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []

    def wait() -> None:
        noise(False)
        waited.append(True)

    monkeypatch.setattr(timer, "wait_until_quiet", wait)
    noise(True)
    assert device_us(lambda: is_quiet() or pytest.fail("it is not quiet"), torch.device("cpu")) >= 0
    assert waited == [True]


def test_refusing_tells_why(noise: Callable[[bool], None]) -> None:
    assert refuse_recording() is None
    noise(True)
    refusal = refuse_recording()
    assert refusal is not None
    assert "kernels are being compiled" in refusal.reason


SCRIPT = """
import os, sys, threading, time
from functools import partial
from kitsune.background import Background, is_quiet, wait_until_quiet

class Compilers:
    stopped = False
    ran = 0

    def job(self):
        if not self.stopped:
            self.ran += 1
            time.sleep(0.2)

    def stop(self):
        self.stopped = True

compilers = Compilers()
beside = Background([compilers.job] * 1000, 2, compilers.stop)
"""


def run(script: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT + script], capture_output=True, text=True, timeout=seconds)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("print('end')", ""),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("threading.Thread(target=time.sleep, args=(0.5,)).start()", ""),
    ],
)
def test_a_process_that_ends_waits_for_what_has_begun_only(script: str, error: str) -> None:
    """Where all jobs would take 100 seconds, longer than `run` waits."""
    done = run(script)
    assert (done.returncode == 0) == (not error)
    assert done.stderr.strip().endswith(error) if error else not done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_process_knows_nothing_of_it() -> None:
    done = run(
        """
child = os.fork()
if not child:
    wait_until_quiet()
    sys.exit(5 if is_quiet() else 6)
_, state = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(state) if not is_quiet() else 7)
"""
    )
    assert done.returncode == 5, done.stderr
