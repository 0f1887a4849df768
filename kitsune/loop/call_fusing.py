"""Fuses the operators of a call and of its backward pass, between which the user's own code runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from kitsune.capture.split_program import SplitProgram, split_anew
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.graph.values import mode_of, value
from kitsune.loop import planning

torch.library.define("kitsune::after", "(Tensor self, Tensor[] others) -> Tensor")

_after = torch.ops.kitsune.after.default


def _copied(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    return tensor.clone()


torch.library.impl("kitsune::after", "CompositeExplicitAutograd", _copied)
torch.library.register_fake("kitsune::after", _copied)


def fused_call(
    program: SplitProgram, flat: Sequence[Tensor], refused: Callable[[Refusal], None]
) -> SplitProgram | None:
    """`program` with operators fused; None where that is not predicted to be faster, or cannot be.

    Both passes are rewritten as one graph, so that what the forward pass saves suits the backward pass, and split anew.

    Args:
        flat: the tensors of the present call. They are left as they are.
        refused: told what could not be done.
    """
    joint = _ordered(program)
    if joint is None:
        return None
    device = flat[0].device
    generator = torch.Generator(device).manual_seed(0)
    tangents = [layout.empty().normal_(generator=generator) for layout in program.tangents]
    inputs = [*(tensor.detach() for tensor in flat), *tangents]
    found = planning.others(joint, inputs, num_streams=1, fuse=True, refused=refused)
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


def _ordered(program: SplitProgram) -> fx.GraphModule | None:
    """The joint graph, with an operator that makes the gradient of the output depend on all outputs.

    So nothing that an output is computed from can become one operator with a part of the backward pass.
    None if there are several gradients, of which some may be missing, or one that an operator would lay out otherwise.
    """
    if len(program.tangents) != 1 or not dataflow.placeholders(program.joint.graph)[-1].users:
        return None
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.joint.graph, {}))
    tangent = dataflow.placeholders(graph)[-1]
    bases = [_base(one) for one in dataflow.outputs(graph)[: len(program.differentiable)] if one is not None]
    order = {node: place for place, node in enumerate(graph.nodes)}
    first = min(tangent.users, key=order.__getitem__)
    if any(order[base] >= order[first] for base in bases):
        return None
    args = tangent, bases
    with graph.inserting_before(first):
        after = graph.call_function(_after, args)
    after.meta["val"] = value(mode_of(graph), _after, args, {})
    if after.meta["val"].stride() != tangent.meta["val"].stride():
        return None
    tangent.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)
    return fx.GraphModule(program.joint, graph)


def _base(node: fx.Node) -> fx.Node:
    """What an output is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _unordered(module: fx.GraphModule) -> fx.GraphModule:
    """Without the operator. Where its result is written to, a copy stays: gradients belong to autograd."""
    graph = module.graph
    (after,) = (node for node in graph.nodes if node.target is _after)
    written = {storage for node in graph.nodes for one in dataflow.written(node) for storage in dataflow.storages(one)}
    tangent = after.args[0]
    with graph.inserting_before(after):
        taken = graph.call_function(torch.ops.aten.clone.default, (tangent,))
    taken.meta = dict(after.meta)
    is_written = not written.isdisjoint(dataflow.storages(after))
    after.replace_all_uses_with(taken if is_written else tangent)
    graph.erase_node(after)
    if not is_written:
        graph.erase_node(taken)
    module.recompile()
    return module
