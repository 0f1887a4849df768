"""A template that spaces the rows of logits apart where they begin at addresses that libraries are slow with.

product(x, weight)      and all that reads its memory, or writes there: the loss, its gradient in place, what reads that

The logits of 50257 tokens in 2 bytes are such. Three products write or read them. In GPT-2 Small (4 sequences of 512
tokens, bfloat16, torch 2.11 on an H200) these took 3.9 ms of 8.2, operators being timed one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.moves import is_view, repeated
from kitsune.fusion.nodes import arguments, aten, calls
from kitsune.graph import dataflow
from kitsune.kernels import products  # noqa: F401 - defines the operator

kitsune = torch.ops.kitsune

_ALIGNMENT = 16
"""Bytes. Libraries are slow with matrices whose rows begin elsewhere than at multiples of it."""

_SPACING = 128
"""Bytes: a line of the cache. Rows are spaced apart to multiples of it."""

_BY_STRIDES = ("as_strided", "set_", "resize_")
"""Operators that tell where elements lie begin with these names: between rows that are spaced apart there are none."""

_MOST_SPACE = 1.05
"""What the matrix may take of memory, as a multiple of what it takes."""


def logits(node: fx.Node) -> Iterator[Match]:
    """Matches of a cross-entropy that `kitsune.fusion.vocabulary` has fused, with the product it is computed of."""
    if not calls(node, kitsune.cross_entropy.default):
        return
    product = arguments(node)[0]
    while is_view(product):
        product = product.all_input_nodes[0]
    row_stride = _row_stride(product)
    if row_stride is None:
        return
    nodes = _touching(product)
    if not all(map(_is_repeatable, nodes)):
        return
    results = [one for one in nodes if isinstance(one.meta.get("val"), torch.Tensor) and not _stays_within(one, nodes)]

    def build(builder: Builder) -> list[fx.Node]:
        made = {product: _spaced(builder, product, row_stride)}
        for one in nodes[1:]:
            made[one] = repeated(builder, one, made)
        return [made[one] for one in results]

    yield Match.of("logits in aligned rows", nodes, results, build)


def _row_stride(product: fx.Node) -> int | None:
    """How many elements the rows of `product` shall lie apart; None where they may stay."""
    *_, beta, alpha = arguments(product) if calls(product, aten.addmm.default) else (1, 1)
    if not calls(product, aten.mm.default, aten.addmm.default) or (beta, alpha) != (1, 1):
        return None
    value = product.meta["val"]
    row_bytes = value.shape[1] * value.element_size()
    spaced_bytes = -(-row_bytes // _SPACING) * _SPACING
    if row_bytes % _ALIGNMENT == 0 or spaced_bytes > _MOST_SPACE * row_bytes or not value.is_contiguous():
        return None
    return int(spaced_bytes // value.element_size())


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


def _spaced(builder: Builder, product: fx.Node, row_stride: int) -> fx.Node:
    given: Sequence[object] = arguments(product)
    bias, matrix, other = given[:3] if calls(product, aten.addmm.default) else (None, *given)
    return builder.call(kitsune.addmm_in_rows.default, bias, matrix, other, row_stride=row_stride)
