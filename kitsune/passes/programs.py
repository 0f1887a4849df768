"""Whole programs as one operator each: `kitsune_programs::...`, with code that Inductor generated for all of it.

A program may write to its inputs, as a training step does. The operator's name is a digest of all that its code depends
on. Operators and their code live as long as the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import getitem
from threading import Lock
from typing import NamedTuple

import torch
from torch import fx

from kitsune.graph import dataflow
from kitsune.graph.dependencies import operations
from kitsune.graph.serialize import digest
from kitsune.graph.signature import graph_signature
from kitsune.kernels.regions import Backend, Code, region_name

NAMESPACE = "kitsune_programs"


def program_name(module: fx.GraphModule, backend: Backend) -> str:
    """The name of the operator that computes `module`: equal for equal operators, constants, layouts and switches.

    Of torch's switches those count that choose kernels: generated code is another where it is to be deterministic.
    """
    inputs, outputs = _values(module)
    facts = region_name(module, inputs, outputs, backend), digest(module), graph_signature(module.graph)
    return f"{backend.name}_{hashlib.sha256(' '.join(facts).encode()).hexdigest()[:24]}"


def program_operator(module: fx.GraphModule, backend: Backend) -> torch._ops.OpOverload:
    """The operator that computes `module`; its code is generated unless there is one of that name.

    It takes two lists of tensors: the inputs that the program writes, and the others, in their order; and returns a
    list of new tensors.

    Raises:
        Exception: `backend` may raise anything.
        ValueError: the program returns what it was given, or nothing.
    """
    name = program_name(module, backend)
    if name not in _operators:
        inputs, outputs = _values(module)
        if not outputs or any(node is None for node in dataflow.outputs(module.graph)):
            raise ValueError("a program returns tensors")
        taken = {dataflow.storage_of(tensor) for tensor in inputs}
        own = {dataflow.storage_of(tensor) for tensor in outputs}
        if not taken.isdisjoint(own) or len(own) < len(outputs):
            raise ValueError("a program returns new tensors, each in memory of its own")
        if len(taken) < len(inputs) and written_places(module):
            raise ValueError("a program that writes takes tensors that share no memory")
        code = backend.compile(module, inputs)
        with _registering:
            if name not in _operators:
                _operators[name] = _register(name, code, written_places(module), inputs, outputs)
                _definitions[name] = module
    return _operators[name]


def definition(name: str) -> fx.GraphModule:
    """What the operator of that name computes. Raises KeyError where there is none."""
    return _definitions[name]


def written_places(module: fx.GraphModule) -> list[int]:
    """The positions of the inputs that the program writes, and of those that share memory with them."""
    return sorted(dataflow.written_inputs(module.graph))


class Part(NamedTuple):
    """Operators of a graph that are to be one operator.

    Attributes:
        module: computes what others read of them.
        names: the names of their nodes.
        rebuilt: given the operator, makes the whole graph with a call of it.
    """

    module: fx.GraphModule
    names: tuple[str, ...]
    rebuilt: Callable[[torch._ops.OpOverload], fx.GraphModule]


def part(module: fx.GraphModule, stays: Callable[[fx.Node], bool]) -> Part:
    """All of `module` but the operators that stay, and those that must come after one of these."""
    found = operations(module.graph)
    later = set[int]()
    for place, operation in enumerate(found.listed):
        if stays(operation.node) or not later.isdisjoint(operation.after):
            later.add(place)
    inside = {node for place, one in enumerate(found.listed) if place not in later for node in one.nodes}
    outside = [node for place in sorted(later) for node in found.listed[place].nodes]
    early = [node for node in found.prologue if node.op not in ("placeholder", "get_attr")]  # views of inputs
    output = module.graph.output_node()
    read = dict.fromkeys(one for node in (*outside, output) for one in node.all_input_nodes if one in inside)
    results = [node for node in read if isinstance(node.meta.get("val"), torch.Tensor)]
    if len(results) < len(read):
        raise ValueError("an operator that stays reads several results at once")
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node in inside or node in early or node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in results])
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "get_attr") and not node.users:
            graph.erase_node(node)
    made = fx.GraphModule(module, graph)
    taken = [node for node in module.graph.nodes if node.op == "placeholder" and copies[node].users]
    names = tuple(node.name for node in module.graph.nodes if node in inside and node.op == "call_function")
    return Part(made, names, partial(_rebuilt, module, made, taken, results, {*early, *outside}))


def _rebuilt(
    module: fx.GraphModule,
    made: fx.GraphModule,
    taken: Sequence[fx.Node],
    results: Sequence[fx.Node],
    kept: Collection[fx.Node],
    target: torch._ops.OpOverload,
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    written = set(written_places(made))
    first = [copies[node] for place, node in enumerate(taken) if place in written]
    second = [copies[node] for place, node in enumerate(taken) if place not in written]
    call = graph.call_function(target, (first, second))
    call.meta["val"] = [node.meta["val"] for node in results]
    for place, node in enumerate(results):
        copies[node] = graph.create_node("call_function", getitem, (call, place), name=node.name)
        copies[node].meta["val"] = node.meta["val"]
    for node in module.graph.nodes:
        if node in kept:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    (output,) = module.graph.output_node().args
    graph.output(fx.map_arg(output, copies.__getitem__))
    return fx.GraphModule(module, graph)


_operators: dict[str, torch._ops.OpOverload] = {}
_definitions: dict[str, fx.GraphModule] = {}
_registering = Lock()


def _values(module: fx.GraphModule) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    inputs = [node.meta["val"] for node in dataflow.placeholders(module.graph)]
    return inputs, [node.meta["val"] for node in dataflow.outputs(module.graph) if node is not None]


def _register(
    name: str, code: Code, written: Sequence[int], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> torch._ops.OpOverload:
    layouts = [(tuple(tensor.size()), tensor.stride(), tensor.dtype) for tensor in outputs]
    device = outputs[0].device
    places = set(written)
    takes_written = [place in places for place in range(len(inputs))]

    def run(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = iter(second), iter(first)
        results = code(*(next(parts[is_written]) for is_written in takes_written))
        pairs = zip(results, layouts, strict=True)
        return [one if one.stride() == stride else _laid_out(one, size, stride) for one, (size, stride, _) in pairs]

    def fake(_first: Sequence[torch.Tensor], _second: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in layouts]

    torch.library.define(f"{NAMESPACE}::{name}", "(Tensor(a!)[] written, Tensor[] others) -> Tensor[]")
    torch.library.impl(f"{NAMESPACE}::{name}", device.type, run)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def _laid_out(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    laid_out: torch.Tensor = tensor.new_empty_strided(size, stride)
    return laid_out.copy_(tensor)
