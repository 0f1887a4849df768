"""Whether tasks are what a graph asks for: found out node by node, not in the way in which `build` makes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from torch import fx

from kitsune.graph import dataflow
from kitsune.plan.tasks import TaskGraph


def problem(graph: fx.Graph, tasks: TaskGraph) -> str | None:
    """The first thing by which running `tasks` could differ from running `graph`; None if there is none.

    Tasks may run in any order that their dependencies allow, after the nodes that are in none of them. This takes time
    and memory that grow with the square of the number of tasks.
    """
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    for found in (_membership(nodes, tasks), _order(tasks)):
        first = next(found, None)
        if first is not None:
            return first
    before = _ancestors(tasks)

    def precedes(earlier: int, later: int) -> bool:
        return earlier == later or bool(before[later] >> earlier & 1)

    owners = {nodes[name]: task.index for task in tasks.tasks for name in task.nodes}
    heads = [(task.index, nodes[task.name]) for task in tasks.tasks]
    operands = [_operands(head, [nodes[name] for name in tasks.tasks[index].nodes]) for index, head in heads]
    checks = (
        _prologue(nodes, owners),
        _arguments(owners, precedes),
        _memory(heads, operands, precedes),
        _random(heads, precedes),
    )
    return next((first for check in checks for first in check), None)


def _membership(nodes: dict[str, fx.Node], tasks: TaskGraph) -> Iterator[str]:
    places = {name: place for place, name in enumerate(nodes)}
    seen: set[str] = set()
    for task in tasks.tasks:
        if task.name not in task.nodes:
            yield f"task {task.index} does not run its operator {task.name}"
        for name in task.nodes:
            if name not in nodes:
                yield f"task {task.index} runs {name}, which is no operator of the graph"
            elif name in seen:
                yield f"{name} runs twice"
            seen.add(name)
        ordered = [places[name] for name in task.nodes if name in places]
        if ordered != sorted(ordered):
            yield f"the nodes of task {task.index} are not in the order of the graph"


def _order(tasks: TaskGraph) -> Iterator[str]:
    for position, task in enumerate(tasks.tasks):
        earlier = [dependency.task for dependency in task.after]
        if task.index != position:
            yield f"task {position} has the index {task.index}"
        if earlier != sorted(set(earlier)) or not all(0 <= other < position for other in earlier):
            yield f"the dependencies of task {position} are not ascending tasks before it"


def _ancestors(tasks: TaskGraph) -> list[int]:
    """By index of the task, the set of tasks before it, as the bits of a number."""
    before: list[int] = []
    for task in tasks.tasks:
        bits = 0
        for dependency in task.after:
            bits |= before[dependency.task] | 1 << dependency.task
        before.append(bits)
    return before


def _prologue(nodes: dict[str, fx.Node], owners: dict[fx.Node, int]) -> Iterator[str]:
    for node in nodes.values():
        if node in owners:
            continue
        if any(argument in owners for argument in node.all_input_nodes):
            yield f"{node.name} is in no task, but needs the result of one"
        given = {storage for argument in node.all_input_nodes for storage in dataflow.storages(argument)}
        if not dataflow.storages(node) <= given or any(dataflow.written(node)):
            yield f"{node.name} is in no task, but is no view of an input"


def _arguments(owners: dict[fx.Node, int], precedes: Callable[[int, int], bool]) -> Iterator[str]:
    for node, task in owners.items():
        for argument in node.all_input_nodes:
            if argument in owners and not precedes(owners[argument], task):
                yield f"{node.name} of task {task} may run before its argument {argument.name}"


def _operands(head: fx.Node, members: list[fx.Node]) -> set[int]:
    """The storages that an operator touches, or those that the nodes before it do, which it needs."""
    return {
        storage
        for member in members
        if member <= head
        for argument in member.all_input_nodes
        for storage in dataflow.storages(argument)
    }


def _memory(
    heads: list[tuple[int, fx.Node]], operands: list[set[int]], precedes: Callable[[int, int], bool]
) -> Iterator[str]:
    """Operators that touch a storage, of which one writes it, must keep the order of the graph."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for task, node in sorted(heads, key=lambda head: head[1]):
        touched = operands[task]
        written = {storage for argument in dataflow.written(node) for storage in dataflow.storages(argument)}
        for storage in sorted(touched):
            others = [writer[storage]] if storage in writer else []
            others += readers.get(storage, []) if storage in written else []
            for other in others:
                if not precedes(other, task):
                    yield f"task {task} may touch memory before task {other}, which comes first in the graph"
        for storage in touched - written:
            readers.setdefault(storage, []).append(task)
        for storage in written:
            writer[storage] = task
            readers[storage] = []


def _random(heads: list[tuple[int, fx.Node]], precedes: Callable[[int, int], bool]) -> Iterator[str]:
    draws = [task for task, node in sorted(heads, key=lambda head: head[1]) if dataflow.draws_random_numbers(node)]
    for earlier, later in itertools.pairwise(draws):
        if not precedes(earlier, later):
            yield f"task {later} may draw random numbers before task {earlier}"
