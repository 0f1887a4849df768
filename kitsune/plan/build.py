"""The tasks of a graph, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from kitsune.collection import no_garbage_collection
from kitsune.graph import dataflow
from kitsune.graph.dependencies import Operation, operations
from kitsune.plan.tasks import Dependency, Task, TaskGraph, Value


@no_garbage_collection()
def task_graph(graph: fx.Graph) -> TaskGraph:
    """The tasks of `graph`, in its order, in time linear in its size: see `kitsune.graph.dependencies`.

    Nodes that are in no task are views of inputs; whoever runs the tasks makes these first, in the order of the graph.
    Constants (`get_attr` nodes) are inputs.
    """
    listed = operations(graph).listed
    tasks = tuple(_task(index, operation) for index, operation in enumerate(listed))
    return TaskGraph(tasks, _values(listed, _returned(graph)))


def _task(index: int, operation: Operation) -> Task:
    node = operation.node
    after = tuple(Dependency(earlier, kind) for earlier, kind in operation.after.items())
    return Task(index, node.name, str(node.target), tuple(member.name for member in operation.nodes), after)


def _values(listed: Iterable[Operation], returned: set[int]) -> tuple[Value, ...]:
    listed = tuple(listed)
    users: dict[int, list[int]] = {allocation.storage: [] for operation in listed for allocation in operation.allocates}
    for index, operation in enumerate(listed):
        for storage in dict.fromkeys((*operation.reads, *operation.writes)):
            if storage in users:
                users[storage].append(index)
    allocations = [(index, made) for index, operation in enumerate(listed) for made in operation.allocates]
    return tuple(
        Value(place, made.node.name, made.num_bytes, producer, tuple(users[made.storage][1:]), made.storage in returned)
        for place, (producer, made) in enumerate(allocations)
    )


def _returned(graph: fx.Graph) -> set[int]:
    return {storage for node in dataflow.outputs(graph) if node is not None for storage in dataflow.storages(node)}
