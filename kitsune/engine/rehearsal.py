"""Compares two graphs of a whole step on copies of the present one, before either trains by the second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from kitsune.engine.rounding import change, norm, off_by, rounding, unit, unit_of_loss
from kitsune.execution.in_order import InOrder, with_copies
from kitsune.graph import dataflow

# A step may make more of rounding than a few draws show. Where more are needed, they are made: a ReLU that is about to
# open decides about all of a weight's row, and does so in some draws only.
_DRAWS = 2
_MOST_DRAWS = 10
_TIMES = 10.0

# A loss near zero is the difference of numbers of about one, in float32 at least.
_LEAST_UNIT = torch.finfo(torch.float32).eps


def difference(before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Tensor]) -> str | None:
    """What `after` returns or writes otherwise than `before` does, in words; None if nothing but for rounding.

    How far apart rounding takes them depends on the model: a difference that is nothing to one layer decides about a
    ReLU of the next, and Adam makes much of gradients that are nearly zero. So the measure is what becomes of `before`
    where every number that it starts from is off by about as much as rounding takes away.

    Args:
        before, after: graphs of a training step with the same inputs.
        inputs: of the present step. They are left as they are, and so are the generators of random numbers.
    """
    device = inputs[0].device
    inputs = [tensor.detach() for tensor in inputs]
    eps, generator = rounding(before.graph), torch.Generator(device).manual_seed(0)
    written = dataflow.written_inputs(after.graph) | dataflow.written_inputs(before.graph)
    wanted = _left_by(before, inputs, written, eps)
    apart = [0.0] * len(wanted)

    def draw() -> None:
        drawn = _left_by(before, [off_by(eps, tensor, generator) for tensor in inputs], written, eps)
        found = map(_distance, drawn, wanted)
        apart[:] = [max(most, one) if math.isfinite(one) else most for most, one in zip(apart, found, strict=True)]

    for _ in range(_DRAWS):
        draw()
    found = _left_by(after, inputs, written, eps)
    if [one.kind() for one in found] != [one.kind() for one in wanted]:
        return "it returns other sizes or types"
    for _ in range(_DRAWS, _MOST_DRAWS):
        if _suspicion(found, wanted, apart) is None:
            return None
        draw()
    return _suspicion(found, wanted, apart)


class _Left(NamedTuple):
    """A result of a step, or what it changes of a value that it writes.

    Attributes:
        name: which it is.
        tensor: the result or the change.
        unit: the norm of what is lost at most where such a value is stored.
    """

    name: str
    tensor: Tensor
    unit: float

    def kind(self) -> tuple[torch.Size, torch.dtype]:
        return self.tensor.size(), self.tensor.dtype


def _left_by(
    module: fx.GraphModule, inputs: Sequence[Tensor], written: Mapping[int, fx.Node], eps: float
) -> list[_Left]:
    device = inputs[0].device
    copies = with_copies(inputs, sorted(written))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        results = InOrder(module)(copies)
    units = [_unit(result, 0.0 if place else eps) for place, result in enumerate(results)]
    left = [_Left(f"result {place}", *pair) for place, pair in enumerate(zip(results, units, strict=True))]
    for place, node in sorted(written.items()):
        tensor = inputs[place]
        name = f"what {node.target} changes of a tensor of {tuple(tensor.size())}"
        left.append(_Left(name, change(tensor, copies[place]), unit(tensor)))
    return left


def _suspicion(found: Sequence[_Left], wanted: Sequence[_Left], apart: Sequence[float]) -> str | None:
    for one, other, most in zip(found, wanted, apart, strict=True):
        distance, allowed = _distance(one, other), _TIMES * most + other.unit
        if not distance <= allowed:  # it may be no number
            return f"{other.name} is off by {distance:.2g}, where rounding explains {allowed:.2g}"
    return None


def _distance(one: _Left, other: _Left) -> float:
    return norm(one.tensor.double() - other.tensor.double())


def _unit(result: Tensor, eps: float) -> float:
    """`eps`: what the loss, which is the first result, may be rounded by on the way; 0 for the gradients after it."""
    least = min(_LEAST_UNIT, torch.finfo(result.dtype).eps) if result.is_floating_point() and result.dim() == 0 else 0.0
    return max(unit_of_loss(result, eps), least)
