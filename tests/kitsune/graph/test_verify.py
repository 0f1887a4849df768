"""What is a legal graph, and what is said of one that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from kitsune.graph.verify import refuse_graph, source_line


def graph_of(function: Callable[..., list[Tensor]], *inputs: Tensor) -> fx.Graph:
    """Traced without any of Kitsune's checks."""
    with fx.traceback.preserve_node_meta():
        module = make_fx(function, tracing_mode="fake", _error_on_data_dependent_ops=False)(*inputs)
    return module.graph


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [torch.relu(x) @ x.t()],
        lambda x: [x.add_(1)],
        lambda x: [torch.nn.functional.dropout(x, 0.5)],
        lambda x: [x.max(0).values],
        lambda x: [x * torch.tensor(2.0)],
        lambda x: [x[[0, 1]]],
        lambda x: [x.index_select(0, torch.tensor([0, 1]))],
    ],
    ids=["arithmetic", "in place", "random", "getitem", "constant", "integer index", "index_select"],
)
def test_legal_graphs(function: Callable[[Tensor], list[Tensor]]) -> None:
    assert refuse_graph(graph_of(function, torch.ones(3, 3))) is None


def test_two_devices() -> None:
    graph = graph_of(lambda x: [x.to("meta") + 1], torch.ones(3))
    refusal = refuse_graph(graph)
    assert refusal is not None
    assert "several devices (cpu, meta)" in refusal.reason


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (torch.ops.aten.nonzero.default, lambda x, mask: (x,)),
        (torch.ops.aten._unique2.default, lambda x, mask: (x,)),
        (torch.ops.aten.masked_select.default, lambda x, mask: (x, mask)),
        (torch.ops.aten.index.Tensor, lambda x, mask: (x, [mask])),
    ],
    ids=["nonzero", "unique", "masked_select", "index"],
)
def test_sizes_that_depend_on_data(
    operator: torch._ops.OpOverload, arguments: Callable[[fx.Node, fx.Node], tuple[Any, ...]]
) -> None:
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    x.meta["val"], mask.meta["val"] = torch.ones(3), torch.ones(3, dtype=torch.bool)
    graph.output([graph.call_function(operator, arguments(x, mask))])
    refusal = refuse_graph(graph)
    assert refusal is not None
    assert "size that depends on data" in refusal.reason
    assert str(operator) in str(refusal)


def test_reading_on_the_host() -> None:
    graph = fx.Graph()
    place = graph.placeholder("x")
    place.meta["val"] = torch.ones(())
    graph.output([graph.call_function(torch.ops.aten._local_scalar_dense.default, (place,))])
    refusal = refuse_graph(graph)
    assert refusal is not None
    assert "takes a number out of a tensor" in refusal.reason
    assert refusal.remedy == "keep the value in a tensor"


def test_what_is_not_aten() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    refusal = refuse_graph(fx.symbolic_trace(module).graph)
    assert refusal is not None
    assert "call_module of 0 was not traced" in refusal.reason
    graph = fx.Graph()
    graph.output([graph.call_function(torch.relu, (graph.placeholder("x"),))])
    refusal = refuse_graph(graph)
    assert refusal is not None
    assert "not an ATen operator" in refusal.reason
    graph = fx.Graph()
    graph.output([graph.call_function(torch.ops.prims.sin.default, (graph.placeholder("x"),))])
    refusal = refuse_graph(graph)
    assert refusal is not None
    assert "custom operator prims.sin" in refusal.reason


def test_the_users_line_is_found() -> None:
    node = fx.Graph().placeholder("x")
    assert source_line(node) is None
    node.meta["stack_trace"] = 'File "a.py", line 1, in f\n    outer()\nFile "b.py", line 2, in g\n    inner()\n'
    assert source_line(node) == 'File "b.py", line 2, in g: inner()'
    node.meta["stack_trace"] = 'File "a.py", line 1, in f'
    assert source_line(node) == 'File "a.py", line 1, in f'
