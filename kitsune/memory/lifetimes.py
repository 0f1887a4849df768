"""When values are surely not alive, whatever the timing of the streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kitsune.plan.schedule import Schedule
from kitsune.plan.tasks import TaskGraph


@dataclass(frozen=True)
class Lifetimes:
    """Births and deaths of values, as each stream knows them.

    A value is alive from the start of its producer to the end of the last of its users, an output for ever. A value
    `old` is surely dead when task `t` starts if the schedule orders its producer and all its users before `t`. From
    then on it is so for every later task of the same stream, so that one list for each task says it all.

    Attributes:
        schedule: what orders the tasks.
        born: by index of the task, the values that it allocates, ascending.
        dead: by index of the task, the values that are surely dead when it starts and were not yet for the task
            before it on its stream.
    """

    schedule: Schedule
    born: tuple[tuple[int, ...], ...]
    dead: tuple[tuple[int, ...], ...]


def lifetimes(graph: TaskGraph, schedule: Schedule) -> Lifetimes:
    """Births and deaths of the graph's values in O((tasks + uses of values) * streams)."""
    born: list[list[int]] = [[] for _ in graph.tasks]
    lasts: list[list[int]] = [[] for _ in graph.tasks]  # by task, the values of which it is the last one on its stream
    streams_left = [0] * len(graph.values)
    for value in graph.values:
        born[value.producer].append(value.index)
        if value.is_output:
            continue
        last_tasks = _last_on_streams(schedule, (value.producer, *value.users))
        streams_left[value.index] = len(last_tasks)
        for task in last_tasks:
            lasts[task].append(value.index)
    on_streams = tasks_on_streams(schedule)
    known = [[0] * schedule.num_streams for _ in on_streams]  # by stream, how many tasks of each it knows as finished
    left = [streams_left.copy() for _ in on_streams]
    dead: list[tuple[int, ...]] = [()] * len(graph.tasks)
    for task in schedule.order:
        stream = schedule.streams[task]
        seen: list[int] = []
        for other, finished in enumerate(schedule.clocks[task]):
            for earlier in on_streams[other][known[stream][other] : finished]:
                for index in lasts[earlier]:
                    left[stream][index] -= 1
                    if left[stream][index] == 0:
                        seen.append(index)
            known[stream][other] = finished
        dead[task] = tuple(seen)
    return Lifetimes(schedule, tuple(map(tuple, born)), tuple(dead))


def tasks_on_streams(schedule: Schedule) -> list[list[int]]:
    """By stream, the indices of its tasks in the order in which it runs them."""
    tasks: list[list[int]] = [[] for _ in range(schedule.num_streams)]
    for task in schedule.order:
        tasks[schedule.streams[task]].append(task)
    return tasks


def live_bytes(lives: Lifetimes, sizes: Sequence[int]) -> int:
    """The most bytes that values alive together take; `sizes` by index of the value, in any unit.

    That is the largest sum, over tasks, of the values that are neither surely dead when the task starts nor surely
    born after it ends. Whatever is alive at some moment is counted at the task that started last before it, so that
    this is an upper bound; with one stream it is exact.
    """
    schedule = lives.schedule
    total = sum(sizes)
    unborn = _unborn_bytes(lives, sizes)
    dead = [0] * schedule.num_streams
    most = 0
    for task in schedule.order:
        stream = schedule.streams[task]
        dead[stream] += sum(sizes[index] for index in lives.dead[task])
        most = max(most, total - dead[stream] - unborn[task])
    return most


def conflicts(lives: Lifetimes, ranks: Sequence[int]) -> list[int]:
    """By rank of a value, which others may be alive together with it: the bits of their ranks.

    Args:
        ranks: by index of the value, its rank; None of the ranks twice.
    """
    schedule = lives.schedule
    apart = [0] * len(ranks)
    dead = [0] * schedule.num_streams
    for task in schedule.order:
        stream = schedule.streams[task]
        for index in lives.dead[task]:
            dead[stream] |= 1 << ranks[index]
        for index in lives.born[task]:
            apart[ranks[index]] = dead[stream]
    unborn = [0] * schedule.num_streams
    for task in reversed(schedule.order):
        stream = schedule.streams[task]
        for index in lives.born[task]:
            unborn[stream] |= 1 << ranks[index]
        for index in lives.dead[task]:
            apart[ranks[index]] |= unborn[stream]
    everything = (1 << len(ranks)) - 1
    return [everything & ~others & ~(1 << rank) for rank, others in enumerate(apart)]


def _unborn_bytes(lives: Lifetimes, sizes: Sequence[int]) -> list[int]:
    """By task, the bytes of the values whose producers surely start after it has ended."""
    schedule = lives.schedule
    on_streams = tasks_on_streams(schedule)
    from_here = [
        _sums_to_the_end([sum(sizes[index] for index in lives.born[task]) for task in tasks]) for tasks in on_streams
    ]
    unborn = [0] * len(schedule.order)
    for stream, tasks in enumerate(on_streams):
        for other, later in enumerate(on_streams):
            place = 0  # the first task of the other stream that knows this one as finished
            for position, task in enumerate(tasks, start=1):
                while place < len(later) and schedule.clocks[later[place]][stream] < position:
                    place += 1
                unborn[task] += from_here[other][place]
    return unborn


def _sums_to_the_end(numbers: Sequence[int]) -> list[int]:
    """By place, the sum of the numbers from there on; one more for the place after the last."""
    return [*accumulate(reversed(numbers), initial=0)][::-1]


def _last_on_streams(schedule: Schedule, tasks: Sequence[int]) -> list[int]:
    """Of `tasks`, the last one on each stream."""
    last: dict[int, int] = {}
    for task in tasks:
        stream = schedule.streams[task]
        if stream not in last or schedule.positions[task] > schedule.positions[last[stream]]:
            last[stream] = task
    return list(last.values())
