"""Compares what a loop replays, module calls and updates, with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kitsune.loop.guarded_step import Call
from kitsune.loop.split_step import SplitStep
from kitsune.loop.update_step import UpdateStep
from kitsune.loop.verifying import Results, State, compare, tensors_of
from kitsune.verification import Difference


class CallComparison:
    """One comparison of a module's call, with its gradients for random gradients of its outputs.

    Attributes:
        output: of the latest call, which autograd can go back through once more.
    """

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.output: Any = None
        self._args, self._kwargs = args, kwargs
        tensors = tensors_of([module], None)
        self._device = next(iter(tensors.values())).device
        self._state = State(tensors, self._device)
        given = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        named = {**tensors, **{f"argument {index}": tensor for index, tensor in enumerate(given)}}
        self._autocast: torch.dtype | None = None
        self._wanted = {name: tensor for name, tensor in named.items() if tensor.is_leaf and tensor.requires_grad}

    def differences(self, step: SplitStep, eager: Call) -> list[Difference] | None:
        """See `compare`; None where `step` cannot replay the call."""

        self._autocast = step.autocast

        def replay() -> Results | None:
            done, output = step.replay(self._args, self._kwargs)
            return self._results(output) if done else None

        return compare(self._state, replay, lambda: self._results(eager(self._args, self._kwargs)), step.rounding)

    def _results(self, output: Any) -> Results:
        self.output = output
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        roots = [leaf for leaf in leaves if leaf.requires_grad]
        tangents = [_tangent(root, index) for index, root in enumerate(roots)]
        wanted = list(self._wanted.values())
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast is not None):
            grads = torch.autograd.grad(roots, wanted, tangents, retain_graph=True, allow_unused=True)
        named: Iterable[tuple[str, Tensor | None]] = zip(self._wanted, grads, strict=True)
        outputs = {f"output {index}": leaf for index, leaf in enumerate(leaves)}
        return {**outputs, **{f"{name}.grad": grad for name, grad in named if grad is not None}}


def _tangent(root: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(root.device).manual_seed(seed)
    values = torch.randn(root.shape, generator=generator, device=root.device, dtype=torch.float32)
    return torch.empty_like(root, requires_grad=False).copy_(values)


def update_differences(
    update: UpdateStep, optimizer: torch.optim.Optimizer, modules: list[torch.nn.Module], device: torch.device
) -> list[Difference] | None:
    """See `compare`, of an update with the present gradients; None where it cannot be replayed."""

    def plain() -> Results:
        optimizer.step()
        return {}

    state = State(tensors_of(modules, optimizer), device)
    return compare(state, lambda: {} if update.replay() else None, plain, lambda: torch.finfo(torch.float32).eps)


def iteration_differences(
    iteration: Callable[[], Any],
    paused: Callable[[], Any],
    modules: list[torch.nn.Module],
    optimizer: torch.optim.Optimizer,
    eps: Callable[[], float],
    device: torch.device,
) -> list[Difference]:
    """See `compare`, of a whole iteration and the same one as plain PyTorch; afterwards all is as it was.

    Args:
        iteration: one of the user's loop.
        paused: the same, replaying nothing.
    """
    tensors = tensors_of(modules, optimizer)
    trained = {name: tensor for name, tensor in tensors.items() if tensor.is_leaf and tensor.requires_grad}
    grads = [(tensor, tensor.grad) for tensor in trained.values()]
    state = State(tensors, device)
    saved = state.save()

    def results(returned: Any) -> Results:
        leaves = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        of_grads = {f"{name}.grad": tensor.grad for name, tensor in trained.items()}
        present = {name: grad for name, grad in of_grads.items() if grad is not None}
        return {**{f"result {index}": leaf for index, leaf in enumerate(leaves)}, **present}

    def run(call: Callable[[], Any]) -> Results:
        for tensor, grad in grads:
            tensor.grad = None if grad is None else grad.clone()
        return results(call())

    try:
        return compare(state, lambda: run(iteration), lambda: run(paused), eps) or []
    finally:
        state.load(saved)
        for tensor, grad in grads:
            tensor.grad = grad
