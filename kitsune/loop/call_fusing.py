"""Fuses the operators of a call and of its backward pass, between which the user's own code runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from kitsune.capture.retention import no_traces
from kitsune.capture.split_program import SplitProgram, split_anew
from kitsune.capture.trace import same_layout
from kitsune.engine import planning
from kitsune.engine.fusing import Fusing
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.graph.values import mode_of, refresh, value

torch.library.define("kitsune::after", "(Tensor self, Tensor[] others) -> Tensor")

_after = torch.ops.kitsune.after.default
_over_logits = torch.ops.kitsune.cross_entropy_backward_.default
_beside_logits = torch.ops.kitsune.cross_entropy_backward.default


def _copied(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    return tensor.clone()


torch.library.impl("kitsune::after", "CompositeExplicitAutograd", _copied)
torch.library.register_fake("kitsune::after", _copied)


def call_fusing(
    program: SplitProgram, flat: Sequence[Tensor], refused: Callable[[Refusal], None] = lambda _: None
) -> Fusing | None:
    """Fuses the operators of `program`, a call of `flat`; None where that cannot be. For `refused` see `Fusing`.

    Both passes are rewritten as one graph, so that what the forward pass saves suits the backward pass.
    """
    joint = _ordered(program)
    return None if joint is None else Fusing(joint, _joint_inputs(program, flat), refused)


@no_traces()
def fused_call(
    program: SplitProgram, fusing: Fusing, flat: Sequence[Tensor], refused: Callable[[Refusal], None]
) -> SplitProgram | None:
    """`program` with operators fused, split anew; None where that is not predicted to be faster, or cannot be.

    Args:
        fusing: its `call_fusing`, which has a result.
        flat: the tensors of the present call. They are left as they are.
        refused: told what could not be done.
    """
    joint = fusing.module
    device = flat[0].device
    inputs = _joint_inputs(program, flat)
    plans = planning.rewritten(joint, fusing.result(), inputs, refused)
    found = planning.others(joint, inputs, num_streams=1, found=plans, max_bytes=None)
    if not found:
        return None
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        before_us = planning.in_order(joint, device, inputs).plan.predicted_us
    if found[0].plan.predicted_us >= before_us:
        return None
    try:
        return split_anew(program, _unordered(found[0].module))
    except RefusedError as error:
        refused(error.refusal)
        return None


def _joint_inputs(program: SplitProgram, flat: Sequence[Tensor]) -> list[Tensor]:
    """Inputs of the joint graph: those of a call, and gradients, which are drawn."""
    generator = torch.Generator(flat[0].device).manual_seed(0)
    tangents = [layout.empty().normal_(generator=generator) for layout in program.tangents]
    return [*(tensor.detach() for tensor in flat), *tangents]


def _ordered(program: SplitProgram) -> fx.GraphModule | None:
    """The joint graph, with operators that make each gradient of a root depend on all outputs, and on all parts before.

    So no two of what an output is computed from and the parts of the backward pass can become one operator.
    None if a part has several roots, of which some may get no gradient, or if the operator would lay one out otherwise.
    """
    if any(len(part.roots) != 1 for part in program.parts):
        return None
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.joint.graph, {}))
    tangents = dataflow.placeholders(graph)[-len(program.tangents) :]
    results = iter(dataflow.outputs(graph))
    before = [_base(next(results)) for _ in program.differentiable]
    for part in program.parts:
        if not _put_after(graph, tangents[part.roots[0]], before):
            return None
        before += [_base(next(results)) for _ in part.gradient_places]
    return fx.GraphModule(program.joint, graph)


def _put_after(graph: fx.Graph, tangent: fx.Node, before: Sequence[fx.Node]) -> bool:
    """Makes `tangent` depend on `before`, if that can be."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    first = min(tangent.users, key=order.__getitem__, default=None)
    if first is None or any(order[node] >= order[first] for node in before):
        return False
    args = tangent, list(before)
    with graph.inserting_before(first):
        after = graph.call_function(_after, args)
    after.meta["val"] = value(mode_of(graph), _after, args, {})
    tangent.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)
    return bool(after.meta["val"].stride() == tangent.meta["val"].stride())


def _base(result: dataflow.Result) -> fx.Node:
    """What a result is a view of."""
    assert result is not None
    node = result
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _unordered(module: fx.GraphModule) -> fx.GraphModule:
    """Without the operators. Where a result of them is written to, a copy stays: gradients belong to autograd."""
    graph = module.graph
    written = {storage for node in graph.nodes for one in dataflow.written(node) for storage in dataflow.storages(one)}
    for after in [node for node in graph.nodes if node.target is _after]:
        taken = after.args[0]
        if not written.isdisjoint(dataflow.storages(after)):
            with graph.inserting_before(after):
                taken = graph.call_function(torch.ops.aten.clone.default, (taken,))
            taken.meta = dict(after.meta)
        after.replace_all_uses_with(taken)
        graph.erase_node(after)
    if over_logits := graph.find_nodes(op="call_function", target=_over_logits):
        for node in over_logits:
            _spare_logits(graph, node)
        refresh(graph)
    module.recompile()
    return module


def _spare_logits(graph: fx.Graph, node: fx.Node) -> None:
    """Has the gradient that takes the place of the logits be elsewhere: a backward pass may run again.

    Where the logits are a part of what lies there, as where their rows are padded, all that is copied.
    """
    logits = node.all_input_nodes[1]
    base, *views = (one for one in graph.nodes if one < node and dataflow.storages(one) == dataflow.storages(logits))
    later = {one for one in graph.nodes if node < one}
    is_whole = _sees_the_same(base, logits) and base.meta["val"].is_contiguous()
    moved: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(node):
        if is_whole:
            moved[base] = graph.call_function(_beside_logits, node.args, dict(node.kwargs))
        else:
            moved[base] = graph.call_function(torch.ops.aten.clone.default, (base,))
        for view in views:
            moved[view] = graph.node_copy(view, lambda one: moved.get(one, one))
        if not is_whole:
            graph.node_copy(node, lambda one: moved.get(one, one))
    for one, other in reversed(moved.items()):
        other.meta = dict(one.meta)
        one.replace_all_uses_with(other, delete_user_cb=later.__contains__)
        if not other.users:
            graph.erase_node(other)
    graph.erase_node(node)


def _sees_the_same(one: fx.Node, other: fx.Node) -> bool:
    """Of two nodes whose values share memory."""
    value, another = one.meta["val"], other.meta["val"]
    return value.size() == another.size() and same_layout(value, another)
