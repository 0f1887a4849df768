"""Leaves one node for each view."""

from __future__ import annotations

import copy
from collections.abc import Hashable

import torch
from torch import fx

from kitsune.graph import dataflow


def simplify(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` without views that see the same elements in the same way as a value that is there already.

    Autograd leaves many: detached tensors, transposed ones that are transposed back, reshaped ones that keep their
    shape. What is done with a value is easier to see without them. Values that are given another shape in place, and
    their views, stay as they are.
    """
    graph = copy.deepcopy(module.graph)
    reshaped = dataflow.reshaped(graph)
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "output" or not isinstance(value, torch.Tensor) or dataflow.storage_of(value) in reshaped:
            continue
        key = _key(value)
        if _is_view(node) and key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
    return fx.GraphModule(module, graph)


def _key(value: torch.Tensor) -> Hashable:
    flags = value.is_conj(), value.is_neg(), value.requires_grad
    return dataflow.storage_of(value), value.dtype, value.size(), value.stride(), value.storage_offset(), flags


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
