"""Where the backward pass of a call is cut so that other processes can get gradients before it has ended.

A `DistributedDataParallel` sends gradients in buckets, each when its gradients have arrived at the parameters. Those of
one node of autograd's graph arrive together: if that were the whole backward pass, nothing would be sent during it. How
a rank cuts is its own affair: the wrapper's buckets, and so the order of collective operations, stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch.utils import _pytree as pytree


def boundaries(graph: fx.Graph, outputs: Collection[fx.Node], bucket_bytes: int) -> set[fx.Node]:
    """Nodes after which to cut, so that the parameters between two cuts have at least `bucket_bytes` of gradients.

    Only where a single value with a gradient goes on, so that each part of the backward pass begins at one gradient.

    Args:
        graph: as Dynamo makes it, of a call; sample values are in `meta["example_value"]`.
        outputs: the differentiable ones.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    left = {node: _gradient_bytes(node) for node in graph.find_nodes(op="placeholder")}
    going_on: set[fx.Node] = set()
    found: set[fx.Node] = set()
    gathered = 0
    for node, place in order.items():
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        gathered += sum(left.pop(argument, 0) for argument in node.all_input_nodes)
        computed = {one for one in (*going_on, node) if _gradient_bytes(one)}
        going_on = {one for one in computed if any(order[user] > place for user in one.users)}
        if gathered >= bucket_bytes and any(left.values()) and len(going_on) == 1 and going_on.isdisjoint(outputs):
            found.add(node)
            gathered = 0
    return found


def _gradient_bytes(node: fx.Node) -> int:
    """Of the gradients of what it produces."""
    examples = pytree.tree_leaves(node.meta.get("example_value"))
    tensors = [one for one in examples if isinstance(one, torch.Tensor) and one.requires_grad]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
