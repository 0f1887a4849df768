"""The graph that autograd has recorded."""

from __future__ import annotations

import torch

from kitsune.capture.autograd_graph import nodes_behind


def test_each_node_comes_once() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    names = sorted(node.name() for node in nodes_behind([y * y, y.sum()]))
    assert names == ["ExpBackward0", "MulBackward0", "SumBackward0", "torch::autograd::AccumulateGrad"]


def test_without_gradients_there_are_none() -> None:
    assert not list(nodes_behind([torch.ones(2), torch.ones(2, requires_grad=True)]))
