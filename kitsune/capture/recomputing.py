"""What lies in activation checkpoints is computed again when gradients go back through it, and not kept till then.

As in plain PyTorch (`torch.utils.checkpoint`), all that the backward pass needs of a checkpoint is computed when it
needs some of it. Random numbers are not drawn again: what has been drawn is kept. (PyTorch draws them again from
the state of before, so they are the same.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

import torch
from torch import fx

from kitsune.capture.checkpoints import Checkpoint, checkpoint_of
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.graph.values import refresh
from kitsune.graph.verify import source_line
from kitsune.kernels.not_before import not_before

_MARK = "kitsune_backward"

BACKWARD = {_MARK: True}
"""How nodes of the backward pass are annotated while they are traced, so that it is known where it begins."""


def recompute(module: fx.GraphModule, tangents: Sequence[fx.Node], source: fx.Graph) -> None:
    """Lets the backward pass of a traced graph use values of checkpoints that are computed for it.

    Args:
        tangents: the inputs that all of the backward pass starts from.
        source: what was traced.

    Raises:
        RefusedError: what PyTorch would compute again would not be the same.
    """
    if all(checkpoint_of(node) is None for node in source.nodes):
        return
    graph = module.graph
    nodes = list(graph.nodes)
    early = list(takewhile(lambda node: _MARK not in node.meta.get("custom", {}), nodes))
    members: dict[Checkpoint, list[fx.Node]] = {}
    for node in early:
        checkpoint = checkpoint_of(node)
        if checkpoint is not None:
            members.setdefault(checkpoint, []).append(node)
    if not members or len(early) == len(nodes):
        raise RefusedError(Refusal("what lies in the model's checkpoints cannot be told in the traced graph"))
    order = {node: place for place, node in enumerate(nodes)}
    late = _dependent(nodes, tangents)
    for checkpoint, region in members.items():
        _refuse(checkpoint, region)
        _recompute(graph, region, early, late, order)
    refresh(graph)
    module.recompile()


def _dependent(nodes: Iterable[fx.Node], tangents: Sequence[fx.Node]) -> list[fx.Node]:
    """The tangents, and those of `nodes` that are computed from them and are tensors, in order."""
    found = dict.fromkeys(tangents)
    reached = set(tangents)
    for node in nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            if isinstance(node.meta.get("val"), torch.Tensor):
                found[node] = None
    return list(found)


def _refuse(checkpoint: Checkpoint, region: Sequence[fx.Node]) -> None:
    own = _made_by(region)
    for node in region:
        if checkpoint.draws_again and dataflow.draws_random_numbers(node):
            reason = "a checkpoint with preserve_rng_state=False draws other random numbers in the backward pass"
            raise RefusedError(Refusal(reason, source_line(node)))
        if any(not dataflow.storages(target) <= own for target in dataflow.written(node)):
            reason = "a checkpoint writes to what was there before, and would twice"
            raise RefusedError(Refusal(reason, source_line(node)))


def _made_by(region: Iterable[fx.Node]) -> set[int]:
    """The keys of the storages that the nodes make; views of inputs make none."""
    own: set[int] = set()
    for node in region:
        given = {key for argument in node.all_input_nodes for key in dataflow.storages(argument)}
        own |= dataflow.storages(node) - given
    return own


def _recompute(
    graph: fx.Graph,
    region: Sequence[fx.Node],
    early: Sequence[fx.Node],
    late: Sequence[fx.Node],
    order: dict[fx.Node, int],
) -> None:
    kept = _kept(graph, region, set(early))
    anew = [node for node in region if not _touched(node) <= kept]
    end = len(early)
    users = {node: [user for user in node.users if order.get(user, 0) >= end] for node in anew}
    if not any(users.values()):
        return
    in_order = sorted({user for several in users.values() for user in several}, key=order.__getitem__)
    first = in_order[0]
    needed = _needed(anew, users)
    _refuse_overwritten(needed, graph, order, order[first])
    trigger = _trigger(in_order, late, order)
    copies = _inputs(graph, needed, first, trigger)
    with graph.inserting_before(first):
        for node in needed:
            copies[node] = graph.node_copy(node, lambda argument: copies.get(argument, argument))
    for node in needed:
        if users[node]:
            node.replace_all_uses_with(copies[node], delete_user_cb=set(users[node]).__contains__)


def _trigger(users: Sequence[fx.Node], late: Collection[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    """The gradient with which the backward pass comes to a checkpoint whose values it uses in `users`, in order."""
    before = [node for node in late if order[node] < order[users[0]]]
    given = (argument for user in users for argument in user.all_input_nodes)
    return next((argument for argument in given if argument in before), before[-1])


def _kept(graph: fx.Graph, region: Sequence[fx.Node], early: Collection[fx.Node]) -> set[int]:
    """The keys of storages that are there anyway when gradients go back: inputs, results, and random numbers."""
    inside = set(region)
    stay = [
        node
        for node in region
        if dataflow.draws_random_numbers(node) or any(user in early and user not in inside for user in node.users)
    ]
    results = [result for result in dataflow.outputs(graph) if result is not None]
    others = [argument for node in region for argument in node.all_input_nodes if argument not in inside]
    return {key for node in (*stay, *results, *others) for key in _touched(node)}


def _touched(node: fx.Node) -> set[int]:
    """The keys of the storages of its results, and of those that it writes to."""
    return dataflow.storages(node).union(*map(dataflow.storages, dataflow.written(node)))


def _needed(anew: Sequence[fx.Node], users: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """Those of `anew` that what is used is computed from, or that write to its memory; in order."""
    needed: set[fx.Node] = set()
    touched: set[int] = set()
    while True:
        before = len(needed)
        for node in reversed(anew):
            written = {key for target in dataflow.written(node) for key in dataflow.storages(target)}
            if users[node] or written & touched or any(user in needed for user in node.users):
                needed.add(node)
                touched |= _touched(node)
        if len(needed) == before:
            return [node for node in anew if node in needed]


def _refuse_overwritten(needed: Sequence[fx.Node], graph: fx.Graph, order: dict[fx.Node, int], until: int) -> None:
    """What is read again must be what was read before; what is written again is not asked."""
    again = set(needed)
    written: dict[int, int] = {}
    for node, place in order.items():
        if node not in again and place < until:
            for target in dataflow.written(node):
                written |= dict.fromkeys(dataflow.storages(target), place)
    for node in needed:
        for argument in node.all_input_nodes:
            if argument not in again and any(written.get(key, -1) > order[node] for key in dataflow.storages(argument)):
                raise RefusedError(Refusal("a checkpoint reads what is overwritten later", source_line(node)))


def _inputs(graph: fx.Graph, needed: Sequence[fx.Node], first: fx.Node, trigger: fx.Node) -> dict[fx.Node, fx.Node]:
    """For what `needed` takes from elsewhere: the same, but not before `trigger`.

    Inputs of the graph are taken as they are, if there is anything else: whatever is computed from them alone may as
    well be shared.
    """
    again = set(needed)
    found = dict.fromkeys(argument for node in needed for argument in node.all_input_nodes if argument not in again)
    given = {key for node in dataflow.placeholders(graph) for key in dataflow.storages(node)}
    made = [node for node in found if not dataflow.storages(node) <= given]
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in made or found:
            copies[node] = graph.call_function(not_before, (node, trigger))
    return copies
