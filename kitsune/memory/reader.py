"""A thread that reads a loader ahead of the consumer of its batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from kitsune.memory.copies import Copies, Loaded

_GRACE_S = 1.0
"""How long `stop` waits for the batch that the loader is making. A loader may be stuck for good."""

_Enter = Callable[[], AbstractContextManager[Any]]


class Reader(threading.Thread):
    """Reads an iterator of `loader` until its end or its next exception, at most `depth` batches beyond those taken.

    It is started by being made, and works in the surroundings of the thread that makes it: torch's grad and inference
    mode, default device, CUDA device and stream. What it shares with the consumer are queues that a finalizer may use
    at any point of any thread, not locks.

    Attributes:
        loader: what `source` iterates.
        stopped: whether it was told to end; it reads no further batch.
    """

    def __init__(self, loader: object, source: Iterator[object], depth: int, copies: Copies) -> None:
        super().__init__(name="kitsune prefetch", daemon=True)
        self.loader = loader
        self.stopped = False
        self._source = source
        self._copies = copies
        self._surroundings = _surroundings()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._outcomes: SimpleQueue[Loaded | BaseException | None] = SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self.start()

    def take(self) -> Loaded | BaseException | None:
        """The next batch, or, as the last outcome, the loader's exception or None for its end. Waits for it."""
        outcome = self._outcomes.get()
        self._room.put(None)
        return outcome

    def stop(self) -> None:
        """Ends the thread. Waits for that, but not forever, and not where the thread itself calls it."""
        self.stopped = True
        self._room.put(None)
        if threading.current_thread() is not self:
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
        try:
            self._outcomes.put(Loaded.of(next(self._source), self._copies))
        except StopIteration:
            self._outcomes.put(None)
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            self._outcomes.put(error)
        else:
            return True
        return False


def await_stopped(loader: object) -> None:
    """Waits for readers of `loader` that were stopped while it was making a batch: it must not be advanced by two."""
    for thread in threading.enumerate():
        if isinstance(thread, Reader) and thread.stopped and thread.loader is loader:
            thread.join()


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
