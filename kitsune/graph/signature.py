"""Keys of operators and of graphs that are equal where a device takes equally long for them."""

from __future__ import annotations

import hashlib

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.graph import dataflow


def signature(node: fx.Node) -> str:
    """A key that is equal for calls that take equally long on a device, whatever graph they are in.

    It holds the operator, its arguments (of tensors data type, sizes, strides and alignment) and the
    flags of torch that choose its kernels.
    """
    tensors = [tensor for argument in (node, *node.all_input_nodes) for tensor in dataflow.tensors(argument)]
    on_cuda = any(tensor.device.type == "cuda" for tensor in tensors)
    call = pytree.tree_map(_describe, (node.args, dict(node.kwargs)))
    text = f"{node.target} {call} {_flags(on_cuda)}"
    return f"{node.target} {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def graph_signature(graph: fx.Graph) -> str:
    """As `signature`, of a whole graph: its operators, how they are connected, and its inputs."""
    numbers = {node: index for index, node in enumerate(graph.nodes)}

    def number(leaf: object) -> str:
        return f"%{numbers[leaf]}" if isinstance(leaf, fx.Node) else _describe(leaf)

    lines = []
    for node in graph.nodes:
        call = pytree.tree_map(number, (node.args, dict(node.kwargs)))
        value = pytree.tree_map(_describe, node.meta.get("val")) if node.op == "placeholder" else ""
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {call} {value}")
    on_cuda = any(tensor.device.type == "cuda" for node in graph.nodes for tensor in dataflow.tensors(node))
    text = "\n".join([*lines, str(_flags(on_cuda))])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _describe(leaf: object) -> str:
    if isinstance(leaf, fx.Node):
        return str(pytree.tree_map(_describe, leaf.meta["val"]))
    if isinstance(leaf, torch.Tensor):
        misalignment = leaf.storage_offset() * leaf.element_size() % 16
        return f"{leaf.dtype}{tuple(leaf.size())}{leaf.stride()}{leaf.device.type}+{misalignment}"
    return leaf.type if isinstance(leaf, torch.device) else repr(leaf)


def _flags(on_cuda: bool) -> tuple[object, ...]:
    if not on_cuda:
        return (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
        str(torch.backends.cuda.preferred_blas_library()),
        cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.benchmark_limit,
        cudnn.deterministic,
    )
