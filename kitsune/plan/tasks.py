"""What there is to do: tasks, the values that they leave in memory, and what each of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["true", "anti", "output", "order"]


@dataclass(frozen=True, order=True)
class Dependency:
    """A task that must have finished before another starts.

    Attributes:
        task: the index of the earlier task.
        kind: `"true"`: the later task reads what the earlier one wrote; `"anti"`: it writes what
            the earlier one reads; `"output"`: both write the same; `"order"`: both draw random
            numbers. Where several hold, the first of these.
    """

    task: int
    kind: Kind = "true"


@dataclass(frozen=True)
class Task:
    """An operator, with the views of its results.

    Attributes:
        index: its place in `TaskGraph.tasks`.
        name: the name of the operator's node in the graph; unique.
        operator: what runs, for example `aten.mm.default`.
        nodes: the names of all nodes that it runs, in order: the operator and views, which cost nothing.
        after: its direct dependencies, ascending by task, at most one for each task; all earlier than itself.
    """

    index: int
    name: str
    operator: str
    nodes: tuple[str, ...]
    after: tuple[Dependency, ...] = ()


@dataclass(frozen=True)
class Value:
    """A storage that the graph allocates; inputs of the graph are none of them.

    Attributes:
        index: its place in `TaskGraph.values`.
        name: the name of the node that allocates it.
        num_bytes: its size.
        producer: the index of the task that allocates it.
        users: the indices of the other tasks that read or write it or a view of it, ascending.
        is_output: whether the graph returns it or a view of it, so that nothing may overwrite it.
    """

    index: int
    name: str
    num_bytes: int
    producer: int
    users: tuple[int, ...] = ()
    is_output: bool = False


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in an order in which they may run, and the values that pass between them."""

    tasks: tuple[Task, ...]
    values: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What a task costs.

    Attributes:
        us: microseconds on the device when it runs alone.
        share: the part of the device that it keeps busy while it runs, from 0 (exclusive) to 1:
            tasks whose shares add up to more than 1 slow each other down.
        bound: what limits it: `"memory"`, `"compute"` or `"latency"`.
    """

    us: float
    share: float = 1.0
    bound: Literal["memory", "compute", "latency"] = "latency"


@dataclass(frozen=True)
class Costs:
    """The costs of all tasks of a graph on one device.

    Attributes:
        tasks: by index of the task.
        launch_us: microseconds that pass between two tasks that follow each other on one stream.
        sync_us: microseconds that a wait for a task of another stream adds.
        source: `"measured"` or `"analytic"`.
    """

    tasks: tuple[Cost, ...]
    launch_us: float
    sync_us: float
    source: Literal["measured", "analytic"]
