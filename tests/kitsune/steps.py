"""Whole training steps as graphs, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, fx, nn

import models
from kitsune.capture.step_program import StepSpec, trace_step
from tests.kitsune.capture.graphs import flat_graph
from tests.kitsune.training import Net, batch


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A graph and tensors that it takes; running it changes some of them."""

    module: fx.GraphModule
    inputs: list[Tensor]

    def fresh_inputs(self) -> list[Tensor]:
        """Copies of the inputs, laid out alike. The inputs are tensors of different storages."""
        return [tensor.detach().clone() for tensor in self.inputs]


class WithLoss(nn.Module):
    def __init__(self, module: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.loss_fn = module, loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(self.module(x), y)


def traced_step(
    module: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    clip_grad_norm: float | None = None,
    keep_grads: bool = True,
) -> TracedStep:
    """The second step of `module`, with Adam if nothing else is said; results are the loss and the gradients."""
    optimizer = optimizer or torch.optim.Adam(module.parameters(), lr=0.01, fused=True)
    whole = WithLoss(module, loss_fn)
    whole(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    graph, flat = flat_graph(whole, x, y)
    spec = StepSpec(
        module, lambda args, _: whole(*args), optimizer, clip_grad_norm=clip_grad_norm, keep_grads=keep_grads
    )
    program = trace_step(spec, "whole", graph, flat, {}, composed=False)
    return TracedStep(program.module, [*flat, *program.state])


@cache
def model_step(name: str, batch_size: int = 2) -> TracedStep:
    workload = models.build(name)
    return traced_step(workload.module, workload.loss_fn, *workload.batch(batch_size))


def dropout_step() -> TracedStep:
    """Batch norm and dropout between two layers, clipped gradients."""
    torch.manual_seed(1)
    (x, y), _ = batch(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Net(batch_norm=True, dropout=0.5))
    return traced_step(layers, nn.functional.cross_entropy, x, y, clip_grad_norm=0.1)


def bits(tensors: list[Tensor | None]) -> list[object]:
    """What is equal if and only if the tensors are, to the last bit."""
    return [
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.numpy().tobytes())
        for tensor in tensors
    ]
