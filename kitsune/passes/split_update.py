"""Splits an optimizer's update of all parameters into updates of groups, which need not wait for the last gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.dependencies import operations
from kitsune.graph.partition import partition

# They treat parameters independently of each other: what they take as lists has an entry for each, or none at all.
_UPDATES = {
    "aten._fused_adam_.tensor_lr",
    "aten._fused_adamw_.tensor_lr",
    "aten._fused_sgd_.tensor_lr",
    "kitsune.adam_.default",
}


def split_update(module: fx.GraphModule, num_parts: int) -> fx.GraphModule:
    """A copy of `module` in which each multi-tensor update is split into `num_parts` calls, or one for each parameter.

    Parameters are grouped in the order in which the graph makes their gradients, in groups of about as many bytes.
    Tensors that all share, like the learning rate, are passed to each call. The results are the same to the bit.

    Raises:
        ValueError: `num_parts` is less than 1.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; an update has at least 1 part")
    graph = copy.deepcopy(module.graph)
    if num_parts > 1:
        for node, ready in _updates(graph):
            _split(node, ready, num_parts)
    return fx.GraphModule(module, graph)


def _updates(graph: fx.Graph) -> list[tuple[fx.Node, Mapping[int, int]]]:
    """The updates of `graph`, each with the latest operation before it that writes each storage."""
    ready: dict[int, int] = {}
    found: list[tuple[fx.Node, Mapping[int, int]]] = []
    for index, operation in enumerate(operations(graph).listed):
        if str(operation.node.target) in _UPDATES:
            found.append((operation.node, dict(ready)))
        ready.update(dict.fromkeys(operation.writes, index))
    return found


def _split(node: fx.Node, ready: Mapping[int, int], num_parts: int) -> None:
    params, grads = _nodes(node.args[0]), _nodes(node.args[1])
    made = [max((ready.get(storage, -1) for storage in dataflow.storages(grad)), default=-1) for grad in grads]
    order = sorted(range(len(params)), key=lambda place: (made[place], place))
    sizes = [sum(tensor.nbytes for tensor in dataflow.tensors(params[place])) for place in order]
    runs = partition(sizes, num_parts)
    if len(runs) < 2:
        return
    for run in runs:
        places = sorted(order[position] for position in run)
        with node.graph.inserting_before(node):
            args = tuple(_selected(value, places) for value in node.args)
            kwargs = {name: _selected(value, places) for name, value in node.kwargs.items()}
            new = node.graph.create_node("call_function", node.target, args, kwargs)
        new.meta = dict(node.meta)
    node.graph.erase_node(node)


def _selected(value: fx.node.Argument, places: Sequence[int]) -> fx.node.Argument:
    """The entries at `places` of a list of tensors, if it is one that is not empty; anything else as it is."""
    entries = _nodes(value)
    return [entries[place] for place in places] if entries else value


def _nodes(value: fx.node.Argument) -> list[fx.Node]:
    """The entries of a list of tensors; nothing for anything else."""
    if not isinstance(value, (list, tuple)):
        return []
    return [entry for entry in value if isinstance(entry, fx.Node)]
