"""The means by which races are looked for on a GPU. On the CPU, where operators run in a plan's order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitsune.engine import planning
from kitsune.engine.planning import Planned
from kitsune.execution.in_order import InOrder
from kitsune.execution.lower import Lowered
from kitsune.memory.pool import MemoryPool
from kitsune.schedule import check
from tests.kitsune.delays import (
    MOST_CYCLES,
    first_difference,
    guarding_waits,
    one_after_another,
    operators,
    random_delays,
    trajectory,
    with_delays,
    without,
)
from tests.kitsune.execution.test_lower import Witness
from tests.kitsune.steps import TracedStep, model_step
from tests.kitsune.test_streams import costs_of_a_gpu

CPU = torch.device("cpu")


@pytest.fixture(params=["mlp", "lenet"])
def step(request: pytest.FixtureRequest) -> TracedStep:
    return model_step(request.param)


@pytest.fixture
def plans(step: TracedStep, monkeypatch: pytest.MonkeyPatch) -> tuple[Planned, ...]:
    monkeypatch.setattr(planning, "measured_costs", costs_of_a_gpu)
    return planning.challengers(step.module, step.inputs, 4)


def lower(planned: Planned) -> Lowered:
    return planned.lowered(MemoryPool().arena(planned.plan.memory.arena_bytes, CPU))


def run(lowered: Lowered, step: TracedStep, lanes: Callable[[], Witness] = Witness) -> list[dict[str, Tensor]]:
    executor = InOrder(lowered.module, lanes=lanes if lowered.num_streams > 1 else None)
    return trajectory(executor, step.fresh_inputs(), [{}], num_steps=3, look_every=2)


def test_delays_are_random_and_a_function_of_the_seed(plans: tuple[Planned, ...]) -> None:
    lowered = lower(plans[-1])
    names = {node.name for node in operators(lowered)}
    several = [random_delays(lowered, seed) for seed in range(20)]
    assert several[3] == random_delays(lowered, 3)
    assert len({tuple(delays.items()) for delays in several}) == 20
    assert {name for delays in several for name in delays} == names
    cycles = [number for delays in several for number in delays.values()]
    assert min(cycles) >= 0
    assert 0.9 * MOST_CYCLES < max(cycles) <= MOST_CYCLES
    assert 0.2 < len(cycles) / (20 * len(names)) < 0.4


def test_delays_come_before_their_operators_on_streams_that_have_begun(
    step: TracedStep, plans: tuple[Planned, ...]
) -> None:
    """And change nothing else: the results are those of the graph in order, to the bit."""
    expected = run(lower(one_after_another(plans[0])), step)
    for seed, planned in enumerate(plans):
        witnesses: list[Witness] = []
        slept: list[tuple[int, int]] = []

        def sleep(cycles: int) -> None:
            assert witnesses[-1].stream in witnesses[-1].begun  # noqa: B023
            slept.append((witnesses[-1].stream, cycles))  # noqa: B023

        def lanes() -> Witness:
            witnesses.append(Witness())  # noqa: B023
            return witnesses[-1]  # noqa: B023

        lowered = lower(planned)
        delays = random_delays(lowered, seed)
        delayed = with_delays(lowered, delays, sleep)
        assert delayed.num_streams == lowered.num_streams
        assert first_difference(run(delayed, step, lanes), expected) is None
        streams = {
            name: planned.plan.schedule.streams[task.index] for task in planned.plan.graph.tasks for name in task.nodes
        }
        assert slept == [(streams.get(name, 0), number) for name, number in delays.items()] * len(expected)
        assert not any(node.target is sleep for node in lowered.module.graph.nodes)
        nodes = list(delayed.module.graph.nodes)
        assert [(after.name, node.args) for node, after in itertools.pairwise(nodes) if node.target is sleep] == [
            (name, (number,)) for name, number in delays.items()
        ]


def test_one_after_another_has_the_same_operators(plans: tuple[Planned, ...]) -> None:
    for planned in plans:
        serial = one_after_another(planned)
        assert serial.plan.schedule.num_streams == 1
        found, wanted = (sorted(str(node.target) for node in operators(lower(one))) for one in (serial, planned))
        assert found == wanted


def test_what_is_left_out_is_one_wait_without_which_the_tasks_are_not_ordered(plans: tuple[Planned, ...]) -> None:
    for planned in plans:
        schedule = planned.plan.schedule
        waits = guarding_waits(planned.plan)
        assert waits
        for wait in waits:
            racing = without(planned, wait).plan
            assert schedule.happens_before(wait.earlier, wait.later)
            assert not racing.schedule.happens_before(wait.earlier, wait.later)
            assert {*schedule.waits} - {*racing.schedule.waits} == {wait}
            assert check(racing.graph, racing.schedule) != []
            assert racing.memory == planned.plan.memory


def test_what_a_racing_plan_runs(step: TracedStep, plans: tuple[Planned, ...]) -> None:
    """The same instructions but for one wait; the host, which runs one operator after the other, sees no race."""
    expected = run(lower(one_after_another(plans[0])), step)
    for planned in plans:
        (wait, *_) = guarding_waits(planned.plan)
        lowered = lower(without(planned, wait))
        told = [node.args[1:] for node in lowered.module.graph.nodes if node.target == "wait"]
        assert len(told) == len(planned.plan.schedule.waits) - 1
        late = planned.plan.graph.tasks[wait.earlier].name
        assert first_difference(run(with_delays(lowered, {late: 5}, lambda cycles: None), step), expected) is None


def accumulate(inputs: list[Tensor]) -> list[Tensor]:
    x, total = inputs
    total += x
    return [x * 2]


def test_a_trajectory_looks_at_the_state_now_and_then() -> None:
    batches = [{0: torch.tensor([1.0])}, {0: torch.tensor([10.0])}]
    steps = trajectory(accumulate, [torch.zeros(1), torch.zeros(1)], batches, num_steps=5, look_every=2)
    assert [left["output 0"].item() for left in steps] == [2, 20, 2, 20, 2]
    assert [left["input 1"].item() if "input 1" in left else None for left in steps] == [None, 11, None, 22, 23]


def test_a_trajectory_draws_the_same_random_numbers_always() -> None:
    first, second = (
        trajectory(lambda inputs: [torch.rand(3)], [torch.zeros(1)], [{}], num_steps=3, look_every=1) for _ in range(2)
    )
    assert first_difference(first, second) is None
    assert first_difference(first[:1], first[1:2]) == "step 0, output 0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_one_element_that_differs_is_seen(dtype: torch.dtype) -> None:
    def steps() -> list[dict[str, Tensor]]:
        return [{"output 0": torch.zeros((), dtype=dtype), "input 1": torch.zeros(3, 4, dtype=dtype).t()} for _ in "ab"]

    found = steps()
    assert first_difference(found, steps()) is None
    found[1]["input 1"][2, 1] = 1
    assert first_difference(found, steps()) == "step 1, input 1"


def test_bits_are_compared_and_not_values() -> None:
    nan, zero = torch.tensor(float("nan")), torch.tensor(0.0)
    assert first_difference([{"x": nan}], [{"x": nan.clone()}]) is None
    assert first_difference([{"x": zero}], [{"x": -zero}]) == "step 0, x"
    assert first_difference([{"x": zero}], [{"x": zero.reshape(1)}]) == "step 0, x"


def test_a_delay_of_an_operator_that_is_not_there(plans: tuple[Planned, ...]) -> None:
    with pytest.raises(KeyError):
        with_delays(lower(plans[0]), {"nowhere": 1})


def test_a_copy_is_delayed(plans: tuple[Planned, ...]) -> None:
    lowered = lower(plans[0])
    before = lowered.module.code
    delayed = with_delays(lowered, random_delays(lowered, 0))
    assert "torch.cuda._sleep(" in delayed.module.code
    assert lowered.module.code == before
    assert dataclasses.replace(delayed, module=lowered.module) == lowered
