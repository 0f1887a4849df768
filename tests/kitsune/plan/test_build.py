"""Tasks and values of graphs, by running the tasks in other orders and against what really happens to memory."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.graph import dataflow
from kitsune.plan import Dependency, TaskGraph, task_graph
from kitsune.plan.legality import problem
from tests.kitsune.graph import programs
from tests.kitsune.plan.running import effects, node_order, random_order
from tests.kitsune.steps import TracedStep, dropout_step, model_step

NUM_ORDERS = 4

STEPS: dict[str, Callable[[], TracedStep]] = {
    "mlp": lambda: model_step("mlp"),
    "lenet": lambda: model_step("lenet"),
    "dropout": dropout_step,
}


def all_names(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


@given(programs.programs_of(programs.WIDER_OPERATORS), st.randoms(use_true_random=False))
def test_tasks_in_any_legal_order_do_what_the_graph_does(program: programs.Program, rng: random.Random) -> None:
    module = programs.traced(program)
    tasks = task_graph(module.graph)
    assert problem(module.graph, tasks) is None
    expected = effects(module, all_names(module), programs.inputs())
    for _ in range(NUM_ORDERS):
        names = node_order(module, tasks, random_order(tasks, rng))
        assert sorted(names) == sorted(all_names(module))
        assert effects(module, names, programs.inputs()) == expected


@pytest.mark.parametrize("name", STEPS)
def test_training_steps_in_any_legal_order(name: str) -> None:
    step, rng = STEPS[name](), random.Random(0)
    tasks = task_graph(step.module.graph)
    assert problem(step.module.graph, tasks) is None
    expected = effects(step.module, all_names(step.module), step.fresh_inputs())
    orders = [random_order(tasks, rng) for _ in range(NUM_ORDERS)]
    assert len(set(map(tuple, orders))) > 1
    for order in orders:
        assert effects(step.module, node_order(step.module, tasks, order), step.fresh_inputs()) == expected


def test_resnet_has_legal_tasks() -> None:
    graph = model_step("resnet18").module.graph
    tasks = task_graph(graph)
    assert problem(graph, tasks) is None
    assert len(tasks.tasks) < len(graph.nodes) / 3


def closure(tasks: TaskGraph) -> list[set[int]]:
    before: list[set[int]] = []
    for task in tasks.tasks:
        direct = {dependency.task for dependency in task.after}
        before.append(direct.union(*(before[earlier] for earlier in direct)))
    return before


def without(tasks: TaskGraph, index: int, dependency: Dependency) -> TaskGraph:
    kept = tuple(other for other in tasks.tasks[index].after if other != dependency)
    changed = dataclasses.replace(tasks.tasks[index], after=kept)
    return dataclasses.replace(tasks, tasks=(*tasks.tasks[:index], changed, *tasks.tasks[index + 1 :]))


# A view of a tensor that is reshaped in place is a task of its own, and ordered like a write: more than is needed.
EXACT = {name: function for name, function in programs.WIDER_OPERATORS.items() if name != "t_"}


@given(programs.programs_of(EXACT, max_size=6))
def test_a_missing_dependency_is_found(program: programs.Program) -> None:
    graph = programs.traced(program).graph
    tasks = task_graph(graph)
    before = closure(tasks)
    for task in tasks.tasks:
        for dependency in task.after:
            changed = without(tasks, task.index, dependency)
            assert (problem(graph, changed) is None) == (closure(changed) == before)


def swapped(tasks: TaskGraph, first: int, second: int) -> list[int]:
    order = list(range(len(tasks.tasks)))
    order[first], order[second] = order[second], order[first]
    return order


def overwritten(x: Tensor) -> list[Tensor]:
    first, second = x[0], x[0]
    return [first.fill_(1), second.fill_(2)]


def changed_twice(x: Tensor) -> list[Tensor]:
    first, second = x[0], x[:, 0]
    return [first.add_(1), second.mul_(3)]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (changed_twice, "true"),
        (lambda x: [x.sin(), x.view(-1).add_(1)], "anti"),
        (overwritten, "output"),
        (lambda x: [torch.rand(3), torch.rand_like(x)], "order"),
        (lambda x: [x.t(), x.t_()], "true"),
    ],
    ids=["true", "anti", "output", "order", "reshaped"],
)
def test_kinds_of_dependencies_and_what_they_prevent(function: Callable[[Tensor], list[Tensor]], kind: str) -> None:
    """Running the two last tasks in the other order gives something else."""
    module = trace(function, [torch.arange(6.0).reshape(2, 3)])
    tasks = task_graph(module.graph)
    last = len(tasks.tasks) - 1
    assert tasks.tasks[last].after == (Dependency(last - 1, kind),)  # type: ignore[arg-type]
    inputs = [torch.arange(6.0).reshape(2, 3) for _ in range(2)]
    expected = effects(module, all_names(module), inputs[:1])
    wrong = node_order(module, tasks, swapped(tasks, last - 1, last))
    assert effects(module, wrong, inputs[1:]) != expected


@pytest.mark.parametrize("damage", ["twice", "missing", "later", "alone", "unknown"])
def test_damaged_tasks_are_found(damage: str) -> None:
    graph = trace(lambda x: [(x + 1).t() @ x, x.view(-1)], [torch.ones(2, 2)]).graph
    tasks = task_graph(graph)
    first, last = tasks.tasks[0], tasks.tasks[1]
    assert first.nodes == ("add", "t")
    damaged = {
        "twice": (first, dataclasses.replace(last, nodes=("t", *last.nodes))),
        "missing": (dataclasses.replace(first, nodes=("add",)), last),
        "later": (dataclasses.replace(first, after=(Dependency(1),)), last),
        "alone": (first,),
        "unknown": (first, dataclasses.replace(last, nodes=(*last.nodes, "nothing"))),
    }[damage]
    assert problem(graph, tasks) is None
    assert problem(graph, TaskGraph(damaged)) is not None


class Watching(fx.Interpreter):
    """Keeps every value, and the address of each storage by the node that it first appeared at."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, list[Tensor]] = {}

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        leaves = torch.utils._pytree.tree_leaves(result)
        self.values[node.name] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return result


@given(programs.programs_of(programs.WIDER_OPERATORS))
def test_values_are_the_memory_that_a_run_allocates(program: programs.Program) -> None:
    module = programs.traced(program)
    tasks = task_graph(module.graph)
    watching = Watching(module)
    watching.run(*programs.inputs())
    first: dict[int, str] = {}
    sizes: dict[int, int] = {}
    touched: dict[int, set[int]] = {}
    owners = {name: task.index for task in tasks.tasks for name in task.nodes}
    for node in module.graph.nodes:
        arguments = [tensor for argument in node.all_input_nodes for tensor in watching.values[argument.name]]
        for tensor in (*arguments, *(watching.values[node.name] if node.op != "output" else ())):
            address = tensor.untyped_storage()._cdata
            first.setdefault(address, node.name)
            sizes[address] = tensor.untyped_storage().nbytes()
            if node.name in owners:
                touched.setdefault(address, set()).add(owners[node.name])
    given = {node.name for node in module.graph.nodes if node.op != "call_function"}
    returned = {
        t.untyped_storage()._cdata for node in dataflow.outputs(module.graph) for t in watching.values[node.name]
    }
    allocated = {
        (name, sizes[address], tuple(sorted(touched[address])), address in returned)
        for address, name in first.items()
        if name not in given
    }
    found = {
        (value.name, value.num_bytes, tuple(sorted((value.producer, *value.users))), value.is_output)
        for value in tasks.values
    }
    assert found == allocated
    assert len(tasks.values) == sum(name not in given for name in first.values())
    assert [value.index for value in tasks.values] == list(range(len(tasks.values)))
    assert all(value.producer < min(value.users, default=len(tasks.tasks)) for value in tasks.values)


def test_unused_memory_and_constants() -> None:
    def function(x: Tensor) -> list[Tensor]:
        torch.empty(5)
        return [x * torch.tensor(2.0), x.new_zeros(0)]

    graph = trace(function, [torch.ones(3)]).graph
    found = [(value.name, value.num_bytes, value.users, value.is_output) for value in task_graph(graph).values]
    assert found == [
        ("empty", 20, (), False),
        ("lift_fresh_copy", 4, (2,), False),
        ("mul", 12, (), True),
        ("new_zeros", 0, (), True),
    ]


@given(programs.programs_of(programs.WIDER_OPERATORS))
def test_the_same_program_has_the_same_tasks(program: programs.Program) -> None:
    first, second = programs.traced(program), programs.traced(program)
    assert task_graph(first.graph) == task_graph(second.graph)


def test_an_empty_graph_has_no_tasks() -> None:
    graph = trace(lambda x: [x.view(-1)], [torch.ones(2, 2)]).graph
    assert task_graph(graph) == TaskGraph(())
    assert problem(graph, TaskGraph(())) is None
