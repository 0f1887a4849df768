"""The template for the last linear layer of a classifier with its loss, forward and backward.

nll_loss(log_softmax(x @ weight.T + bias)), the gradient of the logits, and that of `x` or of what the activation
before the layer was given
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import fx

from kitsune.fusion.linear import ActivationBackward, Layer, activation_backward, layers
from kitsune.fusion.losses import find_cross_entropy
from kitsune.fusion.match import Builder, Match
from kitsune.fusion.nodes import arguments, aten, calls, only_user, result
from kitsune.fusion.operands import Reading, allows_tf32, shaped
from kitsune.kernels import head  # noqa: F401 - defines the operator

kitsune = torch.ops.kitsune

_MEAN = 1


class Loss(NamedTuple):
    """The mean cross-entropy of logits, and its backward.

    Attributes:
        nodes: all that compute it, the last one being the gradient of the logits.
        value: the loss; None if it is unused.
        scale: the gradient of the loss.
    """

    nodes: tuple[fx.Node, ...]
    value: fx.Node | None
    targets: fx.Node
    ignore_index: int
    scale: fx.Node


def forward_and_backward(node: fx.Node) -> Iterator[Match]:
    """Matches of a linear layer with the cross-entropy after it and the backward of both."""
    for layer in layers(node):
        loss = _loss(layer.result)
        if loss is None:
            continue
        grad_logits = loss.nodes[-1]
        products = [user for user in grad_logits.users if _is_input_gradient(user, grad_logits, layer)]
        if not products:
            yield from _matches(layer, loss, ())
        elif len(products) == 1:
            before = activation_backward(products[0])
            if before is not None:
                yield from _matches(layer, loss, (products[0], *before.nodes), before)
            yield from _matches(layer, loss, (products[0],))


def _loss(logits: fx.Node) -> Loss | None:
    """What follows `logits`, if that is a cross-entropy that the kernel knows, and uses its values for nothing else."""
    cast = only_user(logits, aten._to_copy.default)
    softmax = only_user(cast or logits, aten._log_softmax.default)
    loss = None if softmax is None else find_cross_entropy(softmax)
    if loss is None:
        return None
    _, targets, _, reduction, ignore_index = arguments(loss.forward)
    grad_cast = only_user(loss.softmax_backward, aten._to_copy.default)
    ends = [node for node in (loss.softmax_backward, grad_cast) if node is not None and _has_dtype_of(node, logits)]
    if reduction != _MEAN or not ends:
        return None
    others = {*loss.nodes, *([] if cast is None else [cast])} - {ends[0]}
    nodes = (*sorted(others), ends[0])
    return Loss(nodes, result(loss.forward, 0), targets, ignore_index, arguments(loss.backward)[0])


def _has_dtype_of(node: fx.Node, logits: fx.Node) -> bool:
    return bool(node.meta["val"].dtype == logits.meta["val"].dtype)


def _is_input_gradient(node: fx.Node, grad_logits: fx.Node, layer: Layer) -> bool:
    return calls(node, aten.mm.default) and arguments(node) == (grad_logits, layer.weight)


def _matches(
    layer: Layer, loss: Loss, after: tuple[fx.Node, ...], before: ActivationBackward | None = None
) -> Iterator[Match]:
    """With `after`, which make a gradient of the layer's input, or of that of the activation `before` it."""
    grad_x = after[-1] if after else None
    activation = "none" if before is None else before.activation
    name = "linear + cross-entropy" if before is None else f"linear + cross-entropy + {activation} backward"
    saved = None if before is None else before.saved
    for reading in layer.readings((*loss.nodes, *after)):
        build = partial(_build, reading, layer, loss, saved, activation, grad_x)
        others = [*reading.operands, saved]
        yield Match.of(name, reading.nodes, [loss.value, loss.nodes[-1], grad_x], build, others, reading.given)


def _build(
    reading: Reading,
    layer: Layer,
    loss: Loss,
    saved: fx.Node | None,
    activation: str,
    grad_x: fx.Node | None,
    builder: Builder,
) -> list[fx.Node]:
    made = builder.call(
        kitsune.cross_entropy_head.default,
        *reading.operands, loss.targets, None if saved is None else shaped(builder, saved, layer.x), activation,
        dtype=layer.dtype, scale=loss.scale, ignore_index=loss.ignore_index, allow_tf32=allows_tf32(),
    )  # fmt: skip
    value, grad_logits, gradient = builder.results(made)
    return [value, grad_logits, gradient if grad_x is None else shaped(builder, gradient, grad_x)]
