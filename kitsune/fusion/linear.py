"""Templates for linear layers with the activations around them.

act?(x @ weight.T + bias?)                  and the pre-activation, where the backward needs it
act_backward(grad_output @ weight, saved)   where the activation is that of the layer before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.nodes import arguments, aten, calls, only_user
from kitsune.fusion.operands import Reading, allows_tf32, readings, shaped
from kitsune.kernels.linear import DTYPES, OF_PREACTIVATION

kitsune = torch.ops.kitsune

_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}

_ACTIVATIONS: Mapping[Any, Callable[[fx.Node], str]] = {
    aten.relu.default: lambda _: "relu",
    aten.tanh.default: lambda _: "tanh",
    aten.silu.default: lambda _: "silu",
    aten.gelu.default: lambda node: _GELUS[arguments(node)[1]],
}
_BACKWARDS: Mapping[Any, Callable[[fx.Node], str | None]] = {
    aten.threshold_backward.default: lambda node: "relu" if arguments(node)[2] == 0 else None,
    aten.tanh_backward.default: lambda _: "tanh",
    aten.silu_backward.default: lambda _: "silu",
    aten.gelu_backward.default: lambda node: _GELUS[arguments(node)[2]],
}

_VIEWS = (aten.view.default, aten._unsafe_view.default)


class Layer(NamedTuple):
    """`x @ transposed + bias` in a graph.

    Attributes:
        nodes: that compute it, the last one being its result.
        transposed: a weight (N, K) that is transposed.
        bias: (N,).
    """

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    transposed: fx.Node
    bias: fx.Node | None

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def weight(self) -> fx.Node:
        weight: fx.Node = arguments(self.transposed)[0]
        return weight

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.result.meta["val"].dtype
        return dtype

    def readings(self, after: tuple[fx.Node, ...]) -> Iterator[Reading]:
        """The ways to replace it and what comes `after` it by a kernel that reads input, weight and bias."""
        operands = self.x, self.weight, self.bias
        return readings((*self.nodes, *after), operands, self.dtype, views=[self.transposed])


class ActivationBackward(NamedTuple):
    """The backward of an activation, of a matrix or of a view of one.

    Attributes:
        nodes: the view, if there is one, and the operator.
        activation: its name, as `kitsune.kernels.linear` has it.
        saved: what the derivative is computed from.
    """

    nodes: tuple[fx.Node, ...]
    activation: str
    saved: fx.Node


def forward(node: fx.Node) -> Iterator[Match]:
    """Matches of a linear layer and what follows it."""
    for layer in layers(node):
        for viewed in (layer.result, *_views(layer.result)):
            activations = [user for user in viewed.users if calls(user, *_ACTIVATIONS)]
            if len(activations) == 1:
                yield from _forward(layer, viewed, activations[0])
        yield from _forward_alone(layer)


def backward(node: fx.Node) -> Iterator[Match]:
    """Matches of a product of a gradient with a weight, and of the backward of the activation before the layer."""
    if not calls(node, aten.mm.default) or node.meta["val"].dtype not in DTYPES:
        return
    before = activation_backward(node)
    if before is not None:
        yield from _backward(node, before)
    if not any(calls(one, aten.t.default) for one in arguments(node)):
        yield from _backward_alone(node)


def layers(node: fx.Node) -> Iterator[Layer]:
    """The linear layers that begin with the product `node`: with a bias that is added to it, and without."""
    if calls(node, aten.addmm.default):
        bias, x, transposed, beta, alpha = arguments(node)
        is_linear = beta == 1 and alpha == 1 and _is_bias(bias, node)
    elif calls(node, aten.mm.default):
        bias, (x, transposed), is_linear = None, arguments(node), True
    else:
        return
    if not is_linear or not calls(transposed, aten.t.default) or node.meta["val"].dtype not in DTYPES:
        return
    if bias is None:
        for product in (node, *_views(node)):
            yield from _with_added(product, Layer((node,), x, transposed, None))
    yield Layer((node,), x, transposed, bias)


def activation_backward(gradient: fx.Node) -> ActivationBackward | None:
    """The backward of an activation that alone uses the matrix `gradient`."""
    viewed = only_user(gradient, *_VIEWS) or gradient
    node = only_user(viewed, *_BACKWARDS)
    if node is None:
        return None
    grad, saved, *_ = arguments(node)
    activation = _BACKWARDS[node.target](node)
    if grad is not viewed or saved is viewed or activation is None or _shape(saved) != _shape(grad):
        return None
    return ActivationBackward((node,) if viewed is gradient else (viewed, node), activation, saved)


def _views(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if calls(user, *_VIEWS)]


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _is_bias(node: object, sum_: fx.Node) -> bool:
    """Whether `node` is a vector with an element for each column of `sum_`."""
    return isinstance(node, fx.Node) and _shape(node) == _shape(sum_)[-1:]


def _with_added(product: fx.Node, layer: Layer) -> Iterator[Layer]:
    """`layer` with what is added to `product`, which is its result or a view of it, if that is a bias."""
    add = only_user(product, aten.add.Tensor)
    if add is None:
        return
    one, other, alpha = arguments(add)
    bias = other if one is product else one
    is_like = (_shape(add), add.meta["val"].dtype) == (_shape(product), layer.dtype)
    has_columns = _shape(product)[-1:] == _shape(layer.result)[-1:]
    if alpha == 1 and is_like and has_columns and _is_bias(bias, layer.result):
        yield layer._replace(nodes=tuple(dict.fromkeys((*layer.nodes, product, add))), bias=bias)


def _forward(layer: Layer, viewed: fx.Node, last: fx.Node) -> Iterator[Match]:
    """With the activation `last` of `viewed`."""
    activation = _ACTIVATIONS[last.target](last)
    after = (last,) if viewed is layer.result else (viewed, last)
    inside = {*layer.nodes, *after}
    before = dict.fromkeys((layer.result, viewed))
    kept = [node for node in before if any(user not in inside for user in node.users)]
    if kept and activation not in OF_PREACTIVATION:
        return
    for reading in layer.readings(after):
        build = partial(_build_forward, reading, activation, last, kept, layer.dtype)
        yield Match.of(f"linear + {activation}", reading.nodes, [last, *kept], build, reading.operands, reading.given)


def _forward_alone(layer: Layer) -> Iterator[Match]:
    """Without an activation, if there is a cast or a bias to save: a product by itself is best left to the library."""
    for reading in layer.readings(()):
        if {*reading.nodes} - {layer.nodes[0], layer.transposed, *_views(layer.nodes[0])}:
            build = partial(_build_forward, reading, "none", layer.result, (), layer.dtype)
            yield Match.of("linear", reading.nodes, [layer.result], build, reading.operands, reading.given)


def _build_forward(
    reading: Reading, activation: str, last: fx.Node, kept: Sequence[fx.Node], dtype: torch.dtype, builder: Builder
) -> list[fx.Node]:
    made = builder.call(
        kitsune.linear_activation.default,
        *reading.operands, activation, dtype=dtype, keep_preactivation=bool(kept), allow_tf32=allows_tf32(),
    )  # fmt: skip
    y, preactivation = builder.results(made)
    return [shaped(builder, y, last), *(shaped(builder, preactivation, node) for node in kept)]


def _backward(node: fx.Node, before: ActivationBackward) -> Iterator[Match]:
    last = before.nodes[-1]
    for reading in readings((node, *before.nodes), arguments(node), node.meta["val"].dtype):
        build = partial(_build_backward, reading, node, before.activation, before.saved, last)
        others = [*reading.operands, before.saved]
        yield Match.of(
            f"linear backward + {before.activation} backward", reading.nodes, [last], build, others, reading.given
        )


def _backward_alone(node: fx.Node) -> Iterator[Match]:
    """Without an activation, if there is a cast to save."""
    for reading in readings([node], arguments(node), node.meta["val"].dtype):
        if len(reading.nodes) > 1:
            build = partial(_build_backward, reading, node, "none", None, node)
            yield Match.of("linear backward", reading.nodes, [node], build, reading.operands, reading.given)


def _build_backward(
    reading: Reading, product: fx.Node, activation: str, saved: fx.Node | None, last: fx.Node, builder: Builder
) -> list[fx.Node]:
    made = builder.call(
        kitsune.linear_input_gradient.default,
        *reading.operands, None if saved is None else shaped(builder, saved, product), activation,
        dtype=product.meta["val"].dtype, allow_tf32=allows_tf32(),
    )  # fmt: skip
    return [shaped(builder, made, last)]
