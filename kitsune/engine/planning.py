"""From a captured graph to plans: one in order, and others that may be faster: fused, or on several streams."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from kitsune.capture.foreseen_layouts import lay_out_as_foreseen
from kitsune.capture.retention import no_traces
from kitsune.engine.rehearsal import Rehearsal
from kitsune.engine.rewriting import GENERATED, Rewritten, form_of
from kitsune.errors import Refusal, RefusedError, first_line
from kitsune.execution.lower import Lowered, lower
from kitsune.execution.placing import Writer, only, places, writers
from kitsune.memory.planner import plan_memory
from kitsune.memory.pool import Block
from kitsune.memory.pooled import pooled_bytes
from kitsune.memory.segments import pieces
from kitsune.passes import pipeline
from kitsune.plan import Costs, Fusion, Plan, Schedule, TaskGraph, task_graph
from kitsune.schedule import DataflowScheduler, simulate
from kitsune.schedule.cost import analytic_costs, measured_costs
from kitsune.schedule.limits import device_limits

# Each part of an update may start when its gradients are there, and is one launch more.
_PARTS = 4

# What concurrency may cost in memory, as a multiple of what the graph needs in order. With 1.05 plans are not
# predicted to be faster, and float32 steps, which fusing makes a little larger, needed 1.07 times what they need as
# captured.
MEMORY_FACTOR = 1.02

# Plans beyond that, for which there is room: each that is tried takes a recording and some steps.
_MOST_ROOMY = 2


@dataclass(frozen=True)
class Planned:
    """A graph with a plan for it.

    Attributes:
        module: the graph.
        plan: the plan. Its arena holds the values whose operators can write there; the allocator has memory for the
            others.
        writers: those operators, by name of the node.
        is_roomy: whether it was made to use memory that there is room for, and not to need hardly more than in order;
            see `challengers`.
    """

    module: fx.GraphModule
    plan: Plan
    writers: Mapping[str, Writer]
    is_roomy: bool = False

    @property
    def is_generated(self) -> bool:
        """Whether code was generated for all operators, or nearly all, as one."""
        return any(fusion.template.startswith(GENERATED) for fusion in self.plan.fusions)

    def lowered(self, arena: Block, *, timed: bool = False) -> Lowered:
        """The graph as it runs by the plan, with as many bytes of `arena` as the plan says; for `timed` see `lower`."""
        plan = self.plan
        placed = places(self.module.graph, plan.graph, self.writers, plan.memory, arena)
        return lower(self.module, plan.graph, plan.schedule, placed, timed=timed)

    def pieces(self) -> tuple[int, ...]:
        """By stream, the memory that the allocator had better take in one piece; takes as long as some steps do."""
        return pieces(_left(self.plan.graph, self.writers), self.plan.schedule)


def in_order(module: fx.GraphModule, device: torch.device, inputs: Sequence[torch.Tensor] | None = None) -> Planned:
    """`module` as it is; the allocator places all values.

    Given `inputs`, measures what operators cost on their device; else the costs are those known without measuring.
    """
    graph = task_graph(module.graph)
    if inputs is None:
        costs = analytic_costs(module.graph, graph, device_limits(device))
    else:
        costs = measured_costs(module, graph, inputs)
    schedule = DataflowScheduler(num_streams=1).schedule(graph, costs)
    return Planned(module, _plan(graph, schedule, costs, {}), {})


@no_traces()
def others(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    num_streams: int,
    found: Sequence[Planned] = (),
    max_bytes: int | None,
    room_bytes: int | None = None,
) -> tuple[Planned, ...]:
    """Plans that may be faster than the one of `module` in order, the most promising ones first.

    These are `found`, plans of `module` rewritten, in order (see `rewritten`); and the `challengers`, within
    `max_bytes` and `room_bytes`, of the most promising one of them that has operators to schedule, or of `module`.
    """
    ranked = sorted(found, key=lambda planned: planned.plan.predicted_us)
    if num_streams == 1:
        return tuple(ranked)
    base = next((planned for planned in ranked if not planned.is_generated), None)
    graph, fusions = (module, ()) if base is None else (base.module, base.plan.fusions)
    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        on_streams = challengers(graph, inputs, num_streams, max_bytes, room_bytes)
    return *ranked, *(_with_fusions(planned, fusions) for planned in on_streams)


def rewritten(
    module: fx.GraphModule,
    found: Sequence[Rewritten],
    inputs: Sequence[torch.Tensor],
    refused: Callable[[Refusal], None],
) -> list[Planned]:
    """Plans, in order, of those among `found`, graphs made of `module`, that do the same; `refused` is told of others.

    Args:
        inputs: of the present step. They are left as they are.
    """
    plans = list[Planned]()
    for one in found:
        vetting = Vetting(module, one)
        while not vetting.advance(inputs):
            pass
        if vetting.planned is not None:
            plans.append(vetting.planned)
        elif vetting.refusal is not None:
            refused(vetting.refusal)
    return plans


class Vetting:
    """Finds out, in a few short parts, whether a graph that was made of another may take its place.

    It must do the same, with values laid out as its operators were given them.

    Args:
        module: the other one.
        found: the graph.

    Attributes:
        planned: its plan, in order; None as long as that is not known.
        refusal: why it may not; None as long as that is not known.
    """

    def __init__(self, module: fx.GraphModule, found: Rewritten) -> None:
        self.planned: Planned | None = None
        self.refusal: Refusal | None = None
        self._module, (self._graph, self._fusions) = module, found
        self._rehearsal: Rehearsal | None = None

    @no_traces()
    def advance(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Does one part; whether the outcome is known.

        Args:
            inputs: of the present step. They are left as they are.
        """
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            try:
                self._advance(inputs)
            except Exception as error:  # noqa: BLE001 - compilers, drivers and too little memory fail in many ways
                self.refusal = Refusal(f"fusing failed ({type(error).__name__}: {first_line(error)})")
        return self.planned is not None or self.refusal is not None

    def _advance(self, inputs: Sequence[torch.Tensor]) -> None:
        if self._rehearsal is None:
            try:
                lay_out_as_foreseen(self._graph, inputs)
            except RefusedError as error:
                reason = f"a step with fused operators cannot run: {error.refusal.reason}"
                self.refusal = Refusal(reason, error.refusal.culprit)
            self._rehearsal = Rehearsal(self._module, self._graph)
            return
        if not self._rehearsal.advance(inputs):
            return
        if self._rehearsal.problem is not None:
            problem = self._rehearsal.problem
            self.refusal = Refusal(f"a step with fused operators was compared with the captured one: {problem}")
            return
        is_generated = form_of(self._fusions).startswith(GENERATED)
        planned = in_order(self._graph, inputs[0].device, None if is_generated else inputs)
        self.planned = _with_fusions(planned, self._fusions)


def _with_fusions(planned: Planned, fusions: tuple[Fusion, ...]) -> Planned:
    return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, fusions=fusions))


def challengers(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    num_streams: int,
    max_bytes: int | None = None,
    room_bytes: int | None = None,
) -> tuple[Planned, ...]:
    """Plans on 2 to `num_streams` streams, those that the simulation ranks highest first.

    They are of `module` with its operators split where that makes some of them independent. Measures what operators
    cost on the device of `inputs`.

    Args:
        max_bytes: what their values may need at once, on any timing of the streams; None for any number.
        room_bytes: what their values may take of the allocator. Given that, there are two plans at most, behind the
            others, that were made to use it; all others' values need at most a fiftieth more at once than in order.
    """
    split = pipeline.run(module, pipeline.splitting(_PARTS))
    graph = task_graph(split.graph)
    costs = measured_costs(split, graph, inputs)
    serial = DataflowScheduler(num_streams=1).schedule(graph, costs)
    most = sys.maxsize if max_bytes is None else max_bytes
    bound = min(int(MEMORY_FACTOR * plan_memory(graph, serial).live_bytes), most)
    _, *schedules = DataflowScheduler(num_streams, max_bytes=bound).candidates(graph, costs)
    found = writers(split.graph)
    plans = [_placed(split, graph, schedule, costs, found) for schedule in schedules]
    if room_bytes is not None:
        bounds = [one for one in (most, min(most, room_bytes)) if one > bound]
        for schedule in _roomy(graph, costs, num_streams, bounds, room_bytes, schedules):
            plans.append(dataclasses.replace(_placed(split, graph, schedule, costs, found), is_roomy=True))
    return tuple(plans)


def _roomy(
    graph: TaskGraph,
    costs: Costs,
    num_streams: int,
    bounds: Sequence[int],
    room_bytes: int,
    known: Sequence[Schedule],
) -> list[Schedule]:
    """Lists beside those `known` whose values take at most `room_bytes` of the allocator: the most promising ones.

    What may be alive at once, on some timing of the streams, is more than that as a rule: the allocator has memory for
    each stream apart, and what a stream leaves it uses again itself, however far it runs ahead of the others.

    Args:
        bounds: for what may be alive at once, the loosest first.
    """
    found: list[Schedule] = []
    for bound in bounds:
        _, *lists = DataflowScheduler(num_streams, "list", bound).candidates(graph, costs, [*known, *found])
        found += [schedule for schedule in lists if pooled_bytes(graph, schedule) <= room_bytes]
    return found[:_MOST_ROOMY]


def _placed(
    module: fx.GraphModule, graph: TaskGraph, schedule: Schedule, costs: Costs, found: Mapping[str, Writer]
) -> Planned:
    """With an arena for the values that can be written there, if it takes less memory than it saves the allocator."""
    left = _left(graph, found)
    arena_bytes = plan_memory(only(graph, found), schedule).arena_bytes
    saves = arena_bytes < pooled_bytes(graph, schedule) - pooled_bytes(left, schedule)
    placed = found if saves else {}
    return Planned(module, _plan(graph, schedule, costs, placed), placed)


def _left(graph: TaskGraph, placed: Mapping[str, Writer]) -> TaskGraph:
    """`graph` with the values that the allocator places, where an arena holds those of the nodes in `placed`."""
    return only(graph, {value.name for value in graph.values} - placed.keys())


def _plan(graph: TaskGraph, schedule: Schedule, costs: Costs, placed: Mapping[str, Writer]) -> Plan:
    """A plan whose arena holds the values of the nodes in `placed`; its `live_bytes` counts all values."""
    memory = plan_memory(only(graph, placed), schedule)
    memory = dataclasses.replace(memory, live_bytes=plan_memory(graph, schedule).live_bytes)
    simulation = simulate(graph, costs, schedule)
    spans = tuple(zip(simulation.start_us, simulation.end_us, strict=True))
    return Plan(graph, schedule, memory, costs, simulation.total_us, predicted_spans=spans)
