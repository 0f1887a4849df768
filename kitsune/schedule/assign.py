"""Strategies: from a task graph and its costs to a schedule within a bound of memory."""

from __future__ import annotations

from typing import Literal

from kitsune.plan import Costs, Schedule, TaskGraph
from kitsune.schedule.chains import chain_schedule
from kitsune.schedule.listing import list_schedule
from kitsune.schedule.throttle import throttle

StreamStrategy = Literal["chains", "list"]


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
        schedule = list_schedule(graph, costs, num_streams, max_bytes)
    return schedule if max_bytes is None else throttle(graph, schedule, max_bytes)
