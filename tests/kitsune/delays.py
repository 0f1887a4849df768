"""What makes a race between streams show: busy-wait kernels, waits left out, and runs compared to the last bit."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from kitsune.engine.planning import Planned
from kitsune.execution.lower import Lowered
from kitsune.execution.placing import only
from kitsune.memory.planner import plan_memory
from kitsune.plan import Plan, Wait
from kitsune.schedule import DataflowScheduler

MOST_CYCLES = 100_000
"""Of a random delay; 50 us at 2 GHz."""

_SHARE = 0.3  # of the operators that are delayed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Trajectory = list[dict[str, Tensor]]
"""What each step of a run left behind: its outputs, and now and then all that it may have written."""


def operators(lowered: Lowered) -> list[fx.Node]:
    """The nodes that run an operator, in their order; the others speak to the lanes or take results apart."""
    return [node for node in lowered.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def random_delays(lowered: Lowered, seed: int) -> dict[str, int]:
    """Cycles from 0 to `MOST_CYCLES`, by the name of the operator's node, for three operators in ten."""
    choose = random.Random(seed)
    return {node.name: choose.randint(0, MOST_CYCLES) for node in operators(lowered) if choose.random() < _SHARE}


def with_delays(
    lowered: Lowered, cycles: Mapping[str, int], sleep: Callable[[int], None] = torch.cuda._sleep
) -> Lowered:
    """A copy of `lowered` whose stream is busy for so many cycles before each operator that `cycles` names.

    Args:
        sleep: keeps the current stream busy for a number of cycles.

    Raises:
        KeyError: there is no such operator.
    """
    graph = copy.deepcopy(lowered.module.graph)
    nodes = {node.name: node for node in graph.nodes}
    for name, number in cycles.items():
        with graph.inserting_before(nodes[name]):
            graph.call_function(sleep, (number,))
    return dataclasses.replace(lowered, module=fx.GraphModule(lowered.module, graph))


def one_after_another(planned: Planned) -> Planned:
    """The operators of `planned`, each in the form in which it runs there, on one stream."""
    plan = planned.plan
    schedule = DataflowScheduler(num_streams=1).schedule(plan.graph, plan.costs)
    memory = plan_memory(only(plan.graph, planned.writers), schedule)
    return dataclasses.replace(planned, plan=dataclasses.replace(plan, schedule=schedule, memory=memory))


def guarding_waits(plan: Plan) -> list[Wait]:
    """The waits of tasks that read what the awaited task itself has written, ascending."""
    return [
        wait
        for wait in plan.schedule.waits
        if any(before.task == wait.earlier and before.kind == "true" for before in plan.graph.tasks[wait.later].after)
    ]


def without(planned: Planned, wait: Wait) -> Planned:
    """`planned` with a race: one of its waits is left out, the places in memory stay."""
    plan = planned.plan
    waits = tuple(other for other in plan.schedule.waits if other != wait)
    schedule = dataclasses.replace(plan.schedule, waits=waits)
    return dataclasses.replace(planned, plan=dataclasses.replace(plan, schedule=schedule))


def trajectory(
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    batches: Sequence[Mapping[int, Tensor]],
    *,
    num_steps: int,
    look_every: int,
) -> Trajectory:
    """Runs a step again and again, from the same state of the random number generators.

    Args:
        inputs: of which the step may write those that no batch replaces.
        batches: they take turns; each holds inputs by position.
        look_every: after so many steps, and after the last, all inputs are part of what is left behind.
    """
    torch.manual_seed(0)
    steps: Trajectory = []
    for index in range(num_steps):
        batch = batches[index % len(batches)]
        current = [batch.get(position, tensor) for position, tensor in enumerate(inputs)]
        left = {f"output {place}": output.clone() for place, output in enumerate(run(current))}
        if (index + 1) % look_every == 0 or index + 1 == num_steps:
            left |= {f"input {position}": tensor.clone() for position, tensor in enumerate(current)}
        steps.append(left)
    return steps


def first_difference(found: Trajectory, wanted: Trajectory) -> str | None:
    """The first step and tensor whose bits differ; None if there is none. A NaN equals one with the same bits."""
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            if not _same_bits(one[name], other[name]):
                return f"step {index}, {name}"
    return None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    kinds = [(tensor.shape, tensor.dtype) for tensor in (one, other)]
    integer = _INTEGERS[one.element_size()]
    return kinds[0] == kinds[1] and torch.equal(one.view(integer), other.view(integer))
