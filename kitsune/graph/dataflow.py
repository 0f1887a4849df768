"""Which values of a graph share storage, and which storages its operators write.

A graph here is an `fx.Graph` of ATen operators whose nodes carry the fake tensors of tracing in
`node.meta["val"]`; values that alias have fake tensors that share a storage.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

# These mutate their running statistics although their schemas do not say so.
_RUNNING_STATISTICS = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}

# These write to the gradients only to unscale them, although their schemas do not say so.
_FUSED_UPDATES = {
    torch.ops.aten._fused_adam_.tensor_lr,
    torch.ops.aten._fused_adamw_.tensor_lr,
    torch.ops.aten._fused_sgd_.tensor_lr,
}


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """The (fake) tensors that `node` produces."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors that share a storage, as long as they live."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def storages(node: fx.Node) -> set[int]:
    """The keys of the storages that `node`'s values lie in."""
    return {storage_of(tensor) for tensor in tensors(node)}


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


Result = fx.Node | None


def outputs(graph: fx.Graph) -> list[Result]:
    """The values that `graph` returns, flat: nodes, and None where a result is absent."""
    return list(pytree.tree_leaves(graph.output_node().args[0], is_leaf=lambda leaf: leaf is None))


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether it does at this call: attention without dropout draws none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.kwargs.get(argument.name, argument.default_value)
            return bool((node.args[position] if position < len(node.args) else given) != 0.0)
    return True


def reshaped(graph: fx.Graph) -> set[int]:
    """The keys of the storages whose values are given another shape in place."""
    return {
        storage
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags
        for argument in node.all_input_nodes
        for storage in storages(argument)
    }


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments of `node` that its operator mutates."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for position in _RUNNING_STATISTICS.get(node.target, ()):
        statistic, training = node.args[position], node.args[5]
        if isinstance(statistic, fx.Node) and training:
            yield statistic
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name == "grads" and node.target in _FUSED_UPDATES and node.kwargs.get("grad_scale") is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))


def written_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """The inputs that the graph mutates: position of the placeholder → the first node that writes it."""
    writers: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for target in written(node):
            for storage in storages(target):
                writers.setdefault(storage, node)
    result: dict[int, fx.Node] = {}
    for position, placeholder in enumerate(placeholders(graph)):
        hits = [writers[storage] for storage in storages(placeholder) if storage in writers]
        if hits:
            result[position] = hits[0]
    return result
