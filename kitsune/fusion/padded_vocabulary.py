"""A template that gives a vocabulary more entries, where rows of logits begin at addresses that libraries dislike.

logits = x @ weight.t()                         of a weight that the step casts
the loss, and its gradient in place of the logits
x_grad = logits_grad @ weight, weight_grad = logits_grad.t() @ x

The logits of 50257 tokens in 2 bytes are such. In GPT-2 Small (4 sequences of 512 tokens, bfloat16, torch 2.11 on an
H200) the three products took 3.3 ms of the 11.1 of all kernels. The entries that are added have weights of zero: their
logits are zero, no loss looks at them, and they add nothing to the gradients. (Where `x` is not finite they are NaN,
and so is the loss.)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.moves import is_cast, is_view, repeated
from kitsune.fusion.nodes import arguments, aten, calls
from kitsune.graph import dataflow

kitsune = torch.ops.kitsune

_ALIGNMENT = 16
"""Bytes. Libraries are slow with matrices whose rows begin elsewhere than at multiples of it."""

_SPACING = 128
"""Bytes: a line of the cache. The rows become multiples of it."""

_BY_STRIDES = ("as_strided", "set_", "resize_")
"""Operators that tell where elements lie begin with these names: between rows that are longer there are none."""

_MOST_SPACE = 1.05
"""What the logits may take of memory, as a multiple of what they take."""


class _Layer(NamedTuple):
    """The layer that computes the logits.

    Attributes:
        product: its `mm` or `addmm`.
        x: (M, K), what it is given.
        weight: (N, K), dense, cast by the step.
        bias: (N,), or None.
        padding: how many entries to add.
    """

    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    padding: int


def logits(node: fx.Node) -> Iterator[Match]:
    """Matches of a cross-entropy that `kitsune.fusion.vocabulary` has fused, with the product it is computed of."""
    if not calls(node, kitsune.cross_entropy.default):
        return
    product = arguments(node)[0]
    while is_view(product):
        product = product.all_input_nodes[0]
    layer = _layer(product)
    if layer is None:
        return
    views, readers = _uses(layer.weight)
    if layer.x in views or layer.bias in views:
        return
    nodes = [*_touching(product), *views]
    if not all(map(_is_repeatable, nodes)) or not all(_takes_padding(layer, one) for one in readers):
        return
    results = [one for one in nodes if isinstance(one.meta.get("val"), torch.Tensor) and not _stays_within(one, nodes)]

    def build(builder: Builder) -> list[fx.Node]:
        made = _rebuilt(builder, layer, [one for one in nodes if one not in views])
        return [made[one] for one in results]

    yield Match.of("logits of a padded vocabulary", nodes, results, build, [layer.weight])


def _layer(product: fx.Node) -> _Layer | None:
    """The layer of `product`, if a vocabulary with more entries may be faster."""
    if calls(product, aten.mm.default):
        x, transposed = arguments(product)
        bias = None
    elif calls(product, aten.addmm.default) and arguments(product)[3:] == (1, 1):
        bias, x, transposed = arguments(product)[:3]
    else:
        return None
    weight = transposed
    while is_view(weight):
        weight = weight.all_input_nodes[0]
    if not is_cast(weight) or weight.meta["val"].dim() != 2 or not weight.meta["val"].is_contiguous():
        return None
    padding = _padding(product.meta["val"])
    layer = _Layer(product, x, weight, bias, padding)
    fits = bias is None or bias.meta["val"].shape == product.meta["val"].shape[1:]
    return layer if padding and fits and _is_transposed(transposed, weight) else None


def _padding(value: torch.Tensor) -> int:
    """How many elements to add to the rows of `value`; 0 where they may stay."""
    row_bytes = value.shape[1] * value.element_size()
    padded_bytes = -(-row_bytes // _SPACING) * _SPACING
    if row_bytes % _ALIGNMENT == 0 or padded_bytes > _MOST_SPACE * row_bytes or not value.is_contiguous():
        return 0
    return (padded_bytes - row_bytes) // value.element_size()


def _is_whole(node: object, of: fx.Node) -> bool:
    """Whether `node` is all of the matrix `of`, as it lies in memory."""
    return _lies_as(node, of, of.meta["val"])


def _is_transposed(node: object, of: fx.Node) -> bool:
    return _lies_as(node, of, of.meta["val"].t())


def _lies_as(node: object, of: fx.Node, wanted: torch.Tensor) -> bool:
    if not isinstance(node, fx.Node) or dataflow.storages(node) != dataflow.storages(of):
        return False
    value = node.meta["val"]
    places = [(one.shape, one.stride(), one.storage_offset()) for one in (value, wanted)]
    return value.dtype == wanted.dtype and places[0] == places[1]


def _uses(weight: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The views of `weight`, and what reads it or one of them."""
    views: list[fx.Node] = []
    readers: list[fx.Node] = []
    waiting = [weight]
    while waiting:
        for user in waiting.pop().users:
            if is_view(user):
                views.append(user)
                waiting.append(user)
            else:
                readers.append(user)
    return views, readers


def _takes_padding(layer: _Layer, node: fx.Node) -> bool:
    """Whether `node`, which reads the weight, is one of the products that a padded weight makes faster."""
    return node is layer.product or _is_input_gradient(layer, node)


def _is_input_gradient(layer: _Layer, node: fx.Node) -> bool:
    if not calls(node, aten.mm.default):
        return False
    gradient, weight = arguments(node)
    return _is_whole(gradient, layer.product) and _is_whole(weight, layer.weight)


def _touching(product: fx.Node) -> list[fx.Node]:
    """`product`, all that touches its memory, and what lies between two of these; in the order of the graph."""
    memory = dataflow.storages(product)
    after = [node for node in product.graph.nodes if node > product]
    touching = {product}
    for node in after:
        if any(memory & dataflow.storages(one) for one in node.all_input_nodes):
            touching.add(node)
    following: set[fx.Node] = set(touching)
    for node in after:
        if not following.isdisjoint(node.all_input_nodes):
            following.add(node)
    found = set(touching)
    for node in reversed(after):
        is_part = node.target is operator.getitem and node.args[0] in touching
        if is_part or (node in following and not found.isdisjoint(node.users)):
            found.add(node)
    return sorted(found)


def _is_repeatable(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.removeprefix("aten::")
        return not name.startswith(_BY_STRIDES) and not dataflow.draws_random_numbers(node)
    return node.target is operator.getitem


def _stays_within(node: fx.Node, nodes: Collection[fx.Node]) -> bool:
    return all(user in nodes for user in node.users)


def _rebuilt(builder: Builder, layer: _Layer, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, fx.Node]:
    """What stands for `nodes`, the first of which is the product: the same, of longer rows."""
    num_rows = layer.product.meta["val"].shape[1]
    weight = builder.call(aten.constant_pad_nd.default, layer.weight, [0, 0, 0, layer.padding], 0)
    transposed = builder.call(aten.permute.default, weight, [1, 0])
    if layer.bias is None:
        padded = builder.call(aten.mm.default, layer.x, transposed)
    else:
        bias = builder.call(aten.constant_pad_nd.default, layer.bias, [0, layer.padding], 0)
        padded = builder.call(aten.addmm.default, bias, layer.x, transposed)
    made = {layer.product: builder.call(aten.slice.Tensor, padded, 1, 0, num_rows)}
    for node in nodes[1:]:
        if _is_input_gradient(layer, node):
            made[node] = builder.call(aten.mm.default, padded, weight)
        elif calls(node, aten.mm.default) and _is_transposed(node.args[0], layer.product):
            other = arguments(node)[1]
            of_all = builder.call(aten.permute.default, padded, [1, 0])
            gradient = builder.call(aten.mm.default, of_all, made.get(other, other))
            made[node] = builder.call(aten.slice.Tensor, gradient, 0, 0, num_rows)
        else:
            made[node] = repeated(builder, node, made)
    return made
