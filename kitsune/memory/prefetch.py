"""Batches on the device before they are asked for: a loader is read, and its tensors are copied, ahead of the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Generic, TypeVar

import torch

from kitsune.memory.copies import Copies, CudaCopies, Loaded, no_copies
from kitsune.memory.reader import Reader, await_stopped

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch], device: torch.device | str | int | None = None, *, depth: int = 2
) -> Prefetch[Batch]:
    """`loader`, with its batches copied to `device` ahead of their use, while the step before still runs.

        batches = kitsune.prefetch(DataLoader(data, batch_size=64, shuffle=True))
        for epoch in range(10):
            for x, y in batches:  # a new pass of the loader, on the GPU where there is one
                step(x, y)

        for batch in kitsune.prefetch(stream_of_dicts(), "cuda:1", depth=4):
            loss = model(batch["image"])

    A thread reads the loader. For a CUDA device it also copies each batch into pinned memory and from there, on a
    stream of its own, to the device. A batch is ready on the stream that is current when it is handed out, and is the
    user's from then on: nothing writes to it again. The thread costs some tens of microseconds a batch, too much for
    batches that already lie on the device; and it gains nothing where loader and step are both busy in Python itself.

    Args:
        loader: any iterable, such as a `torch.utils.data.DataLoader`, with or without workers and `pin_memory`. Every
            batch needs memory of its own: one that is written again for a later batch would change in the queue.
        device: where the batches go; an int is the index of a CUDA device. None is the current CUDA device, or the CPU
            where there is none. On the CPU batches are read ahead, and handed out as they are.
        depth: how many batches are held in readiness, at least 1; they take memory of the device. The loader is never
            asked for more than `depth` batches beyond those handed out. Of those, the device is still at work on at
            most five: a host that is further ahead waits for it.

    In a batch the tensors in all containers that torch's pytree knows (tuples, named tuples, lists, dicts, ...), and in
    a `UserDict`, such as the batches of transformers' tokenizers, are moved. They keep their strides, as by
    `Tensor.to`, and whether they require grad. What is on the device already, is no tensor, or lies in another kind of
    object (a dataclass that is not registered) stays as it is. Tensors that are not plain CPU tensors (sparse, nested,
    quantized, subclasses, results of a differentiable function) and packed sequences are moved by their own
    `.to(device)` when their batch is handed out, so without being ahead.

    Batches come in the loader's order. An exception of the loader is raised in place of the batch that it took, after
    those before it, with its own traceback; `next` goes on after it as far as the loader does. A pass ends with the
    loader, with `close()`, with an interrupt while it waits, and when its iterator is dropped, as by a `break`. Its
    thread ends then. If the loader is in the middle of a batch, that is waited for, but no longer than a second; what
    remains is waited for when this loader is next iterated.

    `iter(loader)` runs in the calling thread and the loader's `next` in the other one, with the grad and inference
    mode, the default device and the CUDA device and stream as they are at `iter`, but without autocast. A loader that
    only works in the thread that made it (with an SQLite connection, for one) cannot be read like this. One that draws
    from torch's global generator while it reads (random transforms without workers) takes turns with the step in no
    fixed order; a DataLoader that shuffles gives the order that it gives without prefetching.

    A process that is forked in the middle of a pass has no thread. There a pass goes on with what was read ahead and a
    thread of its own, as a plain loop would; where the loader was making a batch at that moment, `next` raises a
    RuntimeError. A new pass needs nothing of that.

    Raises:
        TypeError: `loader` cannot be iterated.
        ValueError: `depth` is not a whole number of at least 1.
    """
    _check(loader, depth)
    target = _resolve(device)
    return Prefetch(loader, target, depth, CudaCopies(target) if target.type == "cuda" else no_copies)


def _check(loader: object, depth: object) -> None:
    if not isinstance(loader, Iterable) and not hasattr(type(loader), "__getitem__"):
        raise TypeError(f"prefetch needs an iterable of batches, such as a DataLoader, not {type(loader).__name__}")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"depth must be a whole number of batches, at least 1, not {depth!r}")


def _resolve(device: torch.device | str | int | None) -> torch.device:
    """The device, a CUDA device with its index."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


class Prefetch(Generic[Batch]):
    """An iterable over the batches of `loader` on `device`, as `prefetch` says. Its length is the loader's.

    Attributes:
        loader, device, depth: what `prefetch` was given; a CUDA device has its index.
    """

    def __init__(self, loader: Iterable[Batch], device: torch.device, depth: int, copies: Copies) -> None:
        self.loader = loader
        self.device = device
        self.depth = depth
        self._copies = copies

    def __iter__(self) -> Pass[Batch]:
        await_stopped(self.loader)
        return Pass(self.loader, self.device, self.depth, self._copies)

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"the loader has no length: {type(self.loader).__name__}")
        return len(self.loader)


class Pass(Iterator[Batch]):
    """One pass of a loader, read from the start on by a thread that ends with it."""

    def __init__(self, loader: Iterable[Batch], device: torch.device, depth: int, copies: Copies) -> None:
        self._device = device
        self._read: Callable[[], Reader] | None = partial(Reader, loader, iter(loader), depth, copies)
        self._reader: Reader | None = self._start(self._read)

    def __next__(self) -> Batch:
        if self._read is None:
            raise StopIteration
        if self._reader is None:
            self._reader = self._start(self._read)
        elif self._reader.is_left_behind:
            self._finalizer.detach()
            self._reader = self._start(self._reader.successor)
        try:
            outcome = self._reader.take()
        except BaseException:  # an interrupt
            self.close()
            raise
        if isinstance(outcome, Loaded):
            batch: Batch = outcome.hand_out(self._device)
            return batch
        if outcome is None:
            self.close()
            raise StopIteration
        self._stop()
        try:
            raise outcome
        finally:
            del outcome  # its traceback holds this frame

    def close(self) -> None:
        """Ends the pass: the batches read ahead are dropped, and there are no more."""
        self._read = None
        self._stop()

    def _start(self, read: Callable[[], Reader]) -> Reader:
        reader = read()
        self._finalizer = weakref.finalize(self, reader.stop)
        return reader

    def _stop(self) -> None:
        self._reader = None
        self._finalizer()
