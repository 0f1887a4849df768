"""Results that are inputs themselves: what operators in place return, as where a model counts (`self.count += 1`).

Python assigns such a result to where it was, and Dynamo makes a result of the graph of it.
"""

from __future__ import annotations

import torch
from torch import fx

from kitsune.graph import dataflow


def take_returned_inputs(module: fx.GraphModule) -> tuple[int | None, ...]:
    """Takes out of a graph that Dynamo made the results that are inputs of it, the same tensors.

    Those that gradients go through are left.

    Returns:
        For each of the results that there were, the place of the input that it is; None for those that are left.
    """
    results = dataflow.outputs(module.graph)
    places = {id(_example(node)): place for place, node in enumerate(dataflow.placeholders(module.graph))}
    returned = tuple(places.get(id(example)) if _is_leaf(example := _example(node)) else None for node in results)
    left = tuple(node for node, place in zip(results, returned, strict=True) if place is None)
    if len(left) < len(results):
        module.graph.output_node().args = (left,)
        module.recompile()
    return returned


def _example(node: dataflow.Result) -> object:
    """Dynamo's own value of `node`. It is one object for all that are the same tensor."""
    return None if node is None else node.meta.get("example_value")


def _is_leaf(example: object) -> bool:
    return isinstance(example, torch.Tensor) and example.is_leaf
