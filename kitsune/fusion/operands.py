"""How kernels that compute as autocast does read their operands: cast or not, transposed or not, of any strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder
from kitsune.fusion.nodes import aten, calls
from kitsune.graph import dataflow


class Reading(NamedTuple):
    """What a kernel is given, and what is not needed any more then.

    Attributes:
        operands: of the kernel; None where one is absent.
        nodes: all that go.
        given: views and casts that stay because others use them, although the kernel reads what they are made of.
    """

    operands: tuple[fx.Node | None, ...]
    nodes: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]


def readings(
    nodes: Sequence[fx.Node], operands: Sequence[fx.Node | None], dtype: torch.dtype, views: Sequence[fx.Node] = ()
) -> Iterator[Reading]:
    """The ways to replace `nodes` by a kernel that casts `operands` from float32 to `dtype` itself.

    First all casts are left to it, so that a cast may lose its last user later. If some have other users now, these
    casts are read next.

    Args:
        views: of operands, which the kernel does not need.
    """
    sources = {one: _before_cast(one, dtype) for one in operands if one is not None}
    casts = [one for one, source in sources.items() if source is not one]
    going = _with_unused(nodes, [*views, *casts])
    shared = [cast for cast in casts if cast not in going]
    viewed = tuple(view for view in views if view not in going)
    last = max(nodes)
    given = tuple(cast for cast in shared if not is_written(sources[cast], cast, last))
    cast_already = sources | {cast: cast for cast in shared}
    if given:
        left_to_it = cast_already | {cast: sources[cast] for cast in given}
        yield Reading(_chosen(operands, left_to_it), going, (*given, *viewed))
    yield Reading(_chosen(operands, cast_already), going, viewed)


def allows_tf32() -> bool:
    """Whether PyTorch may round the operands of float32 matrix products to TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def convolutions_allow_tf32() -> bool:
    """Whether cuDNN may round the operands of float32 convolutions to TF32."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def shaped(builder: Builder, node: fx.Node, like: fx.Node) -> fx.Node:
    """The elements of `node` in the shape of `like`."""
    shape = list(like.meta["val"].shape)
    return node if list(node.meta["val"].shape) == shape else builder.call(aten.view.default, node, shape)


def _before_cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if not calls(node, aten._to_copy.default):
        return node
    source = node.all_input_nodes[0]
    value, cast = source.meta["val"], node.meta["val"]
    leaves_out = cast.dtype == dtype and value.dtype == torch.float32 and value.device == cast.device
    return source if leaves_out else node


def _with_unused(nodes: Sequence[fx.Node], candidates: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """`nodes` and those of `candidates` that nobody else uses."""
    going = list(nodes)
    for candidate in sorted(set(candidates), reverse=True):
        if all(user in going for user in candidate.users):
            going.append(candidate)
    return tuple(going)


def is_written(value: fx.Node, first: fx.Node, last: fx.Node) -> bool:
    """Whether an operator after `first`, up to `last`, writes to the memory of `value`."""
    memory = dataflow.storages(value)
    node = first
    while node is not last:
        node = node.next
        if any(memory & dataflow.storages(target) for target in dataflow.written(node)):
            return True
    return False


def _chosen(operands: Sequence[fx.Node | None], read: dict[fx.Node, fx.Node]) -> tuple[fx.Node | None, ...]:
    return tuple(None if one is None else read[one] for one in operands)
