"""Strategies: from a task graph and its costs to a schedule within a bound of memory."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kitsune.plan import Costs, Schedule, TaskGraph
from kitsune.schedule.chains import chain_schedule
from kitsune.schedule.listing import list_schedule
from kitsune.schedule.live_bytes import peak_bytes
from kitsune.schedule.moves import improved
from kitsune.schedule.simulate import simulate
from kitsune.schedule.throttle import throttle

StreamStrategy = Literal["chains", "list"]

_SMALL = 32  # tasks: a schedule is improved within a tenth of a second


def in_order(graph: TaskGraph) -> Schedule:
    """All tasks on one stream, in graph order."""
    return Schedule("in order", tuple(range(len(graph.tasks))), (0,) * len(graph.tasks))


def on_streams(
    graph: TaskGraph, costs: Costs, strategy: StreamStrategy, num_streams: int, max_bytes: int | None
) -> Schedule | None:
    """A schedule on at most `num_streams` streams that needs at most `max_bytes`; None if `strategy` finds none.

    Chains are always found where the graph in order fits.
    """
    if strategy == "chains":
        schedule = chain_schedule(graph, costs, num_streams)
    else:
        schedule = _list_schedule(graph, costs, num_streams, max_bytes)
    return schedule if max_bytes is None else throttle(graph, schedule, max_bytes)


def _list_schedule(graph: TaskGraph, costs: Costs, num_streams: int, max_bytes: int | None) -> Schedule:
    """List scheduling; of a small graph the best to which moves lead from there, from chains and from one stream.

    Lists look at one task at a time, and where waits cost more than tasks do, that leads astray.
    """
    listed = list_schedule(graph, costs, num_streams, max_bytes)
    if len(graph.tasks) > _SMALL:
        return listed
    others = [chain_schedule(graph, costs, num_streams), in_order(graph)]
    starts = [listed, *(one for one in others if max_bytes is None or peak_bytes(graph, one) <= max_bytes)]
    found = [improved(graph, costs, start, num_streams, max_bytes) for start in starts]
    best = min(found, key=lambda schedule: simulate(graph, costs, schedule).total_us)
    return dataclasses.replace(best, strategy="list")
