"""The passes in their order, and what holds between them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from kitsune.errors import KitsuneError
from kitsune.graph import dataflow
from kitsune.graph.rewrite import misread, reordered, untouched
from kitsune.graph.values import wrong_value
from kitsune.graph.verify import refuse_graph
from kitsune.passes.arrival_counters import arrival_counters
from kitsune.passes.drop_dead import drop_dead
from kitsune.passes.in_place import in_place, out_of_place
from kitsune.passes.native_batch_norm import native_batch_norm
from kitsune.passes.share_casts import share_casts
from kitsune.passes.simplify import simplify
from kitsune.passes.split_backward import split_backward
from kitsune.passes.split_casts import split_casts
from kitsune.passes.split_update import split_update

Pass = Callable[[fx.GraphModule], fx.GraphModule]
"""Makes a new graph with the same inputs and results; values are in `node.meta["val"]` of the old one and the new."""

Passes = tuple[tuple[str, Pass], ...]


CLEARING: Passes = (
    ("drop dead", drop_dead),
    ("simplify", simplify),
    ("drop dead", drop_dead),
    ("out of place", out_of_place),
    ("share casts", share_casts),
    ("simplify", simplify),
    ("native batch norm", native_batch_norm),
)
"""The passes after which every node stands for one value, so that operators can be matched and moved by themselves."""

FINISHING: Passes = (("drop dead", drop_dead), ("in place", in_place), ("arrival counters", arrival_counters))
"""The passes for a graph whose operators have been fused."""


def splitting(num_parts: int) -> Passes:
    """The passes that make a graph's operators more independent; what treats many tensors alike becomes that many."""
    return (
        ("drop dead", drop_dead),
        ("split backward", split_backward),
        ("split casts", partial(split_casts, num_parts=num_parts)),
        ("split update", partial(split_update, num_parts=num_parts)),
    )


def run(module: fx.GraphModule, passes: Passes, *, verify: bool = False) -> fx.GraphModule:
    """The graph that `passes` make of `module`, one after the other. `module` itself stays as it is.

    Args:
        verify: look after each pass whether its graph is legal and has the inputs, results and effects of the
            one before.

    Raises:
        KitsuneError: with `verify`, a pass made something else of the graph: an error of Kitsune's.
        ValueError: a pass was given something wrong.
    """
    for name, function in passes:
        after = function(module)
        after.graph.lint()
        after.recompile()
        found = problem(module.graph, after.graph) if verify else None
        if found is not None:
            raise KitsuneError(f"the pass {name!r} made a wrong graph: {found}")
        module = after
    return module


def problem(before: fx.Graph, after: fx.Graph) -> str | None:
    """The first way in which `after` cannot be used in place of `before`; None if none is seen.

    `after` must be legal, and its values those that its operators compute. Inputs, the form of the results and which
    inputs are written are those of `before`. Nodes that stay keep the order that their dependencies ask for, and read
    what they read. What a node that is new computes is not looked at.
    """
    refusal = refuse_graph(after)
    if refusal is not None:
        return str(refusal)
    for node in after.nodes:
        if "val" not in node.meta and _has_results(node):
            return f"{node.name} has no value"
    if _names(before) != _names(after):
        return f"the inputs are {_names(after)}, not {_names(before)}"
    if _results(before) != _results(after):
        return f"the results are {_results(after)}, not {_results(before)}"
    written = set(dataflow.written_inputs(before)), set(dataflow.written_inputs(after))
    if written[0] != written[1]:
        return f"the inputs {sorted(written[0] ^ written[1])} are written in one of the graphs only"
    return wrong_value(after, untouched(before, after)) or reordered(before, after) or misread(before, after)


def _has_results(node: fx.Node) -> bool:
    return node.target is operator.getitem or (
        isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.returns)
    )


def _names(graph: fx.Graph) -> list[str]:
    return [node.name for node in dataflow.placeholders(graph)]


def _results(graph: fx.Graph) -> list[object]:
    """Shape, strides, type and device of each result; None for one that is absent."""
    found: list[object] = []
    for node in dataflow.outputs(graph):
        tensors = [] if node is None else dataflow.tensors(node)
        found.append([(list(one.shape), one.stride(), one.dtype, str(one.device)) for one in tensors] or None)
    return found
