"""Operators that overwrite what the graph has made, and the way there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import models
from kitsune.capture.trace import trace
from kitsune.passes import pipeline
from kitsune.passes.in_place import in_place, out_of_place
from tests.kitsune.passes.running import names, results, values_are_right
from tests.kitsune.steps import traced_step

Function = Callable[..., Sequence[Tensor]]

OUT = (("out of place", out_of_place),)
BACK = (("in place", in_place),)


def chain(x: Tensor) -> list[Tensor]:
    return [x.sin().add_(x).relu_()]


def with_views_after(x: Tensor) -> list[Tensor]:
    y = x.sin().mul_(2)
    return [y.t().exp(), y.view(6).cos()]


def the_input(x: Tensor) -> list[Tensor]:
    x.mul_(2)
    return [x.sin()]


def a_view_of_it(x: Tensor) -> list[Tensor]:
    y = x.sin()
    y[0].mul_(2)
    return [y.exp()]


def seen_through_another(x: Tensor) -> list[Tensor]:
    y = x.sin()
    other = y.view(6)
    y.mul_(2)
    return [other.exp()]


@pytest.mark.parametrize(
    ("function", "overwriting"),
    [(chain, 0), (with_views_after, 0), (the_input, 1), (a_view_of_it, 1), (seen_through_another, 1)],
)
def test_only_what_others_see_is_overwritten(function: Function, overwriting: int) -> None:
    inputs = [torch.rand(2, 3)]
    module = trace(function, inputs)
    new = pipeline.run(module, OUT, verify=True)
    targets = [str(node.target) for node in new.graph.nodes if node.op == "call_function"]
    assert sum(target.split(".")[1].endswith("_") for target in targets) == overwriting
    assert results(new, [inputs[0].clone()]) == results(module, [inputs[0].clone()])
    assert values_are_right(new, [inputs[0].clone()])
    back = pipeline.run(new, BACK, verify=True)
    assert [node.target for node in back.graph.nodes] == [node.target for node in module.graph.nodes]
    assert results(back, [inputs[0].clone()]) == results(module, [inputs[0].clone()])


def test_what_has_new_readers_is_not_overwritten_again() -> None:
    inputs = [torch.rand(2, 3)]
    new = out_of_place(trace(lambda x: [x.sin().relu_()], inputs))
    sin, relu = (node for node in new.graph.nodes if node.op == "call_function")
    output = new.graph.output_node()
    output.args = ([relu, sin],)
    back = in_place(new)
    assert [node.target for node in back.graph.nodes if node.op == "call_function"][1] == torch.ops.aten.relu.default
    back.recompile()
    one, other = back(*inputs)
    assert torch.equal(one, inputs[0].sin())
    assert torch.equal(other, inputs[0].sin())


def test_another_type_is_no_place_for_the_result() -> None:
    """Where types are promoted, the operator that overwrites rounds to that of its argument."""
    inputs = [torch.rand(2, 3, dtype=torch.float16), torch.rand(2, 3)]
    module = trace(lambda x, y: [x.sin().add_(y)], inputs)
    new = out_of_place(module)
    assert results(new, inputs) == results(module, inputs)


@pytest.mark.parametrize("name", ["lenet", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_steps_come_back_as_they_were(name: str) -> None:
    workload = models.build(name, seed=0)
    step = traced_step(workload.module, torch.nn.functional.cross_entropy, *workload.batch(2, index=0))
    out = pipeline.run(step.module, OUT, verify=True)
    back = pipeline.run(out, BACK, verify=True)
    assert names(back) == names(step.module)
    assert results(out, step.fresh_inputs()) == results(step.module, step.fresh_inputs())
    assert results(back, step.fresh_inputs()) == results(step.module, step.fresh_inputs())
