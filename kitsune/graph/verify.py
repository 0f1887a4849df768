"""What a legal captured graph is."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.errors import Refusal
from kitsune.graph import dataflow

# Their tags say that shapes depend on data, which is so for masks alone.
_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
    torch.ops.aten._unsafe_index.Tensor,
    torch.ops.aten._unsafe_index_put.default,
}

_HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default}

# ATen, and Kitsune's own kernels.
_NAMESPACES = ("aten", "kitsune", "kitsune_regions", "kitsune_programs")

# A tensor that lies elsewhere from then on: replays read and write where it lay when they were captured.
_EXCHANGES = {torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_}

# Eager raises an exception that can be caught; on a GPU these would end the process's use of the device.
_ASSERTIONS = {torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}


def source_line(node: fx.Node) -> str | None:
    """The innermost line of the user's source that led to `node`, where tracing recorded one."""
    return innermost_line([line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()])


def innermost_line(lines: Sequence[str]) -> str | None:
    """The last place in a traceback, given in lines without spaces around, and the code there."""
    places = [position for position, line in enumerate(lines) if line.startswith("File ")]
    return ": ".join(lines[places[-1] : places[-1] + 2]) if places else None


def refuse_graph(graph: fx.Graph) -> Refusal | None:
    """None if `graph` can be replayed; else the first thing that stands in the way.

    Legal is a graph of operators of ATen and of Kitsune (and `getitem`) over tensors of one device, beside
    zero-dimensional CPU tensors, whose shapes do not depend on data and that reads nothing back to
    the host.
    """
    devices: set[torch.device] = set()
    for node in graph.nodes:
        if node.op in ("call_method", "call_module"):
            return Refusal(f"{node.op} of {node.target} was not traced down to ATen", source_line(node))
        if node.op == "call_function" and node.target is not operator.getitem:
            refusal = _refuse_operator(node)
            if refusal is not None:
                return refusal
        devices |= {tensor.device for tensor in dataflow.tensors(node) if tensor.dim() or tensor.device.type != "cpu"}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            return Refusal(f"the step uses several devices ({names})", source_line(node) or node.name)
    return None if devices <= {torch.device("cpu")} else _refuse_host_values(graph)


def _refuse_host_values(graph: fx.Graph) -> Refusal | None:
    """None if all values on the host are constants: a graph on a device computes them once, when it is recorded."""
    for node in graph.nodes:
        if node.op != "call_function" or not any(tensor.device.type == "cpu" for tensor in dataflow.tensors(node)):
            continue
        place = source_line(node) or str(node.target)
        if dataflow.draws_random_numbers(node):
            return Refusal("a random number drawn on the host would be the same at every replay", place)
        arguments = [tensor for argument in node.all_input_nodes for tensor in dataflow.tensors(argument)]
        if any(tensor.device.type != "cpu" for tensor in arguments):
            return Refusal("the step copies device data to the host", place, "keep the value on the device")
    return None


def _indices(node: fx.Node) -> list[torch.Tensor]:
    nodes = [leaf for leaf in pytree.tree_leaves(node.args[1]) if isinstance(leaf, fx.Node)]
    return [tensor for index in nodes for tensor in dataflow.tensors(index)]


def _refuse_operator(node: fx.Node) -> Refusal | None:
    target = node.target
    place = source_line(node) or str(target)
    if not isinstance(target, torch._ops.OpOverload):
        return Refusal(f"{target} is not an ATen operator", place)
    if target.namespace not in _NAMESPACES:
        return Refusal(f"the custom operator {target} may do anything on the host", place)
    if target.overloadpacket in _EXCHANGES:
        remedy = "write into the memory that it has: weight.data.copy_(...)"
        return Refusal("a tensor is given other memory in the call (as by assigning its .data)", place, remedy)
    if target in _ASSERTIONS:
        return Refusal("the step asserts something of its data", place)
    if target in _HOST_READS:
        return Refusal("the step takes a number out of a tensor (as by .item())", place, "keep the value in a tensor")
    if target in _INDEXING:
        masks = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _indices(node))
        return Refusal("indexing with a mask gives a size that depends on data", place) if masks else None
    if torch.Tag.data_dependent_output in target.tags or torch.Tag.dynamic_output_shape in target.tags:
        return Refusal(f"a result of {target} has a size that depends on data", place)
    return None
