"""Plans on several streams, and the memory that they are made for: as counted by an allocator while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from kitsune.capture.trace import trace
from kitsune.engine import planning
from kitsune.engine.planning import MEMORY_FACTOR, Planned, challengers
from kitsune.errors import Refusal
from kitsune.plan import Costs, Fusion, TaskGraph
from kitsune.schedule import check
from kitsune.schedule.cost import analytic_costs
from kitsune.schedule.limits import cuda_limits
from tests.kitsune.memory.test_pooled import held_bytes
from tests.kitsune.schedule.oracles import enforces
from tests.kitsune.steps import TracedStep, model_step, traced_step
from tests.kitsune.training import Net, batch

NUM_STREAMS = 4
PLENTY = 1 << 40


@pytest.fixture(autouse=True)
def _costs_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(module: fx.GraphModule, graph: TaskGraph, _inputs: object) -> Costs:
        return analytic_costs(module.graph, graph, cuda_limits("a GPU", (9, 0)))

    monkeypatch.setattr(planning, "measured_costs", costs)


@pytest.fixture(scope="module")
def step() -> TracedStep:
    """Its activations are larger than its weights, so that memory is in the way of streams."""
    return model_step("lenet", 1024)


@pytest.fixture(scope="module")
def in_order_bytes(step: TracedStep) -> int:
    return planning.in_order(step.module, torch.device("cpu")).plan.memory.live_bytes


def found(step: TracedStep, max_bytes: int | None = None, room_bytes: int | None = None) -> Sequence[Planned]:
    return challengers(step.module, step.inputs, NUM_STREAMS, max_bytes, room_bytes)


def roomy(plans: Sequence[Planned]) -> list[Planned]:
    return [planned for planned in plans if planned.is_roomy]


def taken_bytes(step: TracedStep, planned: Planned) -> int:
    """Of an allocator that has memory for each stream apart."""
    return held_bytes(planned.module, planned.plan.graph, planned.plan.schedule, step.fresh_inputs())


def test_without_room_values_need_hardly_more_than_in_order(step: TracedStep, in_order_bytes: int) -> None:
    plans = found(step)
    assert plans
    assert not roomy(plans)
    assert max(planned.plan.memory.live_bytes for planned in plans) <= MEMORY_FACTOR * in_order_bytes


def test_with_room_there_are_two_lists_more(step: TracedStep, in_order_bytes: int) -> None:
    """Behind the others, which are as they were; the contest takes them where they are faster only."""
    tight, plans = found(step), found(step, room_bytes=PLENTY)
    assert [planned.plan for planned in plans[: len(tight)]] == [planned.plan for planned in tight]
    more = plans[len(tight) :]
    assert [planned.is_roomy for planned in plans] == [*[False] * len(tight), True, True]
    assert {planned.plan.schedule.strategy for planned in more} == {"list"}
    schedules = [planned.plan.schedule for planned in plans]
    assert len({(made.streams, made.positions, made.waits) for made in schedules}) == len(plans)
    assert max(planned.plan.predicted_us for planned in more) < min(planned.plan.predicted_us for planned in tight)
    assert min(planned.plan.memory.live_bytes for planned in more) > MEMORY_FACTOR * in_order_bytes
    for planned in more:
        assert check(planned.plan.graph, planned.plan.schedule) == []
        assert enforces(planned.plan.graph, planned.plan.schedule, planned.plan.schedule.waits)


@pytest.mark.parametrize("factor", [1.05, 1.2, 1.3])
def test_they_take_what_there_is_room_for(step: TracedStep, in_order_bytes: int, factor: float) -> None:
    room_bytes = int(factor * in_order_bytes)
    more = roomy(found(step, room_bytes=room_bytes))
    assert more
    assert max(taken_bytes(step, planned) for planned in more) <= room_bytes


def test_the_more_room_the_faster(step: TracedStep, in_order_bytes: int) -> None:
    times_us = [
        min(planned.plan.predicted_us for planned in found(step, room_bytes=int(factor * in_order_bytes)))
        for factor in (1.0, 1.1, 1.3)
    ]
    assert sorted(times_us, reverse=True) == times_us
    assert len(set(times_us)) == 3


@pytest.mark.parametrize("room_bytes", [-1, 0, 1])
def test_where_there_is_no_room_all_is_as_without(step: TracedStep, room_bytes: int) -> None:
    assert [planned.plan for planned in found(step, room_bytes=room_bytes)] == [planned.plan for planned in found(step)]


def test_what_fits_in_order_alone_leaves_no_room(step: TracedStep, in_order_bytes: int) -> None:
    assert not roomy(found(step, room_bytes=in_order_bytes))


def test_room_is_no_way_around_the_bound_of_the_user(step: TracedStep, in_order_bytes: int) -> None:
    most = int(1.2 * in_order_bytes)
    plans = found(step, most, PLENTY)
    assert roomy(plans)
    assert max(planned.plan.memory.live_bytes for planned in plans) <= most
    assert not roomy(found(step, in_order_bytes, PLENTY))
    assert found(step, 0, PLENTY) == ()


def test_what_needs_no_more_memory_is_not_tried_twice() -> None:
    """Values are so small that nothing bounds them: with room, the same lists would be made again."""
    (x, y), _ = batch(0)
    step = traced_step(Net(batch_norm=True, dropout=0.3), nn.functional.cross_entropy, x, y)
    plans = found(step, room_bytes=PLENTY)
    assert "list" in {planned.plan.schedule.strategy for planned in plans}
    assert not roomy(plans)


class Rewritten:
    """Stands for what has rewritten a step."""

    def __init__(self, module: fx.GraphModule, graph: fx.GraphModule) -> None:
        self.module, self._graph = module, graph

    def result(self) -> tuple[tuple[fx.GraphModule, tuple[Fusion, ...]], ...]:
        return ((self._graph, ()),)


def rewriting(
    function: Callable[[Tensor], list[Tensor]], other: Callable[[Tensor], list[Tensor]], x: Tensor
) -> tuple[tuple[Planned, ...], list[Refusal]]:
    """What comes of a graph of `function` that is rewritten as that of `other`."""
    refused = list[Refusal]()
    found = [(trace(other, [x]), ())]
    plans = planning.rewritten(trace(function, [x]), found, [x], refused.append)
    return plans, refused


def test_rewritten_operators_get_what_their_layouts_were_foreseen_as() -> None:
    """`roll` of an image in channels_last lies otherwise than torch foresees; a flat view of it would fail."""
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    plans, refused = rewriting(
        lambda x: [x.contiguous().roll(1, 1).flatten(1) * 2], lambda x: [x.roll(1, 1).flatten(1) * 2], x
    )
    assert refused == []
    (plan,) = plans
    (found,) = plan.module(x)
    assert torch.equal(found, x.roll(1, 1).flatten(1) * 2)


def test_a_rewritten_step_that_attends_to_what_lies_otherwise_is_not_run() -> None:
    def attend(x: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]

    x = torch.randn(2, 3, 4, 8)
    plans, refused = rewriting(
        lambda x: [attend(x)], lambda x: [attend(x.transpose(2, 3).contiguous().transpose(2, 3))], x
    )
    assert plans == []
    (refusal,) = refused
    assert "takes heads whose elements lie one after the other" in refusal.reason
