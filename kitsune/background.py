"""Work that threads do beside the training, on the same device: kernels are compiled by running them.

Meanwhile nothing that is timed tells anything, and no CUDA graph may be recorded: recording gives workspaces back that
a thread may be about to use, and forbids the whole process to wait for the device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from kitsune.errors import Refusal

T = TypeVar("T")


class Background(Generic[T]):
    """Jobs that threads do, from now on until all are done.

    Args:
        jobs: what they return is kept. They neither time anything nor record graphs. There is at least one.
        most_at_a_time: so many of them.
        stop: lets jobs that have begun end soon, and others do nothing. It takes no lock: it may be called while
            garbage is collected.

    Raises:
        RuntimeError: there can be no thread.

    Attributes:
        stop: as given.
        num_jobs: how many there are.
    """

    def __init__(self, jobs: Sequence[Callable[[], T]], most_at_a_time: int, stop: Callable[[], None]) -> None:
        self.stop = stop
        self.num_jobs = self._num_left = len(jobs)
        self._counting = threading.Lock()
        self._pool = ThreadPoolExecutor(most_at_a_time, "kitsune-background")
        self._futures: list[Future[T]] = []
        _under_way.add(self)
        try:
            for job in jobs:
                self._futures.append(self._pool.submit(self._do, job))
        except BaseException:
            stop()
            self._pool.shutdown()
            _under_way.discard(self)
            raise

    @property
    def num_done(self) -> int:
        return self.num_jobs - self._num_left

    def results(self) -> list[T]:
        """What the jobs have returned, in their order. Waits for them; afterwards their threads have ended."""
        self.wait()
        self._pool.shutdown()
        return [one.result() for one in self._futures]

    def wait(self) -> None:
        """Returns when all jobs are done."""
        wait(self._futures)

    def _do(self, job: Callable[[], T]) -> T:
        try:
            return job()
        finally:
            with self._counting:
                self._num_left -= 1
                is_over = not self._num_left
            if is_over:
                _under_way.discard(self)
                self._pool.shutdown(wait=False)


_under_way: set[Background[Any]] = set()


def is_quiet() -> bool:
    """Whether nothing is done in the background. It takes next to nothing to ask."""
    return not _under_way


def wait_until_quiet() -> None:
    """Returns when nothing is done in the background. Not to be called by a job."""
    while not is_quiet():
        for one in tuple(_under_way):
            one.wait()


def refuse_recording() -> Refusal | None:
    """None if a graph may be recorded at once."""
    return None if is_quiet() else Refusal("kernels are being compiled, and graphs are recorded afterwards")


def _stop_all() -> None:
    for one in tuple(_under_way):
        one.stop()


# When the interpreter ends, `concurrent.futures` waits for its threads and all that was asked of them, by this private
# function; what was registered later is called earlier. `atexit` would come too late.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]
if hasattr(os, "register_at_fork"):  # else there are no forks
    os.register_at_fork(after_in_child=_under_way.clear)  # its threads are the parent's
