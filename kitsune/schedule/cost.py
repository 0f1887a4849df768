"""What the tasks of a graph cost: measured on the device, or estimated from their work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import fx

from kitsune.graph.signature import signature
from kitsune.plan import Cost, Costs, Task, TaskGraph
from kitsune.schedule.analytic import Work, launches, work
from kitsune.schedule.limits import DeviceLimits, device_limits
from kitsune.schedule.measure import measure, measure_gaps
from kitsune.timing import CostCache

_log = logging.getLogger("kitsune")

_LEAST_US = 0.1  # an operator is never free, even if the timer sees no difference to the smallest kernel


def analytic_costs(graph: fx.Graph, tasks: TaskGraph, limits: DeviceLimits) -> Costs:
    """Estimated costs of `tasks`, whose nodes are those of `graph`, on a device with `limits`.

    The roofline model (Williams, Waterman, Patterson, 2009): an operator takes as long as its memory
    traffic or its arithmetic does, whichever is longer. Arithmetic is as fast as the part of the device
    that the operator's results can fill. An operator that would take less than `limits.launch_us` is
    bound by latency. Views and allocations cost nothing.
    """
    nodes = {node.name: node for node in graph.nodes}
    costs = tuple(
        _task_cost(task, nodes, limits, lambda node: analytic_cost(work(node), limits)) for task in tasks.tasks
    )
    return Costs(costs, limits.launch_us, limits.sync_us, "analytic")


def measured_costs(
    module: fx.GraphModule,
    tasks: TaskGraph,
    inputs: Sequence[torch.Tensor],
    cache: CostCache | None = None,
    *,
    limit_s: float = 5.0,
) -> Costs:
    """Costs of `tasks`, whose nodes are those of `module.graph`, on the device of `inputs`.

    Each operator is timed once for each signature (see `kitsune.graph.signature`), and never again: the time
    is kept in `cache`, by default the user's on disk. An operator for which time or memory did not
    suffice gets its analytic cost, and `source` is `"analytic"` then; the next call goes on from there.

    Nothing of the user's changes: the inputs are read only, in-place operators write to copies, and the
    random number generators keep their state. For a while there are copies of all inputs that the graph
    writes, and the device is synchronized.

    Args:
        inputs: one tensor for each placeholder.
        limit_s: seconds after which no further operator is timed.
    """
    device = next((tensor.device for tensor in inputs if tensor.device.type != "cpu"), torch.device("cpu"))
    cache = CostCache.of(device) if cache is None else cache
    limits = device_limits(device)
    nodes = {node.name: node for node in module.graph.nodes}
    running = [nodes[name] for task in tasks.tasks for name in task.nodes if launches(nodes[name])]
    keys = {node.name: signature(node) for node in running}
    gaps = measure_gaps(device, limits, cache)
    measure(module, keys, inputs, cache, device, limit_s=limit_s)
    note = cache.save()
    if note is not None:
        _log.info(note)

    def cost(node: fx.Node) -> Cost:
        us = cache.get(keys[node.name])
        return analytic_cost(work(node), limits) if us is None else measured_cost(work(node), limits, us, gaps.timer_us)

    costs = tuple(_task_cost(task, nodes, limits, cost) for task in tasks.tasks)
    num_estimated = sum(cache.get(key) is None for key in keys.values())
    if num_estimated:
        _log.info("%d of %d operators were not measured: their costs are estimated", num_estimated, len(keys))
    source: Literal["analytic", "measured"] = "analytic" if num_estimated else "measured"
    return Costs(costs, gaps.launch_us, gaps.sync_us, source)


def analytic_cost(job: Work, limits: DeviceLimits) -> Cost:
    """The estimated cost of one operator on a device with `limits`."""
    memory_us, compute_us = _roofline_us(job, limits)
    share = _grid_share(job, limits)
    us = max(memory_us, compute_us / share, _LEAST_US)
    return Cost(us, share, _bound(memory_us, compute_us / share, limits))


def measured_cost(job: Work, limits: DeviceLimits, us: float, gap_us: float) -> Cost:
    """The cost of one operator that took `us` by a timer that counts `gap_us` too much.

    What it is known to use is the part of the device's bandwidth or arithmetic that it reaches; a
    kernel whose grid fills the device leaves less room than that for another, but not none: weight
    gradients beside batch normalization, both with full grids, were measured to gain on an H200. The
    share lies halfway between the two.
    """
    memory_us, compute_us = _roofline_us(job, limits)
    reached = min(1.0, max(memory_us, compute_us) / max(us, _LEAST_US))
    share = (reached + _grid_share(job, limits)) / 2
    return Cost(max(us - gap_us, _LEAST_US), share, _bound(memory_us, compute_us, limits))


def copies_us(tensors: Sequence[torch.Tensor]) -> float:
    """Estimated microseconds of copying each of `tensors`, all of one device, to another place on it."""
    if not tensors:
        return 0.0
    limits = device_limits(tensors[0].device)
    num_bytes = 2 * sum(tensor.nbytes for tensor in tensors)
    return len(tensors) * limits.launch_us + num_bytes / limits.bytes_per_s * 1e6


def _roofline_us(job: Work, limits: DeviceLimits) -> tuple[float, float]:
    """Microseconds of the memory traffic and of the arithmetic, at the device's limits."""
    rate = limits.flops_per_s(job.dtype, convolution=job.convolution)
    return (job.bytes_read + job.bytes_written) / limits.bytes_per_s * 1e6, job.flops / rate * 1e6


def _grid_share(job: Work, limits: DeviceLimits) -> float:
    return min(1.0, max(1 / limits.num_multiprocessors, job.num_items / limits.parallel_items))


def _bound(memory_us: float, compute_us: float, limits: DeviceLimits) -> Literal["memory", "compute", "latency"]:
    if max(memory_us, compute_us) < limits.launch_us:
        return "latency"
    return "memory" if memory_us >= compute_us else "compute"


def _task_cost(task: Task, nodes: dict[str, fx.Node], limits: DeviceLimits, cost: Callable[[fx.Node], Cost]) -> Cost:
    """The cost of all that `task` runs: one operator, as a rule; several follow each other."""
    costs = [cost(nodes[name]) for name in task.nodes if launches(nodes[name])]
    if not costs:
        return Cost(0.0, 1 / limits.num_multiprocessors, "latency")
    longest = max(costs, key=lambda one: one.us)
    us = sum(one.us for one in costs) + (len(costs) - 1) * limits.launch_us
    return Cost(us, longest.share, longest.bound)
