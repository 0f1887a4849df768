"""Task graphs and schedules of them: random ones, and such as training steps have."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from kitsune.plan import Dependency, Schedule, Task, TaskGraph, Value, Wait

SIZES = (0, 1, 4, 511, 512, 513, 1024, 3000, 4096, 10_000, 65_536)


def in_order(graph: TaskGraph) -> Schedule:
    """All tasks on one stream, in the order of the graph."""
    return Schedule("in order", tuple(range(len(graph.tasks))), (0,) * len(graph.tasks))


def random_schedule(graph: TaskGraph, num_streams: int, seed: int, *, stay: float = 0.0) -> Schedule:
    """A legal schedule with every wait that a dependency may need, redundant ones included.

    Args:
        stay: the probability that a task is on the stream of its first dependency; else its stream is random.
    """
    chance = random.Random(seed)
    order = _random_order(graph, chance)
    streams = [0] * len(graph.tasks)
    for task in order:
        after = graph.tasks[task].after
        streams[task] = streams[after[0].task] if after and chance.random() < stay else chance.randrange(num_streams)
    used = sorted(set(streams))
    streams = [used.index(stream) for stream in streams]
    waits = {
        Wait(task.index, dependency.task)
        for task in graph.tasks
        for dependency in task.after
        if streams[task.index] != streams[dependency.task]
    }
    return Schedule("random", tuple(order), tuple(streams), tuple(sorted(waits)))


def _random_order(graph: TaskGraph, chance: random.Random) -> list[int]:
    missing = [len(task.after) for task in graph.tasks]
    followers: list[list[int]] = [[] for _ in graph.tasks]
    for task in graph.tasks:
        for dependency in task.after:
            followers[dependency.task].append(task.index)
    ready = [task.index for task in graph.tasks if not task.after]
    order = []
    while ready:
        task = ready.pop(chance.randrange(len(ready)))
        order.append(task)
        for follower in followers[task]:
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    return order


class GraphWriter:
    """Collects tasks and values of a graph."""

    def __init__(self) -> None:
        self._after: list[list[int]] = []
        self._sizes: list[int] = []
        self._producers: list[int] = []
        self._users: list[list[int]] = []

    def task(self, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> int:
        """Adds a task that reads the values `reads` and allocates values of the sizes `writes`; its index.

        The first of those values has the index `num_values` had before, and so on.
        """
        index = len(self._after)
        self._after.append(sorted({self._producers[value] for value in reads}))
        for value in dict.fromkeys(reads):
            self._users[value].append(index)
        for size in writes:
            self._sizes.append(size)
            self._producers.append(index)
            self._users.append([])
        return index

    def value(self, size: int, *reads: int) -> int:
        """Adds a task that reads the values `reads` and allocates one value; the value's index."""
        self.task(reads, [size])
        return len(self._sizes) - 1

    @property
    def num_values(self) -> int:
        return len(self._sizes)

    def graph(self, outputs: Sequence[int] = ()) -> TaskGraph:
        tasks = [
            Task(index, f"task_{index}", "aten.add.Tensor", (f"task_{index}",), tuple(map(Dependency, after)))
            for index, after in enumerate(self._after)
        ]
        values = [
            Value(index, f"value_{index}", size, self._producers[index], tuple(self._users[index]), index in outputs)
            for index, size in enumerate(self._sizes)
        ]
        return TaskGraph(tuple(tasks), tuple(values))


def random_graph(num_tasks: int, seed: int) -> TaskGraph:
    """Tasks that allocate up to two values and read up to three earlier ones; a few values are outputs."""
    chance = random.Random(seed)
    writer = GraphWriter()
    for _ in range(num_tasks):
        known = range(max(0, writer.num_values - 6), writer.num_values)
        reads = chance.sample(known, min(len(known), chance.choice((0, 1, 1, 2, 3))))
        writer.task(reads, chance.choices(SIZES, k=chance.choice((0, 1, 1, 1, 2))))
    return writer.graph([value for value in range(writer.num_values) if chance.random() < 0.1])


@st.composite
def scheduled_graphs(draw: st.DrawFn, max_tasks: int, max_streams: int) -> tuple[TaskGraph, Schedule]:
    """A random graph with a legal schedule, on one stream as often as on several."""
    graph = random_graph(draw(st.integers(1, max_tasks)), draw(st.integers(0, 10**6)))
    num_streams = draw(st.one_of(st.just(1), st.integers(1, max_streams)))
    return graph, random_schedule(graph, num_streams, draw(st.integers(0, 10**6)))


def training_step(num_layers: int, seed: int = 0) -> TaskGraph:
    """A step of a residual network: ten tasks a layer, as many values, and the loss.

    Forward: product, normalization with its statistics, activation, now and then a sum with an earlier layer.
    Backward: gradients of these, in reverse. Then an update that reads all weight gradients.
    """
    chance = random.Random(seed)
    writer = GraphWriter()
    hidden = writer.value(4096)
    saved = []
    skip, widths = hidden, []
    for layer in range(num_layers):
        width = chance.choice((1 << 14, 1 << 15, 1 << 16, 100_000))
        before = hidden
        product = writer.value(width, hidden)
        normalized = writer.num_values
        writer.task([product], [width, 256, 256])
        hidden = writer.value(width, normalized)
        if layer % 4 == 3:
            hidden = writer.value(width, hidden, skip)
            skip = hidden
        saved.append((before, product, normalized, hidden))
        widths.append(width)
    loss = writer.value(4, hidden)
    gradient = writer.value(widths[-1], loss, hidden)
    updates = []
    for (before, product, normalized, activation), width in zip(reversed(saved), reversed(widths), strict=True):
        gradient = writer.value(width, gradient, activation)
        first = writer.num_values
        writer.task([gradient, product, normalized + 1, normalized + 2], [width, 256, 256])
        weight = writer.value(chance.choice((9_000, 40_000)), first, before)
        gradient = writer.value(width, first)
        updates += [weight, first + 1, first + 2]
        if chance.random() < 0.5:
            writer.task([weight, first + 1, first + 2])
            del updates[-3:]
    writer.task(updates)
    return writer.graph([loss])
