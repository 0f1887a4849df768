"""What a step makes on the host of numbers and sizes alone, and uses on the device: it is the same at every replay.

Models make masks, positions and first states like that, `torch.zeros(len(x), 8).to(x.device)`, and choose channels by a
list, `x[:, [2, 1, 0]]`. A graph on a device cannot copy from the host, so these are copied once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, fx

from kitsune.graph import dataflow

_aten = torch.ops.aten

_COPYING = {
    *(_aten._to_copy.default, _aten.copy_.default, _aten.index_put.default, _aten.index_put_.default),
    *(_aten._index_put_impl_.default, _aten._unsafe_index_put.default),
}
"""These copy a single number, too. Where others take one from the host, they pass it to their kernel."""


def fold(module: fx.GraphModule) -> None:
    """Has the operators that run on a device take from attributes, on that device, what else they take from the host.

    That is what is made there of constants, without random numbers.
    """
    graph = module.graph
    if all(map(_is_on_host, dataflow.placeholders(graph))):
        return
    made: dict[fx.Node, Tensor] = {}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for node in list(graph.nodes):
            if _is_made_on_host(module, node, made):
                made[node] = _make(module, node, made)
            elif node.op == "call_function" and not _is_on_host(node):
                for argument in node.all_input_nodes:
                    if argument in made and (made[argument].dim() or node.target in _COPYING):
                        node.replace_input_with(argument, _on_device(module, node, argument, made[argument]))
    _erase(graph, made)
    module.recompile()


def _is_on_host(node: fx.Node) -> bool:
    return all(tensor.device.type == "cpu" for tensor in dataflow.tensors(node))


def _is_made_on_host(module: fx.GraphModule, node: fx.Node, made: Iterable[fx.Node]) -> bool:
    """Whether it is a tensor on the host that follows from those that are `made`, or from nothing."""
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        return isinstance(value, Tensor) and value.device.type == "cpu"
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"  # others may do anything
        and isinstance(node.meta.get("val"), Tensor)
        and _is_on_host(node)
        and all(argument in made for argument in node.all_input_nodes)
        and not dataflow.draws_random_numbers(node)
    )


def _make(module: fx.GraphModule, node: fx.Node, made: dict[fx.Node, Tensor]) -> Tensor:
    if node.op == "get_attr":
        return cast(Tensor, getattr(module, str(node.target))).clone()  # it may be written to
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    return cast(Tensor, node.target(*args, **kwargs))  # type: ignore[operator]


def _on_device(module: fx.GraphModule, node: fx.Node, argument: fx.Node, value: Tensor) -> fx.Node:
    """Where `node` finds the value on its own device. It is never written to: operators write to their own device."""
    device = dataflow.tensors(node)[0].device
    name = f"_copied_constant{len(list(module.buffers()))}"
    module.register_buffer(name, value.to(device), persistent=False)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    constant.meta = {**argument.meta, "val": argument.meta["val"].to(device)}
    return constant


def _erase(graph: fx.Graph, made: Iterable[fx.Node]) -> None:
    """Erases what nothing needs any more; what is written to a value is needed as long as the value is."""
    needed: set[int] = set()
    for node in reversed(list(made)):
        if node.users or dataflow.storages(node) & needed:
            needed |= dataflow.storages(node)
        else:
            graph.erase_node(node)
