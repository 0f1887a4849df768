"""Split casts give what the combined ones do, the first ones used first."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.passes import split_casts as module_of_pass
from kitsune.passes.pipeline import problem
from kitsune.passes.split_casts import split_casts

CAST = torch.ops.kitsune.cast_many.default


def program(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    """Uses its casts in the order d, b, c; and not that of a."""
    _, half_b, half_c, half_d = CAST([a, b, c, d], torch.bfloat16)
    return [half_d * 2, half_b + 1, half_c * half_d]


def inputs() -> list[Tensor]:
    return [torch.linspace(-3, 3, 2**number).reshape(-1, 2) for number in (4, 5, 6, 6)]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    monkeypatch.setattr(module_of_pass, "_LEAST_BYTES", 16)
    return trace(program, inputs())


def casts(module: fx.GraphModule) -> list[int]:
    """Of each cast, how many tensors it takes."""
    return [len(node.args[0]) for node in module.graph.find_nodes(op="call_function", target=CAST)]


@pytest.mark.parametrize(("num_parts", "expected"), [(1, [4]), (2, [1, 2]), (3, [1, 1, 1]), (9, [1, 1, 1])])
def test_results_are_the_same_bits(module: fx.GraphModule, num_parts: int, expected: list[int]) -> None:
    split = split_casts(module, num_parts)
    assert casts(split) == expected
    assert problem(module.graph, split.graph) is None
    for one, other in zip(split(*inputs()), module(*inputs()), strict=True):
        assert torch.equal(one, other)


def test_what_is_used_first_is_cast_first(module: fx.GraphModule) -> None:
    split = split_casts(module, 3)
    order = [str(node.args[0][0]) for node in split.graph.find_nodes(op="call_function", target=CAST)]
    placeholders = [node.name for node in split.graph.nodes if node.op == "placeholder"]
    assert [placeholders.index(name) for name in order] == [3, 1, 2]


def test_small_casts_stay_together(module: fx.GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_pass, "_LEAST_BYTES", 2**20)
    assert casts(split_casts(module, 4)) == [4]


def test_a_cast_that_is_not_taken_apart_stays(module: fx.GraphModule) -> None:
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in "ab"]
    for node, value in zip(given, inputs(), strict=False):
        node.meta["val"] = value
    made = graph.call_function(CAST, (given, torch.bfloat16))
    made.meta["val"] = CAST([node.meta["val"] for node in given], torch.bfloat16)
    graph.output([graph.call_function(operator.getitem, (graph.call_function(tuple, (made,)), 0))])
    assert casts(split_casts(fx.GraphModule({}, graph), 4)) == [2]


def test_the_number_of_parts_is_checked(module: fx.GraphModule) -> None:
    with pytest.raises(ValueError, match="num_parts is 0"):
        split_casts(module, 0)
