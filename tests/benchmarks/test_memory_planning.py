"""``pytest tests/benchmarks -m benchmark``: how long memory plans of large training steps take."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kitsune.memory.check import check_memory
from kitsune.memory.planner import plan_memory
from kitsune.plan import Schedule, TaskGraph
from tests.kitsune.memory.graphs import in_order, random_schedule, training_step

_LAYERS = {"1,000 tasks": 128, "10,000 tasks": 1280, "20,000 tasks": 2560}


def scheduled(size: str, num_streams: int) -> tuple[TaskGraph, Schedule]:
    graph = training_step(_LAYERS[size])
    schedule = in_order(graph) if num_streams == 1 else random_schedule(graph, num_streams, 0, stay=0.8)
    assert schedule.clocks  # they are the schedule's own, made once
    return graph, schedule


@pytest.mark.benchmark
@pytest.mark.parametrize("num_streams", [1, 2, 4, 8])
@pytest.mark.parametrize("size", _LAYERS)
def test_planning(benchmark: BenchmarkFixture, size: str, num_streams: int) -> None:
    graph, schedule = scheduled(size, num_streams)
    benchmark.group = f"memory plan, {num_streams} streams"
    plan = benchmark.pedantic(plan_memory, (graph, schedule), rounds=5, warmup_rounds=1)  # type: ignore[no-untyped-call]
    benchmark.extra_info["tasks"] = len(graph.tasks)
    benchmark.extra_info["arena / live bytes"] = plan.arena_bytes / plan.live_bytes


@pytest.mark.benchmark
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("size", _LAYERS)
def test_checking(benchmark: BenchmarkFixture, size: str, num_streams: int) -> None:
    graph, schedule = scheduled(size, num_streams)
    plan = plan_memory(graph, schedule)
    benchmark.group = f"check of a memory plan, {num_streams} streams"
    assert benchmark.pedantic(check_memory, (graph, schedule, plan), rounds=5) == []  # type: ignore[no-untyped-call]
