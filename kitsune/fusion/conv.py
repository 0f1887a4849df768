"""Templates for convolutions of stride 1 in half precision, with a batch norm beside them or alone.

relu?(batch_norm(convolution(x, weight)) + residual?)
batch norm's backward of the gradient of a convolution's input, with the ReLU and the sum before it
relu?(convolution(x, weight) + bias?)
the gradients of input and of weight, each apart

They come after those of batch norm, whose operators they take in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.device import refuse_bulk_copies
from kitsune.fusion.match import Builder, Match
from kitsune.fusion.nodes import arguments, aten, calls, is_taken_apart, only_user, result
from kitsune.kernels.conv import DTYPES, WEIGHT_GRAD_KERNELS

kitsune = torch.ops.kitsune

_FEWEST_CHANNELS = 32  # with fewer most of what is fetched at once is zeros


class _Backward(NamedTuple):
    """The backward of a convolution.

    Attributes:
        node: the call of `aten.convolution_backward`.
        grad, x, weight: its operands.
        padding: along height and width.
        options: its arguments from the bias' sizes to the number of groups.
        of_x, of_weight, of_bias: its results; None for one that nobody uses.
    """

    node: fx.Node
    grad: fx.Node
    x: fx.Node
    weight: fx.Node
    padding: list[int]
    options: tuple[Any, ...]
    of_x: fx.Node | None
    of_weight: fx.Node | None
    of_bias: fx.Node | None

    def nodes(self) -> list[fx.Node]:
        return [self.node, *self.node.users]

    def results(self) -> list[fx.Node | None]:
        return [self.of_x, self.of_weight, self.of_bias]

    def without(self, builder: Builder, place: int) -> list[fx.Node]:
        """The gradients that are used, but for one, as they were computed before; anything in the place of others."""
        wanted = [one is not None and other != place for other, one in enumerate(self.results())]
        if not any(wanted):
            return [self.node] * 3
        operands = (self.grad, self.x, self.weight)
        return builder.results(builder.call(aten.convolution_backward.default, *operands, *self.options, wanted))


def forward_with_batch_norm(node: fx.Node) -> Iterator[Match]:
    """Matches of a batch norm and the convolution before it."""
    if not calls(node, kitsune.batch_norm.default) or not is_taken_apart(node):
        return
    conv, residual, *of_norm, momentum, eps, relu, counters = arguments(node)
    if counters is not None or not calls(conv, aten.convolution.default):
        return
    x, weight, bias, *options = arguments(conv)
    if not _fits(x, options) or bias is not None or residual is conv:
        return
    padding = options[1]

    def build(builder: Builder) -> list[fx.Node]:
        made = builder.call(
            kitsune.conv_batch_norm.default, x, weight, padding, residual, *of_norm,
            momentum=momentum, eps=eps, relu=relu,
        )  # fmt: skip
        return builder.results(made)

    parts = ["convolution", "batch norm", *(["residual"] if residual else []), *(["relu"] if relu else [])]
    yield Match.of(" + ".join(parts), [conv, node, *node.users], [conv, *_results(node, 3)], build)


def forward(node: fx.Node) -> Iterator[Match]:
    """Matches of a convolution and the ReLU after it."""
    if not calls(node, aten.convolution.default):
        return
    x, weight, bias, *options = arguments(node)
    if not _fits(x, options):
        return
    padding = options[1]
    for relu in dict.fromkeys((only_user(node, aten.relu.default), None)):

        def build(builder: Builder, relu: fx.Node | None = relu) -> list[fx.Node]:
            return [builder.call(kitsune.conv.default, x, weight, bias, padding, relu=relu is not None)]

        nodes = [node] if relu is None else [node, relu]
        yield Match.of("convolution" if relu is None else "convolution + relu", nodes, nodes[-1:], build)


def backward(node: fx.Node) -> Iterator[Match]:
    """Matches of the gradient of a convolution's input, and of the backward of the batch norm before it.

    The other gradients become an operator of their own.
    """
    conv = _backward(node)
    if conv is None or conv.of_x is None:
        return
    yield from _with_batch_norm_backward(conv)

    def build(builder: Builder) -> list[fx.Node]:
        size = list(conv.x.meta["val"].shape[2:])
        of_x = builder.call(kitsune.conv_input_grad.default, conv.grad, conv.weight, size, conv.padding)
        return [of_x, *conv.without(builder, 0)[1:]]

    yield Match.of("convolution backward of inputs", conv.nodes(), conv.results(), build)


def weight_gradient(node: fx.Node) -> Iterator[Match]:
    """Matches of the gradient of a convolution's weight; the others become an operator of their own."""
    conv = _backward(node)
    if conv is None or conv.of_weight is None or not _fits(conv.x, conv.options[1:]):
        return
    if conv.weight.meta["val"].shape[3] not in WEIGHT_GRAD_KERNELS:
        return

    def build(builder: Builder) -> list[fx.Node]:
        kernel = list(conv.weight.meta["val"].shape[2:])
        of_weight = builder.call(kitsune.conv_weight_grad.default, conv.grad, conv.x, kernel, conv.padding)
        of_x, _, of_bias = conv.without(builder, 1)
        return [of_x, of_weight, of_bias]

    yield Match.of("convolution backward of weights", conv.nodes(), conv.results(), build)


def _backward(node: fx.Node) -> _Backward | None:
    if not calls(node, aten.convolution_backward.default) or not is_taken_apart(node):
        return None
    grad, x, weight, *options, _ = arguments(node)
    if not _fits(grad, options[1:]):
        return None
    return _Backward(node, grad, x, weight, options[2], tuple(options), *_results(node, 3))


def _with_batch_norm_backward(conv: _Backward) -> Iterator[Match]:
    users = [] if conv.of_x is None else list(conv.of_x.users)
    if len(users) != 1 or not is_taken_apart(users[0]):
        return
    norm = users[0]
    if calls(norm, kitsune.batch_norm_backward.default):
        grad_y, x, y, weight, bias, mean, invstd, relu, added, counters = arguments(norm)
        places = [0, None, 1, 2]
    elif calls(norm, kitsune.batch_norm_residual_backward.default):
        grad_y, x, y, weight, mean, invstd, added, counters = arguments(norm)
        bias, relu, places = None, True, [0, 1, 2, 3]
    else:
        return
    if counters is not None or conv.of_x in (x, y) or grad_y is added:
        return
    other = added if grad_y is conv.of_x else grad_y

    def build(builder: Builder) -> list[fx.Node]:
        made = builder.results(
            builder.call(
                kitsune.conv_input_grad_batch_norm_backward.default,
                conv.grad, conv.weight, conv.padding, x, y, weight, bias, mean, invstd,
                relu=relu, added_grad_y=other,
            )
        )  # fmt: skip
        return [
            *conv.without(builder, 0)[1:],
            *(one for one, place in zip(made, places, strict=True) if place is not None),
        ]

    results = [conv.of_weight, conv.of_bias, *_results(norm, len([one for one in places if one is not None]))]
    name = "convolution backward + " + " + ".join(
        [*(["add"] if other is not None else []), *(["relu"] if relu else []), "batch norm backward"]
    )
    nodes = [*conv.nodes(), norm, *norm.users]
    yield Match.of(name, nodes, results, build)


def _results(node: fx.Node, count: int) -> list[fx.Node | None]:
    """Those that are used; None in the place of others."""
    found = [result(node, place) for place in range(count)]
    return [one if one is not None and one.users else None for one in found]


def _fits(images: fx.Node, options: Sequence[Any]) -> bool:
    """Whether it is a convolution of a kind that the kernels take, and has many channels to fetch of `images`.

    Args:
        options: stride, padding, dilation, whether it is transposed, output padding, groups.
    """
    stride, padding, dilation, transposed, _, groups = options
    value = images.meta["val"]
    is_plain = set(stride) == set(dilation) == {1} and not transposed and groups == 1 and len(padding) == 2
    is_half = value.dtype in DTYPES and value.dim() == 4 and value.shape[1] >= _FEWEST_CHANNELS
    return is_plain and is_half and refuse_bulk_copies(value.device) is None
