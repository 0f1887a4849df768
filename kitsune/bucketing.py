"""Pads batches of sequences to a few lengths, so that a step has few shapes, each of which is captured once."""

from __future__ import annotations

import bisect
import copy
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Generic, TypeVar

import torch

from kitsune.config import whole_number

_log = logging.getLogger("kitsune")

Batch = TypeVar("Batch")
Number = bool | int | float


def bucketed(
    loader: Iterable[Batch], to: int | Sequence[int], fill: Mapping[Any, Number], *, dim: int = 1
) -> Bucketed[Batch]:
    """`loader`, with the sequences of its batches padded at their ends to the next length that `to` has.

        batches = kitsune.bucketed(loader, to=64, fill={"input_ids": 0, "attention_mask": 0, "labels": -100})
        for batch in batches:  # every length is a multiple of 64
            loss = model(**batch).loss

        for tokens, is_padding, labels in kitsune.bucketed(loader, to=(32, 64, 128), fill={0: 0, 1: True, 2: -100}):
            loss = cross_entropy(model(tokens, is_padding).flatten(0, 1), labels.flatten())

    What is padding must count neither in the model nor in the loss. Labels are filled with the `ignore_index` of the
    loss, -100 by default: it leaves those out of the sum and out of the mean's count, so that loss and gradients are
    those of the batch as it was. A model that looks at other places than its own and those before it (all but causal
    attention) needs a mask, filled with what stands for padding there. Statistics over places, as those of batch norm,
    would count them.

    Args:
        loader: any iterable of dicts, tuples or lists, such as a `torch.utils.data.DataLoader`; `prefetch`
            may stand around the result or within.
        to: ascending lengths; or one number, of which all lengths will be multiples. A batch that is longer than
            all of them is handed out as it is.
        fill: what to pad with, by the keys of the batches' dicts, or by places in its tuples or lists. Tensors that are
            not named stay as they are.
        dim: the dimension of the sequences. All tensors in `fill` have the same size there, and are padded there; 0 is
            the number of samples, for last batches that are smaller.

    Raises:
        TypeError: `loader` cannot be iterated, or, when it is, a batch is no dict, tuple or list of tensors.
        ValueError: `to` has no lengths from 1 up that ascend, or `fill` is empty; while iterating: a batch lacks what
            `fill` names, has sequences of different lengths, or a dtype that cannot hold the number.
    """
    return Bucketed(loader, to, fill, dim)


class Bucketed(Generic[Batch]):
    """See `bucketed`. Every `iter` is a new pass of the loader."""

    def __init__(self, loader: Iterable[Batch], to: int | Sequence[int], fill: Mapping[Any, Number], dim: int) -> None:
        if not isinstance(loader, Iterable) and not hasattr(type(loader), "__getitem__"):
            raise TypeError(f"bucketed needs an iterable of batches, such as a DataLoader, not {type(loader).__name__}")
        if not fill:
            raise ValueError("bucketed needs in fill what to pad, and with what")
        self._loader, self._fill, self._dim = loader, dict(fill), dim
        self._lengths = _lengths(to)
        self._has_told = False

    def __iter__(self) -> Iterator[Batch]:
        return map(self._padded, self._loader)

    def __len__(self) -> int:
        """The loader's, where that has one."""
        if not isinstance(self._loader, Sized):
            raise TypeError(f"object of type {type(self._loader).__name__!r} has no len()")
        return len(self._loader)

    def _padded(self, batch: Any) -> Any:
        found = {name: _part(batch, name) for name in self._fill}
        try:
            lengths = {name: tensor.size(self._dim) for name, tensor in found.items()}
        except IndexError:
            shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
            raise ValueError(f"a batch has tensors without a dimension {self._dim}, of shapes {shapes}") from None
        length, *others = lengths.values()
        if any(other != length for other in others):
            raise ValueError(f"the sequences of a batch differ in length, in dimension {self._dim}: {lengths}")
        missing = self._wanted(length) - length
        if missing == 0:
            return batch
        return _replaced(batch, {name: self._longer(tensor, name, missing) for name, tensor in found.items()})

    def _wanted(self, length: int) -> int:
        if isinstance(self._lengths, int):
            return -(-length // self._lengths) * self._lengths
        place = bisect.bisect_left(self._lengths, length)
        if place < len(self._lengths):
            return self._lengths[place]
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "a batch of length %d is longer than the longest that bucketed pads to, %d, and stays as it is",
                length, self._lengths[-1],
            )  # fmt: skip
        return length

    def _longer(self, tensor: torch.Tensor, name: object, missing: int) -> torch.Tensor:
        shape, value = list(tensor.shape), self._fill[name]
        shape[self._dim] = missing
        padding = tensor.new_full(shape, value)
        if not tensor.is_floating_point() and padding.numel() and padding.flatten()[0].item() != value:
            raise ValueError(f"fill has {value!r} for {name!r} of a batch, which {tensor.dtype} cannot hold")
        return torch.cat([tensor, padding], self._dim)


def _lengths(to: int | Sequence[int]) -> int | tuple[int, ...]:
    lengths: tuple[object, ...] = tuple(to) if isinstance(to, Iterable) else (to,)
    whole = [number for number in map(whole_number, lengths) if number is not None and number > 0]
    if not whole or len(whole) < len(lengths) or any(one >= other for one, other in itertools.pairwise(whole)):
        raise ValueError(f"to must be a whole number from 1 up, or several that ascend, not {to!r}")
    return tuple(whole) if isinstance(to, Iterable) else whole[0]


def _part(batch: Any, name: Any) -> torch.Tensor:
    if not isinstance(batch, (Mapping, tuple, list)):
        raise TypeError(f"bucketed pads batches that are dicts, tuples or lists of tensors, not {type(batch).__name__}")
    try:
        if not isinstance(batch, Mapping) and name < 0:
            raise IndexError(name)
        part = batch[name]
    except (KeyError, IndexError, TypeError):
        has = list(batch) if isinstance(batch, Mapping) else f"the places 0 to {len(batch) - 1}"
        raise ValueError(f"fill names {name!r}, and a batch has {has}") from None
    if not isinstance(part, torch.Tensor):
        raise TypeError(f"bucketed pads tensors, and {name!r} of a batch is of type {type(part).__name__}")
    return part


def _replaced(batch: Any, parts: Mapping[Any, torch.Tensor]) -> Any:
    """A copy of the batch, of its own type, with other tensors in some places."""
    if isinstance(batch, tuple):
        items = [parts.get(place, part) for place, part in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    copied = copy.copy(batch)
    for name, tensor in parts.items():
        copied[name] = tensor
    return copied
