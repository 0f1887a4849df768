"""How much work an operator is: the bytes it moves and the floating-point operations it does, from its fake tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from kitsune.graph import dataflow
from kitsune.graph.attention import original

_aten = torch.ops.aten

# They allocate and launch nothing.
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted}
_ALLOCATIONS |= {_aten.new_empty, _aten.new_empty_strided}

# They overwrite their first argument without reading it.
_OVERWRITES = {_aten.copy_, _aten.fill_, _aten.zero_, _aten.bernoulli_, _aten.normal_, _aten.uniform_}
_OVERWRITES |= {_aten._foreach_copy_, _aten._foreach_zero_}

# They read of their first argument only what they are asked for.
_GATHERS = {_aten.embedding, _aten.index_select, _aten.gather, _aten.take, _aten.index, _aten._unsafe_index}
_GATHERS |= {_aten.nll_loss_forward, _aten.nll_loss2d_forward}

# They write only a part of their first argument, as large as their other arguments, and may read that part.
_SCATTERS = {_aten.index_put_, _aten._index_put_impl_, _aten.index_add_, _aten.index_copy_}
_SCATTERS |= {_aten.scatter_, _aten.scatter_add_}

_CONVOLUTIONS = {_aten.convolution, _aten._convolution, _aten.cudnn_convolution, _aten.convolution_backward}

_ATTENTION = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_fused_attention_overrideable,
}
_ATTENTION_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable_backward,
}


@dataclass(frozen=True)
class Work:
    """The work of one operator.

    Attributes:
        bytes_read: each argument once; of an expanded tensor what lies in memory.
        bytes_written: results with memory of their own, and what is written in place.
        flops: floating-point operations of matrix products, convolutions and attention; else 0. A
            multiplication and the addition to its sum are two.
        num_items: elements that it can work on at the same time.
        dtype: in which it computes.
        convolution: whether it is one.
    """

    bytes_read: int
    bytes_written: int
    flops: int
    num_items: int
    dtype: torch.dtype
    convolution: bool = False


def launches(node: fx.Node) -> bool:
    """Whether `node` runs a kernel: it computes, or writes. Views, `getitem` and mere allocations do not."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if _packet(node) in _ALLOCATIONS:
        return False
    if any(True for _ in dataflow.written(node)):
        return True
    arguments = {storage for argument in node.all_input_nodes for storage in dataflow.storages(argument)}
    return not dataflow.tensors(node) or not dataflow.storages(node) <= arguments


def work(node: fx.Node) -> Work:
    """The work of `node`, whose arguments and results carry fake tensors."""
    arguments = [tensor for argument in node.all_input_nodes for tensor in dataflow.tensors(argument)]
    targets = [tensor for target in dataflow.written(node) for tensor in dataflow.tensors(target)]
    taken = {dataflow.storage_of(tensor) for tensor in arguments}
    results = [tensor for tensor in dataflow.tensors(node) if dataflow.storage_of(tensor) not in taken]
    packet = _packet(node)
    flops = _flops(node)
    everything = [*arguments, *results]
    num_results = sum(tensor.numel() for tensor in (*results, *targets))
    largest = max((tensor.numel() for tensor in everything), default=0)
    # Libraries split long sums over multiprocessors, where a part has at least some 512 terms.
    num_items = max(num_results, flops // 1024) if flops else max(num_results, largest)
    return Work(
        bytes_read=_bytes_read(packet, arguments, targets, results),
        bytes_written=_bytes_written(packet, arguments, targets, results),
        flops=flops,
        num_items=max(1, num_items),
        dtype=_dtype(everything),
        convolution=packet in _CONVOLUTIONS,
    )


def _bytes_read(
    packet: object, arguments: list[torch.Tensor], targets: list[torch.Tensor], results: list[torch.Tensor]
) -> int:
    total = sum(_bytes_of(tensor) for tensor in arguments)
    if packet in _OVERWRITES:
        return total - sum(_bytes_of(tensor) for tensor in targets)
    if packet in _SCATTERS:
        return total - _bytes_of(arguments[0]) + _least(arguments[0], arguments[1:])
    if packet in _GATHERS:
        return total - _bytes_of(arguments[0]) + _least(arguments[0], [*arguments[1:], *results])
    return total


def _bytes_written(
    packet: object, arguments: list[torch.Tensor], targets: list[torch.Tensor], results: list[torch.Tensor]
) -> int:
    if packet in _SCATTERS:
        return _least(arguments[0], arguments[1:])
    return sum(_bytes_of(tensor) for tensor in (*results, *targets))


def _least(whole: torch.Tensor, others: list[torch.Tensor]) -> int:
    """Bytes of the part of `whole` that has as many elements as the largest of `others`."""
    return min(_bytes_of(whole), max((tensor.numel() for tensor in others), default=0) * whole.element_size())


def _bytes_of(tensor: torch.Tensor) -> int:
    """Bytes in memory: expanded dimensions count once."""
    sizes = zip(tensor.size(), tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size if stride or not size else 1 for size, stride in sizes)


def _dtype(tensors: list[torch.Tensor]) -> torch.dtype:
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point or tensor.dtype.is_complex]
    return max(floats, key=torch.Tensor.numel).dtype if floats else torch.float32


def _packet(node: fx.Node) -> Any:
    target = original(node.target)
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


def _flops(node: fx.Node) -> int:
    packet = _packet(node)
    if packet is _aten.convolution_backward:
        return _convolution_backward_flops(*_values(node.args))
    if packet in _ATTENTION:
        query, key, value = _values(node.args[:3])
        return _attention_flops(query, key, value, 1, 1)
    if packet in _ATTENTION_BACKWARD:
        query, key, value = _values(node.args[1:4])
        return _attention_flops(query, key, value, 3, 2)
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is None:
        return 0
    return int(formula(*_values(node.args), **_values(node.kwargs), out_val=node.meta.get("val")))


def _convolution_backward_flops(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    """As many as the forward pass has, for each of the gradients of input and weight that is wanted.

    torch's own formula counts the weight's gradient of a grouped convolution once for each group.
    """
    transposed, output_mask = rest[4], rest[-1]
    spatial = (x if transposed else grad).size()[2:]
    forward = 2 * x.size(0) * math.prod(spatial) * weight.numel()
    return forward * (int(output_mask[0]) + int(output_mask[1]))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, by_key: int, by_value: int) -> int:
    """Products as wide as the keys and as wide as the values, for each pair of a query and a key of each head.

    Forward: scores, and their sums of values. Backward: the scores again, the gradients of queries and
    keys; of scores and values. Masks are not counted. torch's own formula does not take fewer heads of
    keys than of queries in all versions.
    """
    batch, heads, num_queries, width = query.size()
    pairs = batch * heads * num_queries * key.size(2)
    return 2 * pairs * (by_key * width + by_value * value.size(3))


def _values(arguments: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf, arguments)
