"""What values take of a caching allocator that has memory for each stream apart, as PyTorch's has."""

from __future__ import annotations

from collections import defaultdict

from kitsune.plan.schedule import Schedule
from kitsune.plan.tasks import TaskGraph


def pooled_bytes(graph: TaskGraph, schedule: Schedule) -> int:
    """The most bytes that the values of `graph` take when its tasks are issued in the order of `schedule`.

    A value lies in the memory of its producer's stream, from there to the last of its users, an output for ever. What
    it leaves is used again on that stream only. The allocator's rounding is left out.
    """
    issued = {task: place for place, task in enumerate(schedule.order)}
    begun, ended = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for value in graph.values:
        begun[value.producer].append(value.index)
        if not value.is_output:
            ended[max((value.producer, *value.users), key=issued.__getitem__)].append(value.index)
    present, peaks = [0] * schedule.num_streams, [0] * schedule.num_streams
    for task in schedule.order:
        for index in begun[task]:
            stream = schedule.streams[task]
            present[stream] += graph.values[index].num_bytes
            peaks[stream] = max(peaks[stream], present[stream])
        for index in ended[task]:
            present[schedule.streams[graph.values[index].producer]] -= graph.values[index].num_bytes
    return sum(peaks)
