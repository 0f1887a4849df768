"""What may happen when a schedule runs: every state that streams can be in, and runs on tokens instead of numbers.

Nothing here knows of clocks: tasks start when their stream is idle and what they wait for has ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

from kitsune.plan import MemoryPlan, Schedule, TaskGraph, Value

State = tuple[int, ...]
"""By stream: twice the number of tasks that have ended, and one more while the next one runs."""


class Streams:
    """The tasks of a schedule on their streams, and the steps from state to state."""

    def __init__(self, schedule: Schedule) -> None:
        self.tasks = [
            [task for task in schedule.order if schedule.streams[task] == stream]
            for stream in range(schedule.num_streams)
        ]
        self.waits = {(wait.later, wait.earlier) for wait in schedule.waits}

    @property
    def first(self) -> State:
        return (0,) * len(self.tasks)

    def started(self, state: State) -> set[int]:
        return {task for tasks, steps in zip(self.tasks, state, strict=True) for task in tasks[: (steps + 1) // 2]}

    def ended(self, state: State) -> set[int]:
        return {task for tasks, steps in zip(self.tasks, state, strict=True) for task in tasks[: steps // 2]}

    def next_steps(self, state: State) -> list[int]:
        """The streams on which a task may start or end."""
        ended = self.ended(state)
        return [stream for stream in range(len(self.tasks)) if self._may_step(stream, state[stream], ended)]

    def _may_step(self, stream: int, steps: int, ended: set[int]) -> bool:
        if steps % 2 == 1:
            return True
        if steps // 2 == len(self.tasks[stream]):
            return False
        task = self.tasks[stream][steps // 2]
        return all(earlier in ended for later, earlier in self.waits if later == task)


def step(state: State, stream: int) -> State:
    return (*state[:stream], state[stream] + 1, *state[stream + 1 :])


def states(schedule: Schedule) -> Iterator[tuple[set[int], set[int]]]:
    """The tasks that have started, and those that have ended, in each state that can be reached."""
    streams = Streams(schedule)
    reached = {streams.first}
    pending = [streams.first]
    while pending:
        state = pending.pop()
        yield streams.started(state), streams.ended(state)
        for stream in streams.next_steps(state):
            following = step(state, stream)
            if following not in reached:
                reached.add(following)
                pending.append(following)


def is_alive(value: Value, started: set[int], ended: set[int]) -> bool:
    accesses = {value.producer, *value.users}
    return value.producer in started and (value.is_output or not accesses <= ended)


def alive_together(graph: TaskGraph, schedule: Schedule) -> set[tuple[int, int]]:
    """The pairs of values, ascending, that are alive at once in some state."""
    pairs: set[tuple[int, int]] = set()
    for started, ended in states(schedule):
        alive = [value.index for value in graph.values if is_alive(value, started, ended)]
        pairs.update(combinations(alive, 2))
    return pairs


def most_bytes(graph: TaskGraph, schedule: Schedule, sizes: Sequence[int]) -> int:
    """The most that values alive at once take, over all states."""
    return max(
        sum(sizes[value.index] for value in graph.values if is_alive(value, started, ended))
        for started, ended in states(schedule)
    )


def overlap(graph: TaskGraph, offsets: Sequence[int | None], first: int, second: int) -> bool:
    """Whether two values share a byte."""
    one, other = offsets[first], offsets[second]
    if one is None or other is None:
        return False
    ends = one + graph.values[first].num_bytes, other + graph.values[second].num_bytes
    return max(one, other) < min(ends)


def wrong_reads(graph: TaskGraph, schedule: Schedule, plan: MemoryPlan, seed: int) -> list[tuple[int, int]]:
    """Runs the schedule with one random timing; the tasks that found a value overwritten, with that value.

    A task writes the token of each value that it allocates into all its bytes when it starts and again when it ends,
    and looks at all bytes of what it uses at both times. Outputs are looked at once more at the end, by task -1.
    """
    chance = random.Random(seed)
    streams = Streams(schedule)
    memory = bytearray(plan.arena_bytes)
    wrong: list[tuple[int, int]] = []
    state = streams.first
    used: dict[int, list[Value]] = {task.index: [] for task in graph.tasks}
    born: dict[int, list[Value]] = {task.index: [] for task in graph.tasks}
    for value in graph.values:
        born[value.producer].append(value)
        for user in value.users:
            used[user].append(value)
    while choices := streams.next_steps(state):
        stream = chance.choice(choices)
        task = streams.tasks[stream][state[stream] // 2]
        for value in born[task]:
            _write(memory, plan, value)
        wrong += [(task, value.index) for value in used[task] if not _is_intact(memory, plan, value)]
        state = step(state, stream)
    return wrong + [
        (-1, value.index) for value in graph.values if value.is_output and not _is_intact(memory, plan, value)
    ]


def _token(value: Value) -> bytes:
    return bytes([value.index + 1]) * value.num_bytes


def _write(memory: bytearray, plan: MemoryPlan, value: Value) -> None:
    begin = plan.offsets[value.index]
    if begin is not None:
        memory[begin : begin + value.num_bytes] = _token(value)


def _is_intact(memory: bytearray, plan: MemoryPlan, value: Value) -> bool:
    begin = plan.offsets[value.index]
    return begin is None or memory[begin : begin + value.num_bytes] == _token(value)
