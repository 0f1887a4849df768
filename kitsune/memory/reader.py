"""A thread that reads a loader ahead of the consumer of its batches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from kitsune.memory.copies import Copies, Loaded

_GRACE_S = 1.0
"""How long `stop` waits for the batch that the loader is making. A loader may be stuck for good."""

_Outcome = Loaded | BaseException | None
"""Of reading: a batch, or, as the last one, the loader's exception or None for its end."""

_Enter = Callable[[], AbstractContextManager[Any]]


class Reader(threading.Thread):
    """Reads an iterator of `loader` until its end or its next exception, at most `depth` batches beyond those taken.

    It is started by being made, and works in the surroundings of the thread that makes it: torch's grad and inference
    mode, default device, CUDA device and stream. What it shares with the consumer are queues that a finalizer may use
    at any point of any thread, not locks.

    A process that is forked does not get the thread: there `successor` goes on.

    Args:
        ahead: what was read before, and comes first.

    Attributes:
        loader: what `source` iterates.
        stopped: whether it was told to end; it reads no further batch.
    """

    def __init__(
        self,
        loader: object,
        source: Iterator[object],
        depth: int,
        copies: Copies,
        ahead: Sequence[_Outcome] = (),
    ) -> None:
        super().__init__(name="kitsune prefetch", daemon=True)
        self.loader = loader
        self.stopped = False
        self._source = source
        self._depth = depth
        self._copies = copies
        self._process = os.getpid()
        self._is_reading = False
        self._surroundings = _surroundings()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        for outcome in ahead:
            self._outcomes.put(outcome)
        for _ in range(depth - len(ahead)):
            self._room.put(None)
        if not ahead or isinstance(ahead[-1], Loaded):
            self.start()

    @property
    def is_left_behind(self) -> bool:
        """Whether this process was forked from that of the thread, by Python or by others: here is none."""
        return os.getpid() != self._process

    def successor(self) -> Reader:
        """Where this one is left behind: another one, which goes on where this one was when the process was forked.

        Raises:
            RuntimeError: the loader was making a batch, and cannot be asked for the next one.
        """
        if self._is_reading:
            raise RuntimeError(
                "the process was forked while its thread was reading a batch of the loader, so that this pass cannot"
                " go on in the new process; begin another one there, with iter()"
            )
        ahead = [self._outcomes.get() for _ in range(self._outcomes.qsize())]
        return Reader(self.loader, self._source, self._depth, self._copies, ahead)

    def take(self) -> _Outcome:
        """The next outcome. Waits for it."""
        outcome = self._outcomes.get()
        self._room.put(None)
        return outcome

    def stop(self) -> None:
        """Ends the thread. Waits for that, but not forever, and not where the thread itself calls it."""
        self.stopped = True
        self._room.put(None)
        if self.is_alive() and threading.current_thread() is not self and not self.is_left_behind:
            self.join(_GRACE_S)

    def run(self) -> None:
        with ExitStack() as stack:
            for enter in self._surroundings:
                stack.enter_context(enter())
            reading = True
            while reading:
                self._room.get()
                reading = not self.stopped and self._read()

    def _read(self) -> bool:
        """Whether there was a batch. Its frame ends with it: no local keeps a batch, or an exception in a cycle."""
        self._is_reading = True
        try:
            self._outcomes.put(Loaded.of(next(self._source), self._copies))
        except StopIteration:
            self._outcomes.put(None)
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            self._outcomes.put(error)
        else:
            return True
        finally:
            self._is_reading = False
        return False


def await_stopped(loader: object) -> None:
    """Waits for readers of `loader` that were stopped while it was making a batch: it must not be advanced by two."""
    readers = [thread for thread in threading.enumerate() if isinstance(thread, Reader) and thread.loader is loader]
    for reader in readers:
        if reader.stopped and not reader.is_left_behind:
            reader.join()


def _surroundings() -> tuple[_Enter, ...]:
    """What torch keeps for each thread, as it is in this one: contexts for another thread to enter."""
    entering: list[_Enter] = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    if torch.cuda.is_initialized():
        entering.append(partial(torch.cuda.stream, torch.cuda.current_stream()))
    default = torch.get_default_device()
    if default.type != "cpu":
        entering.append(lambda: default)
    return tuple(entering)
