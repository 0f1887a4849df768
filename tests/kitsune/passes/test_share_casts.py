"""Casts that are made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kitsune.capture.trace import trace
from kitsune.graph import dataflow
from kitsune.passes import pipeline
from kitsune.passes.share_casts import share_casts
from tests.kitsune.passes.running import calls, results, values_are_right

Function = Callable[..., Sequence[Tensor]]

HALF, LONG = torch.float16, torch.float64


def twice(x: Tensor) -> list[Tensor]:
    y = x.sin()
    return [y.to(HALF).cos(), y.to(HALF).exp()]


def of_an_input(x: Tensor) -> list[Tensor]:
    return [x.to(HALF).cos(), x.to(HALF).exp()]


def with_views(x: Tensor) -> list[Tensor]:
    y = x.sin()
    return [y.to(HALF).view(6).cos(), y.to(HALF).view(6).exp()]


def to_different_types(x: Tensor) -> list[Tensor]:
    return [x.to(HALF).cos(), x.to(LONG).exp()]


def in_different_layouts(x: Tensor) -> list[Tensor]:
    y = x.t()
    one = torch.ops.aten._to_copy(y, dtype=HALF)
    return [one.cos(), torch.ops.aten._to_copy(y, dtype=HALF, memory_format=torch.contiguous_format).exp()]


def returned(x: Tensor) -> list[Tensor]:
    return [x.to(HALF), x.to(HALF)]


def returned_as_views(x: Tensor) -> list[Tensor]:
    return [x.to(HALF).t(), x.to(HALF).t()]


def written_between(x: Tensor) -> list[Tensor]:
    before = x.to(HALF).cos()
    x.t().add_(1)
    return [before, x.to(HALF).exp()]


def written_afterwards(x: Tensor) -> list[Tensor]:
    one, other = x.to(HALF), x.to(HALF)
    one.t().add_(1)
    return [one.cos(), other.exp()]


def check(function: Function, count: int) -> None:
    """How many of two casts are left."""
    inputs = [torch.rand(2, 3)]
    module = trace(function, inputs)
    assert len(calls(module, torch.ops.aten._to_copy.default)) == 2
    new = pipeline.run(module, (("share casts", share_casts),), verify=True)
    assert len(calls(new, torch.ops.aten._to_copy.default)) == count
    assert results(new, [inputs[0].clone()]) == results(module, [inputs[0].clone()])
    assert values_are_right(new, inputs)


@pytest.mark.parametrize("function", [twice, of_an_input, with_views])
def test_equal_casts_are_one(function: Function) -> None:
    check(function, 1)


@pytest.mark.parametrize("function", [to_different_types, in_different_layouts])
def test_casts_to_another_form_are_two(function: Function) -> None:
    check(function, 2)


@pytest.mark.parametrize("function", [returned, returned_as_views])
def test_each_result_has_memory_of_its_own(function: Function) -> None:
    check(function, 2)


@pytest.mark.parametrize("function", [written_between, written_afterwards])
def test_what_is_written_is_cast_anew(function: Function) -> None:
    check(function, 2)


def test_views_of_what_is_one_cast_share_its_memory() -> None:
    new = pipeline.run(trace(with_views, [torch.rand(2, 3)]), (("share casts", share_casts),))
    (cast,), views = (calls(new, target) for target in (torch.ops.aten._to_copy.default, torch.ops.aten.view.default))
    assert len(views) == 2
    assert {storage for view in views for storage in dataflow.storages(view)} == dataflow.storages(cast)
