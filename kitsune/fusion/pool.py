"""Templates for max-pooling, with the ReLU before or after it, and its backward.

The backward comes first: it computes the positions that it needs anew, which is weighed with it. Then the forward takes
that over, which costs nothing more: the indices, of eight bytes each, are not used any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.nodes import arguments, aten, calls, is_taken_apart, only_user, result, taken_from
from kitsune.fusion.operands import is_written
from kitsune.kernels import pool  # noqa: F401 - defines the operators

kitsune = torch.ops.kitsune


class _Windows(NamedTuple):
    """Height and width of each."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]


def backward(node: fx.Node) -> Iterator[Match]:
    """Matches of the backward of max-pooling, and of the ReLU after or before it in the backward pass."""
    if not calls(node, aten.max_pool2d_with_indices_backward.default):
        return
    grad, x, *geometry, indices = arguments(node)
    made = taken_from(indices, 1, aten.max_pool2d_with_indices.default)
    windows = _windows(geometry)
    if made is None or windows is None or arguments(made)[0] is not x or _windows(arguments(made)[1:]) != windows:
        return
    masked = only_user(node, aten.threshold_backward.default)
    if masked is not None and arguments(masked)[1:] == (x, 0):
        if calls(x, aten.relu.default) and x.users.keys() <= {made, node, masked}:
            yield from _backward([node, masked], grad, x.args[0], made, windows, relu=True, given=[x, made])
        yield from _backward([node, masked], grad, x, made, windows, relu=True, given=[made])
    if calls(grad, aten.threshold_backward.default) and len(grad.users) == 1:
        inner, y, threshold = arguments(grad)
        pooled = y.args[0] if calls(y, aten.relu.default) else None
        if threshold == 0 and taken_from(pooled, 0, aten.max_pool2d_with_indices.default) is made:
            yield from _backward([grad, node], inner, x, made, windows, relu=True, given=[made, pooled, y])
    yield from _backward([node], grad, x, made, windows, relu=False, given=[made])


def forward(node: fx.Node) -> Iterator[Match]:
    """Matches of max-pooling whose indices are not used, with the ReLU before or after it."""
    if not calls(node, aten.max_pool2d_with_indices.default) or not is_taken_apart(node):
        return
    x, *geometry = arguments(node)
    windows, y = _windows(geometry), result(node, 0)
    if windows is None or y is None or any(user.users for user in node.users if user is not y):
        return
    if calls(x, aten.relu.default) and len(x.users) == 1:
        yield _forward(node, [x], x.args[0], y, windows, relu=True)
    rectified = _rectified(x)
    if rectified is not None and _again(x, windows, _options(node, relu=True)):
        yield _forward(node, [], x, y, windows, relu=True, given=[rectified])
    after = only_user(y, aten.relu.default)
    if after is not None:
        yield _forward(node, [after], x, after, windows, relu=True)
    yield _forward(node, [], x, y, windows, relu=False)


def copied(node: fx.Node) -> Iterator[Match]:
    """Matches of max-pooling as made below, whose maxima are only copied to the other layout, as for a flattening."""
    if not calls(node, kitsune.max_pool.default):
        return
    y, position = result(node, 0), result(node, 1)
    copy = None if y is None else only_user(y, aten.clone.default)
    maxima, positions = node.meta["val"]
    if copy is None or copy.meta["val"].stride() == maxima.stride() or not _is_dense(copy.meta["val"]):
        return
    layouts = {
        "channels_last": _is_channels_last(copy.meta["val"]),
        "position_channels_last": _is_channels_last(positions),
    }

    def build(builder: Builder) -> list[fx.Node]:
        options = {**node.kwargs, **layouts}
        return builder.results(builder.call(kitsune.max_pool.default, *node.args, **options))

    yield Match.of("max pool + copy", [node, *node.users, copy], [copy, position], build)


def _backward(
    nodes: Sequence[fx.Node],
    grad: Any,
    source: Any,
    made: fx.Node,
    windows: _Windows,
    *,
    relu: bool,
    given: Sequence[Any],
) -> Iterator[Match]:
    last = nodes[-1]
    if is_written(source, made, last):
        return
    size = list(source.meta["val"].shape[-2:])

    def build(builder: Builder) -> list[fx.Node]:
        pooled = builder.call(kitsune.max_pool.default, source, *windows, **_options(made, relu=relu))
        _, position = builder.results(pooled)
        found = builder.call(
            kitsune.max_pool_backward.default,
            grad,
            position,
            size,
            *windows,
            channels_last=_is_channels_last(last.meta["val"]),
        )
        return [found]

    name = "relu + max pool backward" if relu else "max pool backward"
    yield Match.of(name, nodes, [last], build, [source], given)


def _forward(
    node: fx.Node,
    others: Sequence[fx.Node],
    source: Any,
    y: fx.Node,
    windows: _Windows,
    *,
    relu: bool,
    given: Sequence[fx.Node] = (),
) -> Match:
    options = _options(node, relu=relu)
    again = _again(source, windows, options)

    def build(builder: Builder) -> list[fx.Node]:
        made = builder.results(builder.call(kitsune.max_pool.default, source, *windows, **options))
        return [made[0], *(made * len(again))]

    nodes = [*others, *(one for made in (node, *again) for one in (made, *made.users))]
    results = [y, *(result(made, place) for made in again for place in range(2))]
    return Match.of("relu + max pool" if relu else "max pool", nodes, results, build, given=given)


def _again(source: fx.Node, windows: _Windows, options: Mapping[str, bool]) -> list[fx.Node]:
    """The calls that compute the same, as backwards do."""
    return [
        user
        for user in source.users
        if calls(user, kitsune.max_pool.default) and user.args == (source, *windows) and user.kwargs == options
    ]


def _options(made: fx.Node, *, relu: bool) -> dict[str, bool]:
    return {"relu": relu, "channels_last": _is_channels_last(made.meta["val"][0])}


def _is_channels_last(images: torch.Tensor) -> bool:
    """By its strides: both layouts have all elements in the same order where there is one channel, or one pixel."""
    return images.dim() == 4 and images.stride() == _strides(images, torch.channels_last)


def _is_dense(images: torch.Tensor) -> bool:
    return images.stride() in (_strides(images, torch.contiguous_format), _strides(images, torch.channels_last))


def _strides(images: torch.Tensor, layout: torch.memory_format) -> tuple[int, ...]:
    return torch.empty(images.shape, device="meta", memory_format=layout).stride()


def _windows(geometry: Sequence[Any]) -> _Windows | None:
    """None if the windows have gaps, or reach beyond the padding."""
    kernel, stride, padding, dilation, ceil_mode = geometry
    if ceil_mode or set(dilation) != {1}:
        return None
    return _Windows(*(_pair(numbers) for numbers in (kernel, stride or kernel, padding)))


def _pair(numbers: Sequence[int]) -> list[int]:
    return [numbers[0], numbers[-1]]


def _rectified(node: Any) -> fx.Node | None:
    """What makes `node`, if it has no negative elements for sure."""
    made = node.args[0] if taken_from(node, 0, kitsune.batch_norm.default) else node
    return made if calls(made, aten.relu.default) or made.kwargs.get("relu") is True else None
