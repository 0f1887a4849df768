"""Runs that end at any point: killed, or with a disk that is full. What was kept is whole, and the next run goes on."""

import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest

from harness import profiles
from harness.context import Context
from harness.session import Session
from harness.store import History, Store
from tests.harness.test_session import CASES, COMMIT, Pretender, context, small

__all__ = ["context", "small"]  # fixtures

_NUM_POINTS = 20


def measure(context: Context, launcher: Pretender | None = None) -> None:
    Session(context, launcher or Pretender()).measure()


def history_of(context: Context) -> History:
    return Store(context.results).load("here")


def in_a_child(action: Callable[[], object]) -> int:
    """Runs it in a forked process; the status that the system gives of it."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def killed_at(point: int) -> Callable[[FrameType, str, object], None]:
    """A profiler that kills its process at so many calls and returns, those of built-in functions included."""
    count = 0

    def at_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return at_event


def num_points(context: Context) -> int:
    """How many calls and returns a whole run has."""
    count = 0

    def at_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(at_event)
    try:
        measure(context)
    finally:
        sys.setprofile(None)
    return count


def assert_complete(context: Context) -> None:
    """Everything that the profile wants is there, once, and nothing is damaged."""
    history = history_of(context)
    rounds = profiles.effort("quick", "cpu").rounds
    assert history.damage == ()
    assert [sum(entry.case == case.name for entry in history.rounds(COMMIT)) for case in CASES] == [rounds] * len(CASES)
    profiled = [(entry.case, entry.variant) for entry in history.profiles(COMMIT)]
    assert len(profiled) == len(set(profiled)) == 3 * len(CASES)
    left = {path.name for path in (context.results / "here").iterdir()}
    # A lock that nobody holds stops nobody, and an index may be thrown away.
    assert left - {".lock", ".index"} == {f"{COMMIT}.samples.jsonl"}


def test_a_run_killed_anywhere_keeps_what_it_had_and_is_taken_up(context: Context) -> None:
    path = context.results / "here" / f"{COMMIT}.samples.jsonl"
    last = num_points(context)
    path.unlink()
    drawn = random.Random(0)
    kept = []
    for point in sorted(drawn.randrange(1, last) for _ in range(_NUM_POINTS)):
        killed = killed_at(point)
        status = in_a_child(lambda killed=killed: (sys.setprofile(killed), measure(context)))  # type: ignore[misc]
        assert os.WIFSIGNALED(status) or (status == 0 and point > 0.9 * last), point
        store = Store(context.results)
        if "here" in store.machines():
            history = store.load("here")
            assert history.damage == (), point
            kept.append(len(history.rounds(COMMIT)))
        measure(replace(context, resume=True))
        assert_complete(context)
        path.unlink()
    assert min(kept) < max(kept)


@pytest.mark.parametrize("most_bytes", [1, 700, 3_000, 5_000])
def test_a_disk_that_gets_full_costs_nothing_that_was_written(context: Context, most_bytes: int) -> None:
    def on_a_small_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        measure(replace(context, progress=None))

    assert os.WEXITSTATUS(in_a_child(on_a_small_disk)) == 1
    store = Store(context.results)
    if "here" in store.machines():
        assert store.load("here").damage == ()
        assert (context.results / "here" / f"{COMMIT}.samples.jsonl").stat().st_size <= most_bytes
    measure(replace(context, resume=True))
    assert_complete(context)


def test_a_disk_that_is_full_is_told_with_the_file(context: Context) -> None:
    measure(context)
    path = context.results / "here" / f"{COMMIT}.samples.jsonl"
    before = path.read_bytes()
    told = context.results / "told"
    told.touch()

    def on_a_full_disk() -> None:
        descriptor = os.open(told, os.O_WRONLY)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
        try:
            measure(replace(context, progress=None))
        except Exception as error:  # noqa: BLE001  # it is looked at below
            os.write(descriptor, str(error).encode()[:500])

    in_a_child(on_a_full_disk)
    assert told.read_text().startswith(f"{path}: cannot be written (File too large); earlier results are untouched")
    assert path.read_bytes() == before


def test_two_runs_at_once_are_both_kept(context: Context) -> None:
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                measure(context)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    history = history_of(context)
    rounds = profiles.effort("quick", "cpu").rounds
    assert history.damage == ()
    assert len(history.runs(COMMIT)) == 3
    assert len(history.rounds(COMMIT)) == 3 * len(CASES) * rounds
