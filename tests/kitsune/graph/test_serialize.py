"""Graphs travel to another process and back as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx

from kitsune.capture.trace import trace
from kitsune.graph import dataflow
from kitsune.graph.serialize import UnknownOperatorError, digest, packed, packed_tensors, unpacked, unpacked_tensors
from kitsune.graph.signature import graph_signature
from kitsune.graph.values import mode_of, wrong_value

Function = Callable[..., Sequence[torch.Tensor]]


def views_and_writes(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    part = x.t()[1:]
    part.add_(1.0)
    values, indices = y.sort(dim=0, stable=True)
    return [part.clone(), values * float("inf"), indices, torch.cat([x.flatten(), y.flatten()]), x.to(torch.bfloat16)]


def constants(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * torch.tensor([1.0, 2.0, 3.0]), torch.full_like(x, 2, dtype=torch.int8)]


def storages(graph: fx.Graph) -> list[list[int]]:
    """Of each node the storages of its values, numbered in the order in which they are met."""
    numbers: dict[int, int] = {}
    return [
        [numbers.setdefault(dataflow.storage_of(tensor), len(numbers)) for tensor in dataflow.tensors(node)]
        for node in graph.nodes
    ]


def statements(module: fx.GraphModule) -> list[str]:
    """Its code, without the head of the function."""
    return [line for line in module.code.splitlines() if line.strip() and not line.startswith("def ")]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (views_and_writes, [torch.randn(4, 3), torch.randn(5)]),
        (constants, [torch.randn(3)]),
        (lambda x: [x.sum()], [torch.randn(6, 2)[::2].t()]),
        (lambda x: [x + 1], [torch.randn(0, 3)]),
    ],
)
def test_a_graph_comes_back_as_it_was(function: Function, inputs: list[torch.Tensor]) -> None:
    module = trace(function, inputs)
    for mode in (None, mode_of(module.graph)):
        back = unpacked(packed(module), mode)
        assert statements(back) == statements(module)
        assert graph_signature(back.graph) == graph_signature(module.graph)
        assert storages(back.graph) == storages(module.graph)
        assert wrong_value(back.graph) is None
        assert mode is None or mode_of(back.graph) is mode
        given = [[tensor.clone() for tensor in inputs] for _ in range(2)]
        for one, other in zip(module(*given[0]), back(*given[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_names_and_lines_of_the_user_s_code_are_kept() -> None:
    module = trace(views_and_writes, [torch.randn(4, 3), torch.randn(5)])
    back = unpacked(packed(module))
    assert [node.name for node in back.graph.nodes] == [node.name for node in module.graph.nodes]
    pairs = zip(module.graph.nodes, back.graph.nodes, strict=True)
    assert all(one.meta.get("stack_trace") == other.meta.get("stack_trace") for one, other in pairs)


def test_an_operator_that_is_not_there_is_named() -> None:
    with torch.library._scoped_library("passing", "DEF") as library:
        library.define("by(Tensor x) -> Tensor")
        library.impl("by", torch.sin, "CompositeExplicitAutograd")
        library.impl("by", torch.sin, "Meta")
        graph = fx.Graph()
        graph.output([graph.call_function(torch.ops.passing.by.default, (graph.placeholder("x"),))])
        content = packed(fx.GraphModule({}, graph))
    for name in ("by", "passing"):
        owner = torch.ops.passing if name == "by" else torch.ops
        if name in owner.__dict__:
            delattr(owner, name)
    with pytest.raises(UnknownOperatorError, match="passing::by is not registered"):
        unpacked(content)


def test_what_is_no_graph_of_operators_is_refused() -> None:
    graph = fx.Graph()
    graph.output([graph.call_function(operator.neg, (graph.placeholder("x"),))])
    with pytest.raises(TypeError, match="is no operator"):
        packed(fx.GraphModule({}, graph))


def test_layouts_of_tensors_come_back_with_what_they_share() -> None:
    base = torch.randn(12)
    tensors = [base.view(3, 4).t(), base[3:5], torch.randn(2, dtype=torch.float64)]
    back = unpacked_tensors(packed_tensors(tensors))
    for one, other in zip(tensors, back, strict=True):
        assert (one.size(), one.stride(), one.dtype, one.storage_offset()) == (
            other.size(),
            other.stride(),
            other.dtype,
            other.storage_offset(),
        )
    keys = list(map(dataflow.storage_of, back))
    assert keys[0] == keys[1] != keys[2]


def test_digests_tell_constants_apart_and_names_of_no_process() -> None:
    """Graphs that differ in what a constant tensor holds are others, though their operators are the same."""

    def scaled(factor: float) -> fx.GraphModule:
        return trace(lambda x: [x * torch.tensor([1.0, factor])], [torch.randn(2)])

    assert digest(scaled(2.0)) == digest(scaled(2.0)) == digest(unpacked(packed(scaled(2.0))))
    assert digest(scaled(2.0)) != digest(scaled(2.0000002))
    assert graph_signature(scaled(2.0).graph) == graph_signature(scaled(3.0).graph), "which is of times alone"


def test_digests_tell_shared_memory_apart() -> None:
    base = torch.randn(4)
    apart, together = ([torch.randn(2), torch.randn(2)], [base[:2], base[2:]])
    assert digest(trace(lambda x, y: [x + y], apart)) != digest(trace(lambda x, y: [x + y], together))
