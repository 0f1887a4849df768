"""Which values of a graph can be written to planned memory, and the operators that do so."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from kitsune.graph import dataflow
from kitsune.memory.pool import Block
from kitsune.memory.views import place
from kitsune.plan import MemoryPlan, TaskGraph


@dataclass(frozen=True)
class Writer:
    """An operator that writes its result to memory that it is given.

    Attributes:
        target: takes the same arguments as the one that it stands for, and `argument`.
        argument: the name of the tensor for its result.
    """

    target: torch._ops.OpOverload
    argument: str


@dataclass(frozen=True)
class Place:
    """Planned memory for the result of an operator, and the operator that writes it there."""

    writer: Writer
    memory: torch.Tensor


def writers(graph: fx.Graph) -> Mapping[str, Writer]:
    """By name of the node, the operators of `graph` whose results can lie in planned memory.

    These have one result, which is dense and new memory, not a result of the graph and never given another
    shape in place, and a kernel of the device that writes it to memory it is given. Many operators have
    the form, but no such kernel: they would compute the result elsewhere and copy it.
    """
    unfit = [*_given_away(graph), *_reshaped(graph)]
    taken = {storage for node in unfit for storage in dataflow.storages(node)}
    found: dict[str, Writer] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or not _is_dense(value):
            continue
        storage = dataflow.storage_of(value)
        writer = None if storage in taken else _writer(node, value.device)
        taken.add(storage)
        if writer is not None:
            found[node.name] = writer
    return found


def only(graph: TaskGraph, names: Container[str]) -> TaskGraph:
    """`graph` with the values of other nodes than those of `names` made empty: there is other memory for them."""
    values = [value if value.name in names else dataclasses.replace(value, num_bytes=0) for value in graph.values]
    return dataclasses.replace(graph, values=tuple(values))


def places(
    graph: fx.Graph, tasks: TaskGraph, writers: Mapping[str, Writer], plan: MemoryPlan, arena: Block
) -> dict[str, Place]:
    """By name of the node, where in `arena` the values that `plan` places are written, and by what."""
    nodes = {node.name: node for node in graph.nodes}
    found: dict[str, Place] = {}
    for value in tasks.values:
        offset = plan.offsets[value.index]
        if offset is not None:
            example = nodes[value.name].meta["val"]
            memory = place(arena, offset, example.size(), example.stride(), example.dtype)
            found[value.name] = Place(writers[value.name], memory)
    return found


def _given_away(graph: fx.Graph) -> list[fx.Node]:
    return [*dataflow.placeholders(graph), *(node for node in dataflow.outputs(graph) if node is not None)]


def _reshaped(graph: fx.Graph) -> list[fx.Node]:
    """Values whose sizes or strides an operator changes: it would change those of the planned tensor for good."""
    return [
        argument
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags
        for argument in node.all_input_nodes
    ]


def _is_dense(value: torch.Tensor) -> bool:
    filled = torch.ops.aten.is_non_overlapping_and_dense.default(value)
    return bool(filled) and value.storage_offset() == 0 and value.nbytes == value.untyped_storage().nbytes()


def _writer(node: fx.Node, device: torch.device) -> Writer | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or any(dataflow.written(node)):
        return None
    if dataflow.draws_random_numbers(node):  # what they draw might depend on the form
        return None
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        results = [argument.name for argument in arguments if argument.is_out]
        given = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if len(results) == 1 and given == wanted and _has_kernel(overload, device):
            return Writer(overload, results[0])
    return None


def _has_kernel(overload: torch._ops.OpOverload, device: torch.device) -> bool:
    """Whether the device has a kernel of its own for `overload`. The call is private; there is no public one."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), device.type.upper())
