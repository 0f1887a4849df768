"""One tensor of counters for all batch norms of a graph."""

from __future__ import annotations

import copy
import itertools
import random
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kitsune.capture.trace import trace
from kitsune.execution.in_order import InOrder
from kitsune.execution.lanes import HostLanes
from kitsune.execution.lower import lower
from kitsune.fusion import batch_norm
from kitsune.fusion.engine import FusionEngine
from kitsune.graph.dependencies import Operations, operations
from kitsune.passes import pipeline
from kitsune.passes.arrival_counters import arrival_counters
from kitsune.plan import task_graph
from kitsune.plan.legality import problem
from tests.kitsune.execution.test_lower import any_schedule
from tests.kitsune.fusion.running import always, operators
from tests.kitsune.passes.running import calls, names, results, values_are_right
from tests.kitsune.plan.running import effects, node_order, random_order
from tests.kitsune.steps import TracedStep, traced_step

aten = torch.ops.aten

PASS = (("arrival counters", arrival_counters),)


class Block(nn.Module):
    """As a ResNet's, whose input may need fitting."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.Conv2d(after, after, 3, padding=1, bias=False)]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        self.fit = (
            nn.Sequential(nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after)) if before != after else None
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        y = self.norms[1](self.convs[1](y))
        return F.relu(y + (x if self.fit is None else self.fit(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 3), Block(3, 40), Block(40, 40))
        self.head = nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


@cache
def step() -> TracedStep:
    torch.manual_seed(0)
    return traced_step(Net(), F.cross_entropy, torch.randn(2, 3, 5, 4), torch.tensor([1, 4]))


@cache
def fused() -> fx.GraphModule:
    """The step with its batch norms fused, before it is finished."""
    cleared = pipeline.run(step().module, pipeline.CLEARING, verify=True)
    templates = (batch_norm.forward, batch_norm.backward)
    return FusionEngine(templates, always).fuse(cleared)[0]


def normalizations(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if getattr(node.target, "namespace", None) == "kitsune"]


def test_each_batch_norm_has_counters_of_its_own() -> None:
    new = pipeline.run(fused(), PASS, verify=True)
    assert operators(new) == operators(fused())
    assert len(operators(new)) == 5
    (zeros,) = calls(new, aten.zeros.default)
    assert zeros is next(node for node in new.graph.nodes if node.op == "call_function")
    assert values_are_right(new, step().fresh_inputs())
    ranges = []
    for node in normalizations(new):
        counters = node.kwargs["counters"]
        assert isinstance(counters, fx.Node)
        assert counters.args[0] is zeros
        value = counters.meta["val"]
        channels = node.args[0].meta["val"].shape[1]  # type: ignore[union-attr]
        assert value.numel() >= channels * (2 if node.target is torch.ops.kitsune.batch_norm_join.default else 1)
        assert value.dtype == torch.int32
        assert value.storage_offset() % 32 == 0
        ranges.append((value.storage_offset(), value.storage_offset() + value.numel()))
    assert ranges == sorted(ranges)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] == zeros.meta["val"].numel()


def waits(found: Operations, left_out: object) -> dict[str, set[str]]:
    """By operation, those on which it directly depends, but for calls of `left_out`."""
    listed = [operation.node for operation in found.listed]
    return {
        operation.node.name: {listed[place].name for place in operation.after if listed[place].target is not left_out}
        for operation in found.listed
        if operation.node.target is not left_out
    }


def test_they_wait_for_nothing_but_the_zeros() -> None:
    before, after = (operations(module.graph) for module in (fused(), arrival_counters(fused())))
    zeros = aten.zeros.default
    assert waits(after, zeros) == waits(before, zeros)
    (place,) = [place for place, operation in enumerate(after.listed) if operation.node.target is zeros]
    waiting = [operation.node.name for operation in after.listed if place in operation.after]
    assert waiting == [node.name for node in normalizations(fused())]


@pytest.mark.parametrize("seed", range(3))
def test_executors_give_the_same(seed: int) -> None:
    wanted = results(fused(), step().fresh_inputs())
    new = pipeline.run(fused(), (*pipeline.FINISHING, *pipeline.splitting(2)), verify=True)
    assert len(calls(new, aten.zeros.default)) == 1
    assert results(new, step().fresh_inputs()) == wanted
    tasks = task_graph(new.graph)
    assert problem(new.graph, tasks) is None
    order = random_order(tasks, random.Random(seed))
    in_order = effects(new, names(new), step().fresh_inputs())
    assert effects(new, node_order(new, tasks, order), step().fresh_inputs()) == in_order
    lowered = lower(new, tasks, any_schedule(tasks, seed, 3))
    runs = InOrder(lowered.module, lanes=HostLanes)
    inputs = step().fresh_inputs()
    outputs = runs(inputs)
    for one, other in zip([*outputs, *inputs], _as_tensors(new), strict=True):
        assert torch.equal(one, other)


def _as_tensors(module: fx.GraphModule) -> list[Tensor]:
    inputs = step().fresh_inputs()
    with torch.no_grad():
        return [*module(*inputs), *inputs]


def test_counters_that_are_there_stay() -> None:
    once = arrival_counters(fused())
    assert names(arrival_counters(once)) == names(once)


def test_other_graphs_stay_as_they_are() -> None:
    module = trace(lambda x: [x.sin()], [torch.ones(3)])
    before = copy.deepcopy(module.graph)
    assert str(arrival_counters(module).graph) == str(before)
