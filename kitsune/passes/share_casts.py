"""Casts a value to another type once."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable

import torch
from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.values import refresh


def share_casts(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` in which equal casts of a value are one operator.

    Autocast remembers what it made of parameters only: an activation that three layers take is cast three times. A cast
    whose memory is returned or written to stays a value of its own.
    """
    graph = copy.deepcopy(module.graph)
    overwritten = _memory(one for node in graph.nodes for one in dataflow.written(node))
    own = overwritten | _memory(node for node in dataflow.outputs(graph) if node is not None)
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten._to_copy.default:
            continue
        (source,) = node.all_input_nodes
        if own & dataflow.storages(node) or overwritten & dataflow.storages(source):
            continue
        first = seen.setdefault((source, tuple(sorted(node.kwargs.items()))), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    refresh(graph)  # views of what is gone are views of something else now
    return fx.GraphModule(module, graph)


def _memory(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage for node in nodes for storage in dataflow.storages(node)}
