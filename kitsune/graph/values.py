"""The fake tensors in `node.meta["val"]`: what tracing knows of a graph's values.

They are private, but there is no public way to learn what an operator would return.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from kitsune.errors import first_line
from kitsune.graph import dataflow


def mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode in which `graph` was traced."""
    tensors = (tensor for node in graph.nodes for tensor in dataflow.tensors(node))
    return next(tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))


def value(mode: FakeTensorMode, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a node that calls `target` would hold; nodes among the arguments stand for their values.

    These stay as they are: an operator that changes the shape of its argument gets another tensor in its place.
    """
    reshapes = isinstance(target, torch._ops.OpOverload) and torch.Tag.inplace_view in target.tags
    with mode, torch.no_grad():
        taken = pytree.tree_map_only(
            fx.Node, lambda node: node.meta["val"].detach() if reshapes else node.meta["val"], (args, kwargs)
        )
        return target(*taken[0], **taken[1])


def refresh(graph: fx.Graph) -> None:
    """Computes all values again, after a change to what aliases what. Those of inputs and constants stay."""
    mode = mode_of(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            found = value(mode, node.target, node.args, dict(node.kwargs))
            if found is not None or node.target is operator.getitem:
                node.meta["val"] = found


def wrong_value(graph: fx.Graph, right: Collection[fx.Node] = ()) -> str | None:
    """The first node whose value is not of the form that its operator computes from its arguments; None if none is.

    Where a value, or a part of it, is None, anything may come out. Nodes in `right` are not looked at.
    """
    mode = mode_of(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node in right:
            continue
        try:
            found = value(mode, node.target, node.args, dict(node.kwargs))
        except (ValueError, TypeError, RuntimeError) as error:  # the operator's own check of its arguments
            return f"{node.name} cannot be computed: {first_line(error)}"
        if not _fits(node.meta.get("val"), found):
            return f"{node.name} has the value {node.meta['val']}, but computes {found}"
    return None


def _fits(known: object, found: object) -> bool:
    if known is None:
        return True
    if isinstance(known, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(known) == len(found) and all(map(_fits, known, found))
    return _form(known) == _form(found)


def _form(value: object) -> object:
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, torch.Tensor) else value
