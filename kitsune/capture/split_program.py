"""A module's call as programs: forward, and backward from the gradients of the outputs.

The call is traced together with its backward pass as one graph; what depends on the outputs'
gradients is the backward pass, everything else the forward program, which also returns the
values that the backward pass reads. The backward pass has a part for each node that stands for it in autograd's graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kitsune.capture.applied_functions import going_back_from
from kitsune.capture.autograd_graph import nodes_behind
from kitsune.capture.buckets import boundaries
from kitsune.capture.checkpoints import inline_checkpoints
from kitsune.capture.cutting import Cut, Root, cut, run_in_stages
from kitsune.capture.foreseen_layouts import lay_out_as_foreseen
from kitsune.capture.late_reads import LateReads, read_by
from kitsune.capture.layout import TensorLayout
from kitsune.capture.partition import BackwardPart, TracedPart, dependence, partition
from kitsune.capture.recomputing import recompute
from kitsune.capture.signature import refuse_arguments
from kitsune.capture.sparse import LookingUp, SparseGradient, looked_up, members
from kitsune.capture.sums import add_out_of_place
from kitsune.capture.trace import gradients, own_gradients, same_layout, trace
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.graph.attention import look_for_random_state
from kitsune.graph.values import mode_of, value
from kitsune.graph.verify import source_line
from kitsune.kernels.casts import is_dense
from kitsune.kernels.images import FLOATS

_as_strided = torch.ops.aten.as_strided.default
_cast_many = torch.ops.kitsune.cast_many.default


@dataclass(frozen=True)
class SplitProgram:
    """The programs of a call.

    Attributes:
        joint: all as one graph: takes the flat tensors of the call, then a gradient for each root; returns the outputs,
            then the gradients that each of the `parts` returns, then the coordinates of the sparse ones among these.
        forward: takes the flat tensors of the call; returns its outputs, then the saved values.
        parts: of the backward pass, in its order: what one of them gives gradients to comes later.
        differentiable: for each output, whether it has a gradient. Those that have one are the first roots.
        tangents: layouts of the gradients of the roots.
        autocast: what autocast computes in during the backward pass; None outside of it.
        is_rewritten: whether operators have been replaced since it was traced.
        repeatable: whether running the call again inside of autograd gives each part's gradients, and has no other
            effect: it draws no random numbers, writes to none of its inputs, and no output is computed from another.
        late_reads: what the backward pass goes by beside.
    """

    joint: fx.GraphModule
    forward: fx.GraphModule
    parts: tuple[BackwardPart, ...]
    differentiable: tuple[bool, ...]
    tangents: tuple[TensorLayout, ...]
    autocast: torch.dtype | None
    repeatable: bool
    late_reads: LateReads
    is_rewritten: bool = False


def trace_split(
    graph: fx.GraphModule,
    flat: Sequence[torch.Tensor],
    autocast: torch.dtype | None = None,
    bucket_bytes: int | None = None,
) -> SplitProgram:
    """Traces `graph(*flat)`, the call of a module, and its backward pass.

    Args:
        autocast: as in `SplitProgram`.
        bucket_bytes: how much of the gradients is wanted at a time, before the rest; None: all may come at the end.

    Raises:
        RefusedError: the call cannot be captured.
    """
    refusal = refuse_arguments(flat)
    if refusal is not None:
        raise RefusedError(refusal)
    inline_checkpoints(graph)
    add_out_of_place(graph)
    heads = [
        result for result in dataflow.outputs(graph.graph) if result is not None and _example(result).requires_grad
    ]
    if not heads:
        raise RefusedError(Refusal("no output of the model requires a gradient"), passing=True)
    ends = set[fx.Node]() if bucket_bytes is None else boundaries(graph.graph, heads, bucket_bytes)
    if ends:
        with suppress(RefusedError):
            return _traced(graph, flat, autocast, cut(graph.graph, heads, ends))
    return _traced(graph, flat, autocast, cut(graph.graph, heads))


def _traced(
    graph: fx.GraphModule, flat: Sequence[torch.Tensor], autocast: torch.dtype | None, stages: Cut
) -> SplitProgram:
    results = dataflow.outputs(graph.graph)
    differentiable = tuple(_example(result).requires_grad for result in results)
    layouts = stages.layouts()
    traced: list[TracedPart] = []

    def joint(*inputs: torch.Tensor) -> list[torch.Tensor]:
        with LookingUp():
            outputs, roots = run_in_stages(graph, stages, inputs[: len(flat)])
        _refuse_aliases(results, outputs, inputs[: len(flat)])
        _refuse_nested(roots, sum(differentiable))
        trained = [tensor.requires_grad for tensor in flat]
        traced[:] = _go_back(stages, roots, inputs, trained, layouts, autocast)
        return [
            *(output.detach() for output in outputs),
            *(grad for part in traced for grad in part.gradients),
            *(indices for part in traced for indices in part.coordinates),
        ]

    tangents = [layout.empty().zero_() for layout in layouts]
    module = trace(joint, [*map(_no_view, flat), *tangents])
    traced = _with_lookups(module.graph, traced, len(flat))
    look_for_random_state(module)
    recompute(module, dataflow.placeholders(module.graph)[len(flat) :], graph.graph)
    lay_out_as_foreseen(module, [*flat, *tangents])
    used = sorted(root for part in traced for root in part.roots)
    _drop_tangents(module, len(flat), set(used))
    forward, parts = partition(module, len(flat), len(results), [part.renumbered(used, len(flat)) for part in traced])
    _refuse_gaps(parts, len(flat))
    repeatable = stages.num_stages == 1 and not dataflow.written_inputs(module.graph)
    repeatable &= not any(map(dataflow.draws_random_numbers, module.graph.nodes))
    return SplitProgram(
        joint=module,
        forward=forward,
        parts=parts,
        differentiable=differentiable,
        tangents=tuple(layouts[root] for root in used),
        autocast=autocast,
        repeatable=repeatable,
        late_reads=read_by(graph),
    )


def _go_back(
    stages: Cut,
    roots: Sequence[Root],
    inputs: Sequence[torch.Tensor],
    trained: Sequence[bool],
    layouts: Sequence[TensorLayout],
    autocast: torch.dtype | None,
) -> list[TracedPart]:
    """The backward pass, stage by stage; what no later stage gives a gradient to is no root.

    Args:
        inputs: the flat ones, then the gradients of all roots.
        trained: for each flat input, whether it gets a gradient.
        layouts: of the gradients of all roots.
    """
    num_flat = len(trained)
    leaves: list[Any] = [*inputs[:num_flat], *(root.leaf for root in roots)]
    parts: list[TracedPart] = []
    reached = set(range(stages.num_outputs))
    for stage in reversed(range(stages.num_stages)):
        here = [index for index in stages.in_order() if index in reached and stages.of_root(index) == stage]
        earlier = [root.leaf is not None and stages.of_root(index) < stage for index, root in enumerate(roots)]
        places = [place for place, needs in enumerate([*trained, *earlier]) if needs]
        for group, keeps in reversed(_groups(roots, here)):
            heads, weights = [roots[index].tensor for index in group], [inputs[num_flat + index] for index in group]
            with going_back_from(weights):
                found = gradients(heads, [leaves[place] for place in places], weights, autocast, may_be_sparse=True)
            grads = {place: grad for place, grad in zip(places, found, strict=True) if grad is not None}
            reached |= {place - num_flat for place in grads if place >= num_flat}
            sparse, coordinates = dict[int, SparseGradient](), list[torch.Tensor]()
            for index, (place, grad) in enumerate(grads.items()):
                if grad.layout is not torch.strided:
                    sparse[place] = SparseGradient(index, grad.size())
                    grads[place], indices = members(grad)
                    coordinates.append(indices)
            owned = _owned(grads, inputs, layouts, sparse)
            parts.append(TracedPart(group, tuple(grads), keeps, tuple(sparse.values()), owned, coordinates))
    return parts


def _with_lookups(graph: fx.Graph, traced: Sequence[TracedPart], num_flat: int) -> list[TracedPart]:
    """`traced`, with what `graph` shows of the embeddings that sparse gradients belong to."""
    inputs, results = dataflow.placeholders(graph)[:num_flat], dataflow.outputs(graph)
    coordinates = iter(results[len(results) - sum(len(part.sparse) for part in traced) :])
    found = []
    for part in traced:
        sparse = []
        for one in part.sparse:
            node = next(coordinates)
            assert node is not None
            words, has_padding = looked_up(node)
            memory = dataflow.storages(words)
            places = tuple(place for place, node in enumerate(inputs) if dataflow.storages(node) & memory)
            sparse.append(one._replace(has_padding=has_padding, words=places))
        found.append(replace(part, sparse=tuple(sparse)))
    return found


def _owned(
    grads: Mapping[int, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    layouts: Sequence[TensorLayout],
    sparse: Collection[int],
) -> list[torch.Tensor]:
    """`grads`, by place, in memory of their own, laid out like what they are of; of `sparse` ones the values."""
    num_flat = len(inputs) - len(layouts)
    laid = {place: grad if place < num_flat else layouts[place - num_flat].fit(grad) for place, grad in grads.items()}
    laid |= {place: laid[place].contiguous() for place in sparse}
    likes = [grad if place in sparse or place >= num_flat else inputs[place] for place, grad in laid.items()]
    return own_gradients(likes, list(laid.values()), inputs)


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    """An input without what it is a view of, which autograd would lead its gradient on to: the user's own does that."""
    return tensor.detach().requires_grad_() if tensor._is_view() and tensor.requires_grad else tensor


def _drop_tangents(module: fx.GraphModule, num_flat: int, used: Collection[int]) -> None:
    for index, tangent in enumerate(dataflow.placeholders(module.graph)[num_flat:]):
        if index not in used:
            module.graph.erase_node(tangent)
    module.recompile()


def split_anew(program: SplitProgram, joint: fx.GraphModule) -> SplitProgram:
    """`program`, from a graph that computes what `program.joint` does.

    It is changed so that nothing shows: results get the strides that they had, and what a part of the backward pass
    reads of inputs that it did not read is copied in the forward pass, for they may be edited before.

    Raises:
        RefusedError: it cannot be split; or part of what the forward pass has to do would be left to the backward pass.
    """
    num_inputs = len(dataflow.placeholders(joint.graph)) - len(program.tangents)
    num_outputs = len(program.differentiable)
    _keep_strides(joint.graph, program.joint.graph)
    for part in program.parts:
        _copy_further_inputs(joint.graph, num_inputs, part.saved_inputs, part.roots)
    traced = [TracedPart(part.roots, part.gradient_places, part.keeps, part.sparse) for part in program.parts]
    forward, parts = partition(joint, num_inputs, num_outputs, traced)
    if dataflow.written_inputs(forward.graph).keys() != dataflow.written_inputs(program.forward.graph).keys():
        raise RefusedError(Refusal("a buffer would be written by the backward pass"))
    parts = tuple(
        replace(before, saved=part.saved, backward=part.backward, coordinates=part.coordinates)
        for before, part in zip(program.parts, parts, strict=True)
    )
    return replace(program, joint=joint, forward=forward, parts=parts, is_rewritten=True)


def _keep_strides(graph: fx.Graph, before: fx.Graph) -> None:
    """Where those of a result differ in dimensions of one element, as a view; else it is refused."""
    output = graph.output_node()
    seen: dict[fx.Node, fx.Node] = {}
    for result, old in zip(dataflow.outputs(graph), dataflow.outputs(before), strict=True):
        if result is None or old is None or result.meta["val"].stride() == old.meta["val"].stride():
            continue
        wanted = old.meta["val"]
        if not same_layout(result.meta["val"], wanted):
            raise RefusedError(Refusal("a result would be laid out otherwise"))
        seen[result] = _call_before(output, _as_strided, (result, list(wanted.size()), list(wanted.stride())))
    output.args = fx.map_arg(output.args, lambda node: seen.get(node, node))


def _copy_further_inputs(graph: fx.Graph, num_inputs: int, saved_inputs: Sequence[int], roots: Sequence[int]) -> None:
    """In the forward pass, for what is computed from gradients of `roots`."""
    places = dataflow.placeholders(graph)
    further = {
        storage
        for place, node in enumerate(places[:num_inputs])
        if place not in saved_inputs
        for storage in dataflow.storages(node)
    }
    depends = dependence(graph, places[num_inputs:])
    order = {node: place for place, node in enumerate(graph.nodes)}
    late = [node for node in graph.nodes if node in depends and node.op == "call_function"]
    own = [node for node in late if depends[node] <= set(roots)]
    read = dict.fromkeys(argument for node in own for argument in node.all_input_nodes if argument not in depends)
    copied = [one for one in read if not dataflow.storages(one).isdisjoint(further)]
    # At the end of the forward pass; a view may have been taken only then. No input is written any later.
    in_time = [one for one in copied if order[one] < order[late[0]]]
    copies = dict(zip(in_time, _copies_before(late[0], in_time), strict=True)) if in_time else {}
    copies |= {one: _copies_before(one.next, [one])[0] for one in copied if one not in copies}
    for one, copy in copies.items():
        one.replace_all_uses_with(copy, delete_user_cb=lambda user: user in own)


def _copies_before(place: fx.Node, values: Sequence[fx.Node]) -> list[fx.Node]:
    """Copies of `values`, in one launch for all that can be: they are as small as biases."""
    kinds: dict[object, list[fx.Node]] = {}
    for one in values:
        tensor = one.meta["val"]
        together = tensor.dtype in FLOATS and is_dense(tensor)
        kinds.setdefault((tensor.dtype, tensor.device) if together else one, []).append(one)
    copies: dict[fx.Node, fx.Node] = {}
    for kind in kinds.values():
        if len(kind) > 1:
            made = _call_before(place, _cast_many, (kind, kind[0].meta["val"].dtype))
            copies |= {one: _call_before(place, operator.getitem, (made, index)) for index, one in enumerate(kind)}
        else:
            copies[kind[0]] = _call_before(place, torch.ops.aten.clone.default, (kind[0],))
    return [copies[one] for one in values]


def _call_before(place: fx.Node, target: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    with place.graph.inserting_before(place):
        node = place.graph.call_function(target, args)
    node.meta["val"] = value(mode_of(place.graph), target, args, {})
    return node


def _example(output: dataflow.Result) -> torch.Tensor:
    value = output.meta.get("example_value") if isinstance(output, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise RefusedError(Refusal("the model's output contains values that are not tensors"))
    if value.is_nested:
        raise RefusedError(Refusal("an output of the model is a nested tensor", remedy="return its values()"))
    return value


def _groups(roots: Sequence[Root], members: Sequence[int]) -> list[tuple[tuple[int, ...], bool]]:
    """Roots that have a node of autograd's graph in common which has kept something, and whether there is one.

    Nodes that have kept nothing may be reached by every backward pass. The order is that of the `members`; that of a
    group is its last one's.
    """
    groups: list[tuple[list[int], set[Any]]] = []
    for index in members:
        keeping = set(filter(_keeps_values, nodes_behind([roots[index].tensor])))
        joined = [group for group in groups if not keeping.isdisjoint(group[1])]
        groups = [group for group in groups if keeping.isdisjoint(group[1])]
        several = [other for others, _ in joined for other in others]
        groups.append(([*several, index], keeping.union(*(nodes for _, nodes in joined))))
    return [(tuple(group), bool(keeping)) for group, keeping in groups]


def _keeps_values(node: Any) -> bool:
    """Whether a node of autograd's graph lets go of tensors after its backward pass."""
    return hasattr(node, "saved_tensors") or any(name.startswith("_raw_saved_") for name in dir(node))


def _refuse_nested(roots: Sequence[Root], num_outputs: int) -> None:
    """Autograd knows best: where an operator writes in place, the graph does not tell what a value is computed from."""
    outputs = {(root.tensor.grad_fn, root.tensor.output_nr) for root in roots[:num_outputs]}
    edges = {edge for node in nodes_behind([root.tensor for root in roots]) for edge in node.next_functions}
    if not outputs.isdisjoint(edges):
        raise RefusedError(Refusal("an output of the model, or a tensor it stores, is computed from another one"))


def _refuse_gaps(parts: Sequence[BackwardPart], num_flat: int) -> None:
    """Autograd calls hooks of all that a node may give gradients to, and without one where it gives none."""
    for part in parts:
        everything = frozenset(range(len(part.roots)))
        pairs = zip(part.gradient_places, part.depends, strict=True)
        if not part.gradient_places:
            raise RefusedError(Refusal("no gradient reaches the model from one of its outputs"))
        if any(place >= num_flat and needs != everything for place, needs in pairs):
            raise RefusedError(
                Refusal("of two outputs of the model that are computed together, one is computed from a third")
            )


def _refuse_aliases(
    results: Sequence[dataflow.Result], outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    taken = {dataflow.storage_of(tensor) for tensor in inputs}
    for result, output in zip(results, outputs, strict=True):
        storage = dataflow.storage_of(output)
        if storage in taken:
            reason = "an output of the model shares memory with an input or another output"
            culprit = None if result is None else source_line(result)
            raise RefusedError(Refusal(reason, culprit, remedy="return a copy of it, as by clone()"))
        taken.add(storage)
