"""Results of a call that share memory with its inputs, or with other results: plain PyTorch takes them as views.

A graph cannot return them as its own, but it can what they are views of, from which they are taken after each replay.
An input that was written in place (`self.count += 1`) is such a result, too, of no view at all: Python assigns it to
where it was, and Dynamo makes a result of it.

Tensors that were broadcast together, as the distributions of torch do, count as views of what each of them was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import getitem
from typing import cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.graph import dataflow


def take_views(module: fx.GraphModule) -> fx.GraphModule | None:
    """Takes out of a graph that Dynamo made, which is changed, the results that can be taken as views.

    Returns:
        What makes the results that there were, of those that are left followed by the inputs; None if all are left.
    """
    _expand_each(module.graph)
    results, inputs = _first_of_same(dataflow.outputs(module.graph)), dataflow.placeholders(module.graph)
    bases = _bases(results, inputs)
    if not bases and len(set(results)) == len(results):
        return None
    given = {id(_example(node)): node for node in inputs}
    left = dict.fromkeys(node for node in results if node not in bases)
    left |= dict.fromkeys(base for base in bases.values() if id(_example(base)) not in given)
    ends = fx.Graph()
    copies: dict[fx.Node | None, fx.Node] = {
        node: ends.placeholder(f"result_{place}") for place, node in enumerate(left)
    }
    copies |= {node: ends.placeholder(f"input_{place}") for place, node in enumerate(inputs)}
    taken: set[fx.Node] = set()
    for node, base in bases.items():
        copies.setdefault(base, copies[given.get(id(_example(base)), base)])
        for view in _way(node, base):
            taken.add(view)
            if view not in copies:
                copies[view] = ends.node_copy(view, copies.__getitem__)
    ends.output([copies[node] for node in results])
    module.graph.output_node().args = (tuple(left),)
    for node in reversed([*module.graph.nodes]):
        if node in taken and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return fx.GraphModule(module, ends)


def _expand_each(graph: fx.Graph) -> None:
    """Has each tensor expanded by itself where several are broadcast together, unless it has their shape already."""
    for broadcast in graph.find_nodes(op="call_function", target=torch.functional.broadcast_tensors):
        for user in [user for user in broadcast.users if user.target is getitem]:
            tensor = cast(fx.Node, broadcast.args[cast(int, user.args[1])])
            if _example(user) is not _example(tensor):
                with graph.inserting_before(broadcast):
                    tensor = graph.call_method("expand", (tensor, tuple(user.meta["example_value"].shape)))
                tensor.meta = user.meta
            user.replace_all_uses_with(tensor)
            graph.erase_node(user)
        if not broadcast.users:
            graph.erase_node(broadcast)


def _first_of_same(results: Sequence[dataflow.Result]) -> list[dataflow.Result]:
    """For each result the first one that is the same tensor."""
    first: dict[int, dataflow.Result] = {}
    examples = map(_example, results)
    return [
        node if example is None else first.setdefault(id(example), node)
        for node, example in zip(results, examples, strict=True)
    ]


def _bases(results: Sequence[dataflow.Result], inputs: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each result that is to be a view, what it is a view of: an input, a result, or what may become one."""
    given = {id(_example(node)) for node in inputs}
    tensors = {id(example): example for node in (*inputs, *results) if (example := _example(node)) is not None}
    sharing = Counter(map(dataflow.storage_of, tensors.values()))
    bases: dict[fx.Node, fx.Node] = {}
    for node in results:
        example = _example(node)
        if node is None or example is None:
            continue
        if sharing[dataflow.storage_of(example)] == 1 and id(example) not in given:
            continue
        base = node
        while id(_example(base)) not in given and (source := _viewed(base)) is not None:
            base = source
        found = _example(base)
        is_input = found is not None and id(found) in given and found.is_leaf
        if is_input or (base is not node and found is not None and found._version == 0):
            bases[node] = base
    return bases


def _way(node: fx.Node, base: fx.Node) -> list[fx.Node]:
    """From `base`, which is left out, to `node`."""
    way: list[fx.Node] = []
    while node is not base:
        way.insert(0, node)
        (node,) = node.all_input_nodes
    return way


def _viewed(node: fx.Node) -> fx.Node | None:
    """What `node` is a view of that may be taken at any time; None if that is not sure."""
    if node.op not in ("call_function", "call_method") or len(node.all_input_nodes) != 1:
        return None
    (source,) = node.all_input_nodes
    before, after = _tensors(source), _tensors(node)
    memory = {dataflow.storage_of(tensor) for tensor in before}
    if not after or any(dataflow.storage_of(tensor) not in memory for tensor in after):
        return None
    needs = any(tensor.requires_grad for tensor in before)
    is_same = all(tensor.requires_grad == needs for tensor in after)
    return source if is_same or node.target == "detach" else None


def _example(node: dataflow.Result) -> torch.Tensor | None:
    """Dynamo's own value of `node`, with memory. It is one object for all that are the same tensor."""
    tensors = [] if node is None else _tensors(node)
    return tensors[0] if node is not None and tensors and tensors[0] is node.meta["example_value"] else None


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
