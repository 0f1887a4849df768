"""``pytest tests/benchmarks/test_planning.py -m benchmark``: how long planning takes as graphs grow."""

import operator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import fx

from kitsune.plan import TaskGraph, task_graph

_aten = torch.ops.aten
_TASKS_PER_LAYER = 8
_WIDTH = 4


def training_graph(num_tasks: int) -> fx.Graph:
    """A graph of `num_tasks` tasks like a training step: forward, backward, one update of all weights.

    A layer is batch norm (with results that are taken apart and statistics that it changes), a linear map of a
    transposed weight, a residual sum and an activation in place; its backward pass has three tasks, and one more
    counts the layer's calls. Values are tensors without data.
    """
    num_layers = (num_tasks - 1) // _TASKS_PER_LAYER
    graph = fx.Graph()
    width = torch.empty(_WIDTH, device="meta")
    square = torch.empty(_WIDTH, _WIDTH, device="meta")

    def given(name: str, form: torch.Tensor) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty_like(form)
        return node

    def call(target: object, args: tuple[object, ...], value: object) -> fx.Node:
        node = graph.create_node("call_function", target, args)
        node.meta["val"] = value
        return node

    def new(target: object, *args: object) -> fx.Node:
        return call(target, args, torch.empty_like(square))

    def view(target: object, node: fx.Node, *args: object) -> fx.Node:
        return call(target, (node, *args), node.meta["val"].t() if target is _aten.t.default else node.meta["val"][:])

    def inputs(name: str, form: torch.Tensor) -> list[fx.Node]:
        return [given(f"{name}_{layer}", form) for layer in range(num_layers)]

    weights, moments, steps = inputs("weight", square), inputs("moment", square), inputs("step", width)
    means, variances = inputs("mean", width), inputs("variance", width)
    value, rate = given("x", square), given("rate", width)
    saved = []
    for layer in range(num_layers):
        results = (torch.empty_like(square), torch.empty_like(width), torch.empty_like(width))
        arguments = (value, None, None, means[layer], variances[layer], True, 0.1, 1e-5)
        norm = call(_aten.native_batch_norm.default, arguments, results)
        parts = [call(operator.getitem, (norm, place), results[place]) for place in range(3)]
        product = new(_aten.mm.default, parts[0], view(_aten.t.default, weights[layer]))
        total = new(_aten.add.Tensor, product, value)
        value = call(_aten.relu_.default, (total,), total.meta["val"])
        saved.append((parts[0], view(_aten.detach.default, value)))
        call(_aten.add_.Tensor, (steps[layer], 1), steps[layer].meta["val"])
    gradient, grads = new(_aten.sin.default, value), []
    for layer in reversed(range(num_layers)):
        before, after = saved[layer]
        gradient = new(_aten.threshold_backward.default, gradient, after, 0)
        grads.append(new(_aten.mm.default, view(_aten.t.default, gradient), before))
        gradient = new(_aten.mm.default, gradient, weights[layer])
    numbers = (0.0, 0.9, rate, 0.0, False, False, False)
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "is_first_step")
    lists = (weights, [view(_aten.detach.default, grad) for grad in reversed(grads)], moments)
    update = graph.call_function(_aten._fused_sgd_.tensor_lr, lists, dict(zip(names, numbers, strict=True)))
    update.meta["val"] = None
    graph.output([value, gradient])
    return graph


def test_the_graph_is_what_it_says() -> None:
    tasks = task_graph(training_graph(8 * 5 + 2)).tasks
    assert len(tasks) == 8 * 5 + 2
    update = tasks[-1]
    assert sum(dependency.kind == "true" for dependency in update.after) == 5
    assert max(len(task.after) for task in tasks[:-1]) <= 3


@pytest.mark.benchmark
@pytest.mark.parametrize("num_tasks", [2_500, 5_000, 10_000, 20_000])
def test_finding_tasks_and_dependencies(benchmark: BenchmarkFixture, num_tasks: int) -> None:
    graph = training_graph(num_tasks)
    benchmark.group = "tasks of a graph"
    found: TaskGraph = benchmark.pedantic(task_graph, (graph,), rounds=5, warmup_rounds=1)  # type: ignore[no-untyped-call]
    assert abs(len(found.tasks) - num_tasks) <= _TASKS_PER_LAYER
