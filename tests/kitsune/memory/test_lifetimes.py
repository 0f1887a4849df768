"""Lifetimes against every state that the streams can reach."""

from hypothesis import given

from kitsune.memory.lifetimes import conflicts, lifetimes, live_bytes
from kitsune.plan import Schedule, TaskGraph, Wait
from tests.kitsune.memory.graphs import GraphWriter, in_order, scheduled_graphs
from tests.kitsune.memory.interleavings import alive_together, most_bytes


def conflicting_pairs(graph: TaskGraph, schedule: Schedule, ranks: list[int]) -> set[tuple[int, int]]:
    found = conflicts(lifetimes(graph, schedule), ranks)
    indices = range(len(graph.values))
    return {(one, two) for one in indices for two in indices if one < two and found[ranks[one]] >> ranks[two] & 1}


@given(scheduled_graphs(max_tasks=9, max_streams=3))
def test_values_conflict_exactly_if_they_are_alive_together_in_some_state(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    forwards = list(range(len(graph.values)))
    expected = alive_together(graph, schedule)
    assert conflicting_pairs(graph, schedule, forwards) == expected
    assert conflicting_pairs(graph, schedule, forwards[::-1]) == expected


@given(scheduled_graphs(max_tasks=9, max_streams=3))
def test_conflicts_are_mutual(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    found = conflicts(lifetimes(graph, schedule), range(len(graph.values)))
    for one, others in enumerate(found):
        assert not others >> one & 1
        assert others >> len(found) == 0
        assert all(found[two] >> one & 1 == others >> two & 1 for two in range(len(found)))


@given(scheduled_graphs(max_tasks=9, max_streams=3))
def test_live_bytes_bound_every_state_and_are_exact_on_one_stream(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    sizes = [value.num_bytes for value in graph.values]
    bound, most = live_bytes(lifetimes(graph, schedule), sizes), most_bytes(graph, schedule, sizes)
    assert bound == most if schedule.num_streams == 1 else bound >= most


@given(scheduled_graphs(max_tasks=9, max_streams=3))
def test_live_bytes_follow_their_definition(case: tuple[TaskGraph, Schedule]) -> None:
    graph, schedule = case
    sizes = [value.num_bytes for value in graph.values]

    def may_live(index: int, task: int) -> bool:
        value = graph.values[index]
        accesses = (value.producer, *value.users)
        is_dead = not value.is_output and all(schedule.happens_before(access, task) for access in accesses)
        return not is_dead and not schedule.happens_before(task, value.producer)

    sums = [sum(size for index, size in enumerate(sizes) if may_live(index, task.index)) for task in graph.tasks]
    assert live_bytes(lifetimes(graph, schedule), sizes) == max(sums)


def test_a_stream_learns_of_a_death_by_its_waits() -> None:
    writer = GraphWriter()
    value = writer.value(1)
    reader = writer.task([value])
    last = writer.task()
    graph = writer.graph()
    assert lifetimes(graph, in_order(graph)).dead == ((), (), (0,))
    apart = Schedule("by hand", (0, 1, 2), (0, 0, 1))
    assert lifetimes(graph, apart).dead == ((), (), ())
    joined = Schedule("by hand", (0, 1, 2), (0, 0, 1), (Wait(last, reader),))
    assert lifetimes(graph, joined).dead == ((), (), (0,))


def test_an_output_never_dies() -> None:
    writer = GraphWriter()
    output = writer.value(1)
    writer.task([output])
    writer.task()
    graph = writer.graph([output])
    assert lifetimes(graph, in_order(graph)).dead == ((), (), ())


def test_a_graph_without_tasks_has_no_lifetimes() -> None:
    lives = lifetimes(TaskGraph(()), Schedule("in order", (), ()))
    assert (lives.born, lives.dead) == ((), ())
    assert live_bytes(lives, []) == 0
    assert conflicts(lives, []) == []
