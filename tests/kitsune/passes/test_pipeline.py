"""Passes in a row: what they make together, and that a wrong one is found."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import fx

from kitsune.capture.trace import trace
from kitsune.errors import KitsuneError
from kitsune.graph.values import refresh
from kitsune.passes.pipeline import Pass, run, splitting
from kitsune.plan import task_graph
from kitsune.plan.legality import problem
from tests.kitsune.passes.running import names, results, values_are_right
from tests.kitsune.plan.running import effects, node_order, random_order
from tests.kitsune.steps import TracedStep, dropout_step, model_step

STEPS: dict[str, Callable[[], TracedStep]] = {
    "mlp": lambda: model_step("mlp"),
    "lenet": lambda: model_step("lenet"),
    "dropout": dropout_step,
}


@pytest.mark.parametrize("name", STEPS)
def test_split_steps_in_any_legal_order(name: str) -> None:
    step, rng = STEPS[name](), random.Random(0)
    before = names(step.module)
    module = run(step.module, splitting(4), verify=True)
    assert names(step.module) == before
    assert results(module, step.fresh_inputs()) == results(step.module, step.fresh_inputs())
    assert values_are_right(module, step.fresh_inputs())
    tasks = task_graph(module.graph)
    assert problem(module.graph, tasks) is None
    expected = effects(module, names(module), step.fresh_inputs())
    for _ in range(4):
        order = node_order(module, tasks, random_order(tasks, rng))
        assert effects(module, order, step.fresh_inputs()) == expected


def test_resnet_keeps_its_bits_and_gains_tasks() -> None:
    step = model_step("resnet18")
    module = run(step.module, splitting(4), verify=True)
    tasks = task_graph(module.graph)
    assert problem(module.graph, tasks) is None
    operators = [task.operator for task in tasks.tasks]
    assert operators.count("aten.convolution_backward.default") == 39
    assert operators.count("aten._fused_adam_.tensor_lr") == 4
    assert results(module, step.fresh_inputs()) == results(step.module, step.fresh_inputs())


def edited(edit: Callable[[fx.Graph], None]) -> Pass:
    def broken(module: fx.GraphModule) -> fx.GraphModule:
        graph = copy.deepcopy(module.graph)
        edit(graph)
        return fx.GraphModule(module, graph)

    return broken


def last(graph: fx.Graph) -> fx.Node:
    return [node for node in graph.nodes if node.op == "call_function"][-1]


def drop_a_write(graph: fx.Graph) -> None:
    graph.erase_node(last(graph))


def lose_a_value(graph: fx.Graph) -> None:
    del last(graph).meta["val"]


def drop_a_result(graph: fx.Graph) -> None:
    graph.output_node().args = ([],)


def add_an_input(graph: fx.Graph) -> None:
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("another").meta["val"] = torch.empty(())


def read_on_the_host(graph: fx.Graph) -> None:
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.item.default, (last(graph),)).meta["val"] = 0.0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_a_write, "inputs .0. are written in one of the graphs only"),
        (lose_a_value, "has no value"),
        (drop_a_result, "the results are"),
        (add_an_input, "the inputs are"),
        (read_on_the_host, "reads device data"),
    ],
)
def test_a_wrong_pass_is_found(edit: Callable[[fx.Graph], None], message: str) -> None:
    module = trace(lambda x: [x.sin(), x.view(-1).mul_(2)][:1], [torch.ones(3)])
    passes = (("good", edited(lambda _graph: None)), ("bad", edited(edit)))
    with pytest.raises(KitsuneError, match=f"the pass 'bad' made a wrong graph: .*{message}"):
        run(module, passes, verify=True)
    run(module, passes)


def noisy(x: torch.Tensor) -> list[torch.Tensor]:
    """Reads a value of its own before and after that is overwritten, twice, and draws two random numbers."""
    own = x.exp()
    flat, early = own.view(-1), own.sin()
    own.mul_(2)
    middle = own.cos()
    flat.fill_(1)
    return [early, middle, own.tan(), torch.rand_like(x), torch.bernoulli(x)]


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def move(name: str, before: str) -> Callable[[fx.Graph], None]:
    return lambda graph: named(graph, before).prepend(named(graph, name))


def drop(name: str) -> Callable[[fx.Graph], None]:
    def edit(graph: fx.Graph) -> None:
        node = named(graph, name)
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)

    return edit


def give(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[fx.Graph], None]:
    def edit(graph: fx.Graph) -> None:
        node = named(graph, name)
        node.meta["val"] = value(node.meta["val"])

    return edit


def overwrite(name: str, by: torch._ops.OpOverload) -> Callable[[fx.Graph], None]:
    def edit(graph: fx.Graph) -> None:
        node = named(graph, name)
        node.target = by
        refresh(graph)

    return edit


FAULTS = (
    (move("mul_", "sin"), r"mul_ comes before sin, on which it depends \(anti\)"),
    (move("tan", "fill_"), r"tan comes before fill_, on which it depends \(true\)"),
    (move("fill_", "mul_"), r"fill_ comes before mul_, on which it depends \(output\)"),
    (move("bernoulli", "rand_like"), r"bernoulli comes before rand_like, on which it depends \(order\)"),
    (give("exp", lambda value: value.unsqueeze(0)), "exp has the value .* but computes"),
    (give("exp", lambda value: value.double()), "exp has the value .* but computes"),
    (drop("mul_"), "cos reads what exp wrote, which had been overwritten"),
    (drop("fill_"), "tan reads what mul_ wrote, which had been overwritten"),
    (overwrite("sin", torch.ops.aten.sin_.default), "mul_ reads what exp wrote only after it is overwritten"),
)


def test_a_pass_that_changes_what_is_read_is_found() -> None:
    module = trace(noisy, [torch.ones(3)])
    for edit, message in FAULTS:
        with pytest.raises(KitsuneError, match=f"the pass 'bad' made a wrong graph: {message}"):
            run(module, (("bad", edited(edit)),), verify=True)


def test_passes_run_in_their_order() -> None:
    seen: list[str] = []

    def noting(name: str) -> Pass:
        def note(module: fx.GraphModule) -> fx.GraphModule:
            seen.append(name)
            return module

        return note

    run(trace(lambda x: [x + 1], [torch.ones(1)]), tuple((name, noting(name)) for name in "cab"))
    assert seen == ["c", "a", "b"]
