"""Turns cuDNN's batch norm into PyTorch's own."""

from __future__ import annotations

import copy
import operator

import torch
from torch import fx

aten = torch.ops.aten


def native_batch_norm(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` in which batch norm in training mode is PyTorch's own, forward and backward.

    cuDNN's backward reads what its forward has reserved, so that neither could be replaced without the other. Where
    anything else reads it, both stay. Results differ in rounding.
    """
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        if node.target is not aten.cudnn_batch_norm.default or node.args[5] is not True:
            continue
        backwards = _backwards(node)
        if backwards is None:
            continue
        for backward in backwards:
            x, grad, weight, running_mean, running_var, mean, invstd, eps, _ = backward.args
            backward.target = aten.native_batch_norm_backward.default
            backward.args = (grad, x, weight, running_mean, running_var, mean, invstd, True, eps, [True] * 3)
        for reserve in _reserves(node):
            _erase(reserve)
        node.target = aten.native_batch_norm.default
        node.meta["val"] = node.meta["val"][:3]
    return fx.GraphModule(module, graph)


def _reserves(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == 3]


def _backwards(node: fx.Node) -> list[fx.Node] | None:
    """The backwards of cuDNN that read what `node` has reserved, or copies of it; None if anything else does."""
    found = []
    waiting = _reserves(node)
    while waiting:
        for user in waiting.pop().users:
            if user.target is aten.clone.default:  # where the graph of autograd is kept
                waiting.append(user)
            elif user.target is aten.cudnn_batch_norm_backward.default:
                found.append(user)
            else:
                return None
    return found


def _erase(node: fx.Node) -> None:
    """With all that was made of it."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
