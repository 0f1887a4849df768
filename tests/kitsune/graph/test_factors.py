"""Values told by the factors of their sizes, against the values themselves."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from kitsune.graph.factors import Form, common_parts, of_itself, sizes_of

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


def known(tensor: Tensor) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = tensor
    return node


def told(form: Form) -> Tensor:
    """The value, by what is said of it."""
    flat, of_base = (list(itertools.chain(*dims)) for dims in (form.dims, form.split))
    parts: Tensor = form.base.meta["val"].reshape([factor.size for factor in of_base])
    turned = parts.permute([of_base.index(factor) for factor in flat])
    return turned.reshape([math.prod(factor.size for factor in dim) for dim in form.dims])


@given(SIZES, st.data())
def test_views_of_a_value(sizes: list[int], data: st.DataObject) -> None:
    value = torch.arange(math.prod(sizes)).reshape(sizes)
    form = of_itself(known(value))
    for _ in range(4):
        order = data.draw(st.permutations(range(value.dim())))
        form, value = form.permuted(order), value.permute(order)
        others = data.draw(st.permutations(list(value.size())))
        regrouped = form.regrouped(others)
        if regrouped is not None:
            form, value = regrouped, value.reshape(others)
        assert torch.equal(told(form), value)
        assert torch.equal(told(form.renamed()), value)


@given(SIZES, st.data())
def test_strides_are_those_of_the_base(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    value = torch.arange(math.prod(sizes)).reshape(sizes).permute(order)
    form = of_itself(known(value)).regrouped([value.numel()])
    assert form is not None
    strides = form.strides()
    assert [strides[factor] for factor in form.dims[0]] == [
        stride for size, stride in zip(value.size(), value.stride(), strict=True) if size > 1
    ]
    (lying,) = form.as_it_lies()
    assert [strides[factor] for factor in lying] == sorted(strides.values(), reverse=True)


def test_a_dimension_is_split_no_finer_than_needed() -> None:
    form = of_itself(known(torch.zeros(6, 4)))
    assert form.regrouped([24]) == Form(form.base, form.split, ((form.dims[0][0], form.dims[1][0]),))
    finer = form.regrouped([2, 12])
    assert finer is not None
    assert sizes_of(finer.dims) == [[2], [3, 4]]
    assert sizes_of(finer.split) == [[2, 3], [4]]
    assert form.regrouped([4, 6]) is None


@pytest.mark.parametrize(
    ("splits", "parts"),
    [
        ([[[6]], [[6]]], [[6]]),
        ([[[6]], [[2, 3]]], [[2, 3]]),
        ([[[4, 6]], [[2, 12]]], [[2, 2, 6]]),
        ([[[2, 3]], [[3, 2]]], None),
        ([[[2], []], [[2], []]], [[2], []]),
    ],
)
def test_common_parts(splits: list[list[list[int]]], parts: list[list[int]] | None) -> None:
    assert common_parts(splits) == parts
