"""Fresh processes: results, failures of every kind, and freshness."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from harness.processes import Launcher, Note, ProcessFailed

_STATE: list[str] = []


def answer(job: tuple[str, object], note: Note) -> object:
    """What a test's child does: the first part of the job says what, the second with which value."""
    what, value = job
    note(f"about to {what}")
    if what == "raise":
        raise ValueError(value)
    if what == "die":
        print("last words", flush=True)
        assert isinstance(value, int)
        os.kill(os.getpid(), value)
    if what == "exit":
        assert isinstance(value, int)
        os._exit(value)
    if what == "hang":
        time.sleep(600)
    if what == "remember":
        _STATE.append(str(value))
        return list(_STATE), os.getpid()
    if what == "modules":
        return sorted({"torch", "torch._dynamo", "harness.measure"} & set(sys.modules))
    return value


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher()


def failure(launcher: Launcher, job: tuple[str, object], timeout_s: float = 60) -> ProcessFailed:
    with pytest.raises(ProcessFailed) as caught:
        launcher.run(answer, job, timeout_s=timeout_s)
    return caught.value


def test_a_result_comes_back(launcher: Launcher) -> None:
    assert launcher.run(answer, ("return", {"a": [1.5]}), timeout_s=60) == {"a": [1.5]}


def test_a_spawned_process_does_the_same() -> None:
    assert Launcher("spawn").run(answer, ("return", 1), timeout_s=60) == 1


def test_slow_imports_are_there_already(launcher: Launcher) -> None:
    assert launcher.run(answer, ("modules", None), timeout_s=60) == ["harness.measure", "torch", "torch._dynamo"]


def test_nothing_is_left_of_the_process_before(launcher: Launcher) -> None:
    first, first_pid = launcher.run(answer, ("remember", "first"), timeout_s=60)  # type: ignore[misc]
    second, second_pid = launcher.run(answer, ("remember", "second"), timeout_s=60)  # type: ignore[misc]
    assert (first, second) == (["first"], ["second"])
    assert len({first_pid, second_pid, os.getpid()}) == 3


def test_what_is_raised_is_the_first_line_of_the_reason(launcher: Launcher) -> None:
    caught = failure(launcher, ("raise", "no such luck"))
    assert caught.reason.splitlines()[0] == "ValueError: no such luck"
    assert "in answer" in caught.reason
    assert caught.note == "about to raise"


def test_a_crash_is_named_with_its_place_and_last_words(launcher: Launcher) -> None:
    caught = failure(launcher, ("die", signal.SIGSEGV))
    assert caught.reason.splitlines()[0] == "the process was killed by SIGSEGV (while it was at: about to die)"
    assert "last words" in caught.reason
    assert "in answer" in caught.reason
    assert caught.note == "about to die"


def test_the_kernel_s_kill_hints_at_memory(launcher: Launcher) -> None:
    assert "out of memory" in failure(launcher, ("die", signal.SIGKILL)).reason


def test_a_process_that_just_ends_is_a_failure(launcher: Launcher) -> None:
    assert "exit code 3 and no result" in failure(launcher, ("exit", 3)).reason


def test_a_hanging_process_is_killed(launcher: Launcher) -> None:
    assert "not finished after 1 s and killed" in failure(launcher, ("hang", None), timeout_s=1).reason


def test_a_result_that_cannot_be_sent_is_a_failure(launcher: Launcher) -> None:
    with pytest.raises(ProcessFailed, match="exit code 1"):
        launcher.run(unsendable, None, timeout_s=60)


def unsendable(job: None, note: Note) -> object:
    """A lambda cannot be pickled."""
    return lambda: job


def test_no_process_outlives_an_interrupt(launcher: Launcher, tmp_path: Path) -> None:
    written = tmp_path / "pid"
    threading.Thread(target=interrupt_when_there, args=(written,)).start()
    with pytest.raises(KeyboardInterrupt):
        launcher.run(hang_after_writing_pid, written, timeout_s=60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(written.read_text()), 0)


def hang_after_writing_pid(path: Path, note: Note) -> None:
    part = path.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(path)
    time.sleep(600)


def interrupt_when_there(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
