"""Runs a captured graph operator by operator, on any device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import fx

from kitsune.execution.lanes import Lanes

Outputs = Sequence[torch.Tensor]


class InOrder:
    """Executes the operators of a graph in their order.

    The inputs are used as they are, in-place writes reach them, and the outputs are new tensors
    that belong to the caller. Neither autograd nor autocast sees the operators: the graph holds
    the gradients and the casts already.

    Args:
        module: a graph of ATen operators over flat tensors.
        compile: let Inductor compile the graph at the first call.
        lanes: makes, for each call, what a graph lowered to several streams takes before its inputs.
    """

    name = "in order"
    keeps_outputs = False

    def __init__(
        self, module: fx.GraphModule, *, compile: bool = False, lanes: Callable[[], Lanes] | None = None
    ) -> None:
        self._run: Callable[..., Outputs] = module.forward
        if lanes is not None:
            self._run = partial(_run_on_lanes, module, lanes)
        if compile:
            self.name = "inductor"
            self._run = partial(_run_compiled, torch.compile(module, fullgraph=True, dynamic=False))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        device = inputs[0].device.type
        with torch.no_grad():
            if not torch.is_autocast_enabled(device):
                return self._run(*inputs)
            with torch.autocast(device, enabled=False):
                return self._run(*inputs)

    def static_outputs(self) -> list[torch.Tensor]:
        """None: every call returns new tensors."""
        return []

    def release(self) -> None:
        """Drops the graph."""
        del self._run


def with_copies(inputs: Sequence[torch.Tensor], positions: Collection[int]) -> list[torch.Tensor]:
    """`inputs` with copies at `positions`, laid out alike; those that share memory do so as copies too."""
    copies = copy.deepcopy({position: inputs[position] for position in positions})
    return [copies.get(position, tensor) for position, tensor in enumerate(inputs)]


def _run_compiled(run: Callable[..., Outputs], *inputs: torch.Tensor) -> Outputs:
    """Dynamo would compile again for a parameter where it has seen a copy of one, even in the midst of a recording."""
    return run(*(tensor.detach() for tensor in inputs))


def _run_on_lanes(module: fx.GraphModule, make: Callable[[], Lanes], *inputs: torch.Tensor) -> Outputs:
    lanes = make()
    try:
        outputs: Outputs = module.forward(lanes, *inputs)
    finally:
        lanes.to(0)  # where an operator raised: a recording can only be ended on the stream where it began
    return outputs
