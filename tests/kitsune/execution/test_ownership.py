"""Whether memory that was handed out is still somebody's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitsune.execution.ownership import HandedOut, free_place


@pytest.mark.parametrize(
    "alias",
    [
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.detach().view(-1)[1:],
        lambda tensor: tensor.data,
        lambda tensor: tensor.detach().numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.data.untyped_storage(),
    ],
    ids=["detached", "view", "data", "numpy", "storage", "storage of an alias"],
)
def test_an_alias_of_any_kind_counts(alias: Callable[[Tensor], object]) -> None:
    tensors = [torch.ones(4), torch.ones(2, 2)]
    handed_out = HandedOut(tensors)
    assert not handed_out.in_use()
    held = alias(tensors[1])
    assert handed_out.in_use()
    del held
    assert not handed_out.in_use()


def test_a_gradient_that_autograd_took_over_counts() -> None:
    static = torch.ones(3)
    handed_out = HandedOut([static])
    param = torch.zeros(3, requires_grad=True)
    param.grad = static.detach()
    assert handed_out.in_use()
    param.grad = None
    assert not handed_out.in_use()


def test_nothing_handed_out() -> None:
    assert not HandedOut([]).in_use()


def test_of_two_graphs_neither_is_free_while_the_second_is_in_use() -> None:
    first, second = torch.ones(3), torch.ones(3)
    both = [HandedOut([first]), HandedOut([second])]
    assert free_place([]) is None
    assert free_place(both) == 0
    held = first.detach()
    assert free_place(both) == 1
    assert free_place(both[:1]) is None
    other = second.detach()
    assert free_place(both) is None
    del held
    assert free_place(both) is None
    del other
    assert free_place(both) == 0
