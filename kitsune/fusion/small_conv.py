"""Templates for convolutions of few channels, with the casts of autocast and the ReLUs around them.

relu?(convolution(x, weight) + bias?)
threshold_backward?(input gradient), weight and bias gradients, in float32 where they are cast to it
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.nodes import arguments, aten, calls, is_taken_apart, only_user, result
from kitsune.fusion.operands import Reading, allows_tf32, convolutions_allow_tf32, readings
from kitsune.kernels.small_conv import MOST_CHANNELS

kitsune = torch.ops.kitsune

# Of one sum. On an H200 the kernels take 0.1 to 0.8 of cuDNN's time for 150 (LeNet), and 1.3 to 8.5 times that for 576.
_MOST_PRODUCTS = 288


class _Backward(NamedTuple):
    """The backward of a convolution.

    Attributes:
        node: the call of `aten.convolution_backward`.
        x: what was convolved.
        stride, padding: along height and width.
        dtype: of the factors.
    """

    node: fx.Node
    x: fx.Node
    stride: list[int]
    padding: list[int]
    dtype: torch.dtype


class _Gradients(NamedTuple):
    """What becomes of the results; None for one that is not used.

    Attributes:
        of_x: the gradient of the input, or of what a ReLU made it of.
        activation: the result of that ReLU.
        of_weight, of_bias: the gradients, or what they are cast to.
        nodes: what follows the results.
    """

    of_x: fx.Node | None
    activation: fx.Node | None
    of_weight: fx.Node | None
    of_bias: fx.Node | None
    nodes: tuple[fx.Node, ...]


def forward(node: fx.Node) -> Iterator[Match]:
    """Matches of a convolution and the ReLU after it."""
    if not calls(node, aten.convolution.default):
        return
    x, weight, bias, *geometry = arguments(node)
    if not _is_small(weight, geometry):
        return
    for relu in dict.fromkeys((only_user(node, aten.relu.default), None)):
        nodes = [node] if relu is None else [node, relu]
        for reading in readings(nodes, (x, weight, bias), node.meta["val"].dtype):
            build = partial(_build_forward, reading, node, relu is not None)
            name = "small convolution" if relu is None else "small convolution + relu"
            yield Match.of(name, reading.nodes, nodes[-1:], build, reading.operands, reading.given)


def backward(node: fx.Node) -> Iterator[Match]:
    """Matches of the backward of a convolution, the backward of the ReLU before it, and the casts of gradients."""
    if not calls(node, aten.convolution_backward.default) or not is_taken_apart(node):
        return
    grad, x, weight, _, *geometry, _ = arguments(node)
    if not _is_small(weight, geometry):
        return
    conv = _Backward(node, x, geometry[0], geometry[1], grad.meta["val"].dtype)
    masked = _masked(conv)
    for found in (
        (_gradients(conv, masked), _gradients(conv, None)) if masked is not None else (_gradients(conv, None),)
    ):
        for reading in readings([node, *node.users, *found.nodes], (grad, x, weight), conv.dtype):
            build = partial(_build_backward, reading, conv, found)
            results = [one for one in (found.of_x, found.of_weight, found.of_bias) if one is not None]
            name = "small convolution backward" if found.activation is None else "small convolution + relu backward"
            yield Match.of(name, reading.nodes, results, build, [*reading.operands, found.activation], reading.given)


def _is_small(weight: fx.Node, geometry: Sequence[Any]) -> bool:
    _, _, dilation, transposed, _, groups = geometry
    is_plain = set(dilation) == {1} and not transposed and groups == 1
    shape = weight.meta["val"].shape
    return is_plain and max(shape[:2]) <= MOST_CHANNELS and math.prod(shape[1:]) <= _MOST_PRODUCTS


def _masked(conv: _Backward) -> fx.Node | None:
    """The backward of the ReLU that made the input.

    A ReLU before a cast has its backward after that of the cast.
    """
    of_x = result(conv.node, 0)
    masked = None if of_x is None else only_user(of_x, aten.threshold_backward.default)
    is_of_input = masked is not None and arguments(masked) == (of_x, conv.x, 0)
    return masked if is_of_input and not calls(conv.x, aten._to_copy.default) else None


def _gradients(conv: _Backward, masked: fx.Node | None) -> _Gradients:
    of_x, of_weight, of_bias = (_used(result(conv.node, place)) for place in range(3))
    wanted = [one for one in (of_weight, of_bias) if one is not None]
    casts = [cast for one in wanted if (cast := _to_float32(one)) is not None]
    if len(casts) < len(wanted):
        casts = []
    cast_to = dict(zip(wanted, casts, strict=True)) if casts else dict(zip(wanted, wanted, strict=True))
    return _Gradients(
        of_x if masked is None else masked,
        None if masked is None else conv.x,
        None if of_weight is None else cast_to[of_weight],
        None if of_bias is None else cast_to[of_bias],
        (*([] if masked is None else [masked]), *casts),
    )


def _used(node: fx.Node | None) -> fx.Node | None:
    return node if node is not None and node.users else None


def _to_float32(node: fx.Node) -> fx.Node | None:
    cast = only_user(node, aten._to_copy.default)
    return cast if cast is not None and cast.meta["val"].dtype == torch.float32 else None


def _build_forward(reading: Reading, node: fx.Node, relu: bool, builder: Builder) -> list[fx.Node]:
    _, _, _, stride, padding, *_ = arguments(node)
    options = _options(node, node.meta["val"].dtype)
    return [builder.call(kitsune.small_conv.default, *reading.operands, stride, padding, relu=relu, **options)]


def _build_backward(reading: Reading, conv: _Backward, found: _Gradients, builder: Builder) -> list[fx.Node]:
    grad, x, weight = reading.operands
    assert x is not None and weight is not None
    made = []
    if found.of_x is not None:
        size = list(x.meta["val"].shape[2:])
        of_x = builder.call(
            kitsune.small_conv_input_grad.default,
            grad, weight, found.activation, size, conv.stride, conv.padding, **_options(found.of_x, conv.dtype),
        )  # fmt: skip
        made.append(of_x)
    of_parameters = found.of_weight or found.of_bias
    if of_parameters is not None:
        kernel = list(weight.meta["val"].shape[2:])
        both = builder.call(
            kitsune.small_conv_weight_grad.default,
            grad, x, kernel, conv.stride, conv.padding,
            result_dtype=of_parameters.meta["val"].dtype, **_options(found.of_weight, conv.dtype),
        )  # fmt: skip
        of_weight, of_bias = builder.results(both)
        made += [of_weight] * (found.of_weight is not None) + [of_bias] * (found.of_bias is not None)
    return made


def _options(like: fx.Node | None, dtype: torch.dtype) -> Mapping[str, Any]:
    """What all three operators are told of the layout of their result, `like`, and of precision."""
    channels_last = like is not None and not like.meta["val"].is_contiguous()
    return {
        "dtype": dtype,
        "channels_last": channels_last,
        "allow_tf32": allows_tf32() and convolutions_allow_tf32(),
    }
