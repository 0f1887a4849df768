"""Memory plans of whole training steps of the benchmark's models."""

from functools import cache

import pytest

import models
from kitsune.graph.liveness import peak_bytes
from kitsune.memory.check import check_memory
from kitsune.memory.planner import plan_memory
from kitsune.plan import TaskGraph, task_graph
from tests.kitsune.memory.graphs import in_order, random_schedule
from tests.kitsune.steps import traced_step

BATCH_SIZES = {"mlp": 64, "lenet": 64, "resnet18": 8}


@cache
def step_of(name: str, keep_grads: bool) -> tuple[TaskGraph, int]:
    """The tasks of the model's step (forward, loss, backward, Adam), and the peak bytes of its graph, run in order."""
    workload = models.build(name)
    x, y = workload.batch(BATCH_SIZES[name])
    graph = traced_step(workload.module, workload.loss_fn, x, y, keep_grads=keep_grads).module.graph
    return task_graph(graph), peak_bytes(graph)


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("name", models.names())
def test_in_order_a_step_needs_little_more_than_what_is_alive(name: str, keep_grads: bool) -> None:
    graph, peak = step_of(name, keep_grads)
    schedule = in_order(graph)
    plan = plan_memory(graph, schedule)
    assert check_memory(graph, schedule, plan) == []
    assert plan.arena_bytes <= 1.05 * plan.live_bytes
    exact = plan_memory(graph, schedule, alignment=1)
    assert exact.live_bytes == peak
    assert exact.arena_bytes <= 1.05 * peak


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("num_streams", [2, 4])
def test_on_streams_a_step_needs_no_more_than_what_may_be_alive(name: str, num_streams: int) -> None:
    graph, _ = step_of(name, False)
    for seed in range(5):
        schedule = random_schedule(graph, num_streams, seed, stay=0.9)
        plan = plan_memory(graph, schedule)
        assert check_memory(graph, schedule, plan) == []
        assert plan.arena_bytes <= 1.05 * plan.live_bytes
        assert plan.arena_bytes < sum(value.num_bytes for value in graph.values)
