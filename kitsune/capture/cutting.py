"""Cuts a call into stages, so that no output is computed from another one of its own stage.

What is computed together is one node of autograd's graph, and the outputs of a node are siblings. A gradient that goes
through an output, as from a loss through the logits, comes from a node of a later stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.capture.layout import TensorLayout
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow


@dataclass(frozen=True)
class Cut:
    """Where a call is cut.

    Attributes:
        stages: the stage of each node; in the graph's order they never fall.
        roots: the values that gradients come to from outside of their stage, each a node and which of its tensors: the
            differentiable outputs, then what later stages use otherwise.
        num_outputs: how many of them are outputs.
    """

    stages: Mapping[fx.Node, int]
    roots: tuple[tuple[fx.Node, int], ...]
    num_outputs: int

    @property
    def num_stages(self) -> int:
        return 1 + max(self.stages.values())

    def of_root(self, index: int) -> int:
        """The stage of the root at `index`."""
        return self.stages[self.roots[index][0]]

    def in_order(self) -> list[int]:
        """The indices of the roots, in the order in which they are computed."""
        order = {node: place for place, node in enumerate(self.stages)}
        return sorted(range(len(self.roots)), key=lambda index: order[self.roots[index][0]])

    def layouts(self) -> list[TensorLayout]:
        """Of the gradients of the roots: an output's is laid out like it, if that can be; another one has no gaps."""
        examples = [_examples(node)[index] for node, index in self.roots]
        outputs, others = examples[: self.num_outputs], examples[self.num_outputs :]
        return [
            *map(TensorLayout.of_gradient, outputs),
            *(TensorLayout.of(torch.empty_like(other)) for other in others),
        ]


class Root(NamedTuple):
    """A value that gradients come to: as autograd knows it in its stage, and what stands for it in later ones.

    Attributes:
        leaf: None where no later stage uses it with gradient.
    """

    tensor: torch.Tensor
    leaf: torch.Tensor | None


def cut(graph: fx.Graph, outputs: Sequence[fx.Node], boundaries: Collection[fx.Node] = ()) -> Cut:
    """As few stages as there can be without moving an operator, by the sample values of the graph's nodes.

    Args:
        outputs: the differentiable ones.
        boundaries: nodes that end their stage beside.
    """
    leading = _leading(graph, set(outputs))
    stages: dict[fx.Node, int] = {}
    latest: set[fx.Node] = set()  # the outputs of the present stage
    present = 0
    for node in graph.nodes:
        if node in leading and not latest.isdisjoint(node.all_input_nodes):
            present, latest = present + 1, set()
        stages[node] = present
        latest |= {node} & set(outputs)
        if node in boundaries:
            present, latest = present + 1, set()
    others = [
        (node, index)
        for node in graph.nodes
        if node not in outputs and any(_crosses(stages, node, user) for user in node.users)
        for index, value in enumerate(_examples(node))
        if _needs_gradient(value)
    ]
    return Cut(stages, (*((output, 0) for output in outputs), *others), len(outputs))


def run_in_stages(
    graph: fx.GraphModule, cut: Cut, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[Root]]:
    """The outputs of `graph(*inputs)` and the roots of `cut`, where each stage is differentiable by itself.

    Raises:
        RefusedError: the stages differ from those that were found with sample values.
    """
    running = _InStages(graph, cut.stages)
    results = dataflow.outputs(graph.graph)
    values = dict(zip(results, running.run(*inputs), strict=True))
    crossed = running.crossed
    if not set(cut.roots[cut.num_outputs :]) <= crossed.keys() <= set(cut.roots):
        raise RefusedError(Refusal("a value between outputs of the model gets a gradient in an unforeseen way"))
    values |= {node: root.tensor for (node, _), root in crossed.items() if node in values}
    roots = [crossed[root] if root in crossed else Root(values[root[0]], None) for root in cut.roots]
    return [values[result] for result in results], roots


class _InStages(fx.Interpreter):
    """Gives later stages a leaf in place of each tensor that needs a gradient.

    Attributes:
        crossed: those tensors, by the node and the index that they come from.
    """

    def __init__(self, graph: fx.GraphModule, stages: Mapping[fx.Node, int]) -> None:
        super().__init__(graph)
        self._stages = stages
        self._done: set[fx.Node] = set()
        self.crossed: dict[tuple[fx.Node, int], Root] = {}

    def run_node(self, n: fx.Node) -> Any:
        for argument in n.all_input_nodes:
            if argument not in self._done and _crosses(self._stages, argument, n):
                self._done.add(argument)
                self.env[argument] = self._leaves(argument, self.env[argument])
        return super().run_node(n)

    def _leaves(self, node: fx.Node, value: Any) -> Any:
        tensors, structure = pytree.tree_flatten(value)
        for index, tensor in enumerate(tensors):
            if _needs_gradient(tensor):
                tensors[index] = tensor.detach().requires_grad_()
                self.crossed[node, index] = Root(tensor, tensors[index])
        return pytree.tree_unflatten(tensors, structure)


def _crosses(stages: Mapping[fx.Node, int], node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` takes the value of `node` from an earlier stage. Inputs are of no stage."""
    return node.op not in ("placeholder", "get_attr") and user.op != "output" and stages[node] < stages[user]


def _leading(graph: fx.Graph, outputs: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes through which gradients of outputs go."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(map(_needs_gradient, _examples(node))) and (node in outputs or not found.isdisjoint(node.users)):
            found.add(node)
    return found


def _examples(node: fx.Node) -> list[Any]:
    """What `node` was seen to produce, flat."""
    return list(pytree.tree_leaves(node.meta.get("example_value")))


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
