"""The dependencies of a task graph as bare indices, and how urgent its tasks are."""

from __future__ import annotations

from collections.abc import Sequence

from kitsune.plan import Costs, TaskGraph

Edges = Sequence[Sequence[int]]
"""By index of the task, indices of other tasks."""


def dependencies(graph: TaskGraph) -> list[list[int]]:
    """By index of the task, the tasks that must have finished before it starts; all of lower index, ascending."""
    return [[dependency.task for dependency in task.after] for task in graph.tasks]


def dependents(after: Edges) -> list[list[int]]:
    """The dependencies `after`, turned round: by index of the task, the tasks that depend on it, ascending."""
    result: list[list[int]] = [[] for _ in after]
    for task, earlier_tasks in enumerate(after):
        for earlier in earlier_tasks:
            result[earlier].append(task)
    return result


def upward_ranks(before: Edges, costs: Costs) -> list[float]:
    """By index of the task, the microseconds from its start to the end of the longest path that begins with it.

    The upward rank of HEFT (Topcuoglu et al., 2002), with the gap between two tasks in place of communication.
    `before` are the dependents of each task, all of higher index.
    """
    ranks = [0.0] * len(before)
    for task in range(len(before) - 1, -1, -1):
        longest = max((ranks[later] + costs.launch_us for later in before[task]), default=0.0)
        ranks[task] = costs.tasks[task].us + longest
    return ranks
