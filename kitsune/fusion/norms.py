"""Templates for layer norm and RMS norm over the last dimension, with what surrounds them.

cast?(norm(x + residual?))                    with the sum, where it is used otherwise
cast?(norm_backward(cast?(grad))) + other?    with the gradient that reaches the sum on its other way

An input that is cast to float32 is read as it was before; so is a gradient. Where some users of a result cast it, it is
made in both precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Builder, Match
from kitsune.fusion.moves import (
    Path,
    all_of,
    cast_after,
    casts_after,
    casts_beside,
    repeated,
    widened,
    without_cast,
)
from kitsune.fusion.nodes import arguments, aten, calls, is_taken_apart, only_user, result
from kitsune.kernels import layer_norm  # noqa: F401 - defines the operators
from kitsune.kernels.rows import row_stride

kitsune = torch.ops.kitsune

Call = Callable[[Builder, fx.Node, fx.Node | None, torch.dtype, torch.dtype | None], fx.Node]
CallBackward = Callable[[Builder, fx.Node, fx.Node | None, fx.Node, torch.dtype | None], fx.Node]


class Norm(NamedTuple):
    """A norm in a graph.

    Attributes:
        name: for the user.
        nodes: that compute it.
        x: what is normalized.
        y: the result.
        statistics: of the rows, as the operator returns them; None for one that is unused.
        call: adds the operator, with `x`, the residual, the type of its result, and that of a copy or None.
    """

    name: str
    nodes: Sequence[fx.Node]
    x: fx.Node
    y: fx.Node
    statistics: Sequence[fx.Node | None]
    call: Call


class NormBackward(NamedTuple):
    """The backward of a norm in a graph.

    Attributes:
        name: for the user.
        nodes: that compute it.
        grad_y: the gradient of the norm's result.
        x: what was normalized.
        grad_x: the gradient of `x`.
        others: of the gradients, in the operator's order; None for one that is unused.
        call: adds the operator, with the gradients of result and sum, with `x`, and the type of a copy or None.
        given: what the nodes read beside that, and the operator computes itself.
        grad_total: of `x`, where `grad_x` includes it.
    """

    name: str
    nodes: Sequence[fx.Node]
    grad_y: fx.Node
    x: fx.Node
    grad_x: fx.Node
    others: Sequence[fx.Node | None]
    call: CallBackward
    given: Sequence[fx.Node] = ()
    grad_total: fx.Node | None = None


def forward(node: fx.Node) -> Iterator[Match]:
    """Matches of layer norm or PyTorch's own RMS norm, and what is around it."""
    for find in (_layer_norm, _fused_rms_norm):
        norm = find(node)
        if norm is not None:
            yield from matches(norm)


def backward(node: fx.Node) -> Iterator[Match]:
    """Matches of the backward of layer norm or PyTorch's own RMS norm, and what is around it.

    Where it reads what was before a cast, that may be for the forward alone afterwards.
    """
    for find in (_layer_norm_backward, _fused_rms_norm_backward):
        norm = find(node)
        if norm is not None:
            yield from backward_matches(norm)


def matches(norm: Norm) -> Iterator[Match]:
    """With and without a residual that is added before, and with and without casts of the result."""
    total = widened(norm.x)
    is_wide = norm.y.meta["val"].dtype == torch.float32
    casts = casts_after(norm.y) if is_wide else []
    beside = casts_beside(norm.y) if is_wide else []
    ways: list[tuple[Sequence[Path], Sequence[fx.Node]]] = [(casts, []), ([], beside)]
    for after, copies in [*(way for way in ways if any(way)), ([], [])]:
        if is_sum(total) and total.meta["val"].is_contiguous():
            yield _match(norm, total, after, copies, residual=True)
        yield _match(norm, total, after, copies, residual=False)


def backward_matches(norm: NormBackward) -> Iterator[Match]:
    """With and without the gradient that is added, and with and without a cast of the input."""
    x = widened(norm.x)
    cast = cast_after(norm.grad_x, x.meta["val"].dtype) if x is not norm.x else None
    if cast is not None and len(cast.nodes) == 1 and norm.grad_total is None:
        yield from _with_added(norm, x, cast.nodes)
    yield from _with_added(norm, norm.x, ())


def is_sum(node: fx.Node) -> bool:
    """Whether two tensors of the shape of their sum are added."""
    if not calls(node, aten.add.Tensor):
        return False
    one, other, alpha = arguments(node)
    terms = {term for term in (one, other) if isinstance(term, fx.Node)}
    return alpha == 1 and len(terms) == 2 and all(_shape(term) == _shape(node) for term in terms)


def _match(norm: Norm, total: fx.Node, casts: Sequence[Path], copies: Sequence[fx.Node], *, residual: bool) -> Match:
    """With its sum, where there is a `residual`, and with `casts` of its result; `copies` are such beside it."""
    x, added = arguments(total)[:2] if residual else (total, None)
    ys = [path.nodes[-1] for path in casts] or [norm.y]
    nodes = [*norm.nodes, *all_of(casts), *copies, *([total] if residual else [])]
    cast = None if total is norm.x else norm.x
    if cast is not None and (residual or cast.users.keys() <= set(nodes)):
        nodes.append(cast)
    kept = [cast] if cast in nodes and not cast.users.keys() <= set(nodes) else []

    def build(builder: Builder) -> list[fx.Node]:
        operands = _in_rows(builder, x), None if added is None else _in_rows(builder, added)
        dtypes = ys[0].meta["val"].dtype, _type_of(copies)
        y, sum_, *statistics, copy = builder.results(norm.call(builder, *operands, *dtypes))
        made = [path.moved(builder, y) for path in casts] or [y]
        if residual:
            made.append(sum_)
        made += [repeated(builder, one, {total: sum_}) for one in kept]
        return [*made, *statistics, *(copy for _ in copies)]

    results = [*ys, *([total] if residual else []), *kept, *norm.statistics, *copies]
    after = ["cast"] if casts else ["copy"] if copies else []
    name = " + ".join([*(["residual"] if residual else []), norm.name, *after])
    given = [] if cast is None or cast in nodes else [cast]
    return Match.of(name, nodes, results, build, [x, added], given)


def _with_added(norm: NormBackward, x: fx.Node, cast: Sequence[fx.Node]) -> Iterator[Match]:
    grad_x = cast[-1] if cast else norm.grad_x
    add = only_user(grad_x, aten.add.Tensor)
    if add is not None and is_sum(add) and norm.grad_total is None:
        (other,) = (term for term in arguments(add)[:2] if term is not grad_x)
        yield from _with_copy(norm, x, [*cast, add], other)
    yield from _with_copy(norm, x, cast, norm.grad_total)


def _with_copy(norm: NormBackward, x: fx.Node, after: Sequence[fx.Node], grad_total: fx.Node | None) -> Iterator[Match]:
    grad_x = after[-1] if after else norm.grad_x
    copies = casts_beside(grad_x) if grad_x.meta["val"].dtype == torch.float32 else []
    if copies:
        yield _backward(norm, x, after, grad_total, copies)
    yield _backward(norm, x, after, grad_total, [])


def _backward(
    norm: NormBackward,
    x: fx.Node,
    after: Sequence[fx.Node],
    grad_total: fx.Node | None,
    copies: Sequence[fx.Node],
) -> Match:
    inside = {*norm.nodes, *after}
    grad = without_cast(norm.grad_y, inside)
    total = None if grad_total is None else without_cast(grad_total, inside)

    def build(builder: Builder) -> list[fx.Node]:
        added = None if total is None else _in_rows(builder, total.moved(builder, total.source))
        read = _in_rows(builder, grad.moved(builder, grad.source)), added, _in_rows(builder, x)
        *made, copy = builder.results(norm.call(builder, *read, _type_of(copies)))
        return [*made, *(copy for _ in copies)]

    nodes = [*norm.nodes, *grad.nodes, *(total.nodes if total else ()), *after, *copies]
    given = [*norm.given, *([norm.x] if x is not norm.x else [])]
    others = [x, grad.source, total.source if total else None]
    name = " + ".join([norm.name, *(["residual"] if total else []), *(["copy"] if copies else [])])
    results = [after[-1] if after else norm.grad_x, *norm.others, *copies]
    return Match.of(name, nodes, results, build, others, given)


def _type_of(copies: Sequence[fx.Node]) -> torch.dtype | None:
    return copies[0].meta["val"].dtype if copies else None


def _in_rows(builder: Builder, node: fx.Node) -> fx.Node:
    """`node`, or a copy if its rows are not evenly spaced, as PyTorch's own operators make one."""
    try:
        row_stride("a norm", node.name, node.meta["val"])
    except ValueError:
        return builder.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return node


def _layer_norm(node: fx.Node) -> Norm | None:
    if not calls(node, aten.native_layer_norm.default) or not is_taken_apart(node):
        return None
    x, shape, weight, bias, eps = arguments(node)
    y = result(node, 0)
    if y is None or len(shape) != 1:
        return None

    def call(
        builder: Builder, x: fx.Node, residual: fx.Node | None, dtype: torch.dtype, copy_dtype: torch.dtype | None
    ) -> fx.Node:
        options = {"eps": eps, "dtype": dtype, "copy_dtype": copy_dtype}
        return builder.call(kitsune.layer_norm.default, x, residual, weight, bias, **options)

    return Norm("layer norm", _apart(node), x, y, [result(node, 1), result(node, 2)], call)


def _layer_norm_backward(node: fx.Node) -> NormBackward | None:
    if not calls(node, aten.native_layer_norm_backward.default) or not is_taken_apart(node):
        return None
    grad_y, x, shape, mean, rstd, weight, bias, mask = arguments(node)
    grad_x = result(node, 0)
    if grad_x is None or len(shape) != 1:
        return None
    weight_dtype, bias_dtype = _dtype(weight, mask[1]), _dtype(bias, mask[2])

    def call(
        builder: Builder, grad: fx.Node, grad_total: fx.Node | None, x: fx.Node, copy_dtype: torch.dtype | None
    ) -> fx.Node:
        return builder.call(
            kitsune.layer_norm_backward.default,
            grad, grad_total, x, mean, rstd, weight,
            weight_dtype=weight_dtype, bias_dtype=bias_dtype, copy_dtype=copy_dtype,
        )  # fmt: skip

    others = [result(node, 1), result(node, 2)]
    return NormBackward("layer norm backward", _apart(node), grad_y, x, grad_x, others, call)


def _fused_rms_norm(node: fx.Node) -> Norm | None:
    if not calls(node, aten._fused_rms_norm.default) or not is_taken_apart(node):
        return None
    x, shape, weight, eps = arguments(node)
    y = result(node, 0)
    if y is None or len(shape) != 1:
        return None
    if eps is None:
        eps = torch.finfo(torch.float32).eps  # of what PyTorch computes in, for lower precisions as well
    return Norm("rms norm", _apart(node), x, y, [result(node, 1)], rms_norm_call(weight, eps))


def _fused_rms_norm_backward(node: fx.Node) -> NormBackward | None:
    if not calls(node, aten._fused_rms_norm_backward.default) or not is_taken_apart(node):
        return None
    grad_y, x, shape, rstd, weight, mask = arguments(node)
    grad_x = result(node, 0)
    if grad_x is None or len(shape) != 1:
        return None
    call = rms_norm_backward_call(rstd, weight, _dtype(weight, mask[1]))
    return NormBackward("rms norm backward", _apart(node), grad_y, x, grad_x, [result(node, 1)], call)


def rms_norm_call(weight: fx.Node | None, eps: float) -> Call:
    """What adds the operator to a graph, as `Norm.call` does."""

    def call(
        builder: Builder, x: fx.Node, residual: fx.Node | None, dtype: torch.dtype, copy_dtype: torch.dtype | None
    ) -> fx.Node:
        options = {"eps": eps, "dtype": dtype, "copy_dtype": copy_dtype}
        return builder.call(kitsune.rms_norm.default, x, residual, weight, **options)

    return call


def rms_norm_backward_call(rstd: fx.Node, weight: fx.Node | None, weight_dtype: torch.dtype | None) -> CallBackward:
    """What adds the operator to a graph, as `NormBackward.call` does."""

    def call(
        builder: Builder, grad: fx.Node, grad_total: fx.Node | None, x: fx.Node, copy_dtype: torch.dtype | None
    ) -> fx.Node:
        options = {"weight_dtype": weight_dtype, "copy_dtype": copy_dtype}
        return builder.call(kitsune.rms_norm_backward.default, grad, grad_total, x, rstd, weight, **options)

    return call


def _apart(node: fx.Node) -> list[fx.Node]:
    return [node, *node.users]


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _dtype(of: Any, wanted: bool) -> torch.dtype | None:
    return of.meta["val"].dtype if wanted and isinstance(of, fx.Node) else None
