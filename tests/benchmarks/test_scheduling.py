"""How long scheduling takes for graphs shaped like training steps: ``pytest -m benchmark tests/benchmarks``."""

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kitsune.plan import Costs, Schedule, TaskGraph
from kitsune.schedule import DataflowScheduler, check, peak_bytes, simulate
from kitsune.schedule.assign import in_order
from kitsune.schedule.scheduler import Strategy
from tests.kitsune.schedule.graphs import training_step

pytestmark = pytest.mark.benchmark

_NUM_LAYERS = {10_001: 1111, 20_000: 2222}  # by number of tasks


@pytest.fixture(params=_NUM_LAYERS)
def step(request: pytest.FixtureRequest) -> tuple[TaskGraph, Costs]:
    graph, costs = training_step(_NUM_LAYERS[request.param])
    assert len(graph.tasks) == request.param
    return graph, costs


@pytest.mark.parametrize("strategy", ["auto", "chains", "list"])
def test_schedule(benchmark: BenchmarkFixture, step: tuple[TaskGraph, Costs], strategy: Strategy) -> None:
    schedule = _run(benchmark, lambda: DataflowScheduler(4, strategy).schedule(*step))
    assert check(step[0], schedule) == []


def test_schedule_within_the_peak_of_one_stream(benchmark: BenchmarkFixture, step: tuple[TaskGraph, Costs]) -> None:
    graph, costs = step
    bound = peak_bytes(graph, in_order(graph))
    schedule = _run(benchmark, lambda: DataflowScheduler(4, max_bytes=bound).schedule(graph, costs))
    assert peak_bytes(graph, schedule) <= bound


def test_simulate(benchmark: BenchmarkFixture, step: tuple[TaskGraph, Costs]) -> None:
    graph, costs = step
    schedule = DataflowScheduler(4, "chains").schedule(graph, costs)
    assert benchmark.pedantic(lambda: simulate(graph, costs, schedule), rounds=3).total_us > 0


def _run(benchmark: BenchmarkFixture, make: Callable[[], Schedule]) -> Schedule:
    schedule: Schedule = benchmark.pedantic(make, rounds=3)
    benchmark.extra_info.update(strategy=schedule.strategy, streams=schedule.num_streams, waits=len(schedule.waits))
    return schedule
