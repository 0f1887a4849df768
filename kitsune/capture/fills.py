"""Assignments of one number by a mask, `x[mask] = 0`, as the fills that torch runs for them.

As indexing they would need to know how many elements the mask selects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_Indices = Sequence[Tensor | None]


def _fill_in_place(x: Tensor, indices: _Indices, value: Tensor, accumulate: bool = False) -> Any:
    mask = _mask_of(x, indices, value, accumulate)
    return NotImplemented if mask is None else x.masked_fill_(mask, value)


def _fill(x: Tensor, indices: _Indices, value: Tensor, accumulate: bool = False) -> Any:
    mask = _mask_of(x, indices, value, accumulate)
    return NotImplemented if mask is None else x.masked_fill(mask, value)


FILLS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    _aten.index_put_.default: _fill_in_place,
    _aten.index_put.default: _fill,
}
"""What `make_fx` is to trace in place of indexing; NotImplemented where that is no such assignment."""


def _mask_of(x: Tensor, indices: _Indices, value: Tensor, accumulate: bool) -> Tensor | None:
    """The mask of an assignment of one number, to be broadcast with `x`; None if it is another one."""
    places = [place for place, index in enumerate(indices) if index is not None]
    if accumulate or value.dim() or value.dtype != x.dtype or len(places) != 1:
        return None
    mask = indices[places[0]]
    assert mask is not None
    if mask.dtype != torch.bool or mask.device != x.device:
        return None
    end = places[0] + mask.dim()
    if mask.shape != x.shape[places[0] : end]:
        return None
    return mask.reshape(*mask.shape, *[1] * (x.dim() - end))
