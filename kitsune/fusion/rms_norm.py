"""Templates for RMS norms that are written out, in float32 or with casts to it: x * rsqrt(mean(x ** 2) + eps) * weight.

The backward is the one that autograd makes of that. It comes first: the forward can be one operator only where the
backward does not read what is computed on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from kitsune.fusion.match import Match
from kitsune.fusion.moves import is_cast
from kitsune.fusion.nodes import arguments, aten, calls, only_user
from kitsune.fusion.norms import (
    Norm,
    NormBackward,
    backward_matches,
    is_sum,
    matches,
    rms_norm_backward_call,
    rms_norm_call,
)


class _Normal(NamedTuple):
    """`x * rstd` with `rstd = rsqrt(mean(x ** 2) + eps)`, of rows.

    Attributes:
        nodes: that compute it, the last one being the product.
        x: (*, N).
        rstd: (*, 1).
    """

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    rstd: fx.Node
    eps: float

    @property
    def product(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def cast(self) -> fx.Node:
        """What the weight is multiplied with: the product, or its cast to what the input was."""
        casts = [user for user in self.product.users if is_cast(user)]
        return casts[0] if len(casts) == 1 else self.product


def forward(node: fx.Node) -> Iterator[Match]:
    """Matches of an RMS norm with a weight, and what is around it."""
    normal = _normal(node)
    if normal is None:
        return
    y = only_user(normal.cast, aten.mul.Tensor)
    weight = None if y is None else _other_factor(y, normal.cast)
    if y is None or weight is None or weight.meta["val"].shape != normal.x.meta["val"].shape[-1:]:
        return
    nodes = [*normal.nodes, normal.cast, y]
    call = rms_norm_call(weight, normal.eps)
    yield from matches(Norm("rms norm", nodes, normal.x, y, [normal.rstd], call))


def backward(node: fx.Node) -> Iterator[Match]:
    """Matches of the backward of an RMS norm, and what is around it."""
    normal = _normal(node)
    if normal is None:
        return
    for cube in _users(normal.rstd, aten.pow.Tensor_Scalar, 3):
        found = _backward(normal, cube)
        if found is not None:
            yield from backward_matches(found)


def _normal(rstd: fx.Node) -> _Normal | None:
    if not calls(rstd, aten.rsqrt.default):
        return None
    add = arguments(rstd)[0]
    if not calls(add, aten.add.Tensor, aten.add.Scalar):
        return None
    mean, eps, alpha = arguments(add)
    if not isinstance(eps, float) or alpha != 1 or not calls(mean, aten.mean.dim):
        return None
    square, dims, keepdim, dtype = arguments(mean)
    if not calls(square, aten.pow.Tensor_Scalar) or arguments(square)[1] != 2 or dtype is not None:
        return None
    x = arguments(square)[0]
    products = [user for user in rstd.users if calls(user, aten.mul.Tensor) and _other_factor(user, rstd) is x]
    if not (keepdim and _are_last(dims, x)) or len(products) != 1 or x.meta["val"].dtype != torch.float32:
        return None
    return _Normal((square, mean, add, rstd, products[0]), x, rstd, eps)


def _backward(normal: _Normal, cube: fx.Node) -> NormBackward | None:
    """With `cube = rstd ** 3`: the gradient of `x` is `scaled * rstd - x * cube * mean(scaled * x)`, a sum of terms."""
    x, rstd = normal.x, normal.rstd
    num_columns = x.meta["val"].shape[-1]
    factor = only_user(cube, aten.mul.Tensor)
    halved = None if factor is None else _other_factor(factor, cube)
    if factor is None or not calls(halved, aten.mul.Scalar) or arguments(halved)[1] != -0.5:
        return None
    sum_ = arguments(halved)[0]
    spread = only_user(factor, aten.expand.default)
    divided = None if spread is None else only_user(spread, aten.div.Scalar)
    through_mean = None if divided is None else only_user(divided, aten.mul.Tensor)
    if divided is None or through_mean is None or arguments(divided)[1] != num_columns or not _is_row_sum(sum_, x):
        return None
    assert spread is not None
    doubled = _other_factor(through_mean, divided)
    weighted = arguments(sum_)[0]
    scaled = _other_factor(weighted, x) if calls(weighted, aten.mul.Tensor) else None
    if scaled is None or not _is_doubled(doubled, x):
        return None
    assert doubled is not None
    directs = [user for user in scaled.users if calls(user, aten.mul.Tensor) and _other_factor(user, rstd) is scaled]
    if len(directs) != 1:
        return None
    total = _total(directs[0], through_mean)
    if total is None:
        return None
    sums, grad_total = total
    nodes = [
        cube, halved, factor, sum_, spread, divided, through_mean, doubled, arguments(doubled)[0], weighted,
        directs[0], *sums,
    ]  # fmt: skip
    return _with_weight(normal, scaled, nodes, sums[-1], grad_total)


def _with_weight(
    normal: _Normal, scaled: fx.Node, nodes: list[fx.Node], grad_x: fx.Node, grad_total: fx.Node | None
) -> NormBackward | None:
    """With the multiplication by the weight, whose result is `scaled`, perhaps after a cast."""
    product = scaled.all_input_nodes[0] if is_cast(scaled) else scaled
    if not calls(product, aten.mul.Tensor):
        return None
    shape = normal.x.meta["val"].shape[-1:]
    weights = [factor for factor in arguments(product) if isinstance(factor, fx.Node) and _shape(factor) == shape]
    if len(weights) != 1 or _other_factor(product, weights[0]) is None:
        return None
    grad_y = _other_factor(product, weights[0])
    assert grad_y is not None
    nodes += [scaled, product]
    grad_weight = _grad_weight(normal, grad_y)
    if grad_weight:
        nodes += grad_weight
    weight_dtype = grad_weight[-1].meta["val"].dtype if grad_weight else None
    return NormBackward(
        "rms norm backward",
        nodes,
        grad_y,
        normal.x,
        grad_x,
        [grad_weight[-1] if grad_weight else None],
        rms_norm_backward_call(normal.rstd, weights[0], weight_dtype),
        [normal.product, normal.cast] if grad_weight else [],
        grad_total,
    )


def _grad_weight(normal: _Normal, grad_y: fx.Node) -> list[fx.Node]:
    """What computes the sum of `grad_y * normal` over all rows, the last one being it; nothing if there is none."""
    for user in normal.cast.users:
        if not calls(user, aten.mul.Tensor) or _other_factor(user, normal.cast) is not grad_y:
            continue
        sum_ = only_user(user, aten.sum.dim_IntList)
        view = None if sum_ is None else only_user(sum_, aten.view.default)
        rows = list(range(normal.x.meta["val"].dim() - 1))
        if sum_ is not None and view is not None and arguments(sum_)[1] == rows and view.meta["val"].dim() == 1:
            return [user, sum_, view]
    return []


def _total(direct: fx.Node, through_mean: fx.Node) -> tuple[list[fx.Node], fx.Node | None] | None:
    """The additions of both terms, and what is added before them if anything is."""
    one, other = only_user(direct, aten.add.Tensor), only_user(through_mean, aten.add.Tensor)
    if one is None or other is None or not is_sum(one) or not is_sum(other):
        return None
    if one is other:
        return [one], None
    for first, last, term in ((one, other, direct), (other, one, through_mean)):
        if only_user(first, aten.add.Tensor) is last:
            (added,) = (node for node in arguments(first)[:2] if node is not term)
            return [first, last], added
    return None


def _is_row_sum(node: object, x: fx.Node) -> bool:
    if not calls(node, aten.sum.dim_IntList):
        return False
    _, dims, keepdim, dtype = arguments(node)
    return bool(keepdim) and dtype is None and _are_last(dims, x)


def _are_last(dims: Sequence[int] | None, x: fx.Node) -> bool:
    return dims is not None and list(dims) in ([-1], [x.meta["val"].dim() - 1])


def _is_doubled(node: fx.Node | None, x: fx.Node) -> bool:
    """Whether `node` is `2 * x ** 1`, as the derivative of a square is written."""
    if not calls(node, aten.mul.Scalar) or arguments(node)[1] != 2:
        return False
    power = arguments(node)[0]
    return calls(power, aten.pow.Tensor_Scalar) and arguments(power) == (x, 1)


def _users(node: fx.Node, target: Any, number: float) -> list[fx.Node]:
    return [user for user in node.users if calls(user, target) and arguments(user)[1] == number]


def _other_factor(product: fx.Node, factor: fx.Node) -> fx.Node | None:
    """What is multiplied with `factor`, if it is another tensor."""
    factors = [one for one in arguments(product) if one is not factor]
    return factors[0] if len(factors) == 1 and isinstance(factors[0], fx.Node) else None


def _shape(node: fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape
