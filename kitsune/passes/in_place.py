"""Operators that overwrite their argument, and those that make a new tensor instead."""

from __future__ import annotations

import copy

import torch
from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.values import mode_of, refresh, value

_IN_PLACE = "kitsune_in_place"


def out_of_place(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` whose operators overwrite no values that the graph itself has made, as far as can be.

    Then every node stands for one value, and operators can be matched and moved. `in_place` takes it back.
    """
    graph = copy.deepcopy(module.graph)
    mode = mode_of(graph)
    found = {node: _functional(node) for node in graph.nodes if node.op == "call_function"}
    changed = {
        node: target
        for node, target in found.items()
        if target is not None
        and _is_last_user(graph, node)
        and _alike(value(mode, target, node.args, dict(node.kwargs)), node.meta["val"])
    }
    for node, target in changed.items():
        node.meta[_IN_PLACE] = node.target
        node.target = target
    refresh(graph)
    return fx.GraphModule(module, graph)


def in_place(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` in which operators that `out_of_place` has changed overwrite their argument again.

    Those do whose argument is still a value that nobody reads afterwards.
    """
    graph = copy.deepcopy(module.graph)
    found = {node: node.meta.pop(_IN_PLACE) for node in graph.nodes if _IN_PLACE in node.meta}
    changed = {node: target for node, target in found.items() if _is_last_user(graph, node)}
    for node, target in changed.items():
        node.target = target
    refresh(graph)
    return fx.GraphModule(module, graph)


def _functional(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that computes what `node` writes to its first argument; None if it is not of that kind."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target.overloadpacket.__name__
    if not name.endswith("_") or name.startswith("_") or list(dataflow.written(node)) != [node.args[0]]:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    found = getattr(packet, target._overloadname, None)
    if not isinstance(found, torch._ops.OpOverload) or found._schema.is_mutable or found.is_view:
        return None
    return found if _arguments(found) == _arguments(target) else None


def _arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def _is_last_user(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether the first argument of `node` is a whole value of the graph's own that only `node` hands on.

    Nothing after `node` reads its memory but through `node`, and the result has its type and layout.
    """
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    if not _alike(argument.meta["val"], node.meta["val"]):
        return False
    storage = dataflow.storage_of(argument.meta["val"])
    from_outside = [*dataflow.placeholders(graph), *graph.find_nodes(op="get_attr")]
    if any(storage in dataflow.storages(other) for other in from_outside):
        return False
    handed_on = {node}
    is_after = False
    for other in graph.nodes:
        if other is node:
            is_after = True
        elif is_after:
            readers = [read for read in other.all_input_nodes if storage in dataflow.storages(read)]
            if any(read not in handed_on for read in readers):
                return False
            if readers and storage in dataflow.storages(other):
                handed_on.add(other)
    return True


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.size(), one.stride()) == (other.dtype, other.size(), other.stride())
