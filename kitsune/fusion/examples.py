"""Random inputs for a part of a graph and its replacement, which both take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Alone
from kitsune.fusion.moves import is_view
from kitsune.fusion.nodes import arguments, aten, calls
from kitsune.graph import dataflow


class _Indices(NamedTuple):
    """An argument of an operator whose integers are indices.

    Attributes:
        name: of the argument.
        bound: the argument that has so many places in dimension `dim`, or is their number.
        left_out: the argument with an index that counts for nothing.
    """

    name: str
    bound: str
    dim: int = 0
    left_out: str | None = None


_OF_LIKELIHOODS = (_Indices("target", "self", 1, "ignore_index"),)
_OF_LOGITS = (_Indices("targets", "logits", 1, "ignore_index"),)

_INDICES: Mapping[str, tuple[_Indices, ...]] = {
    "aten::embedding": (_Indices("indices", "weight"),),
    "aten::embedding_dense_backward": (_Indices("indices", "num_weights", left_out="padding_idx"),),
    "aten::nll_loss_forward": _OF_LIKELIHOODS,
    "aten::nll_loss_backward": _OF_LIKELIHOODS,
    "aten::nll_loss2d_forward": _OF_LIKELIHOODS,
    "aten::nll_loss2d_backward": _OF_LIKELIHOODS,
    "kitsune::embedding": (_Indices("indices", "weight"), _Indices("added_indices", "added_weight")),
    "kitsune::embedding_backward": (_Indices("indices", "num_embeddings", left_out="padding_idx"),),
    "kitsune::cross_entropy": _OF_LOGITS,
    "kitsune::cross_entropy_backward": _OF_LOGITS,
    "kitsune::cross_entropy_backward_": _OF_LOGITS,
    "kitsune::cross_entropy_head": (_Indices("targets", "weight", 0, "ignore_index"),),
}


class _Range(NamedTuple):
    """Valid indices: from 0 to below `bound`, and `left_out`, which counts for nothing."""

    bound: int
    left_out: int | None


def examples(alone: Alone, device: torch.device) -> Sequence[torch.Tensor]:
    """Inputs, equal at each call: of normal numbers, but for positive ones in scalars and vectors.

    Integers are valid indices for the operators that take them as such, with some that are left out, and else 0, which
    is a valid count; half of the Booleans are true.
    """
    generator = torch.Generator(device).manual_seed(0)
    ranges = _ranges(alone)
    free = [_example(node.meta["val"], ranges[node], generator) for node in dataflow.placeholders(alone.given.graph)]
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        made: Sequence[torch.Tensor] = alone.given.forward(*free)
    return made


def _ranges(alone: Alone) -> dict[fx.Node, _Range | None]:
    """For each input of `alone.given` the indices that all its users take; None where none is known to take any."""
    results: dict[fx.Node | None, list[_Range]] = {}
    for module in (alone.before, alone.after):
        for node, source in zip(dataflow.placeholders(module.graph), dataflow.outputs(alone.given.graph), strict=True):
            results.setdefault(source, []).extend(_taken(node, {}))
    return {node: _in_all(_taken(node, results)) for node in dataflow.placeholders(alone.given.graph)}


def _taken(node: fx.Node, results: Mapping[fx.Node | None, Sequence[_Range]]) -> list[_Range]:
    """The indices that users of `node` take, also through views and casts; `results`: those of users of the graph's."""
    found = list(results.get(node, ()))
    for user in node.users:
        if is_view(user) or calls(user, aten._to_copy.default, aten.clone.default):
            found += _taken(user, results)
        elif isinstance(user.target, torch._ops.OpOverload):
            named = dict(zip((one.name for one in user.target._schema.arguments), arguments(user), strict=True))
            taken = _INDICES.get(user.target._schema.name, ())
            found += [_range(indices, named) for indices in taken if named[indices.name] is node]
    return found


def _range(indices: _Indices, named: Mapping[str, Any]) -> _Range:
    bound = named[indices.bound]
    if isinstance(bound, fx.Node):
        size = bound.meta["val"].size()
        bound = size[min(indices.dim, len(size) - 1)]
    if indices.left_out is None or (indices.left_out == "padding_idx" and named["padding_idx"] < 0):
        return _Range(bound, None)
    return _Range(bound, named[indices.left_out])


def _in_all(ranges: Sequence[_Range]) -> _Range | None:
    if not ranges:
        return None
    bound = min(one.bound for one in ranges)
    left_out = ranges[0].left_out
    known = [one.left_out for one in ranges if one.left_out is not None and 0 <= one.left_out < bound]
    if any(one.left_out != left_out for one in ranges):
        left_out = known[0] if known else None
    return _Range(bound, left_out)


def _example(value: torch.Tensor, indices: _Range | None, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    size = [1 if stride == 0 else size for size, stride in zip(value.size(), value.stride(), strict=True)]
    made = torch.empty_strided(size, value.stride(), dtype=value.dtype, device=device)
    if value.dtype == torch.bool:
        made.copy_(torch.rand(size, generator=generator, device=device) < 0.5)
    elif not value.dtype.is_floating_point:
        made.zero_() if indices is None else made.copy_(_drawn(size, indices, value.dtype, generator))
    else:
        draw = torch.rand if value.dim() < 2 else torch.randn
        made.copy_(draw(size, generator=generator, device=device))
    return made.expand(value.size())


def _drawn(size: Sequence[int], indices: _Range, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Indices at random, every seventh of them left out where one is."""
    bound, left_out = max(indices.bound, 1), indices.left_out
    if left_out is None or left_out < torch.iinfo(dtype).min:
        return torch.randint(bound, size, generator=generator, device=generator.device)
    is_between = 0 <= left_out < bound and bound > 1
    drawn = torch.randint(bound - is_between, size, generator=generator, device=generator.device)
    if is_between:
        drawn += drawn >= left_out
    drawn.view(-1)[3::7] = left_out
    return drawn
