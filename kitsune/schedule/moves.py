"""Improves the schedules of small graphs, one move at a time."""

from __future__ import annotations

from collections.abc import Iterator

from kitsune.plan import Costs, Schedule, TaskGraph
from kitsune.schedule.edges import Edges, dependencies
from kitsune.schedule.live_bytes import peak_bytes
from kitsune.schedule.reduce import reduce_waits
from kitsune.schedule.simulate import simulate

_LEAST_GAIN = 1e-6  # of the time; less is the rounding of sums


def improved(
    graph: TaskGraph, costs: Costs, schedule: Schedule, num_streams: int, max_bytes: int | None = None
) -> Schedule:
    """The schedule to which moves lead that each make the simulated step shorter: of one task to another stream.

    The order of issue stays. It is a local optimum, found by hill climbing; for n tasks one round of it takes n times
    `num_streams` simulations, so it is for small graphs. With `max_bytes`, no move is made after which values may need
    more than that.
    """
    after = dependencies(graph)
    best, best_us = schedule, simulate(graph, costs, schedule).total_us
    is_better = True
    while is_better:
        is_better = False
        for task in best.order:
            for candidate in _moves(after, best, task, num_streams):
                time_us = simulate(graph, costs, candidate).total_us
                fits = max_bytes is None or peak_bytes(graph, candidate) <= max_bytes
                if fits and time_us < (1 - _LEAST_GAIN) * best_us:
                    best, best_us, is_better = candidate, time_us, True
    return best


def _moves(after: Edges, schedule: Schedule, task: int, num_streams: int) -> Iterator[Schedule]:
    """The schedules with `task` on another stream; one unused stream is like another."""
    for stream in range(min(num_streams, schedule.num_streams + 1)):
        if stream == schedule.streams[task]:
            continue
        streams = [*schedule.streams[:task], stream, *schedule.streams[task + 1 :]]
        numbers: dict[int, int] = {}
        for other in schedule.order:
            numbers.setdefault(streams[other], len(numbers))
        numbered = [numbers[stream] for stream in streams]
        yield Schedule(
            schedule.strategy, schedule.order, tuple(numbered), reduce_waits(after, schedule.order, numbered)
        )
