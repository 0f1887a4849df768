"""Assignments of a number by a mask are fills; other indexing by a mask has a size that depends on data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitsune.capture.trace import gradients, trace
from kitsune.errors import RefusedError

SHAPES = {"of all elements": ((3, 4), (3, 4)), "of rows": ((3, 4), (3,)), "of elements of rows": ((3, 4, 2), (3, 4))}


def filled(x: Tensor, mask: Tensor) -> Tensor:
    x = x * 2
    x[mask] = 5
    return x


def filled_elsewhere(x: Tensor, mask: Tensor) -> Tensor:
    return (x * 2).index_put((mask,), torch.tensor(5.0))


def filled_behind(x: Tensor, mask: Tensor) -> Tensor:
    x = (x * 2).movedim(0, -1)
    x[:, mask] = 5
    return x


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("function", [filled, filled_elsewhere])
def test_a_mask_of_leading_dimensions(function: Callable[..., Tensor], name: str) -> None:
    compare(function, *SHAPES[name])


def test_a_mask_of_a_later_dimension() -> None:
    compare(filled_behind, (3, 4), (3,))


def compare(function: Callable[..., Tensor], shape: tuple[int, ...], masked: tuple[int, ...]) -> None:
    """The result and the gradient, with a mask that is not the one that was traced."""

    def step(x: Tensor, mask: Tensor) -> list[Tensor | None]:
        result = function(x, mask)
        return [result.detach(), *gradients([result], [x], [torch.ones_like(result)])]

    x = torch.randn(shape, requires_grad=True)
    graph = trace(step, [x, torch.zeros(masked, dtype=torch.bool)])
    mask = torch.rand(masked) > 0.5
    assert 0 < mask.sum() < mask.numel()
    torch.testing.assert_close(graph(x, mask), step(x, mask), rtol=0, atol=0)


@pytest.mark.parametrize(
    "assign",
    [
        lambda x, mask: x.index_put_((mask,), x[0, :1].clone()),
        lambda x, mask: x.index_put_((mask,), torch.tensor(1.0), accumulate=True),
        lambda x, mask: x.index_put_((mask, torch.zeros((), dtype=torch.long)), torch.tensor(1.0)),
    ],
    ids=["one of the tensor's own values", "added", "with another index"],
)
def test_other_assignments_are_refused(assign: Callable[[Tensor, Tensor], Tensor]) -> None:
    def function(x: Tensor, mask: Tensor) -> list[Tensor]:
        return [assign(x * 2, mask)]

    with pytest.raises(RefusedError, match="a size that depends on data"):
        trace(function, [torch.randn(3, 4), torch.ones(3, dtype=torch.bool)])
