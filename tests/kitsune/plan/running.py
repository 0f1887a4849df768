"""Runs the tasks of a graph one by one, in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kitsune.plan import TaskGraph
from tests.kitsune.steps import bits


class _Runner(fx.Interpreter):
    def run_order(self, names: Sequence[str], inputs: Sequence[Tensor]) -> Any:
        nodes = {node.name: node for node in self.module.graph.nodes}
        self.args_iter = iter(inputs)
        given = [node.name for node in nodes.values() if node.op in ("placeholder", "get_attr")]
        for name in [*given, *names, "output"]:
            self.env[nodes[name]] = self.run_node(nodes[name])
        return self.env[nodes["output"]]


def node_order(module: fx.GraphModule, tasks: TaskGraph, order: Sequence[int]) -> list[str]:
    """All operators' nodes: those of no task, then those of the tasks in `order`."""
    names = [name for index in order for name in tasks.tasks[index].nodes]
    missing = set(names)
    first = [node.name for node in module.graph.nodes if node.op == "call_function" and node.name not in missing]
    return [*first, *names]


def effects(module: fx.GraphModule, names: Sequence[str], inputs: Sequence[Tensor]) -> list[object]:
    """The bits of the results of running the nodes in order, and of `inputs` afterwards. Drawing starts at one seed."""
    torch.manual_seed(7)
    with torch.no_grad():
        outputs = _Runner(module, garbage_collect_values=False).run_order(names, inputs)
    return bits([*outputs, *inputs])


def random_order(tasks: TaskGraph, rng: random.Random) -> list[int]:
    """An order that the dependencies allow. Half of the time, of what can run the latest in the graph runs first."""
    latest_first = rng.random() < 0.5
    missing = {task.index: {dependency.task for dependency in task.after} for task in tasks.tasks}
    order: list[int] = []
    while missing:
        ready = [index for index, earlier in missing.items() if not earlier]
        chosen = max(ready) if latest_first and rng.random() < 0.9 else rng.choice(ready)
        del missing[chosen]
        order.append(chosen)
        for earlier in missing.values():
            earlier.discard(chosen)
    return order
