"""Drops operators whose results nobody uses."""

from __future__ import annotations

import copy
import operator

import torch
from torch import fx

from kitsune.graph import dataflow


def drop_dead(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` without operators that have no effect on its results, its inputs or its random numbers.

    Tracing leaves some: unused gradients' `getitem`s, views of values that were needed in eager mode only, and the
    reserved space that batch norm has on some devices.
    """
    graph = copy.deepcopy(module.graph)
    graph.eliminate_dead_code(is_impure_node=_has_effects)
    return fx.GraphModule(module, graph)


def _has_effects(node: fx.Node) -> bool:
    """Whether `node` must stay even if nobody uses it. An operator without results is there for something else."""
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or not dataflow.tensors(node):
        return True
    return dataflow.draws_random_numbers(node) or any(dataflow.written(node))
