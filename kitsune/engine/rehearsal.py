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
    """What a `Rehearsal` with these inputs finds, all at once."""
    rehearsal = Rehearsal(before, after)
    while not rehearsal.advance(inputs):
        pass
    return rehearsal.problem


class Rehearsal:
    """Finds out whether one graph does what another does, but for rounding, in a few short parts.

    How far apart rounding takes them depends on the model: a difference that is nothing to one layer decides about a
    ReLU of the next, and Adam makes much of gradients that are nearly zero. So the measure is what becomes of `before`
    where every number that it starts from is off by about as much as rounding takes away.

    Args:
        before, after: graphs of a training step with the same inputs.

    Attributes:
        problem: what `after` returns or writes otherwise than `before` does, in words; None but for rounding.
    """

    def __init__(self, before: fx.GraphModule, after: fx.GraphModule) -> None:
        self.problem: str | None = None
        self._before, self._after, self._eps = before, after, rounding(before.graph)
        self._written = dataflow.written_inputs(after.graph) | dataflow.written_inputs(before.graph)
        self._generator: torch.Generator | None = None
        self._apart: list[float] = []
        self._num_draws, self._enough = 0, _DRAWS

    def advance(self, inputs: Sequence[Tensor]) -> bool:
        """Runs two graphs; whether `problem` is known.

        Args:
            inputs: of the present step. They are left as they are, and so are the generators of random numbers.
        """
        inputs = [tensor.detach() for tensor in inputs]
        wanted = self._left_by(self._before, inputs)
        if self._num_draws < self._enough:
            self._draw(inputs, wanted)
            return False
        found = self._left_by(self._after, inputs)
        if [one.kind() for one in found] != [one.kind() for one in wanted]:
            self.problem = "it returns other sizes or types"
            return True
        self.problem = _suspicion(found, wanted, self._apart)
        self._enough += 1
        return self.problem is None or self._num_draws >= _MOST_DRAWS

    def _draw(self, inputs: Sequence[Tensor], wanted: Sequence[_Left]) -> None:
        """Looks what rounding may make of the step."""
        generator = self._generator or torch.Generator(inputs[0].device).manual_seed(0)
        self._generator = generator
        drawn = self._left_by(self._before, [off_by(self._eps, tensor, generator) for tensor in inputs])
        found = list(map(_distance, drawn, wanted))
        most = self._apart or [0.0] * len(found)
        self._apart = [max(one, other) if math.isfinite(other) else one for one, other in zip(most, found, strict=True)]
        self._num_draws += 1

    def _left_by(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> list[_Left]:
        return _left_by(module, inputs, self._written, self._eps)


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
