"""Splits a cast of many inputs into casts of groups, so that what is needed first need not wait for the rest."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence

import torch
from torch import fx

from kitsune.graph.partition import partition
from kitsune.kernels import casts  # noqa: F401 - defines the operator

_CAST = torch.ops.kitsune.cast_many.default

_LEAST_BYTES = 2**22
"""Of what a part writes: less takes hardly longer than a launch."""


def split_casts(module: fx.GraphModule, num_parts: int) -> fx.GraphModule:
    """A copy of `module` in which each large cast of many tensors is split into up to `num_parts` calls.

    Tensors are grouped in the order in which the graph first uses what they are cast to, in groups of about as many
    bytes. The results are the same to the bit.

    Raises:
        ValueError: `num_parts` is less than 1.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; a cast has at least 1 part")
    graph = copy.deepcopy(module.graph)
    for node in graph.find_nodes(op="call_function", target=_CAST):
        if all(user.target is operator.getitem for user in node.users):
            _split(node, num_parts)
    return fx.GraphModule(module, graph)


def _split(node: fx.Node, num_parts: int) -> None:
    inputs, dtype = node.args
    assert isinstance(inputs, (list, tuple))
    values: Sequence[torch.Tensor] = node.meta["val"]
    results: dict[int, fx.Node] = {user.args[1]: user for user in node.users if user.users}  # type: ignore[misc]
    order = sorted(results, key=lambda place: (min(results[place].users), place))
    sizes = [values[place].nbytes for place in order]
    runs = partition(sizes, min(num_parts, sum(sizes) // _LEAST_BYTES))
    if len(runs) < 2:
        return
    for run in runs:
        places = sorted(order[position] for position in run)
        with node.graph.inserting_before(node):
            new = node.graph.call_function(_CAST, ([inputs[place] for place in places], dtype))
        new.meta = {**node.meta, "val": [values[place] for place in places]}
        for position, place in enumerate(places):
            results[place].args = (new, position)
    for left in list(node.users):  # nobody uses it
        node.graph.erase_node(left)
    node.graph.erase_node(node)
