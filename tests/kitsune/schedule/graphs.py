"""Task graphs and costs: random ones, and ones shaped like training steps."""

import random

from hypothesis import strategies as st

from kitsune.plan import Cost, Costs, Dependency, Schedule, Task, TaskGraph, Value
from kitsune.schedule.reduce import reduce_waits


def make_graph(after: list[list[int]], values: list[tuple[int, int, list[int], bool]] | None = None) -> TaskGraph:
    """A graph of tasks with the dependencies `after` and values of (bytes, producer, users, whether returned)."""
    tasks = [
        Task(index, f"task_{index}", "aten.add.Tensor", (f"task_{index}",), tuple(map(Dependency, sorted(earlier))))
        for index, earlier in enumerate(after)
    ]
    made = [
        Value(index, f"task_{producer}", num_bytes, producer, tuple(sorted(users)), is_output)
        for index, (num_bytes, producer, users, is_output) in enumerate(values or [])
    ]
    return TaskGraph(tuple(tasks), tuple(made))


def make_costs(
    us: list[float], share: list[float] | float = 1.0, launch_us: float = 1.0, sync_us: float = 1.0
) -> Costs:
    """Costs of tasks that take `us`; one share for all, or one for each."""
    shares = share if isinstance(share, list) else [share] * len(us)
    return Costs(tuple(Cost(*cost) for cost in zip(us, shares, strict=True)), launch_us, sync_us, "analytic")


@st.composite
def graphs(draw: st.DrawFn, max_tasks: int = 12, min_tasks: int = 0) -> TaskGraph:
    """A random graph, each task of which allocates one value that those read that depend on it, or some of them."""
    num_tasks = draw(st.integers(min_tasks, max_tasks))
    after = [sorted(draw(st.sets(st.integers(0, task - 1), max_size=3))) if task else [] for task in range(num_tasks)]
    values = []
    for task in range(num_tasks):
        later = [other for other in range(num_tasks) if task in after[other]]
        users = [other for other in later if draw(st.booleans())]
        values.append((draw(st.integers(0, 9)), task, users, draw(st.integers(0, 5)) == 0))
    return make_graph(after, values)


@st.composite
def costs_of(draw: st.DrawFn, graph: TaskGraph) -> Costs:
    """Random costs, exact in binary so that sums do not depend on their order."""
    us = [draw(st.integers(0, 40)) / 4 for _ in graph.tasks]
    shares = [draw(st.integers(1, 8)) / 8 for _ in graph.tasks]
    return make_costs(us, shares, draw(st.integers(0, 8)) / 4, draw(st.integers(0, 8)) / 4)


@st.composite
def scheduled(draw: st.DrawFn, max_tasks: int = 12, max_streams: int = 4) -> tuple[TaskGraph, Schedule]:
    """A random graph with a random legal schedule of it, its waits reduced."""
    graph = draw(graphs(max_tasks))
    after = [[dependency.task for dependency in task.after] for task in graph.tasks]
    order: list[int] = []
    while len(order) < len(after):
        ready = [task for task in range(len(after)) if task not in order and set(after[task]) <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    streams = [0] * len(after)
    used = 0
    for task in order:
        streams[task] = draw(st.integers(0, min(used, max_streams - 1)))
        used = max(used, streams[task] + 1)
    return graph, Schedule("random", tuple(order), tuple(streams), reduce_waits(after, order, streams))


def training_step(num_layers: int, seed: int = 0) -> tuple[TaskGraph, Costs]:
    """A step with 9 tasks a layer: a forward chain with residual branches, input and weight gradients, and updates.

    Layer k convolves, normalizes and activates; every third adds what came out of the layer two before. Backwards,
    each layer has the gradients of its activation and normalization, of its input and of its weights, an average of
    the gradient and an update. Values are as large as such a layer's.
    """
    generator = random.Random(seed)
    after: list[list[int]] = []
    values: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    us: list[float] = []
    shares: list[float] = []

    def add(cost_us: float, share: float, num_bytes: int, *inputs: int) -> int:
        task = len(after)
        after.append(sorted(set(inputs)))
        us.append(cost_us * generator.uniform(0.7, 1.3))
        shares.append(share)
        sizes[task] = num_bytes
        values[task] = []
        for producer in set(inputs):
            values[producer].append(task)
        return task

    kinds = [generator.choice([1, 2, 4]) for _ in range(num_layers)]
    layers: list[tuple[int, int, int, int]] = []  # input, convolved, normalized, activated
    current = add(1.0, 0.1, 1 << 20)
    for layer, scale in enumerate(kinds):
        convolved = add(20.0 / scale, 1.0 / scale, (1 << 20) // scale, current)
        normalized = add(6.0 / scale, 0.5, (1 << 20) // scale, convolved)
        skip = [layers[-2][3]] if layer % 3 == 2 else []
        activated = add(4.0 / scale, 0.4, (1 << 20) // scale, normalized, *skip)
        layers.append((current, convolved, normalized, activated))
        current = activated
    gradient = add(2.0, 0.1, 1 << 20, current)
    skipped: dict[int, list[int]] = {}
    for layer in range(num_layers - 1, -1, -1):
        scale = kinds[layer]
        given, convolved, normalized, activated = layers[layer]
        through = add(5.0 / scale, 0.4, (1 << 20) // scale, gradient, activated, *skipped.get(layer, []))
        if layer % 3 == 2:
            skipped[layer - 2] = [through]
        inner = add(7.0 / scale, 0.5, (1 << 20) // scale, through, convolved, normalized)
        gradient = add(20.0 / scale, 1.0 / scale, (1 << 20) // scale, inner)
        weight = add(20.0 / scale, 1.0 / scale, 1 << 16, inner, given)
        moment = add(2.0, 0.2, 1 << 16, weight)
        add(3.0, 0.2, 0, weight, moment)
    made = [(sizes[task], task, values[task], False) for task in range(len(after)) if sizes[task]]
    return make_graph(after, made), make_costs(us, shares, 0.96, 1.0)
