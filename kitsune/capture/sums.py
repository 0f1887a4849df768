"""Scalars that the model adds up in place, as `loss += penalty`, are added up out of place.

Dynamo has one value for all that is ever made of such a scalar, so that its graph does not tell which of them gradients
go through; and what stands for a value that comes from an earlier stage of a call cannot be written.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kitsune.graph import dataflow

_OUT_OF_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    **{f"{name}_": name for name in ("add", "sub", "mul", "div")},
}


def add_out_of_place(module: fx.GraphModule) -> None:
    """Replaces what a graph that Dynamo made writes to scalars of its own, where nobody can see the difference."""
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    examples = [example for node in order if isinstance(example := node.meta.get("example_value"), torch.Tensor)]
    for node in order:
        if node.target in _OUT_OF_PLACE and _is_unseen(node, order, examples):
            total = node.args[0]
            assert isinstance(total, fx.Node)
            node.target = _OUT_OF_PLACE[node.target]
            _tell_apart(total)
            _tell_apart(node)
    module.recompile()


def _is_unseen(node: fx.Node, order: dict[fx.Node, int], examples: list[torch.Tensor]) -> bool:
    """Whether `node` is the last to see the scalar that it writes, and gives what it would give out of place."""
    if len(node.args) != 2 or node.kwargs:
        return False
    total, other = node.args
    if not isinstance(total, fx.Node) or total.op in ("placeholder", "get_attr"):
        return False
    before = total.meta.get("example_value")
    if not isinstance(before, torch.Tensor) or before.dim() or not before.is_floating_point():
        return False
    added = other.meta.get("example_value") if isinstance(other, fx.Node) else other
    is_alike = isinstance(added, torch.Tensor) and (added.dim(), added.dtype) == (0, before.dtype)
    if not is_alike and not isinstance(added, int | float):
        return False
    memory, after = dataflow.storage_of(before), node.meta.get("example_value")
    shared = [one for one in examples if one.layout is torch.strided and dataflow.storage_of(one) == memory]
    return all(one is after for one in shared) and all(order[user] <= order[node] for user in total.users)


def _tell_apart(node: fx.Node) -> None:
    """Gives `node` a sample value of its own, that needs a gradient if something does that it is computed from."""
    example = node.meta["example_value"]
    sources = [source.meta.get("example_value") for source in node.all_input_nodes]
    needs = any(isinstance(source, torch.Tensor) and source.requires_grad for source in sources)
    node.meta["example_value"] = example.detach().requires_grad_(needs and example.requires_grad)
