"""Point-wise values that a region computes again, rather than to read what another one has written for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.dependencies import Operation

Group = tuple[int, ...]
"""The positions of operations, ascending."""


@dataclass(frozen=True)
class Repeats:
    """What regions compute again.

    Attributes:
        places: of operations of other regions, ascending, by the region that repeats them.
        values: the nodes that a region makes itself, by the region.
    """

    places: Mapping[Group, Sequence[int]]
    values: Mapping[Group, Collection[fx.Node]]


def repeats(
    graph: fx.Graph,
    listed: Sequence[Operation],
    inputs: Mapping[Group, Sequence[fx.Node]],
    dependent: Collection[Group],
    is_cheap: Callable[[fx.Node], bool],
    base: Callable[[fx.Node], fx.Node],
) -> Repeats:
    """What each region had better compute again: fewer bytes are read and written then.

    An activation that consists of many operators leaves several values to its backward, all of which follow from the
    one that the activation takes.

    Args:
        listed: the operations of `graph`.
        inputs: the values that regions read, by region.
        dependent: regions that repeat nothing.
        is_cheap: whether an operator is point-wise.
        base: the value that a node is a view of.
    """
    owners = {node: place for place, operation in enumerate(listed) for node in operation.nodes}
    group_of = {place: group for group in inputs for place in group}
    written = [node for one in listed for node in dataflow.written(one.node)]
    returned = [node for node in dataflow.outputs(graph) if node is not None]
    may_change = {storage for node in (*written, *returned) for storage in dataflow.storages(node)}
    places: dict[Group, Sequence[int]] = {}
    values: dict[Group, Collection[fx.Node]] = {}
    for group, taken in inputs.items():
        if group in dependent:
            continue
        found: dict[fx.Node, tuple[set[int], set[fx.Node]]] = {}
        for value in taken:
            made = _made_of(value, listed, owners, group_of, is_cheap, base)
            if made is not None and not any(may_change & dataflow.storages(source) for source in made[1]):
                found[value] = made
        sources = {source for _, some in found.values() for source in some}.difference(taken)
        own = {node for place in group for node in listed[place].nodes}
        saved = 0
        for value in found:
            there = {node for place in group_of[owners[value]] for node in listed[place].nodes}
            saved += _num_bytes(value) * (2 if value.users.keys() <= own | there else 1)
        if found and saved > sum(map(_num_bytes, sources)):
            places[group] = sorted({place for some, _ in found.values() for place in some})
            values[group] = found.keys()
    return Repeats(places, values)


def _made_of(
    value: fx.Node,
    listed: Sequence[Operation],
    owners: Mapping[fx.Node, int],
    group_of: Mapping[int, Group],
    is_cheap: Callable[[fx.Node], bool],
    base: Callable[[fx.Node], fx.Node],
) -> tuple[set[int], set[fx.Node]] | None:
    """The operations of its region that make a value, and what they make it of.

    None if that is not cheap; if what they make it of is made by a region, which may not write it either; or if it is
    an input of the graph, to which somebody may write between the two, where the graph is divided later. (So may they
    to a result, which the caller looks for.)
    """
    if owners.get(value) not in group_of:
        return None
    group = group_of[owners[value]]
    places: set[int] = set()
    sources: set[fx.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        place = owners.get(node)
        if place is None:
            return None
        if place not in group_of:
            sources.add(node)
        elif place not in group or not is_cheap(listed[place].node):
            return None
        elif place not in places:
            places.add(place)
            pending += map(base, listed[place].node.all_input_nodes)
    return places, sources


def _num_bytes(node: fx.Node) -> int:
    return sum(tensor.nbytes for tensor in dataflow.tensors(node))
