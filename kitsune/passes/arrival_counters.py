"""Zeroes the counters of all batch norms of a graph at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import fx

from kitsune.graph.values import mode_of, value
from kitsune.kernels.batch_norm import num_counters

# A line of a device's cache, so that counters of different operators are apart and begin where tensors do.
_COUNTERS_A_LINE = 32

_aten = torch.ops.aten
_kitsune = torch.ops.kitsune

# How many normalizations of its first argument's channels each takes sums for by itself.
_BRANCHES: Mapping[object, int] = {
    _kitsune.batch_norm.default: 1,
    _kitsune.batch_norm_backward.default: 1,
    _kitsune.batch_norm_residual_backward.default: 1,
    _kitsune.batch_norm_join.default: 2,
    _kitsune.batch_norm_join_backward.default: 1,
}


def arrival_counters(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` whose batch norms have a part each of one tensor, which the graph's first operator zeroes.

    So they need not zero counters of their own, a launch each. No two share a counter: they may run at the same time.
    """
    graph = copy.deepcopy(module.graph)
    operators = [node for node in graph.nodes if node.target in _BRANCHES and node.kwargs.get("counters") is None]
    if operators:
        _give_counters(graph, operators)
    return fx.GraphModule(module, graph)


def _give_counters(graph: fx.Graph, operators: list[fx.Node]) -> None:
    ends = [0]
    for node in operators:
        lines = -(-_num_counters(node) // _COUNTERS_A_LINE)
        ends.append(ends[-1] + lines * _COUNTERS_A_LINE)
    mode = mode_of(graph)

    def call(target: torch._ops.OpOverload, *args: object, **kwargs: object) -> fx.Node:
        node = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        node.meta["val"] = value(mode, target, args, kwargs)
        return node

    with graph.inserting_before(next(node for node in graph.nodes if node.op == "call_function")):
        device = operators[0].args[0].meta["val"].device  # type: ignore[union-attr]
        zeros = call(_aten.zeros.default, [ends[-1]], dtype=torch.int32, device=device)
    for node, begin, end in zip(operators, ends, ends[1:], strict=False):
        with graph.inserting_before(node):
            counters = call(_aten.slice.Tensor, zeros, 0, begin, end)
        node.kwargs = {**node.kwargs, "counters": counters}


def _num_counters(node: fx.Node) -> int:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return num_counters(first.meta["val"].shape[1], _BRANCHES[node.target])
