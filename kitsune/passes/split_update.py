"""Splits an optimizer's update of all parameters into updates of groups, which need not wait for the last gradient."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence

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

# They compute gradients as well: their first two lists have an entry for each layer, and the third says which of them a
# parameter is of.
_UPDATES_OF_LAYERS = {"kitsune.linear_adam_.default", "kitsune.linear_sgd_.default"}

# Of parameters, in a part that computes their gradients, on average: where all would be done in a few microseconds, a
# launch more is no small part of it.
_LEAST_BYTES_OF_LAYERS = 8 << 20


def split_update(module: fx.GraphModule, num_parts: int) -> fx.GraphModule:
    """A copy of `module` in which each multi-tensor update is split into `num_parts` calls, or one for each parameter.

    Parameters are grouped in the order in which the graph makes their gradients, in groups of about as many bytes.
    Tensors that all share, like the learning rate, are passed to each call. Of given gradients the results are the same
    to the bit. An update that computes them has a kernel for each kind of layer whose form is chosen for each part, and
    may round otherwise: parts are of one kind each, of about as many parameters, so that few forms will do, and of
    8 MiB or more on average; what is left stays together.

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
        if str(operation.node.target) in _UPDATES | _UPDATES_OF_LAYERS:
            found.append((operation.node, dict(ready)))
        ready.update(dict.fromkeys(operation.writes, index))
    return found


def _split(node: fx.Node, ready: Mapping[int, int], num_parts: int) -> None:
    is_of_layers = str(node.target) in _UPDATES_OF_LAYERS
    parts = (_parts_of_layers if is_of_layers else _parts)(node, ready, num_parts)
    if len(parts) < 2:
        return
    for places in parts:
        args = _args_of_layers(node, places) if is_of_layers else _selected_of_all(node.args, places)
        kwargs = {name: _selected(value, places) for name, value in node.kwargs.items()}
        with node.graph.inserting_before(node):
            new = node.graph.create_node("call_function", node.target, args, kwargs)
        new.meta = dict(node.meta)
    node.graph.erase_node(node)


def _parts(node: fx.Node, ready: Mapping[int, int], num_parts: int) -> list[list[int]]:
    """The places of the parameters of each part."""
    params, grads = _nodes(node.args[0]), _nodes(node.args[1])
    order = _as_made([[grad] for grad in grads], ready)
    runs = partition([_num_bytes(params[place]) for place in order], num_parts)
    return [sorted(order[position] for position in run) for run in runs]


def _parts_of_layers(node: fx.Node, ready: Mapping[int, int], num_parts: int) -> list[list[int]]:
    """As `_parts`, for an update that computes the gradients."""
    params = _nodes(node.args[3])
    operands = list(zip(_nodes(node.args[0]), _nodes(node.args[1]), strict=True))
    sources = [operands[layer] for layer in _layers(node)]
    kinds: dict[Hashable, list[int]] = {}
    for place in _as_made(sources, ready):
        kinds.setdefault(tuple(_form(one) for one in (params[place], *sources[place])), []).append(place)
    parts: list[list[int]] = []
    rest: list[int] = []
    for places in kinds.values():
        count = min(num_parts, sum(_num_bytes(params[place]) for place in places) // _LEAST_BYTES_OF_LAYERS)
        if count < 2:
            rest += places
        else:
            parts += [[places[position] for position in run] for run in partition([1] * len(places), count)]
    return [*parts, sorted(rest)] if rest else parts


def _as_made(sources: Sequence[Sequence[fx.Node]], ready: Mapping[int, int]) -> list[int]:
    """The places of parameters in the order in which all that their gradients are made of is there."""

    def last(place: int) -> int:
        storages = (storage for node in sources[place] for storage in dataflow.storages(node))
        return max((ready.get(storage, -1) for storage in storages), default=-1)

    return sorted(range(len(sources)), key=lambda place: (last(place), place))


def _num_bytes(node: fx.Node) -> int:
    return sum(tensor.nbytes for tensor in dataflow.tensors(node))


def _form(node: fx.Node) -> Hashable:
    value = node.meta["val"]
    return value.dtype, value.size(), value.stride()


def _args_of_layers(node: fx.Node, places: Sequence[int]) -> tuple[fx.node.Argument, ...]:
    """The arguments for the parameters at `places`, with their layers only."""
    all_layers = _layers(node)
    layers = [all_layers[place] for place in places]
    used = list(dict.fromkeys(layers))
    of_layers = _selected_of_all(node.args[:2], used)
    return (*of_layers, [used.index(layer) for layer in layers], *_selected_of_all(node.args[3:], places))


def _layers(node: fx.Node) -> Sequence[int]:
    """For each parameter the index of its layer."""
    layers: Sequence[int] = node.args[2]  # type: ignore[assignment]
    return layers


def _selected_of_all(values: Sequence[fx.node.Argument], places: Sequence[int]) -> tuple[fx.node.Argument, ...]:
    return tuple(_selected(value, places) for value in values)


def _selected(value: fx.node.Argument, places: Sequence[int]) -> fx.node.Argument:
    """The entries at `places` of a list of tensors, if it is one that is not empty; anything else as it is."""
    entries = _nodes(value)
    return [entries[place] for place in places] if entries else value


def _nodes(value: fx.node.Argument) -> list[fx.Node]:
    """The entries of a list of tensors; nothing for anything else."""
    if not isinstance(value, (list, tuple)):
        return []
    return [entry for entry in value if isinstance(entry, fx.Node)]
