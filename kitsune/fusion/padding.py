"""Templates that give convolutions more input channels, all zero, where tensor cores do not like their number.

Those multiply matrices of which each row fills 16 bytes, at least in half precision. The library has other kernels
for other numbers of channels (the three of an image), mostly slower ones.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.nodes import arguments, aten, calls, is_taken_apart, result
from kitsune.fusion.operands import is_written
from kitsune.kernels.images import FLOATS

_CHANNELS = 8
"""The number of input channels becomes a multiple of it."""


def forward(node: fx.Node) -> Iterator[Match]:
    """Matches of a two-dimensional convolution."""
    if not calls(node, aten.convolution.default):
        return
    x, weight, *options = arguments(node)
    if not _needs_channels(x, options):
        return
    there = _padded_before(node, [x, weight])

    def build(builder: Builder) -> list[fx.Node]:
        padded = _padded(builder, [x, weight], there)
        return [builder.call(aten.convolution.default, *padded, *options)]

    others = list(there.values())
    yield Match.of("convolution of padded channels", [node], [node], build, others, others)


def weight_gradient(node: fx.Node) -> Iterator[Match]:
    """Matches of the backward of such a convolution that has no use for the gradient of its input, as for the first."""
    if not calls(node, aten.convolution_backward.default) or not is_taken_apart(node):
        return
    grad, x, weight, bias_sizes, *options, mask = arguments(node)
    gradient = result(node, 1)
    if mask[0] or gradient is None or not _needs_channels(x, [None, *options]):
        return
    there = _padded_before(node, [x, weight])

    def build(builder: Builder) -> list[fx.Node]:
        padded = _padded(builder, [x, weight], there)
        made = builder.call(aten.convolution_backward.default, grad, *padded, bias_sizes, *options, mask)
        wide = builder.call(operator.getitem, made, 1)
        narrow = builder.call(aten.slice.Tensor, wide, 1, 0, x.meta["val"].size(1))
        dense = builder.call(aten.clone.default, narrow)
        return [dense, builder.call(operator.getitem, made, 2)]

    others = list(there.values())
    results = [gradient, result(node, 2)]
    yield Match.of("weight gradient of padded channels", [node, *node.users], results, build, others, others)


def _needs_channels(x: fx.Node, options: Sequence[Any]) -> bool:
    """Whether a convolution of `x` with these options, bias first, is one that may gain."""
    _, stride, _, _, transposed, _, groups = options
    value = x.meta["val"]
    plain = len(stride) == 2 and not transposed and groups == 1
    return plain and value.dtype in FLOATS and value.size(1) % _CHANNELS != 0


def _padding(node: fx.Node) -> list[int]:
    """What to add at both ends of each dimension, the last one first."""
    return [0, 0, 0, 0, 0, -node.meta["val"].size(1) % _CHANNELS]


def _padded_before(node: fx.Node, values: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Those of `values` that have been padded for an earlier operator, and stay as they are until `node`."""
    found: dict[fx.Node, fx.Node] = {}
    for value in values:
        for user in sorted(value.users):
            padded = calls(user, aten.constant_pad_nd.default) and arguments(user) == (value, _padding(value), 0)
            if padded and user < node and not is_written(value, user, node):
                found.setdefault(value, user)
    return found


def _padded(builder: Builder, values: Sequence[fx.Node], there: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    return [
        there[value] if value in there else builder.call(aten.constant_pad_nd.default, value, _padding(value), 0)
        for value in values
    ]
