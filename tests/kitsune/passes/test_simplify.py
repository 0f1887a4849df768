"""Views that see what is there already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kitsune.capture.trace import trace
from kitsune.passes import pipeline
from kitsune.passes.drop_dead import drop_dead
from kitsune.passes.simplify import simplify
from tests.kitsune.passes.running import names, results, values_are_right

Function = Callable[..., Sequence[Tensor]]


def detached(x: Tensor) -> list[Tensor]:
    return [x.sin().detach().detach().cos()]


def turned_back(x: Tensor) -> list[Tensor]:
    return [x.t().sin().t().t().cos(), x.t().t().exp()]


def same_shape(x: Tensor) -> list[Tensor]:
    return [x.view(2, 3).sin(), x.expand(2, 3).cos(), x.view(6).exp(), x.reshape(6).tan()]


def written_through_a_view(x: Tensor) -> list[Tensor]:
    y = x.sin()
    first = y.view(6)
    y.mul_(2)
    return [first.cos(), y.view(6).exp()]


def returned(x: Tensor) -> list[Tensor]:
    y = x.sin()
    return [y.detach(), y.t()]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (detached, ["sin", "cos"]),
        (turned_back, ["t", "sin", "cos", "exp"]),
        (same_shape, ["sin", "cos", "view", "exp", "tan"]),
        (written_through_a_view, ["sin", "view", "mul_", "cos", "exp"]),
        (returned, ["sin", "t"]),
    ],
)
def test_one_node_is_left_for_each_view(function: Function, left: list[str]) -> None:
    inputs = [torch.rand(2, 3)]
    module = trace(function, inputs)
    new = pipeline.run(module, (("simplify", simplify), ("drop dead", drop_dead)), verify=True)
    assert [name.rstrip("_0123456789") for name in names(new)] == [name.rstrip("_") for name in left]
    assert results(new, [inputs[0].clone()]) == results(module, [inputs[0].clone()])
    assert values_are_right(new, inputs)


def test_what_is_given_another_shape_in_place_is_left_alone() -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x[:].t_()
        return [y.exp(), x.sin()]

    inputs = [torch.rand(2, 3)]
    module = trace(function, inputs)
    new = pipeline.run(module, pipeline.CLEARING, verify=True)
    assert results(new, inputs) == results(module, inputs)
    assert values_are_right(new, inputs)


def test_copies_and_in_place_operators_are_no_views() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [x.clone().relu_(), x.contiguous().exp(), x.to(torch.float32, copy=True).sin()]

    inputs = [torch.randn(2, 3)]
    module = trace(function, inputs)
    new = simplify(module)
    assert len(names(new)) == len([name for name in names(module) if not name.startswith("detach")])
    assert results(new, inputs) == results(module, inputs)
