"""What rewriting a graph must keep: the order of the nodes that stay, and what they read.

A node stays if one of the same name and target is in the graph afterwards, whatever its arguments have become. Which
storages a node touches is taken from the values of its own graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.dependencies import History, operands

_Key = tuple[str, object]


def reordered(before: fx.Graph, after: fx.Graph) -> str | None:
    """The first dependency of `before` between two nodes that stay whose order `after` turns round; None if none is.

    Views are not ordered by what is written to their memory: they only name it.
    """
    places = {_key(node): place for place, node in enumerate(after.nodes)}
    history = History()
    kept: list[fx.Node] = []
    for access in _accesses(before):
        node = access.node
        if _key(node) not in places:
            continue
        found = history.append(access.reads, access.writes, dataflow.draws_random_numbers(node))
        for position, kind in found.items():
            if places[_key(kept[position])] > places[_key(node)]:
                return f"{node.name} comes before {kept[position].name}, on which it depends ({kind})"
        kept.append(node)
    return None


def misread(before: fx.Graph, after: fx.Graph) -> str | None:
    """The first node that stays but reads an older or a newer state of a storage in `after`; None if none does.

    It reads an older one where the latest write is by a node that had been overwritten in `before`, so that a write
    was lost; a newer one where the node that had written last is overwritten in `after`. Writers that do not stay tell
    nothing: what took their place may write the same. So what is read from a copy or a new tensor may be changed.
    """
    known = dict(_sources(before))
    for key, now in _sources(after):
        then = known.get(key)
        if then is None:
            continue
        for name, _ in sorted(then.overwritten & now.latest, key=str):
            return f"{key[0]} reads what {name} wrote, which had been overwritten"
        for name, _ in sorted(then.latest & now.overwritten, key=str):
            return f"{key[0]} reads what {name} wrote only after it is overwritten"
    return None


def untouched(before: fx.Graph, after: fx.Graph) -> set[fx.Node]:
    """The nodes of `after` that are as in `before`, with the same value, and so is all that they are computed from."""
    known = {_described(node): node.meta.get("val") for node in before.nodes}
    found: set[fx.Node] = set()
    for node in after.nodes:
        same = known.get(_described(node), found) is node.meta.get("val")
        if same and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


@dataclass(frozen=True)
class _Access:
    """A node with the storages that it reads, and those that it writes or brings."""

    node: fx.Node
    reads: set[int]
    writes: set[int]


@dataclass(frozen=True)
class _Sources:
    """Who wrote what a node reads: last, and only before that."""

    latest: set[_Key]
    overwritten: set[_Key]


def _key(node: fx.Node) -> _Key:
    return node.name, node.target


def _described(node: fx.Node) -> tuple[object, ...]:
    return *_key(node), repr(node.args), repr(node.kwargs)


def _accesses(graph: fx.Graph) -> Iterator[_Access]:
    """All nodes in their order. Who called the graph reads its results and its inputs at the end."""
    reshaped = dataflow.reshaped(graph)
    inputs = _storages(dataflow.placeholders(graph))
    for node in graph.nodes:
        given, made = _storages(node.all_input_nodes), dataflow.storages(node)
        written = _storages(dataflow.written(node))
        is_view = bool(made) and made <= given and not written and reshaped.isdisjoint(made)
        reads = set() if is_view else _storages(operands(node))
        yield _Access(node, reads | inputs if node.op == "output" else reads, written | (made - given))


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage for node in nodes for storage in dataflow.storages(node)}


def _sources(graph: fx.Graph) -> Iterator[tuple[_Key, _Sources]]:
    writers: dict[int, tuple[_Key, ...]] = {}
    for access in _accesses(graph):
        past = [writers[storage] for storage in access.reads if storage in writers]
        latest = {one[-1] for one in past}
        yield _key(access.node), _Sources(latest, {key for one in past for key in one[:-1]} - latest)
        for storage in access.writes:
            writers[storage] = (*writers.get(storage, ()), _key(access.node))
