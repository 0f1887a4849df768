"""Copies of a batch's tensors to a device, begun in one thread ahead of their use in another."""

from __future__ import annotations

import copy
import itertools
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from kitsune.collection import spare_garbage_in_forks

# PyTorch hands the same streams out again and again, 32 of each priority. With a priority that is used for nothing
# else, no copy gets onto a stream on which another thread is recording a CUDA graph.
_PRIORITY = -2

_NUM_STREAMS = 4

# How many batches may have been handed out whose use is not over: enough to keep the device busy.
_MOST_IN_USE = 4


@dataclass(frozen=True)
class Sent:
    """Leaves of a batch on their way to a device: for use after `receive()`, on the stream current in that call."""

    leaves: Sequence[Any]
    receive: Callable[[], None]


Copies = Callable[[Sequence[Any]], Sent]
"""Begins to copy those leaves of a batch that it can copy; the others stay as they are."""


def no_copies(leaves: Sequence[Any]) -> Sent:
    """Nothing is copied ahead."""
    return Sent(leaves, lambda: None)


class CudaCopies:
    """Copies plain CPU tensors to one CUDA device, through pinned memory, on streams of its own.

    No buffer is rewritten too early, because torch's allocators see to both kinds. Pinned memory is given out again
    when the copies from it have ended. Device memory goes back to its stream, and is given out again when all that
    the receiving streams had been asked to do, by the time the last reference was dropped, has ended.

    The tensors of a batch take turns on the streams. So each has memory of its own stream, where torch's allocator
    gives equal sizes the same few places again and again, and batches of few tensors the same few combinations.

    Who receives a batch waits until the device has done what it was asked to do before the fourth batch before that
    one was received. A host that runs ahead of the device would otherwise fill it with batches.

    Attributes:
        device: the target, with its index.
        streams: where the copies run.
    """

    def __init__(self, device: torch.device) -> None:
        spare_garbage_in_forks()
        self.device = device
        self.streams = [torch.cuda.Stream(device, priority=_PRIORITY) for _ in range(_NUM_STREAMS)]
        self._received: deque[torch.cuda.Event] = deque()

    def __call__(self, leaves: Sequence[Any]) -> Sent:
        events = []
        if any(isinstance(leaf, Tensor) and leaf.device == self.device for leaf in leaves):
            events.append(torch.cuda.current_stream(self.device).record_event())  # where the loader computed it
        sent = list(leaves)
        copied = [place for place, leaf in enumerate(leaves) if _is_plain(leaf, torch.device("cpu"))]
        for place, stream in zip(copied, itertools.cycle(self.streams)):
            with torch.cuda.stream(stream):
                sent[place] = self._copy(sent[place])
        events += [stream.record_event() for stream in self.streams[: len(copied)]]
        return Sent(sent, partial(self._receive, sent, events))

    def _copy(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if not source.is_pinned():
            source = torch.empty_like(source, pin_memory=True).copy_(source)
        return source.to(self.device, non_blocking=True).requires_grad_(tensor.requires_grad)

    def _receive(self, sent: Sequence[Any], events: Sequence[torch.cuda.Event]) -> None:
        stream = torch.cuda.current_stream(self.device)
        self._received.append(stream.record_event(torch.cuda.Event(blocking=True)))
        if len(self._received) > _MOST_IN_USE:
            self._received.popleft().synchronize()
        for event in events:
            stream.wait_event(event)
        for leaf in sent:
            if _is_plain(leaf, self.device):
                leaf.record_stream(stream)


def _is_plain(leaf: object, device: torch.device) -> bool:
    """Whether `leaf` is nothing but strided numbers on `device`. A result in an autograd graph must stay in it."""
    if type(leaf) is not Tensor or leaf.device != device or leaf.grad_fn is not None:
        return False
    special = leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized or leaf.is_conj() or leaf.is_neg()
    return not special


@dataclass(frozen=True)
class Loaded:
    """A batch of the loader, its leaves on their way.

    Attributes:
        sent: the leaves.
        spec: how they are put together.
        batch: the loader's object as long as no leaf of it has been replaced, else None.
    """

    sent: Sent
    spec: pytree.TreeSpec
    batch: Any

    @classmethod
    def of(cls, batch: object, copies: Copies) -> Loaded:
        """Begins to copy `batch`."""
        leaves, spec = _flattened(batch)
        sent = copies(leaves)
        return cls(sent, spec, batch if _same(sent.leaves, leaves) else None)

    def hand_out(self, device: torch.device) -> Any:
        """The batch on `device`; what was not copied ahead moves now. The loader's own object if nothing had to."""
        self.sent.receive()
        leaves = [leaf.to(device) if _is_movable(leaf) else leaf for leaf in self.sent.leaves]
        if self.batch is not None and _same(leaves, self.sent.leaves):
            return self.batch
        return pytree.tree_unflatten(leaves, self.spec)


class _Items:
    """Stands for a `UserDict` in a tree, as pytree does not know its subclasses: the children are what it keeps.

    That need not be what it gives: it may compute something of a value that is asked for.
    """

    def __init__(self, mapping: UserDict[Any, Any]) -> None:
        self.mapping = mapping


def _values(items: _Items) -> tuple[list[Any], UserDict[Any, Any]]:
    return list(items.mapping.data.values()), items.mapping


def _with_values(values: Iterable[Any], mapping: UserDict[Any, Any]) -> UserDict[Any, Any]:
    changed = copy.copy(mapping)
    changed.data.update(zip(mapping.data, values, strict=True))
    return changed


pytree.register_pytree_node(_Items, _values, _with_values)


def _flattened(batch: object) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a batch, and how they are put together."""
    leaves, spec = pytree.tree_flatten(batch, is_leaf=_is_movable)
    while any(isinstance(leaf, UserDict) for leaf in leaves):
        opened = [_Items(leaf) if isinstance(leaf, UserDict) else leaf for leaf in leaves]
        leaves, spec = pytree.tree_flatten(pytree.tree_unflatten(opened, spec), is_leaf=_is_movable)
    return leaves, spec


def _is_movable(leaf: object) -> bool:
    return isinstance(leaf, Tensor | PackedSequence)


def _same(leaves: Sequence[object], others: Sequence[object]) -> bool:
    return all(leaf is other for leaf, other in zip(leaves, others, strict=True))
