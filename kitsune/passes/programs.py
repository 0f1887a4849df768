"""Whole programs as one operator each: `kitsune_programs::...`, with code that Inductor generated for all of it.

A program may write to its inputs, as a training step does. The operator's name is a digest of all that its code depends
on. Operators and their code live as long as the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from threading import Lock

import torch
from torch import fx

from kitsune.graph import dataflow
from kitsune.kernels.regions import Backend, Code, region_name

NAMESPACE = "kitsune_programs"


def program_name(module: fx.GraphModule, backend: Backend) -> str:
    """The name of the operator that computes `module`: equal for equal operators, constants and layouts."""
    inputs, outputs = _values(module)
    return region_name(module, inputs, outputs, backend)


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
        if any(dataflow.storage_of(tensor) in taken for tensor in outputs):
            raise ValueError("a program returns new tensors")
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


def called(module: fx.GraphModule, operator: torch._ops.OpOverload) -> fx.GraphModule:
    """A graph with the inputs and results of `module` that calls its operator."""
    graph = fx.Graph()
    placeholders = []
    for node in dataflow.placeholders(module.graph):
        placeholders.append(graph.placeholder(node.name))
        placeholders[-1].meta["val"] = node.meta["val"]
    written = set(written_places(module))
    first = [node for place, node in enumerate(placeholders) if place in written]
    second = [node for place, node in enumerate(placeholders) if place not in written]
    call = graph.call_function(operator, (first, second))
    outputs = [node for node in dataflow.outputs(module.graph) if node is not None]
    call.meta["val"] = [node.meta["val"] for node in outputs]
    items = []
    for place, node in enumerate(outputs):
        items.append(graph.call_function(getitem, (call, place)))
        items[-1].meta["val"] = node.meta["val"]
    graph.output(items)
    return fx.GraphModule({}, graph)


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
