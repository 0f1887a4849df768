"""A plan as code: the graph's operators in the plan's order, between instructions to its streams."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from kitsune.execution.placing import Place
from kitsune.graph import dataflow
from kitsune.memory.pooled import releases
from kitsune.plan import Schedule, TaskGraph


@dataclass(frozen=True)
class Lowered:
    """A graph that runs as planned.

    Attributes:
        module: takes the original graph's inputs; with several streams, before them `kitsune.execution.lanes.Lanes`,
            and where it was lowered with `timed`, on any number of streams, `TimedLanes`.
        num_streams: how many streams it uses.
    """

    module: fx.GraphModule
    num_streams: int


def lower(
    module: fx.GraphModule,
    graph: TaskGraph,
    schedule: Schedule,
    places: Mapping[str, Place] | None = None,
    *,
    timed: bool = False,
) -> Lowered:
    """`module`, whose tasks are `graph`, with its operators in the order and on the streams of `schedule`.

    Nodes that are in no task, views of inputs, come first. The results of the nodes that `places` names
    are written there. Every value is held until the stream that it was made on has waited for all of its
    readers: from then on the allocator may use its memory again for that stream. See
    `kitsune.memory.pooled.releases`.

    With `timed`, the lanes are told of the start and the end of every task: all that it waits for has ended
    before its start, and nothing that waits for it starts before its end.
    """
    return _Lowering(module, graph, schedule, places or {}, timed).run()


class _Lowering:
    def __init__(
        self, module: fx.GraphModule, graph: TaskGraph, schedule: Schedule, places: Mapping[str, Place], timed: bool
    ) -> None:
        self._module, self._graph, self._schedule, self._places = module, graph, schedule, places
        self._timed = timed
        self._attributes: dict[str, object] = {}
        self._nodes = {node.name: node for node in module.graph.nodes}
        self._new = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._lanes: fx.Node | None = None
        self._stream = 0
        self._begun = {0}

    def run(self) -> Lowered:
        schedule = self._schedule
        if schedule.num_streams > 1 or self._timed:
            self._lanes = self._new.placeholder("kitsune_lanes")
        in_tasks = {name for task in self._graph.tasks for name in task.nodes}
        for node in self._module.graph.nodes:
            if node.op != "output" and node.name not in in_tasks:
                self._copy(node)
        awaited = _by_later(schedule)
        recorded = {wait.earlier for wait in schedule.waits}
        held = self._releases() if schedule.num_streams > 1 else {}
        for index in schedule.order:
            self._switch(schedule.streams[index])
            for earlier in awaited.get(index, ()):
                self._tell("wait", earlier)
            self._hold(held.get(index, ()))
            self._issue(index)
            if index in recorded:
                self._tell("record", index)
        self._end(held.get(None, ()))
        return Lowered(fx.GraphModule(self._attributes, self._new), schedule.num_streams)

    def _issue(self, task: int) -> None:
        if self._timed:
            self._tell("start", task)
        for name in self._graph.tasks[task].nodes:
            self._copy(self._nodes[name])
        if self._timed:
            self._tell("end", task)

    def _copy(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            name = str(node.target)
            self._attributes[name] = operator.attrgetter(name)(self._module)
        copied = self._copies[node] = self._new.node_copy(node, self._copies.__getitem__)
        place = self._places.get(node.name)
        if place is not None:
            name = f"kitsune_place_{node.name}"
            self._attributes[name] = place.memory
            with self._new.inserting_before(copied):
                memory = self._new.get_attr(name)
            copied.target = place.writer.target
            copied.kwargs = {**copied.kwargs, place.writer.argument: memory}

    def _tell(self, method: str, *args: fx.node.Argument) -> None:
        self._new.call_method(method, (self._lanes, *args))

    def _switch(self, stream: int) -> None:
        if stream != self._stream:
            self._tell("to", stream)
            self._stream = stream
        if stream not in self._begun:
            self._tell("begin")
            self._begun.add(stream)

    def _hold(self, nodes: Iterable[fx.Node]) -> None:
        """Python drops a value after its last use in the code: this is one more."""
        copies = [self._copies[node] for node in dict.fromkeys(nodes)]
        if copies:
            self._tell("hold", *copies)

    def _end(self, nodes: Iterable[fx.Node]) -> None:
        self._switch(0)
        if self._lanes is not None:
            self._tell("join")
        self._hold(nodes)
        (result,) = self._module.graph.output_node().args
        self._new.output(fx.map_arg(result, self._copies.__getitem__))

    def _releases(self) -> Mapping[int | None, Sequence[fx.Node]]:
        """By task, the nodes that need not be held any longer when it starts; under None, those held to the end."""
        task_of = {name: task.index for task in self._graph.tasks for name in task.nodes}
        kept = {storage for node in _kept(self._module.graph) for storage in dataflow.storages(node)}
        nodes: dict[int, list[fx.Node]] = {}
        touched: dict[int, list[int]] = {}
        for node in self._module.graph.nodes:
            if node.name not in task_of or _is_taken_apart(node):
                continue
            for storage in dataflow.storages(node) - kept:
                nodes.setdefault(storage, []).append(node)
                users = [task_of[user.name] for user in node.users if user.name in task_of]
                touched.setdefault(storage, []).extend((task_of[node.name], *users))
        result: dict[int | None, list[fx.Node]] = {}
        for storage, task in zip(touched, releases(self._schedule, touched.values()), strict=True):
            result.setdefault(task, []).extend(nodes[storage])
        return result


def _is_taken_apart(node: fx.Node) -> bool:
    """Whether the results of an operator live on under names of their own: then it is dropped with its last result."""
    return bool(node.users) and all(user.target is operator.getitem for user in node.users)


def _kept(graph: fx.Graph) -> list[fx.Node]:
    """Nodes whose memory is not the graph's to release: inputs and results."""
    given = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    return given + [node for node in dataflow.outputs(graph) if node is not None]


def _by_later(schedule: Schedule) -> dict[int, list[int]]:
    awaited: dict[int, list[int]] = {}
    for wait in schedule.waits:
        awaited.setdefault(wait.later, []).append(wait.earlier)
    return awaited
