"""What the composed forms of several optimizers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kitsune.capture.update_rules.rule import Tensors


def descent(
    params: Tensors,
    grads: Tensors,
    hyper: Mapping[str, torch.Tensor],
    *,
    maximize: bool,
    decays: bool,
    decoupled: bool = False,
) -> Tensors:
    """The gradients to descend by, with weight decay. Decoupled, it shrinks the parameters in place instead."""
    dtype = params[0].dtype
    if maximize:
        grads = list(torch._foreach_neg(grads))
    if decays and decoupled:
        torch._foreach_mul_(params, (1 - hyper["lr"] * hyper["weight_decay"]).to(dtype))
    elif decays:
        grads = list(torch._foreach_add(grads, torch._foreach_mul(params, hyper["weight_decay"].to(dtype))))
    return grads


def decay_towards(averages: Tensors, values: Sequence[torch.Tensor], decay: torch.Tensor) -> None:
    """Moves running averages towards `values`, in place."""
    dtype = averages[0].dtype
    torch._foreach_mul_(averages, decay.to(dtype))
    torch._foreach_add_(averages, torch._foreach_mul(list(values), (1 - decay).to(dtype)))


def decay_towards_squares(averages: Tensors, values: Tensors, decay: torch.Tensor) -> None:
    """Moves running averages towards the squares of `values`, in place."""
    dtype = averages[0].dtype
    torch._foreach_mul_(averages, decay.to(dtype))
    torch._foreach_addcmul_(averages, torch._foreach_mul(values, (1 - decay).to(dtype)), values)


def add_scalar_(tensors: Tensors, scalar: torch.Tensor) -> None:
    """Adds a zero-dimensional tensor to all, in place."""
    # torch._foreach_add_ would take the tensor for a number, and read it on the host.
    torch.ops.aten._foreach_add_.Tensor(tensors, scalar.to(tensors[0].dtype))


def add_scalar(tensors: Tensors, scalar: torch.Tensor) -> Tensors:
    """The same, in new tensors."""
    return list(torch.ops.aten._foreach_add.Tensor(tensors, scalar.to(tensors[0].dtype)))


def roots_plus(squares: Tensors, eps: torch.Tensor) -> Tensors:
    """`sqrt(squares) + eps`."""
    roots = list(torch._foreach_sqrt(squares))
    add_scalar_(roots, eps)
    return roots


def step_by_ratio(params: Tensors, numerators: Tensors, denominators: Tensors, size: torch.Tensor) -> None:
    """Subtracts `size * numerators / denominators` from `params`, in place."""
    torch._foreach_addcdiv_(params, torch._foreach_mul(numerators, (-size).to(params[0].dtype)), denominators)
