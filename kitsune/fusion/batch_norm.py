"""Templates for batch norm in training mode with what surrounds it.

relu?(batch_norm(x) + residual?)        and its backward
relu(batch_norm(a) + batch_norm(b))     and its backward, where the branches of a block meet

The backwards also add the two gradients that meet where the output goes two ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match, same_layout
from kitsune.fusion.nodes import arguments, aten, calls, is_taken_apart, only_user, result, taken_from
from kitsune.graph import dataflow
from kitsune.kernels import batch_norm  # noqa: F401 - defines the operators

kitsune = torch.ops.kitsune

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class _Gradient(NamedTuple):
    """The gradient that enters a match, or the two of which it is the sum.

    Attributes:
        first, second: what the operator takes; None as the second where the gradient is no sum.
        add: adds them.
    """

    first: Any
    second: Any = None
    add: fx.Node | None = None

    def nodes(self) -> list[fx.Node]:
        """Those that a match takes in."""
        return [] if self.add is None else [self.add]

    def named(self, name: str) -> str:
        return name if self.add is None else f"add + {name}"


def forward(node: fx.Node) -> Iterator[Match]:
    """Matches of a batch norm and what follows it."""
    if not _is_forward(node):
        return
    normal = result(node, 0)
    if normal is None:
        return
    add = only_user(normal, aten.add.Tensor)
    if add is not None and _is_sum(add):
        relu = only_user(add, aten.relu.default)
        (other,) = (term for term in arguments(add)[:2] if term is not normal)
        if relu is not None:
            joined = taken_from(other, 0, aten.native_batch_norm.default)
            if joined is not None and _is_forward(joined) and len(other.users) == 1 and _are_apart(node, joined):
                yield _join(node, joined, add, relu)
            yield _forward(node, [add, relu], other, relu=True)
        yield _forward(node, [add], other, relu=False)
    relu = only_user(normal, aten.relu.default)
    if relu is not None:
        yield _forward(node, [relu], None, relu=True)
    yield _forward(node, [], None, relu=False)


def backward(node: fx.Node) -> Iterator[Match]:
    """Matches of the backward of a batch norm, and of a ReLU before it in the backward pass."""
    if not _is_backward(node):
        return
    masked = arguments(node)[0]
    if calls(masked, aten.threshold_backward.default) and arguments(masked)[2] == 0:
        others = [user for user in masked.users if user is not node]
        for grad in _terms(arguments(masked)[0], node):
            if len(others) == 1 and _is_backward(others[0]):
                yield from _join_backward(node, others[0], masked, grad)
            if others:
                yield _residual_backward(node, masked, grad)
            else:
                yield from _relu_backward(node, masked, grad)
    for grad in _terms(masked, node):
        yield _backward(node, grad)


def _terms(grad: Any, node: fx.Node) -> Iterator[_Gradient]:
    """The terms of `grad` if only a match from `node` needs their sum, and `grad` itself."""
    if calls(grad, aten.add.Tensor) and len(grad.users) == 1 and _is_sum(grad):
        one, other, _ = arguments(grad)
        like = arguments(node)[1].meta["val"]
        values = [term.meta["val"] for term in (one, other)]
        if all(value.size() == like.size() and same_layout(value, like) for value in values):
            yield _Gradient(one, other, grad)
    yield _Gradient(grad)


def _are_apart(one: fx.Node, other: fx.Node) -> bool:
    """Whether two batch norms keep their running statistics in different memory: they would be updated at once."""
    first, second = (
        {storage for kept in dataflow.written(node) for storage in dataflow.storages(kept)} for node in (one, other)
    )
    return first.isdisjoint(second)


def _is_forward(node: fx.Node) -> bool:
    return calls(node, aten.native_batch_norm.default) and arguments(node)[5] is True and is_taken_apart(node)


def _is_backward(node: fx.Node) -> bool:
    return calls(node, aten.native_batch_norm_backward.default) and arguments(node)[7] is True and is_taken_apart(node)


def _is_sum(node: fx.Node) -> bool:
    """Whether two tensors of one type and shape are added."""
    one, other, alpha = arguments(node)
    if alpha != 1 or one is other or not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return False
    values = one.meta["val"], other.meta["val"]
    return len({(value.dtype, value.size()) for value in values}) == 1


def _apart(node: fx.Node) -> list[fx.Node]:
    return [node, *node.users]


def _forward(node: fx.Node, after: list[fx.Node], residual: fx.Node | None, *, relu: bool) -> Match:
    x, weight, bias, running_mean, running_var, _, momentum, eps = arguments(node)

    def build(builder: Builder) -> list[fx.Node]:
        made = builder.call(
            kitsune.batch_norm.default,
            x, residual, weight, bias, running_mean, running_var, momentum=momentum, eps=eps, relu=relu,
        )  # fmt: skip
        return builder.results(made)

    name = " + ".join(["batch norm", *(["residual"] if residual else []), *(["relu"] if relu else [])])
    results = [after[-1] if after else result(node, 0), result(node, 1), result(node, 2)]
    return Match.of(name, [*_apart(node), *after], results, build)


def _join(one: fx.Node, other: fx.Node, add: fx.Node, relu: fx.Node) -> Match:
    a, weight_a, bias_a, mean_a, var_a, _, momentum_a, eps_a = arguments(one)
    b, weight_b, bias_b, mean_b, var_b, _, momentum_b, eps_b = arguments(other)

    def build(builder: Builder) -> list[fx.Node]:
        made = builder.call(
            kitsune.batch_norm_join.default,
            a, weight_a, bias_a, mean_a, var_a, b, weight_b, bias_b, mean_b, var_b,
            momentum_a=momentum_a, eps_a=eps_a, momentum_b=momentum_b, eps_b=eps_b,
        )  # fmt: skip
        return builder.results(made)

    results = [relu, result(one, 1), result(one, 2), result(other, 1), result(other, 2)]
    return Match.of("batch norm + batch norm + relu", [*_apart(one), *_apart(other), add, relu], results, build)


def _relu_backward(node: fx.Node, masked: fx.Node, grad: _Gradient) -> Iterator[Match]:
    """Without reading the output, if it can be had again to the bit, and with it."""
    y = arguments(masked)[1]
    made = taken_from(y, 0, kitsune.batch_norm.default)
    if made is not None:
        _, residual, _, bias, *_ = arguments(made)
        if residual is None and _normalized(made, 0, 1) == _saved(node):
            yield _backward(node, grad, masked=masked, bias=bias, given=[made])
    yield _backward(node, grad, masked=masked, y=y)


def _backward(
    node: fx.Node,
    grad: _Gradient,
    *,
    masked: fx.Node | None = None,
    y: Any = None,
    bias: Any = None,
    given: Sequence[fx.Node] = (),
) -> Match:
    x, weight, mean, invstd = _saved(node)

    def build(builder: Builder) -> list[fx.Node]:
        made = builder.call(
            kitsune.batch_norm_backward.default,
            _laid_out(builder, grad.first, x), x, y, weight, bias, mean, invstd,
            relu=masked is not None, added_grad_y=grad.second,
        )  # fmt: skip
        return builder.results(made)

    name = grad.named("batch norm backward" if masked is None else "relu + batch norm backward")
    nodes = [*_apart(node), *([masked] if masked else []), *grad.nodes()]
    return Match.of(name, nodes, _gradients(node), build, [bias], given)


def _residual_backward(node: fx.Node, masked: fx.Node, grad: _Gradient) -> Match:
    x, weight, mean, invstd = _saved(node)
    y = arguments(masked)[1]

    def build(builder: Builder) -> list[fx.Node]:
        made = builder.call(
            kitsune.batch_norm_residual_backward.default,
            _laid_out(builder, grad.first, x), x, y, weight, mean, invstd, added_grad_y=grad.second,
        )  # fmt: skip
        grad_x, grad_residual, grad_weight, grad_bias = builder.results(made)
        return [grad_x, grad_weight, grad_bias, grad_residual]

    name, nodes = grad.named("relu + residual + batch norm backward"), [*_apart(node), masked, *grad.nodes()]
    return Match.of(name, nodes, [*_gradients(node), masked], build)


def _join_backward(node: fx.Node, other: fx.Node, masked: fx.Node, grad: _Gradient) -> Iterator[Match]:
    y = arguments(masked)[1]
    made = taken_from(y, 0, kitsune.batch_norm_join.default)
    if made is not None:
        _, _, bias_a, _, _, _, _, bias_b, *_ = arguments(made)
        saved = {_saved(one): one for one in (node, other)}
        branches = [saved.get(_normalized(made, 0, 1)), saved.get(_normalized(made, 5, 3))]
        if all(branches):
            yield _join_backward_of(branches, grad, masked, None, (bias_a, bias_b), [made])
    yield _join_backward_of([node, other], grad, masked, y, (None, None))


def _join_backward_of(
    branches: Sequence[Any],
    grad: _Gradient,
    masked: fx.Node,
    y: Any,
    biases: tuple[Any, Any],
    given: Sequence[fx.Node] = (),
) -> Match:
    (a, weight_a, mean_a, invstd_a), (b, weight_b, mean_b, invstd_b) = map(_saved, branches)

    def build(builder: Builder) -> list[fx.Node]:
        made = builder.call(
            kitsune.batch_norm_join_backward.default,
            _laid_out(builder, grad.first, a), y,
            a, weight_a, biases[0], mean_a, invstd_a, b, weight_b, biases[1], mean_b, invstd_b,
            added_grad_y=grad.second,
        )  # fmt: skip
        return builder.results(made)

    name = grad.named("relu + batch norm backward + batch norm backward")
    nodes = [masked, *(node for branch in branches for node in _apart(branch)), *grad.nodes()]
    results = [found for branch in branches for found in _gradients(branch)]
    return Match.of(name, nodes, results, build, biases, given)


def _laid_out(builder: Builder, grad: fx.Node, x: fx.Node) -> fx.Node:
    """`grad` in memory as `x` is: that of a mean over an image, say, is contiguous whatever the images are."""
    value, like = grad.meta["val"], x.meta["val"]
    if value.size() != like.size() or same_layout(value, like) or like.dim() not in _CHANNELS_LAST:
        return grad
    memory_format = torch.contiguous_format if like.is_contiguous() else _CHANNELS_LAST[like.dim()]
    return builder.call(aten.clone.default, grad, memory_format=memory_format)


def _saved(node: fx.Node) -> tuple[Any, ...]:
    """Input, weight, mean and inverse standard deviation, as the backward has them."""
    _, x, weight, _, _, mean, invstd, *_ = arguments(node)
    return x, weight, mean, invstd


def _normalized(made: fx.Node, place: int, statistics: int) -> tuple[Any, ...]:
    """As `_saved`, of a forward: its input at `place` among the arguments, its statistics among the results."""
    x, weight = arguments(made)[place], arguments(made)[place + (2 if place == 0 and _has_residual(made) else 1)]
    return x, weight, result(made, statistics), result(made, statistics + 1)


def _has_residual(made: fx.Node) -> bool:
    """Whether the second argument is a residual, or None in its place."""
    return calls(made, kitsune.batch_norm.default)


def _gradients(node: fx.Node) -> list[fx.Node | None]:
    """Of input, weight and bias."""
    return [result(node, place) for place in range(3)]
