"""Templates for small operators on many tensors: parameters and gradients that are cast, counters that advance."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.nodes import arguments, aten, calls, only_user
from kitsune.graph import dataflow
from kitsune.kernels import casts, scalars
from kitsune.kernels.images import FLOATS

kitsune = torch.ops.kitsune

_MOST_COUNTED = 64
"""Elements of a counter: several small ones take one launch, large ones keep a device busy by themselves."""

_MOST_CAST_BYTES = 2**24
"""Of a result that is cast with others: a larger one takes much longer than a launch, and what it is cast from would be
kept until the others are there."""

Kind = Callable[[fx.Node], Hashable]
"""What nodes that may go together have in common; None for a node that may go with none."""


def parameters(node: fx.Node) -> Iterator[Match]:
    """All casts of inputs from one type to another, which are ready at once.

    What is cast to be padded stays: a region may do both at once.
    """
    nodes = _group(node, _cast)
    if len(nodes) < 2:
        return

    yield _cast_together("casts of many inputs", nodes)


def results(node: fx.Node) -> Iterator[Match]:
    """Casts that the graph returns, such as those of gradients: all from one type to another, once the last is there.

    Those of a part of the graph that must be over before another may begin stay apart.
    """
    kind = _result_cast(node)
    if kind is None:
        return
    found: dict[fx.Node, None] = {}
    for one in node.graph.nodes:
        if one.op != "output" and any(argument in found for argument in one.all_input_nodes):
            if node in found:
                break
            found = {}
        if _result_cast(one) == kind:
            found[one] = None
    if len(found) > 1 and node is next(iter(found)):
        yield _cast_together("casts of many results", list(found))


def _cast_together(name: str, nodes: list[fx.Node]) -> Match:
    def build(builder: Builder) -> list[fx.Node]:
        sources = [cast.args[0] for cast in nodes]
        return builder.results(builder.call(kitsune.cast_many.default, sources, nodes[0].meta["val"].dtype))

    return Match.of(name, nodes, nodes, build)


def counters(node: fx.Node) -> Iterator[Match]:
    """All additions of one number to small integer inputs that are not used otherwise."""
    nodes = _group(node, _count)
    if len(nodes) < 2:
        return

    def build(builder: Builder) -> list[fx.Node]:
        builder.call(aten._foreach_add_.Scalar, [add.args[0] for add in nodes], node.args[1])
        return []

    yield Match.of("counters", nodes, [], build)


def steps(node: fx.Node) -> Iterator[Match]:
    """Matches of a whole number that is added to tensors of one element, such as an optimizer's step counts."""
    if not calls(node, aten._foreach_add_.Scalar):
        return
    tensors, number = arguments(node)
    values = [tensor.meta["val"] for tensor in tensors]
    alike = len({(value.dtype, value.device, value.numel()) for value in values}) == 1
    memory = {storage for tensor in tensors for storage in dataflow.storages(tensor)}
    if not alike or values[0].numel() != 1 or values[0].dtype not in scalars.DTYPES or len(memory) < len(tensors):
        return
    if type(number) is not int or not -(2**31) <= number < 2**31:
        return

    def build(builder: Builder) -> list[fx.Node]:
        builder.call(kitsune.add_to_scalars_.default, tensors, number)
        return []

    yield Match.of("step counts", [node], [], build)


def _group(first: fx.Node, kind: Kind) -> list[fx.Node]:
    """Those of the kind of `first` that read what the graph is given; none if `first` is not the first of them."""
    wanted = kind(first)
    if wanted is None:
        return []
    found: list[fx.Node] = []
    written: set[int] = set()
    for node in first.graph.nodes:
        if node.op != "call_function":
            continue
        if kind(node) == wanted and not written & dataflow.storages(node.args[0]):
            if not found and node is not first:
                return []
            found.append(node)
        written |= {storage for target in dataflow.written(node) for storage in dataflow.storages(target)}
    return found


def _cast(node: fx.Node) -> Hashable:
    kind = _types_of_cast(node)
    if kind is None or node.all_input_nodes[0].op != "placeholder":
        return None
    return kind if only_user(node, aten.constant_pad_nd.default) is None else None


def _result_cast(node: fx.Node) -> Hashable:
    kind = _types_of_cast(node)
    if kind is None or node.all_input_nodes[0].op == "placeholder" or node.meta["val"].nbytes > _MOST_CAST_BYTES:
        return None
    return kind if node.graph.output_node() in node.users else None


def _types_of_cast(node: fx.Node) -> Hashable:
    """None if it is no cast, or the strides are not those before."""
    if not calls(node, aten._to_copy.default):
        return None
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    fits = before.dtype in FLOATS and after.dtype in FLOATS and before.device == after.device
    if not fits or not casts.is_dense(before) or before.stride() != after.stride():
        return None
    return before.dtype, after.dtype, str(before.device)


def _count(node: fx.Node) -> Hashable:
    if not calls(node, aten.add_.Tensor):
        return None
    counter, number, alpha = arguments(node)
    count = counter.meta["val"]
    small = not count.dtype.is_floating_point and count.dtype is not torch.bool and count.numel() <= _MOST_COUNTED
    alone = counter.op == "placeholder" and len(counter.users) == 1 and not node.users
    if not alone or not small or not isinstance(number, int) or alpha != 1:
        return None
    return count.dtype, str(count.device), number
