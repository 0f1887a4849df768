"""A region's operators as a graph of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kitsune.graph.dependencies import Operation


@dataclass(frozen=True)
class Extract:
    """What a region computes, and what it is connected with.

    Attributes:
        module: takes the values of `inputs`, returns a list of those of `outputs`.
        inputs: nodes outside; none of them is a view of another value, as far as is known.
        outputs: nodes of the region that are used outside, each in memory of its own.
        views: views of `outputs` that are used outside, in an order in which they can be made.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]

    def values(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The fake tensors of the inputs and of the outputs."""
        return [node.meta["val"] for node in self.inputs], [node.meta["val"] for node in self.outputs]


def extract(
    operations: Sequence[Operation],
    is_view: Callable[[fx.Node], bool],
    repeated: Collection[fx.Node] = (),
    makes_itself: Callable[[fx.Node, fx.Node], bool] = lambda user, node: False,
) -> Extract:
    """The region of `operations`, which are in an order in which they can run.

    Views that their operators need are made inside, from the values outside that they are views of, so that two views
    of one value are read as one.

    Args:
        repeated: nodes of operations outside that it does again.
        makes_itself: whether a user outside does without a node, which its region makes again.
    """
    nodes = [node for operation in operations for node in operation.nodes]
    inside = set(nodes)
    outputs, views = _used_outside(nodes, inside, is_view, makes_itself)
    copying = _Copying({*inside, *repeated}, is_view)
    live = _live(nodes, inside)
    for operation in operations:
        if operation.node in live:
            copying.copy(operation.node)
    copying.graph.output([copying.copy(node) for node in outputs])
    return Extract(fx.GraphModule({}, copying.graph), tuple(copying.inputs), tuple(outputs), tuple(views))


def _live(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    live = set[fx.Node]()
    for node in reversed(nodes):
        if any(user not in inside or user in live for user in node.users):
            live.add(node)
    return live


def _used_outside(
    nodes: Sequence[fx.Node],
    inside: set[fx.Node],
    is_view: Callable[[fx.Node], bool],
    makes_itself: Callable[[fx.Node, fx.Node], bool],
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Of `nodes`, the values and the views of values that others need."""
    needed = set[fx.Node]()
    for node in reversed(nodes):
        outside = [user for user in node.users if user not in inside and not makes_itself(user, node)]
        if outside or any(user in needed and is_view(user) for user in node.users):
            needed.add(node)
    single = [node for node in nodes if node in needed and isinstance(node.meta["val"], torch.Tensor)]
    outputs = [node for node in single if not is_view(node)]
    return outputs, [node for node in nodes if node in needed and is_view(node)]


class _Copying:
    """Copies of nodes in a graph whose inputs are the values that come from outside."""

    def __init__(self, inside: set[fx.Node], is_view: Callable[[fx.Node], bool]) -> None:
        self._inside, self._is_view = inside, is_view
        self._copies: dict[fx.Node, fx.Node] = {}
        self.graph = fx.Graph()
        self.inputs: dict[fx.Node, fx.Node] = {}

    def copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            self._copies[node] = self._new(node)
        return self._copies[node]

    def _new(self, node: fx.Node) -> fx.Node:
        is_inside = self._is_view(node) or node in self._inside
        if not is_inside or node.op != "call_function":
            return self._input(node)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.copy)
        return self._with_value(self.graph.create_node("call_function", node.target, args, kwargs), node)

    def _input(self, node: fx.Node) -> fx.Node:
        last = next(reversed(self.inputs.values()), None)
        with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
            self.inputs[node] = self._with_value(self.graph.placeholder(f"input_{len(self.inputs)}"), node)
        return self.inputs[node]

    def _with_value(self, copy: fx.Node, node: fx.Node) -> fx.Node:
        copy.meta["val"] = node.meta["val"]
        return copy
