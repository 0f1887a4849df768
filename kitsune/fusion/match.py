"""A part of a graph that a template fits, what would replace it, and whether that may be done."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.values import mode_of, value

_ORIGIN = ("stack_trace", "nn_module_stack")

_ALIASING_UNSAID = (operator.getitem, torch.ops.aten._unsafe_view.default)
"""What may alias its argument, although no schema says so."""


class Builder:
    """Adds calls to a graph, with their values.

    Args:
        graph: where its insertion point is set.
        stand_ins: for nodes that templates pass to it, those of `graph` that stand for them; the others stay.

    Raises:
        ValueError, TypeError, RuntimeError: by `call`, as the operator's checks of what it is given.
    """

    def __init__(self, graph: fx.Graph, stand_ins: Mapping[fx.Node, fx.Node] | None = None) -> None:
        self._graph, self._stand_ins = graph, stand_ins or {}
        self._mode = mode_of(graph)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `target`; arguments may be nodes, also in lists."""
        args, kwargs = fx.map_arg((args, kwargs), lambda node: self._stand_ins.get(node, node))
        made = value(self._mode, target, args, kwargs)
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = made
        return node

    def results(self, node: fx.Node) -> list[fx.Node]:
        """The results of an operator that has several, a node each."""
        return [self.call(operator.getitem, node, place) for place in range(len(node.meta["val"]))]


Build = Callable[[Builder], Sequence[fx.Node]]
"""Adds what replaces a match; returns for each of its results the node that stands for it."""


@dataclass(frozen=True)
class Match:
    """Operators that a few calls can replace.

    Attributes:
        template: a name of what fits, for the user.
        nodes: all that would go; in the order of the graph.
        results: those among them that others may use; None in the place of one that the graph does not have.
        build: adds the replacement.
        others: what it reads beside the inputs of `nodes`; earlier nodes.
        given: earlier operators whose results are among the inputs, where the replacement relies on what they compute.
        squares: inputs that are never negative, which matters to what is done with them.
        has_rivals: whether the next match from the same node is tried even if this one may be used. Of those that may,
            the one that saves most is used.
    """

    template: str
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]
    build: Build
    others: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    squares: tuple[fx.Node, ...]
    has_rivals: bool

    @classmethod
    def of(
        cls,
        template: str,
        nodes: Iterable[fx.Node],
        results: Iterable[fx.Node | None],
        build: Build,
        others: Iterable[fx.Node | None] = (),
        given: Iterable[fx.Node] = (),
        squares: Iterable[fx.Node] = (),
        *,
        has_rivals: bool = False,
    ) -> Match:
        """With the nodes in the order of their graph, each once."""
        present = tuple(node for node in others if node is not None)
        return cls(
            template, tuple(sorted(set(nodes))), tuple(results), build, present, tuple(given), tuple(squares),
            has_rivals,
        )  # fmt: skip

    def inputs(self) -> list[fx.Node]:
        """What the nodes and their replacement read of others, in a fixed order."""
        inside = set(self.nodes)
        read = dict.fromkeys(argument for node in self.nodes for argument in node.all_input_nodes)
        return list(dict.fromkeys([*(argument for argument in read if argument not in inside), *self.others]))


def refuse(match: Match) -> str | None:
    """None if `match` can be replaced by what reads and writes the same, all at one place; else why not."""
    inside, results = set(match.nodes), set(match.results)
    if any(node not in results and any(user not in inside for user in node.users) for node in match.nodes):
        return "a value within is used elsewhere"
    place = _place(match)
    if any(place <= node for node in match.inputs()):
        return "a result is used before all inputs are there"
    return _refuse_moves(match.nodes, place) or _refuse_changes(match, place)


def _place(match: Match) -> fx.Node:
    """The node before which the replacement goes: as late as may be, but before the results are used."""
    inside = set(match.nodes)
    outside = [user for node in match.nodes for user in node.users if user not in inside]
    return min([match.nodes[-1].next, *outside])


def _refuse_moves(nodes: Sequence[fx.Node], place: fx.Node) -> str | None:
    """None if all of `nodes` may run before `place`: of the others, none that they pass depends on their order."""
    effects = {node: _effects(node) for node in nodes}
    node = nodes[0]
    while node is not nodes[-1]:
        node = node.next
        if node in effects:
            continue
        reads, writes = _effects(node)
        for passing, (theirs, written) in effects.items():
            if (passing < node) == (node < place) and (writes & (theirs | written) or reads & written):
                return f"{node.name} stands in between"
    return None


def _refuse_changes(match: Match, place: fx.Node) -> str | None:
    """None if what the replacement reads besides is before `place` what it was when `given` ran."""
    if not match.given:
        return None
    read = [*match.others, *(argument for node in match.given for argument in node.all_input_nodes)]
    memory = {storage for node in read for storage in dataflow.storages(node)}
    node = min(match.given)
    while node.next is not place:
        node = node.next
        if node not in match.given and _effects(node)[1] & memory:
            return f"{node.name} changes what the replacement reads"
    return None


def _effects(node: fx.Node) -> tuple[set[int], set[int]]:
    """The storages that `node` reads, and those that it writes beside its own results."""
    read = {storage for argument in node.all_input_nodes for storage in dataflow.storages(argument)}
    return read, {storage for target in dataflow.written(node) for storage in dataflow.storages(target)}


class Alone(NamedTuple):
    """A match by itself, as three graphs.

    Attributes:
        before: its nodes.
        after: their replacement, with the same inputs and results.
        given: makes inputs for both that belong together: it takes what the graph makes them of.
    """

    before: fx.GraphModule
    after: fx.GraphModule
    given: fx.GraphModule


def alone(match: Match) -> Alone:
    """What there is to compare.

    Raises:
        ValueError, TypeError, RuntimeError: the replacement's operators do not take what they are given, give tensors
            of another kind or layout, or read what is not among the inputs.
    """
    inputs = match.inputs()
    before, stand_ins = _with_inputs(inputs)
    for node in match.nodes:
        stand_ins[node] = before.node_copy(node, stand_ins.__getitem__)
    after, others = _with_inputs(inputs)
    built = match.build(Builder(after, others))
    pairs = [(node, other) for node, other in zip(match.results, built, strict=True) if node is not None and node.users]
    for node, other in pairs:
        _refuse_other(node, other)
    before.output([stand_ins[node] for node, _ in pairs])
    after.output([other for _, other in pairs])
    after.lint()
    return Alone(fx.GraphModule({}, before), fx.GraphModule({}, after), fx.GraphModule({}, _given(match, inputs)))


def _given(match: Match, inputs: Sequence[fx.Node]) -> fx.Graph:
    made = sorted({*match.given, *(user for node in match.given for user in node.users if user in set(inputs))})
    read = dict.fromkeys(argument for node in made for argument in node.all_input_nodes)
    free = [node for node in dict.fromkeys([*read, *inputs]) if node not in made]
    graph, stand_ins = _with_inputs(free)
    for node in match.squares:
        stand_ins[node] = graph.call_function(torch.ops.aten.abs.default, (stand_ins[node],))
    for node in made:
        stand_ins[node] = graph.node_copy(node, stand_ins.__getitem__)
    graph.output([stand_ins[node] for node in inputs])
    return graph


def _with_inputs(inputs: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph = fx.Graph()
    stand_ins = {}
    for node in inputs:
        stand_in = stand_ins[node] = graph.placeholder(node.name)
        stand_in.meta["val"] = node.meta["val"]
    return graph, stand_ins


def splice(graph: fx.Graph, match: Match) -> None:
    """Replaces the nodes of `match` in their graph."""
    with graph.inserting_before(_place(match)):
        built = match.build(Builder(graph))
    for node, stand_in in zip(match.results, built, strict=True):
        if node is None:
            continue
        for name in _ORIGIN:
            if name in node.meta:
                stand_in.meta.setdefault(name, node.meta[name])
        node.replace_all_uses_with(stand_in)
        _refresh_aliases(stand_in)
    for node in reversed(match.nodes):
        graph.erase_node(node)


def _refresh_aliases(node: fx.Node) -> None:
    """Makes the values of what aliases `node` share its value's memory: who asks what overlaps looks there."""
    for user in node.users:
        target = user.target
        is_alias = isinstance(target, torch._ops.OpOverload) and any(made.alias_info for made in target._schema.returns)
        if is_alias or target in _ALIASING_UNSAID:
            assert callable(target)
            user.meta["val"] = value(mode_of(node.graph), target, user.args, dict(user.kwargs))
            _refresh_aliases(user)


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of as many dimensions have the same strides, where those matter."""
    strides = zip(one.size(), one.stride(), other.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in strides)


def _refuse_other(node: fx.Node, stand_in: fx.Node) -> None:
    """Raises ValueError unless `stand_in` can be used where `node` is."""
    one, other = node.meta["val"], stand_in.meta["val"]
    is_alike = (one.dtype, one.size(), one.device) == (other.dtype, other.size(), other.device)
    if not is_alike or not same_layout(one, other):
        raise ValueError(f"a result is {_layout(one)}, what replaces it {_layout(other)}")


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.size())} with strides {tensor.stride()}"
