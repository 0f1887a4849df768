"""Regions that compute point-wise values again, rather than to have them written and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.errors import Refusal
from kitsune.graph import dataflow
from kitsune.passes import pipeline
from kitsune.passes.regions import Fused, fuse_regions
from tests.kitsune.passes.running import OPERATORS, calls, results, values_are_right

Function = Callable[[Tensor, Tensor], Sequence[Tensor]]


def activation(x: Tensor, w: Tensor) -> list[Tensor]:
    """Its backward needs the tangent, which follows from `a`."""
    a = x @ w
    t = (a * a * a + a).tanh()
    z = ((t + 1) * a) @ w
    return [(z * (1 - t * t) * a) @ w]


def views(x: Tensor, w: Tensor) -> list[Tensor]:
    """The same, where the two see it in different shapes."""
    a = x @ w
    t = (a * a * a + a).tanh().view(-1)
    z = ((t.view(a.shape) + 1) * a) @ w
    return [(z * (1 - t * t).view(a.shape) * a) @ w]


def twice(x: Tensor, w: Tensor) -> list[Tensor]:
    """Two regions do so."""
    a = x @ w
    t = (a * a * a + a).tanh()
    z = ((t + 1) * a) @ w
    g = (z * (1 - t * t) * a) @ w
    return [(g * (1 + t) * a) @ w]


def returned(x: Tensor, w: Tensor) -> list[Tensor]:
    """Somebody else needs the tangent, which costs nothing more."""
    a = x @ w
    t = (a * a * a + a).tanh()
    z = ((t + 1) * a) @ w
    return [(z * (1 - t * t) * a) @ w, t]


def of_a_sum(x: Tensor, w: Tensor) -> list[Tensor]:
    a = x @ w
    t = (a.exp() / a.exp().sum(1, keepdim=True)).tanh()
    z = ((t + 1) * a) @ w
    return [(z * (1 - t * t) * a) @ w]


def of_more_values(x: Tensor, w: Tensor) -> list[Tensor]:
    """It would read three values in place of one that is written anyway."""
    a, b, c = x @ w, w @ x, x @ x
    t = (a + b * c).tanh()
    z = t @ w
    return [(z * t * z) @ w]


def of_inputs(x: Tensor, w: Tensor) -> list[Tensor]:
    t = (x * x * x + x).tanh()
    z = ((t + 1) * x) @ w
    return [(z * (1 - t * t) * x) @ w]


def of_a_result(x: Tensor, w: Tensor) -> list[Tensor]:
    """To which the caller may write, where the graph is divided before the second region."""
    a = x @ w
    t = (a * a * a + a).tanh()
    z = ((t + 1) * a) @ w
    return [(z * (1 - t * t) * z) @ w, a.t()]


def of_a_region(x: Tensor, w: Tensor) -> list[Tensor]:
    """What the middle one makes follows from what the first one makes and does not write."""
    a = x @ w
    t = (a * a * a + a).tanh()
    z = ((t + 1) * a) @ w
    s = (z * (1 - t * t) * a).sin()
    g = (s + 1) @ w
    return [(g * (1 + s) * z) @ w]


def overwritten(x: Tensor, w: Tensor) -> list[Tensor]:
    a = x @ w
    t = (a * a * a + a).tanh()
    z = ((t + 1) * a) @ w
    a.view(-1).add_(1)
    return [(z * (1 - t * t) * (z + 1)) @ w, a]


def fused(function: Function, judge: Callable[..., Refusal | None] = lambda *_: None) -> Fused:
    """What becomes of it; it computes the same."""
    inputs = [torch.randn(6, 6), torch.randn(6, 6)]
    module = trace(function, inputs)
    new = fuse_regions(module, OPERATORS, judge)
    for graph in (new.module, pipeline.run(new.module, pipeline.FINISHING, verify=True)):
        assert results(graph, [one.clone() for one in inputs]) == results(module, [one.clone() for one in inputs])
        assert values_are_right(graph, inputs)
    return new


def traffic(found: Fused) -> list[tuple[int, int]]:
    """Of each region, how many values it reads and writes."""
    return [(region.num_inputs, region.num_outputs) for region in found.regions]


@pytest.mark.parametrize("function", [activation, views])
def test_what_follows_from_what_is_read_anyway_is_not_kept(function: Function) -> None:
    assert traffic(fused(function)) == [(1, 1), (2, 1)]


def test_several_regions_may_repeat_the_same() -> None:
    assert traffic(fused(twice)) == [(1, 1), (2, 1), (2, 1)]


def test_what_others_need_is_written_all_the_same() -> None:
    assert traffic(fused(returned)) == [(1, 2), (2, 1)]


@pytest.mark.parametrize(
    ("function", "written", "read"),
    [(of_a_sum, 2, 3), (of_more_values, 1, 2), (of_inputs, 2, 3), (of_a_result, 2, 2), (overwritten, 2, 2)],
)
def test_what_is_dear_or_may_change_is_read(function: Function, written: int, read: int) -> None:
    (_, num_outputs), (num_inputs, _) = traffic(fused(function))
    assert (num_outputs, num_inputs) == (written, read)


def test_what_is_repeated_is_made_of_what_is_there() -> None:
    assert traffic(fused(of_a_region)) == [(1, 1), (2, 2), (3, 1)]


@pytest.mark.parametrize(("refuses_all", "left"), [(False, [(1, 2), (3, 1)]), (True, [(1, 2)])])
def test_where_a_region_is_refused_others_write_what_is_read(refuses_all: bool, left: list[tuple[int, int]]) -> None:
    """What repeats, or what reads the result of the second product at all."""

    def judge(module: fx.GraphModule, _operator: object) -> Refusal | None:
        reads, repeats = len(dataflow.placeholders(module.graph)), bool(calls(module, torch.ops.aten.tanh.default))
        return Refusal("it is not faster") if reads > 1 and (repeats or refuses_all) else None

    found = fused(activation, judge)
    assert traffic(found) == left
    assert len(found.refused) == refuses_all


OPERATORS_OF_PROGRAMS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    lambda a, b: a @ b / 6,
    lambda a, b: a * b,
    lambda a, b: a + b,
    lambda a, _: a.tanh(),
    lambda a, b: a.reshape(-1).sin().view(6, 6) - b,
    lambda a, b: a - b.mean(1, keepdim=True),
    lambda a, b: a.t() * b,
)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 9)), min_size=8, max_size=30),
    st.sets(st.integers(0, 30), max_size=3),
    st.integers(2, 7),
)
def test_programs_compute_the_same(lines: Sequence[tuple[int, int, int]], kept: set[int], refused: int) -> None:
    """A line takes two of the latest ten values. Regions with so many operators, or multiples of that, are refused."""

    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        values = [x, w]
        for operator, one, other in lines:
            first, second = (values[-1 - place % min(len(values), 10)] for place in (one, other))
            values.append(OPERATORS_OF_PROGRAMS[operator](first, second))
        return [values[-1], *(values[place % len(values)].clone() for place in kept)]

    def judge(module: fx.GraphModule, _operator: object) -> Refusal | None:
        return None if len(module.graph.nodes) % refused else Refusal("it is not faster")

    fused(program, judge)
