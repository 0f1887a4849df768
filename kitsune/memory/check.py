"""Whether a memory plan is legal."""

from __future__ import annotations

from collections.abc import Iterator

from kitsune.memory.extents import Extents
from kitsune.memory.planner import ALIGNMENT
from kitsune.plan.memory import MemoryPlan
from kitsune.plan.schedule import Schedule
from kitsune.plan.tasks import TaskGraph, Value


def check_memory(graph: TaskGraph, schedule: Schedule, plan: MemoryPlan, *, alignment: int = ALIGNMENT) -> list[str]:
    """What is wrong with `plan`; nothing if it is legal.

    Legal is a plan that places every value that has bytes, inside the arena and aligned, and that lets two values
    share bytes only if one is dead before the other is born, on every timing of the streams.

    Values are compared only with the latest that was placed on the same bytes before them, which finds an illegal plan
    as surely as comparing all: where each is born after the death of the one before it, it is so for all
    before it. Of several values that share a byte illegally, not every pair is named.
    """
    if len(plan.offsets) != len(graph.values):
        return [f"the plan places {len(plan.offsets)} values, and the graph has {len(graph.values)}"]
    return [*_misplaced(graph, plan, alignment), *_overwritten(graph, schedule, plan)]


def _misplaced(graph: TaskGraph, plan: MemoryPlan, alignment: int) -> Iterator[str]:
    for value, begin in zip(graph.values, plan.offsets, strict=True):
        if begin is None:
            if value.num_bytes > 0:
                yield f"value {value.index} ({value.name}) has {value.num_bytes} bytes and no place"
            continue
        if begin % alignment != 0:
            yield f"value {value.index} ({value.name}) begins at byte {begin}, no multiple of {alignment}"
        if begin < 0 or begin + value.num_bytes > plan.arena_bytes:
            yield (
                f"value {value.index} ({value.name}), bytes {begin} to {begin + value.num_bytes}, is not in the arena "
                f"of {plan.arena_bytes} bytes"
            )


def _overwritten(graph: TaskGraph, schedule: Schedule, plan: MemoryPlan) -> Iterator[str]:
    born: list[list[Value]] = [[] for _ in graph.tasks]
    for value in graph.values:
        born[value.producer].append(value)
    extents = Extents()
    for task in schedule.order:
        for value in born[task]:
            begin = plan.offsets[value.index]
            if begin is None or begin < 0 or value.num_bytes == 0:
                continue
            end = begin + value.num_bytes
            for owner in dict.fromkeys(extent.owner for extent in extents.overlapping(begin, end)):
                older = graph.values[owner]
                if not _is_dead(older, task, schedule):
                    yield (
                        f"value {value.index} ({value.name}) shares bytes with value {owner} ({older.name}), "
                        f"which may be alive when task {task} starts"
                    )
            extents.claim(begin, end, value.index)


def _is_dead(value: Value, task: int, schedule: Schedule) -> bool:
    """Whether nothing touches the value any more when the task starts, for sure."""
    if value.is_output:
        return False
    return all(schedule.happens_before(access, task) for access in (value.producer, *value.users))
