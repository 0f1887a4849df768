"""Divides the graph of a call and its backward pass into programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kitsune.capture.sparse import SparseGradient
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.kernels.not_before import not_before

_TANGENTS = "kitsune_tangents"


@dataclass(frozen=True)
class BackwardPart:
    """What one node of autograd's graph does.

    Gradients come to the call's roots: its differentiable outputs, and what lies between outputs of which one is
    computed from another. Roots have a part in common if autograd would let go at once of something that it has kept
    for both.

    Attributes:
        roots: the indices of those that the part goes back from.
        gradient_places: what gets a gradient: positions of flat inputs; for roots of later parts, their indices counted
            from the number of flat inputs.
        keeps: whether autograd keeps something for it, so that it can run only once.
        saved: the indices of the forward program's saved values that it reads.
        backward: takes those, then a gradient for each of the roots; returns the gradients of `gradient_places`.
        depends: for each of these, the indices among `roots` of those that it depends on.
        saved_inputs: positions of the flat inputs that saved values are, or are views of, and of those that were looked
            up for sparse gradients: as in eager, no edit may come between the call and its backward pass.
        sparse: gradients of which `backward` returns the values alone.
        coordinates: for each of these, where its coordinates are among the saved values that the part reads.
    """

    roots: tuple[int, ...]
    gradient_places: tuple[int, ...]
    keeps: bool
    saved: tuple[int, ...]
    backward: fx.GraphModule
    depends: tuple[frozenset[int], ...]
    saved_inputs: tuple[int, ...]
    sparse: tuple[SparseGradient, ...] = ()
    coordinates: tuple[int, ...] = ()

    def without(self, missing: frozenset[int]) -> fx.GraphModule:
        """`backward` for the case that the roots at the indices `missing` have no gradient.

        It takes none of those, and returns no gradient that depends on those alone. What is computed from those alone
        becomes zero: running `backward` on gradients of zero would not do, as it gives NaN where the outputs' own
        derivatives are infinite. Sample values are to be computed again (`refresh`).
        """
        if not missing:
            return self.backward
        tangents = dataflow.placeholders(self.backward.graph)[len(self.saved) :]
        absent = {tangents[index] for index in missing}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.backward.graph.nodes:
            depends = node.meta[_TANGENTS] if node.op == "call_function" else frozenset()
            if node in absent or (depends and depends <= missing and _is_tensor(node)):
                copies[node] = _zeros(graph, node.meta["val"])
            elif node.op != "output":
                copies[node] = graph.node_copy(node, lambda argument: copies[argument])
        grads = dataflow.outputs(self.backward.graph)
        graph.output([fx.map_arg(grads[index], copies.__getitem__) for index in self._present(missing)])
        graph.eliminate_dead_code()
        return fx.GraphModule(self.backward, graph)

    def spread(self, missing: frozenset[int], grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """What `without(missing)` returns, as gradients of `gradient_places`; None for the others."""
        found: list[torch.Tensor | None] = [None for _ in self.depends]
        for index, grad in zip(self._present(missing), grads, strict=True):
            found[index] = grad
        return found

    def _present(self, missing: frozenset[int]) -> list[int]:
        """The indices of the gradients that depend on other roots than `missing`, or on none."""
        return [index for index, needs in enumerate(self.depends) if not needs or not needs <= missing]


@dataclass(frozen=True)
class TracedPart:
    """A part of the backward pass as it was traced; see `BackwardPart`.

    Attributes:
        sparse: those of which `gradients` has the values.
        coordinates: of each of these.
    """

    roots: tuple[int, ...]
    gradient_places: tuple[int, ...]
    keeps: bool
    sparse: tuple[SparseGradient, ...] = ()
    gradients: Sequence[torch.Tensor] = ()
    coordinates: Sequence[torch.Tensor] = ()

    def renumbered(self, used: Sequence[int], num_flat: int) -> TracedPart:
        """The same, of the roots that are `used` alone."""
        places = [
            place if place < num_flat else num_flat + used.index(place - num_flat) for place in self.gradient_places
        ]
        return TracedPart(tuple(map(used.index, self.roots)), tuple(places), self.keeps, self.sparse)


def partition(
    joint: fx.GraphModule, num_inputs: int, num_outputs: int, traced: Sequence[TracedPart]
) -> tuple[fx.GraphModule, tuple[BackwardPart, ...]]:
    """The forward program, and the parts of the backward pass."""
    places = dataflow.placeholders(joint.graph)
    inputs, tangents = places[:num_inputs], places[num_inputs:]
    results = dataflow.outputs(joint.graph)
    outputs, others = results[:num_outputs], iter(results[num_outputs:])
    grads = [[next(others) for _ in part.gradient_places] for part in traced]
    coordinates = [[node for _ in part.sparse if (node := next(others)) is not None] for part in traced]
    depends = by_value = dependence(joint.graph, tangents)
    if joint.graph.find_nodes(op="call_function", target=not_before):
        by_value = dependence(joint.graph, tangents, by_value=True)
    if any(output in depends for output in outputs):
        raise RefusedError(Refusal("the backward pass writes to an output of the model"))
    _refuse_order(joint.graph, depends)
    drafts = [
        _draft(joint.graph, *of_part, depends, by_value) for of_part in zip(traced, grads, coordinates, strict=True)
    ]
    early = [node for node in joint.graph.nodes if node not in depends and node.op in ("call_function", "get_attr")]
    saved = [node for node in (*inputs, *early) if any(node in draft.read for draft in drafts)]
    forward = _extract(joint, inputs, early, [*outputs, *saved])
    return forward, tuple(_part(joint, draft, inputs, tangents, saved) for draft in drafts)


@dataclass(frozen=True)
class _Draft:
    """A part of the backward pass in the joint graph.

    Attributes:
        late: its nodes.
        grads: what it returns.
        coordinates: of its sparse gradients.
        depends: for each of these, and for each of the nodes, the indices among its roots of those that it depends on.
        read: what it takes from elsewhere.
    """

    traced: TracedPart
    late: list[fx.Node]
    grads: list[dataflow.Result]
    coordinates: list[fx.Node]
    depends: dict[dataflow.Result, frozenset[int]]
    read: set[fx.Node]


def _draft(
    graph: fx.Graph,
    traced: TracedPart,
    grads: list[dataflow.Result],
    coordinates: list[fx.Node],
    depends: dict[fx.Node, frozenset[int]],
    by_value: dict[fx.Node, frozenset[int]],
) -> _Draft:
    places = {root: index for index, root in enumerate(traced.roots)}
    late = [node for node in graph.nodes if node.op == "call_function" and depends.get(node, set()) & places.keys()]
    of = {node: depends.get(node, frozenset()) for node in (*late, *grads) if node is not None}
    if not all(roots <= places.keys() for roots in of.values()):
        raise RefusedError(Refusal("the backward passes of outputs that have nothing in common are computed together"))
    arguments = {argument for node in late for argument in node.all_input_nodes}
    own = {node: frozenset(places[root] for root in by_value.get(node, ())) for node in of}
    read = {node for node in (*arguments, *of, *coordinates) if node not in depends}
    return _Draft(traced, late, grads, coordinates, own, read)


def _part(
    joint: fx.GraphModule,
    draft: _Draft,
    inputs: Sequence[fx.Node],
    tangents: Sequence[fx.Node],
    saved: Sequence[fx.Node],
) -> BackwardPart:
    for node in draft.late:
        node.meta[_TANGENTS] = draft.depends[node]
    kept = [node for node in saved if node in draft.read]
    memory = {storage for node in kept for storage in dataflow.storages(node)}
    words = {place for sparse in draft.traced.sparse for place in sparse.words}
    given = [*kept, *(tangents[root] for root in draft.traced.roots)]
    return BackwardPart(
        roots=draft.traced.roots,
        gradient_places=draft.traced.gradient_places,
        keeps=draft.traced.keeps or bool(kept),
        saved=tuple(index for index, node in enumerate(saved) if node in draft.read),
        backward=_extract(joint, given, draft.late, draft.grads),
        depends=tuple(draft.depends.get(grad, frozenset()) for grad in draft.grads),
        saved_inputs=tuple(
            index for index, node in enumerate(inputs) if index in words or dataflow.storages(node) & memory
        ),
        sparse=draft.traced.sparse,
        coordinates=tuple(map(kept.index, draft.coordinates)),
    )


def dependence(
    graph: fx.Graph, tangents: Sequence[fx.Node], *, by_value: bool = False
) -> dict[fx.Node, frozenset[int]]:
    """For every node that depends on tangents, through data or through memory that such a node writes: on which.

    What is not computed before a tangent is there depends on it; `by_value` it does not.
    """
    depends = {tangent: frozenset([index]) for index, tangent in enumerate(tangents)}
    written: dict[int, frozenset[int]] = {}
    known = -1
    while known < sum(map(len, depends.values())):
        known = sum(map(len, depends.values()))
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            union = depends.get(node, frozenset()).union(
                *(depends.get(argument, frozenset()) for argument in _arguments(node, by_value)),
                *(written.get(storage, frozenset()) for storage in dataflow.storages(node)),
            )
            if not union:
                continue
            depends[node] = union
            for target in dataflow.written(node):
                for storage in dataflow.storages(target):
                    written[storage] = written.get(storage, frozenset()) | union
    return depends


def _arguments(node: fx.Node, by_value: bool) -> list[fx.Node]:
    return node.all_input_nodes[:1] if by_value and node.target is not_before else node.all_input_nodes


def _refuse_order(graph: fx.Graph, depends: dict[fx.Node, frozenset[int]]) -> None:
    """The split runs every early node before every late one; that must not reorder writes or random numbers."""
    early_storages: set[int] = set()
    late_seen = False
    for node in graph.nodes:
        late = node in depends and node.op == "call_function"
        late_seen |= late
        targets = {storage for target in dataflow.written(node) for storage in dataflow.storages(target)}
        if late and targets & early_storages:
            raise RefusedError(Refusal(f"the backward pass writes to a value of the forward pass ({node.target})"))
        if late_seen and not late and (dataflow.draws_random_numbers(node) or targets & early_storages):
            raise RefusedError(Refusal(f"{node.target} runs between parts of the backward pass"))
        if not late and not late_seen:
            early_storages |= dataflow.storages(node)


def _extract(
    joint: fx.GraphModule, inputs: Sequence[fx.Node], body: Sequence[fx.Node], results: Sequence[dataflow.Result]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    graph.output([copies[result] if isinstance(result, fx.Node) else result for result in results])
    return fx.GraphModule(joint, graph)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _zeros(graph: fx.Graph, like: torch.Tensor) -> fx.Node:
    """Laid out like `like`: what comes later may be a view that another layout does not allow."""
    size = tuple(like.size())
    kwargs: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    if like.is_contiguous():
        return graph.call_function(torch.ops.aten.zeros.default, (size,), kwargs)
    count = 1 + sum((length - 1) * stride for length, stride in zip(size, like.stride(), strict=True))
    flat = graph.call_function(torch.ops.aten.zeros.default, ((count,),), kwargs)
    return graph.call_function(torch.ops.aten.as_strided.default, (flat, size, like.stride()))
