"""Split updates do what the combined ones do, as early as the gradients allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from kitsune.capture.trace import trace
from kitsune.graph import dataflow
from kitsune.kernels.adam import adam_
from kitsune.kernels.grouped_update import linear_adam_, linear_sgd_
from kitsune.passes.pipeline import problem
from kitsune.passes.split_update import split_update
from kitsune.plan import Task, task_graph
from tests.kitsune.passes.running import calls, names, results
from tests.kitsune.steps import TracedStep, traced_step
from tests.kitsune.training import Net, batch

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True, amsgrad=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, weight_decay=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, fused=True, momentum=0.9),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, fused=True),
    "two groups": lambda model: torch.optim.Adam(
        [{"params": list(model.parameters())[:2], "lr": 0.1}, {"params": list(model.parameters())[2:]}],
        fused=True,
    ),
}


def net_step(name: str, **options: Any) -> TracedStep:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), Net(batch_norm=True))
    (x, y), _ = batch(0)
    return traced_step(model, nn.functional.cross_entropy, x, y, OPTIMIZERS[name](model), **options)


def updates(module: fx.GraphModule) -> list[Task]:
    wanted = ("_fused_", "adam_", "linear_")
    return [task for task in task_graph(module.graph).tasks if any(name in task.operator for name in wanted)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_same_bits(name: str, num_parts: int) -> None:
    step = net_step(name)
    split = split_update(step.module, num_parts)
    assert problem(step.module.graph, split.graph) is None
    assert results(split, step.fresh_inputs()) == results(step.module, step.fresh_inputs())
    before = [len(node.args[0]) for node in step.module.graph.nodes if "_fused_" in str(node.target)]
    assert len(updates(split)) == sum(min(count, num_parts) for count in before)
    if num_parts == 1:
        assert names(split) == names(step.module)


def test_a_part_waits_for_its_own_gradients_alone() -> None:
    """The last layers' gradients are made first. Without clipping no part depends on gradients of another."""
    step = net_step("adam", keep_grads=False)
    graph = split_update(step.module, 3).graph
    tasks = task_graph(graph).tasks
    makers = {name: task.index for task in tasks for name in task.nodes}
    parts = [node for node in graph.nodes if node.target is torch.ops.aten._fused_adam_.tensor_lr]
    made = [{makers[grad.name] for grad in part.args[1]} for part in parts]
    assert all(max(one) < max(two) for one, two in pairwise(made))
    gradients = set().union(*made)
    for part, own in zip(parts, made, strict=True):
        after = {dependency.task for dependency in tasks[makers[part.name]].after if dependency.kind == "true"}
        assert after & gradients == own


def test_sums_that_are_made_late_count_and_not_their_memory() -> None:
    """A gradient is there when its storage is written for the last time."""

    def function(*inputs: Tensor) -> list[Tensor]:
        params, grads, lr = list(inputs[:3]), list(inputs[3:6]), inputs[6]
        early = torch.empty_like(params[0])
        sums = [early, grads[1] * 2, grads[2] + 1]
        early.copy_(grads[0])
        torch._fused_sgd_(
            params, sums, [], weight_decay=0.0, momentum=0.0, lr=lr, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
        return []

    inputs = [torch.rand(2) for _ in range(6)] + [torch.tensor(0.1, dtype=torch.float64)]
    split = split_update(trace(function, inputs), 3)
    found = [[param.name for param in node.args[0]] for node in calls(split, torch.ops.aten._fused_sgd_.tensor_lr)]
    assert found == [["inputs_1"], ["inputs_2"], ["inputs_0"]] or found == [["arg1_1"], ["arg2_1"], ["arg0_1"]]


def fused(inputs: Sequence[Tensor], update: Callable[..., None], **options: Any) -> list[Tensor]:
    params, grads, first, second = (list(inputs[start : start + 3]) for start in (0, 3, 6, 9))
    grads = [grad * 2 for grad in grads]
    update(
        params, grads, first, second, [], [inputs[12]] * 3, lr=inputs[13], beta1=0.9, beta2=0.99, weight_decay=0.1,
        eps=1e-8, maximize=False, found_inf=inputs[14], **options,
    )  # fmt: skip
    return grads


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_what_is_shared_goes_to_every_part(found_inf: float) -> None:
    """The step count, which may be one tensor, the learning rate and the sign of an overflow."""
    tensors = [torch.rand(place % 3 + 2) for place in range(12)] + [torch.tensor(3.0), torch.tensor(0.1)]
    inputs = [*tensors, torch.tensor(found_inf)]

    def function(*inputs: Tensor) -> list[Tensor]:
        return fused(inputs, torch._fused_adam_, amsgrad=False, grad_scale=None)

    module = trace(function, inputs)
    split = split_update(module, 3)
    assert len(updates(split)) == 3
    copies = [[tensor.clone() for tensor in inputs] for _ in range(2)]
    assert results(split, copies[0]) == results(module, copies[1])
    assert torch.equal(copies[0][0], inputs[0]) == bool(found_inf)


def test_kitsunes_own_update_is_split() -> None:
    inputs = [torch.rand(place % 3 + 2) for place in range(12)] + [torch.tensor(value) for value in (3.0, 0.1, 0.0)]
    graph = split_update(trace(lambda *all: fused(all, adam_, decoupled=True), inputs), 2).graph
    parts = [node for node in graph.nodes if node.target is torch.ops.kitsune.adam_.default]
    assert [[len(value) for value in part.args] for part in parts] == [[2, 2, 2, 2, 0, 2], [1, 1, 1, 1, 0, 1]]
    assert parts[0].kwargs == parts[1].kwargs
    written = [{node.name for node in dataflow.written(part)} for part in parts]
    assert written[0].isdisjoint(written[1])
    assert len(written[0] | written[1]) == 9


ROWS, OUTPUTS, INPUTS = 7, 4, 5
BACKWARDS = (2, 0, 3, 1)
"""The order in which layers' gradients are made."""


def of_layers(num_states: int) -> list[Tensor]:
    """What a step of four layers, two of which have biases, takes: see `in_layers`."""
    torch.manual_seed(2)
    rows = [torch.randn(ROWS, cols) for cols in [INPUTS] * 4 + [OUTPUTS] * 4]
    states = [[torch.rand(OUTPUTS, INPUTS) for _ in range(4)] + [torch.rand(OUTPUTS) for _ in range(2)]]
    states += [[torch.rand_like(one) for one in states[0]] for _ in range(num_states)]
    return [*rows, *(one for state in states for one in state), torch.tensor(3.0), torch.tensor(0.1)]


def in_layers(update: Callable[..., None], tensors: Sequence[Tensor], num_states: int, **options: Any) -> list[Tensor]:
    xs, grads = list(tensors[:4]), list(tensors[4:8])
    made = {layer: grads[layer] * 2 for layer in BACKWARDS}
    params, *states = (list(tensors[8 + 6 * start : 14 + 6 * start]) for start in range(1 + num_states))
    others = [[], [tensors[-2]] * 6] if num_states == 2 else []  # Adam's greatest squares and steps
    update(
        [made[layer] for layer in range(4)], xs, [0, 1, 2, 3, 1, 2], params, *states, *others,
        lr=tensors[-1], weight_decay=0.1, maximize=False, **options,
    )  # fmt: skip
    return []


@pytest.mark.parametrize(
    ("update", "num_states", "options"),
    [
        pytest.param(linear_adam_, 2, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": True}, id="adam"),
        pytest.param(linear_sgd_, 1, {"momentum": 0.9, "dampening": 0.0, "nesterov": False}, id="sgd"),
    ],
)
def test_an_update_that_computes_gradients_is_split_by_kinds_of_layers(
    update: Callable[..., None], num_states: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = of_layers(num_states)
    module = trace(lambda *all: in_layers(update, all, num_states, **options), inputs)
    assert len(updates(split_update(module, 2))) == 1, "they are small"
    monkeypatch.setattr("kitsune.passes.split_update._LEAST_BYTES_OF_LAYERS", 100)
    split = split_update(module, 2)
    parts = [node for node in split.graph.nodes if str(node.target).startswith("kitsune.linear_")]
    places = {node: place - 8 for place, node in enumerate(dataflow.placeholders(split.graph))}
    assert [[places[param] for param in part.args[3]] for part in parts] == [[2, 0], [3, 1], [4, 5]]
    assert [list(part.args[2]) for part in parts] == [[0, 1], [0, 1], [0, 1]]
    assert [[places[x] + 8 for x in part.args[1]] for part in parts] == [[2, 0], [3, 1], [1, 2]]
    assert problem(module.graph, split.graph) is None
    copies = [[tensor.clone() for tensor in inputs] for _ in range(2)]
    assert results(split, copies[0]) == results(module, copies[1])
    assert not any(torch.equal(copies[0][place], inputs[place]) for place in range(8, 14))


def test_layers_with_other_operands_are_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is compiled for strides, too."""
    inputs = of_layers(1)
    inputs[3] = torch.randn(ROWS, INPUTS + 2)

    def function(*all: Tensor) -> list[Tensor]:
        narrow = [*all[:3], all[3][:, :INPUTS], *all[4:]]
        return in_layers(linear_sgd_, narrow, 1, momentum=0.9, dampening=0.0, nesterov=False)

    monkeypatch.setattr("kitsune.passes.split_update._LEAST_BYTES_OF_LAYERS", 100)
    split = split_update(trace(function, inputs), 2)
    parts = [node for node in split.graph.nodes if str(node.target).startswith("kitsune.linear_")]
    places = {node: place - 8 for place, node in enumerate(dataflow.placeholders(split.graph))}
    assert [{places[param] for param in part.args[3]} for part in parts][-1] == {3, 4, 5}


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_parts is 0"):
        split_update(trace(lambda x: [x + 1], [torch.ones(2)]), 0)
