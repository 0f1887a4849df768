"""Regions of a graph as operators: `kitsune_regions::...`, each with code that a compiler generated for it.

An operator's name is a digest of all that its code depends on, so that equal regions, of one graph or of several,
share it. Operators and their code live as long as the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import fx

from kitsune.device import synchronize
from kitsune.errors import Refusal, first_line

NAMESPACE = "kitsune_regions"

Code = Callable[..., Sequence[torch.Tensor]]
"""Takes a region's inputs, returns its outputs as new tensors."""

_ALIGNMENT = 16  # bytes; generated code depends on whether its inputs lie at multiples of it


@dataclass(frozen=True)
class Backend:
    """What generates code.

    Attributes:
        name: part of the names of its operators: letters and digits.
        refuse: None if it can generate code for a device.
        compile: makes code of a graph of functional ATen operators and of tensors laid out like its inputs; may
            raise anything.
    """

    name: str
    refuse: Callable[[torch.device], Refusal | None]
    compile: Callable[[fx.GraphModule, Sequence[torch.Tensor]], Code]


def region_name(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], backend: Backend
) -> str:
    """The name of the operator that computes `module`: equal for equal operators, constants and layouts."""
    numbers = {node: f"%{number}" for number, node in enumerate(module.graph.nodes)}
    lines = [f"{node.op} {node.target} {_arguments(node, numbers)}" for node in module.graph.nodes]
    lines += [_layout(tensor) for tensor in inputs]
    lines += [f"-> {_layout(tensor)}" for tensor in outputs]
    return f"{backend.name}_{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:24]}"


def region_operator(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], backend: Backend
) -> torch._ops.OpOverload | Refusal:
    """The operator that computes `module`; its code is generated, and tried out, unless there is one of that name.

    Args:
        module: a graph of functional ATen operators that returns a list of tensors.
        inputs, outputs: (fake) tensors with the sizes, strides, dtypes and the device of what it takes, at least one
            tensor, and returns.

    Returns:
        A functional operator that takes the inputs one by one and returns new tensors with exactly the strides of
        `outputs`: one tensor, or several as a tuple. A refusal where there is no code or it does something else.
    """
    name = region_name(module, inputs, outputs, backend)
    if name not in _operators:
        code = _tried(module, inputs, outputs, backend)
        if isinstance(code, Refusal):
            return code
        with _registering:
            if name not in _operators:  # another thread may have come first
                _definitions[name] = Definition(module, tuple(inputs), tuple(outputs))
                _operators[name] = _register(name, code, len(inputs), outputs)
    return _operators[name]


def definition(name: str) -> Definition:
    """What the operator of that name was made of. Raises KeyError where there is none."""
    return _definitions[name]


class Definition(NamedTuple):
    """The arguments of `region_operator`, but for the backend."""

    module: fx.GraphModule
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


_operators: dict[str, torch._ops.OpOverload] = {}
_definitions: dict[str, Definition] = {}
_registering = Lock()


def _tried(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], backend: Backend
) -> Code | Refusal:
    """Code that has run once, so that it is loaded and tuned before a recording and fails, if at all, here."""
    device = inputs[0].device
    refusal = backend.refuse(device)
    if refusal is not None:
        return refusal
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            examples = [_example(tensor) for tensor in inputs]
            code = backend.compile(module, examples)
            results = code(*examples)
            synchronize(device)
    except Exception as error:  # noqa: BLE001 - generators, C++ compilers, Triton and its drivers fail in many ways
        return Refusal(f"{backend.name} failed: {type(error).__name__}: {first_line(error)}")
    problem = _difference(examples, results, outputs)
    return code if problem is None else Refusal(f"{backend.name} made code that {problem}")


def _difference(
    inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> str | None:
    """The first way in which `results` are no new tensors with the layouts of `outputs`."""
    if len(results) != len(outputs):
        return f"returns {len(results)} tensors, not {len(outputs)}"
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for result, output in zip(results, outputs, strict=True):
        if not _are_laid_out_alike(result, output) or result.dtype != output.dtype:
            return f"returns {_layout(result)}, not {_layout(output)}"
        storage = result.untyped_storage().data_ptr()
        if storage in taken and result.nbytes:
            return "returns a tensor in the memory of another one"
        taken.add(storage)
    return None


def _are_laid_out_alike(result: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether every element is where it is wanted; strides of dimensions with one place say nothing of that."""
    strides = zip(output.size(), result.stride(), output.stride(), strict=True)
    return result.size() == output.size() and all(size == 1 or one == other for size, one, other in strides)


def _register(name: str, code: Code, num_inputs: int, outputs: Sequence[torch.Tensor]) -> torch._ops.OpOverload:
    takes = ", ".join(f"Tensor x{place}" for place in range(num_inputs))
    gives = "Tensor" if len(outputs) == 1 else f"({', '.join(['Tensor'] * len(outputs))})"
    layouts = [(tuple(tensor.size()), tensor.stride(), tensor.dtype) for tensor in outputs]
    device = outputs[0].device

    def run(*inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        results = [
            result if result.stride() == stride else result.as_strided(size, stride)
            for result, (size, stride, _) in zip(code(*inputs), layouts, strict=True)
        ]
        return results[0] if len(results) == 1 else tuple(results)

    def fake(*_inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        results = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in layouts]
        return results[0] if len(results) == 1 else tuple(results)

    torch.library.define(f"{NAMESPACE}::{name}", f"({takes}) -> {gives}")
    torch.library.impl(f"{NAMESPACE}::{name}", device.type, run)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return operator


def _example(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros, which are valid indices, laid out and aligned like `tensor`."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = _misalignment(tensor) // tensor.element_size()
    memory = torch.zeros(start + last + 1 if tensor.numel() else start, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.size(), tensor.stride(), start)


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.size())} {tensor.stride()} {tensor.device} +{_misalignment(tensor)}"


def _misalignment(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size() % _ALIGNMENT


def _arguments(node: fx.Node, numbers: dict[fx.Node, str]) -> str:
    return repr(fx.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__))
