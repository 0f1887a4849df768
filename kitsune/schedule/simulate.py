"""How long a schedule would take."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from kitsune.plan import Costs, Schedule, TaskGraph
from kitsune.schedule.sharing import SharedDevice


@dataclass(frozen=True)
class Simulation:
    """When tasks would run.

    Attributes:
        start_us: by index of the task, when it starts; the whole starts at 0.
        end_us: by index of the task, when it ends.
        total_us: when all have ended.
    """

    start_us: tuple[float, ...]
    end_us: tuple[float, ...]
    total_us: float


def simulate(graph: TaskGraph, costs: Costs, schedule: Schedule) -> Simulation:
    """Runs `schedule`, which must be legal, in a model of the device.

    A task starts `costs.launch_us` after the last of those that must have finished (the one before it on its stream,
    and those it waits for), and `costs.sync_us` later still for each wait; with nothing before it, at 0. Running
    tasks share the device: while their shares add up to s > 1, all of them run at a rate of 1 / s.
    Takes O(tasks * log streams).
    """
    num_tasks = len(graph.tasks)
    following = _following(schedule)
    awaiting: dict[int, list[int]] = {}
    blockers, delays = [0] * num_tasks, [0.0] * num_tasks
    for task in following:
        if task is not None:
            blockers[task] = 1
    for wait in schedule.waits:
        awaiting.setdefault(wait.earlier, []).append(wait.later)
        blockers[wait.later] += 1
        delays[wait.later] += costs.sync_us
    delays = [delay + costs.launch_us if blocker else 0.0 for delay, blocker in zip(delays, blockers, strict=True)]
    starts, ends = [0.0] * num_tasks, [0.0] * num_tasks
    device = SharedDevice()
    starting = [(0.0, task) for task in range(num_tasks) if not blockers[task]]
    for _ in range(2 * num_tasks):
        if starting and starting[0][0] < device.next_end_us():
            time_us, task = heappop(starting)
            device.run_until(time_us)
            device.start(task, costs.tasks[task])
            starts[task] = time_us
            continue
        ended = device.end_next()
        ends[ended] = device.now_us
        for released in (following[ended], *awaiting.get(ended, ())):
            if released is None:
                continue
            blockers[released] -= 1
            if not blockers[released]:
                heappush(starting, (device.now_us + delays[released], released))
    return Simulation(tuple(starts), tuple(ends), max(ends, default=0.0))


def _following(schedule: Schedule) -> list[int | None]:
    """By index of the task, the next one on its stream."""
    following: list[int | None] = [None] * len(schedule.order)
    latest: dict[int, int] = {}
    for task in schedule.order:
        stream = schedule.streams[task]
        if stream in latest:
            following[latest[stream]] = task
        latest[stream] = task
    return following
