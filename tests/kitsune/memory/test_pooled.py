"""What an allocator with memory for each stream needs, against every moment of an issue."""

from hypothesis import given

from kitsune.memory.planner import plan_memory
from kitsune.memory.pooled import pooled_bytes
from kitsune.plan import Schedule, TaskGraph
from tests.kitsune.memory.graphs import in_order, scheduled_graphs, training_step

Case = tuple[TaskGraph, Schedule]


def at_every_moment(graph: TaskGraph, schedule: Schedule, stream: int) -> list[int]:
    """The bytes of a stream's values while each task is issued."""
    issued = {task: place for place, task in enumerate(schedule.order)}
    found = []
    for moment in range(len(schedule.order)):
        present = [
            value.num_bytes
            for value in graph.values
            if schedule.streams[value.producer] == stream
            and issued[value.producer] <= moment
            and (value.is_output or moment <= max(issued[task] for task in (value.producer, *value.users)))
        ]
        found.append(sum(present))
    return found


@given(scheduled_graphs(max_tasks=12, max_streams=4))
def test_it_is_the_most_of_each_stream_at_any_moment(case: Case) -> None:
    graph, schedule = case
    streams = range(schedule.num_streams)
    wanted = sum(max(at_every_moment(graph, schedule, stream), default=0) for stream in streams)
    assert pooled_bytes(graph, schedule) == wanted


def test_on_one_stream_it_is_what_is_alive() -> None:
    graph = training_step(4)
    schedule = in_order(graph)
    assert pooled_bytes(graph, schedule) == plan_memory(graph, schedule, alignment=1).live_bytes
