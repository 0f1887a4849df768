"""Real runs that are ended from outside: nothing of them is left, and until then no other run begins."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from harness.project import Project, ProjectError
from tests.harness.checkout import KITSUNE, Checkout

_ENOUGH_S = 90.0

SLEEPY = (
    KITSUNE
    + '''

class TrainStep(TrainStep):
    def __call__(self, x, y):
        """Tells which process measures, and goes on for longer than any test."""
        import os, pathlib, time
        pathlib.Path(os.environ["MEASURING"]).write_text(str(os.getpid()))
        time.sleep(600)
'''
)


class Running:
    """A check of a small repository, and which of its processes there are."""

    def __init__(self, folder: Path) -> None:
        self.checkout = Checkout(folder)
        self.checkout.commit("only", SLEEPY)
        self.measuring = folder / "measuring"
        self._mark = f"MEASURING={self.measuring}\0".encode()
        self.front = self.start()
        wait_until(lambda: self.measuring.exists() and self.measuring.read_text() != "")

    def start(self) -> "subprocess.Popen[str]":
        """Begins a check."""
        return self.checkout.start("-m", "harness.run", "--check", MEASURING=str(self.measuring), CXX="none")

    def processes(self) -> list[int]:
        """All that the check has started and that has not ended, found by a variable that it has inherited."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self._mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def is_free(self) -> bool:
        """Whether another run may begin."""
        try:
            with Project(self.checkout.root, self.checkout.root, is_kitsune=True).alone():
                return True
        except ProjectError:
            return False


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    found = Running(tmp_path)
    yield found
    for process in found.processes():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    found.front.communicate()


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _ENOUGH_S
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def test_a_run_that_is_terminated_leaves_nothing_and_until_then_no_other_begins(running: Running) -> None:
    measuring = int(running.measuring.read_text())
    assert {running.front.pid, measuring} < set(running.processes())
    second = running.start()
    output, _ = second.communicate()
    assert second.returncode == 2
    assert f"process {running.front.pid} measures in this checkout" in output
    assert measuring in running.processes()
    running.front.terminate()
    output, _ = running.front.communicate(timeout=_ENOUGH_S)
    assert running.front.returncode == 128 + signal.SIGTERM
    assert output.endswith("\nInterrupted. A check keeps nothing of what was measured.\n")
    assert running.processes() == []
    assert running.is_free()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "is_of_group", "code"),
    [
        (signal.SIGINT, True, 128 + signal.SIGINT),  # a key
        (signal.SIGHUP, True, 128 + signal.SIGHUP),  # a terminal that was closed
        (signal.SIGTERM, True, 128 + signal.SIGTERM),  # `timeout`
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
)
def test_however_a_run_is_ended_its_checkout_is_free_only_after_its_last_process(
    running: Running, number: int, is_of_group: bool, code: int
) -> None:
    kill = os.killpg if is_of_group else os.kill
    kill(running.front.pid, number)
    assert running.front.wait(_ENOUGH_S) == code
    wait_until(running.is_free)
    assert running.processes() == []


@pytest.mark.slow
def test_what_asv_leaves_when_it_is_killed_is_ended_too(running: Running) -> None:
    (asv,) = [
        process
        for process in running.processes()
        if Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"asv"]
    ]
    os.kill(asv, signal.SIGKILL)
    output, _ = running.front.communicate(timeout=_ENOUGH_S)
    assert running.front.returncode == 2
    assert "asv ended with exit code 137" in output
    assert running.processes() == []
