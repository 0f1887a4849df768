"""Tensors that a call which Dynamo traces makes of sizes and numbers alone: they are the same in every replay.

Masks, positions and lengths are made like that. Where Python asks for what is in one, the answer is computed once, with
the tensor made again. The nodes behind Dynamo's variables are private.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.capture.called import IN_PLACE
from kitsune.graph.dataflow import storage_of

_HIDING = frozenset({getattr(torch._C._autograd, "_get_data_attr", None)})
"""What gives another view of a tensor, `tensor.data`, of which the count of writes is its own."""

_TORCHS = frozenset({"torch", "_operator", "builtins"})


def made_again(node: fx.Node) -> Tensor | None:
    """What a node of Dynamo's graph gives in every replay, computed now; None if it depends on anything else.

    That is what is made without inputs and random numbers, by torch's own functions, and written to by nothing else.
    """
    nodes = _behind(node)
    if not _can_be_made_again(nodes):
        return None
    made: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad(), _NothingRandom():  # type: ignore[no-untyped-call]
            for one in nodes:
                made[one] = _make(one, made)
                if not _is_item_set(one) and not _is_like(made[one], one.meta["example_value"]):
                    return None
    except _RandomError:
        return None
    found: Tensor = made[node]
    return found


class _RandomError(Exception):
    """Random numbers were to be drawn."""


class _NothingRandom(TorchDispatchMode):
    """Random numbers are not drawn within it: a `_RandomError` is raised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _RandomError
        return func(*args, **(kwargs or {}))


def _behind(node: fx.Node) -> list[fx.Node]:
    """What it is made of, in the graph's order, with the items that were set (`mask[0] = 1`)."""
    found, waiting = set[fx.Node](), [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(one.all_input_nodes)
            waiting.extend(user for user in one.users if _is_item_set(user) and user.args[0] is one)
    return [one for one in node.graph.nodes if one in found]


def _can_be_made_again(nodes: Sequence[fx.Node]) -> bool:
    """Whether they are made of nothing else, and all are tensors to which they alone have written."""
    values = {node: _written_by(node) for node in nodes}
    if not all(_is_torchs(node) and isinstance(value, Tensor) for node, value in values.items()):
        return False
    if any(value.is_inference() for value in values.values()):  # they have no count of writes
        return False
    memory = {node: storage_of(value) for node, value in values.items()}  # with its views it has one count of writes
    writes = Counter(memory[node] for node in nodes if _writes(node))
    return all(
        value._version == writes[memory[node]] and not any(user.target in _HIDING for user in node.users)
        for node, value in values.items()
    )


def _written_by(node: fx.Node) -> Any:
    """What it gives, or sets an item of."""
    of: Any = node.args[0] if _is_item_set(node) else node
    return of.meta.get("example_value")


def _is_item_set(node: fx.Node) -> bool:
    return node.target is operator.setitem


def _is_torchs(node: fx.Node) -> bool:
    """Whether it calls a function of torch's, an operator of Python's or a method, and no other library's operator."""
    if node.op != "call_function":
        return node.op == "call_method"
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(node.target).startswith("aten.")
    return _module(node) in _TORCHS


def _module(node: fx.Node) -> str:
    """The library of what it calls; what torch has in C names none."""
    return str(getattr(node.target, "__module__", None) or "torch").partition(".")[0]


def _writes(node: fx.Node) -> bool:
    """Whether its function writes to what it is given, as the names of torch's tell: `mul_`, and not `__eq__`."""
    if _module(node) == "_operator":
        return node.target in IN_PLACE or _is_item_set(node)
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name.endswith("_") and not name.endswith("__")


def _make(node: fx.Node, made: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_like(value: Any, example: Tensor) -> bool:
    """Whether it was made as in the call: regions of autocast, and of devices, are not entered here."""
    if not isinstance(value, Tensor):
        return False
    return (value.shape, value.dtype, value.device) == (example.shape, example.dtype, example.device)
