"""What ideas about streams are worth on a captured step: each as a plan, all replayed in turns on the same GPU.

    python -m tests.benchmarks.stream_attempts measure --model resnet18 --batch 128 --precision amp FILE
    python -m tests.benchmarks.stream_attempts show FILE

The first attempt, the step in order on one stream, is what the others are compared with. The step is fused first, as
users have it; with `--unfused` it is as it was captured. Every round is a fresh process, as in the harness.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx

import kitsune
import models
from harness import stats
from kitsune.background import wait_until_quiet
from kitsune.engine import planning
from kitsune.engine.fusing import Fusing
from kitsune.engine.planning import Planned
from kitsune.engine.recording import Recording
from kitsune.errors import Refusal, RefusedError
from kitsune.execution import stream_pool
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.placing import only, writers
from kitsune.execution.stream_pool import StreamPool
from kitsune.memory.planner import plan_memory
from kitsune.memory.pool import MemoryPool
from kitsune.passes import pipeline
from kitsune.plan import Cost, Costs, Dependency, Plan, Schedule, TaskGraph, task_graph
from kitsune.schedule import DataflowScheduler, simulate
from kitsune.schedule.cost import measured_costs
from kitsune.timing.busy import keep_busy
from tests.benchmarks import command

_TURNS = 15
_BLOCK_US = 20_000.0
_MOST_REPLAYS = 200


@dataclasses.dataclass(frozen=True)
class Captured:
    """A step as Kitsune captures it: its graph, the inputs of a call, and what a `Recording` of it takes besides."""

    module: fx.GraphModule
    inputs: Sequence[torch.Tensor]
    conditions: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A way of running a captured step: a schedule for its graph after some passes.

    Attributes:
        idea: in words.
        passes: what is done to the graph first.
        schedule: for its tasks and costs; None where the idea finds none.
        change: what is done to the tasks before they are scheduled.
        other_priority: the priority of all streams but the first, whose is -1.
    """

    idea: str
    passes: pipeline.Passes
    schedule: Callable[[TaskGraph, Costs], Schedule]
    change: Callable[[TaskGraph], TaskGraph] = lambda graph: graph
    other_priority: int = 0


@dataclasses.dataclass(frozen=True)
class Times:
    """One round of an attempt: how it was planned, and microseconds of a replay, by turn."""

    idea: str
    strategy: str
    num_streams: int
    waits: int
    live_bytes: int
    predicted_us: float
    measured_us: tuple[float, ...]


def attempts() -> tuple[Attempt, ...]:
    """All of them; the first one is what Kitsune does without streams."""
    whole: pipeline.Passes = ()
    split = pipeline.splitting(4)

    def listing(
        num_streams: int, factor: float | None = planning.MEMORY_FACTOR
    ) -> Callable[[TaskGraph, Costs], Schedule]:
        return partial(_schedule, "list", num_streams, factor)

    def chains(num_streams: int) -> Callable[[TaskGraph, Costs], Schedule]:
        return partial(_schedule, "chains", num_streams, planning.MEMORY_FACTOR)

    return (
        Attempt("in order", whole, partial(_schedule, "in order", 1, None)),
        Attempt("in order, gradients and update split", split, partial(_schedule, "in order", 1, None)),
        Attempt("list, nothing split", whole, listing(4)),
        *(Attempt(f"list, at most {count} streams", split, listing(count)) for count in (2, 3, 4, 8)),
        *(Attempt(f"chains, at most {count} streams", split, chains(count)) for count in (2, 4, 8)),
        Attempt("list, update in one piece", pipeline.splitting(1), listing(4)),
        Attempt("list, update in 16 pieces", pipeline.splitting(16), listing(4)),
        Attempt("list, equal priorities", split, listing(4), other_priority=-1),
        Attempt("list, weight gradients after input gradients", split, listing(4), change=weights_after_inputs),
        Attempt("list, compute-bound beside memory-bound", split, partial(_beside, 4)),
        Attempt("list, no bound of memory", split, listing(4, None)),
    )


def weights_after_inputs(graph: TaskGraph) -> TaskGraph:
    """`graph` with every gradient of a weight made to wait for the gradient of the same operator's input."""
    last_input: dict[tuple[int, ...], int] = {}
    tasks = []
    for task in graph.tasks:
        if "convolution_backward" in task.operator:
            source = tuple(dependency.task for dependency in task.after if dependency.kind == "true")[-1:]
            earlier = last_input.setdefault(source, task.index)
            known = {dependency.task for dependency in task.after}
            if earlier != task.index and earlier not in known:
                task = dataclasses.replace(task, after=tuple(sorted((*task.after, Dependency(earlier, "order")))))
        tasks.append(task)
    return dataclasses.replace(graph, tasks=tuple(tasks))


def _schedule(strategy: Any, num_streams: int, factor: float | None, graph: TaskGraph, costs: Costs) -> Schedule:
    serial = DataflowScheduler(1).schedule(graph, costs)
    bound = None if factor is None else int(factor * plan_memory(graph, serial).live_bytes)
    return DataflowScheduler(num_streams, strategy, bound).schedule(graph, costs)


def _beside(num_streams: int, graph: TaskGraph, costs: Costs) -> Schedule:
    """By costs that let a compute-bound task run beside a memory-bound one, and neither beside its like."""
    changed = tuple(_exclusive(cost) for cost in costs.tasks)
    changed_costs = dataclasses.replace(costs, tasks=changed)
    return _schedule("list", num_streams, planning.MEMORY_FACTOR, graph, changed_costs)


def _exclusive(cost: Cost) -> Cost:
    share = {"memory": 0.34, "compute": 0.66, "latency": cost.share}[cost.bound]
    return dataclasses.replace(cost, share=share)


def capture(model: str, batch: int, precision: str, device: str = "cuda") -> Captured:
    """The step of a workload on a device, channels last where an expert would."""
    workload = models.build(model, seed=0)
    module = workload.module.to(device)
    batches = [workload.batch(batch, index=index, device=device) for index in range(2)]
    if workload.channels_last:
        module = module.to(memory_format=torch.channels_last)
        batches = [(x.to(memory_format=torch.channels_last), y) for x, y in batches]
    caught: list[Captured] = []
    original = Recording.__init__

    def catch(recording: Recording, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], **conditions: Any) -> None:
        caught.append(Captured(graph, list(inputs), conditions))
        original(recording, graph, inputs, **conditions)

    optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate)
    step = kitsune.TrainStep(
        module, workload.loss_fn, optimizer, mode="replay", num_streams=1, enable_amp=precision == "amp"
    )
    with mock.patch.object(Recording, "__init__", catch):
        for x, y in batches:
            step(x, y)
    return caught[0]


def fused(captured: Captured) -> Captured:
    """The step with its operators fused, as `TrainStep` has it.

    Raises:
        RuntimeError: it cannot be, or nothing in it is worth it.
    """
    refusals: list[Refusal] = []
    fusing = Fusing(captured.module, captured.inputs[0].device)
    while not fusing.advance():
        wait_until_quiet()
    found = planning.others(
        captured.module, captured.inputs, num_streams=1, fusing=fusing, max_bytes=None, refused=refusals.append
    )
    if not found:
        raise RuntimeError(f"the step was not fused: {', '.join(map(str, refusals)) or 'nothing in it is worth it'}")
    return dataclasses.replace(captured, module=found[0].module)


def plan(captured: Captured, attempt: Attempt) -> Planned:
    """The captured step, planned as the attempt says, with costs measured on its device."""
    module = pipeline.run(captured.module, attempt.passes)
    graph = attempt.change(task_graph(module.graph))
    costs = measured_costs(module, graph, captured.inputs, limit_s=30.0)
    schedule = attempt.schedule(graph, costs)
    placed = writers(module.graph) if schedule.num_streams > 1 else {}
    memory = plan_memory(only(graph, placed), schedule)
    memory = dataclasses.replace(memory, live_bytes=plan_memory(graph, schedule).live_bytes)
    return Planned(module, Plan(graph, schedule, memory, costs, simulate(graph, costs, schedule).total_us), placed)


@contextmanager
def recorded(captured: Captured, planned: Planned, other_priority: int, arenas: MemoryPool) -> Iterator[Recording]:
    """The plan as a CUDA graph, in memory that it shares with the other attempts."""
    arena = arenas.take(planned.plan.memory.arena_bytes, captured.inputs[0].device)
    with mock.patch.object(stream_pool, "_OTHER_PRIORITY", other_priority):
        conditions = {**captured.conditions, "pool": GraphPool(StreamPool())}
        recording = Recording(planned.module, captured.inputs, lowered=planned.lowered(arena), **conditions)
        try:
            yield recording
        finally:
            recording.release()
            arenas.give(arena)


def time_blocks(recordings: Sequence[Recording], inputs: Sequence[torch.Tensor]) -> list[list[float]]:
    """For each recording the microseconds of a replay, by turn: in each, every recording replays a block of steps."""
    device = inputs[0].device
    replays = [_replays(recording, inputs) for recording in recordings]
    times: list[list[float]] = [[] for _ in recordings]
    for turn in range(_TURNS):
        order = range(len(recordings)) if turn % 2 == 0 else reversed(range(len(recordings)))
        for index in order:
            times[index].append(_block_us(recordings[index], inputs, replays[index], device))
    return times


def _replays(recording: Recording, inputs: Sequence[torch.Tensor]) -> int:
    device = inputs[0].device
    _block_us(recording, inputs, 3, device)
    return max(3, min(_MOST_REPLAYS, round(_BLOCK_US / _block_us(recording, inputs, 5, device))))


def _block_us(recording: Recording, inputs: Sequence[torch.Tensor], replays: int, device: torch.device) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    recording(inputs)  # its data are not in the caches yet
    keep_busy(100.0 + 50.0 * replays, device)
    start.record()
    for _ in range(replays):
        recording(inputs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / replays


def measure(model: str, batch: int, precision: str, device: str, *, unfused: bool) -> list[dict[str, Any]]:
    """One round: the `Times` of all attempts that can be recorded, in turns, on a CUDA device."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0
    captured = capture(model, batch, precision, device)
    if not unfused:
        captured = fused(captured)
    arenas = MemoryPool()
    with ExitStack() as stack:
        kept: list[tuple[Attempt, Plan, Recording]] = []
        for attempt in attempts():
            print(f"  {attempt.idea}", flush=True)
            planned = plan(captured, attempt)
            try:
                recording = stack.enter_context(recorded(captured, planned, attempt.other_priority, arenas))
            except RefusedError as error:
                print(f"    left out: {error}", flush=True)
                continue
            kept.append((attempt, planned.plan, recording))
        times = time_blocks([recording for _, _, recording in kept], captured.inputs)
    return [
        dataclasses.asdict(
            Times(
                idea=attempt.idea,
                strategy=made.schedule.strategy,
                num_streams=made.schedule.num_streams,
                waits=len(made.schedule.waits),
                live_bytes=made.memory.live_bytes,
                predicted_us=made.predicted_us,
                measured_us=tuple(spans),
            )
        )
        for (attempt, made, _), spans in zip(kept, times, strict=True)
    ]


def table(document: Mapping[str, Any]) -> str:
    """Markdown of what `measure` has written: a row for each attempt that every round has."""
    rounds = [{entry["idea"]: entry for entry in entries} for entries in document["rounds"]]
    first = document["rounds"][0][0]["idea"]
    lines = [
        "| attempt | schedule | waits | predicted | measured | time, of in order | alive at once |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for idea, entry in rounds[0].items():
        if not all(idea in found for found in rounds):
            continue
        pairs = [list(zip(found[idea]["measured_us"], found[first]["measured_us"], strict=True)) for found in rounds]
        ratio = stats.paired_ratio(pairs)
        interval = f" [{ratio.low:.3f}, {ratio.high:.3f}]" if ratio.has_interval and idea != first else ""
        measured = statistics.median(us for found in rounds for us in found[idea]["measured_us"])
        schedule = f"{entry['strategy']}, {entry['num_streams']}"
        lines.append(
            f"| {idea} | {schedule} | {entry['waits']} | {entry['predicted_us']:.0f} us | {measured:.0f} us "
            f"| {ratio.ratio:.3f}{interval} | {entry['live_bytes'] / 2**20:.0f} MiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    unfused = {"unfused": "the step as it was captured, not fused"}
    command.run("tests.benchmarks.stream_attempts", __doc__, measure, table, flags=unfused)
