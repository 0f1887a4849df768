"""When the tasks of a plan run: measured between them, in runs that serve nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from kitsune.device import synchronize
from kitsune.errors import Refusal, RefusedError, first_line
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.in_order import InOrder, with_copies
from kitsune.execution.lanes import TimedLanes, timed_lanes_for
from kitsune.execution.lower import Lowered
from kitsune.graph import dataflow
from kitsune.plan.plan import Span

# The first replay of a graph uploads it to the device.
_UNTIMED = 2
_TIMED = 5

# CUDA's events resolve about half a microsecond.
_RESOLUTION_US = 0.5


def measure_spans(
    module: fx.GraphModule, lowered: Lowered, inputs: Sequence[Tensor], pool: GraphPool
) -> tuple[Span, ...]:
    """By index of the task, its start and end on the device in microseconds; the first start is 0.

    All spans are of one run: of five, the one of median duration. On a CUDA device it is a replay of a CUDA graph
    that records an event before and after each task. These are launches of their own, so that a run takes longer
    than without them, most of all where tasks are small. On the CPU it is the host's clock, and tasks run one
    after the other whatever their streams.

    Every run starts from the values of `inputs` and writes to copies; the state of the random number generators is
    restored. On a CUDA device the graph is recorded into `pool` and released at the end: what the outputs of
    other graphs of the pool held is overwritten, and memory goes back to the allocator with the last graph of the
    pool.

    Args:
        module: the graph that `lowered` computes; its nodes say which inputs are written.
        lowered: the graph with its plan, lowered with `timed`.
        inputs: tensors of one device, as for a replay.
        pool: where the graph is recorded, with the streams that it runs on; none of its graphs may run meanwhile.

    Raises:
        RefusedError: the graph cannot be recorded, or there is too little memory.
    """
    device = inputs[0].device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            runs = _runs(module, lowered, [tensor.detach() for tensor in inputs], pool)
        return _from_first_start(sorted(runs, key=_duration_us)[_TIMED // 2])
    except torch.OutOfMemoryError:
        refusal = Refusal("there is too little device memory to time the tasks of the plan")
    except RuntimeError as error:  # CUDA forbids some operators to be recorded, and says so in many ways
        refusal = Refusal(f"timing the tasks of the plan failed: {first_line(error)}")
    # Out of the handlers: an exception that is being handled would keep alive all that was allocated.
    gc.collect()
    torch.cuda.empty_cache()
    raise RefusedError(refusal)


def _runs(
    module: fx.GraphModule, lowered: Lowered, inputs: Sequence[Tensor], pool: GraphPool
) -> list[tuple[Span, ...]]:
    device = inputs[0].device
    written = dataflow.written_inputs(module.graph)
    make = timed_lanes_for(lowered.num_streams, pool.streams, device)
    made: list[TimedLanes] = []  # of CUDA the last ones are the recording's

    def lanes() -> TimedLanes:
        made.append(make())
        return made[-1]

    def repeat(run: Callable[[], object]) -> list[tuple[Span, ...]]:
        spans = []
        for _ in range(_UNTIMED + _TIMED):
            run()
            synchronize(device)
            spans.append(made[-1].spans_us())
        return spans[_UNTIMED:]

    in_order = InOrder(lowered.module, lanes=lanes)
    if device.type != "cuda":
        return repeat(lambda: in_order(with_copies(inputs, written)))
    graph = CudaGraph(in_order, inputs, copied=written, mutated=written, pool=pool)
    try:
        return repeat(lambda: graph(inputs))
    finally:
        graph.release()


def _duration_us(spans: Sequence[Span]) -> float:
    return max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)


def _from_first_start(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans since the first start. An end before its start, by no more than events resolve, is moved there."""
    first = min((start for start, _ in spans), default=0.0)
    moved = [(start, start if 0 < start - end <= _RESOLUTION_US else end) for start, end in spans]
    return tuple((start - first, end - first) for start, end in moved)
