"""Whole programs as one operator, and updates that code can be generated for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from kitsune.capture.trace import trace
from kitsune.engine.rehearsal import difference
from kitsune.graph import dataflow
from kitsune.kernels.regions import Backend
from kitsune.passes import pipeline
from kitsune.passes.compose_updates import compose_updates, is_update
from kitsune.passes.programs import NAMESPACE, part, program_name, program_operator
from tests.kitsune.steps import traced_step

EAGER = Backend("eager", lambda device: None, lambda module, inputs: lambda *given: module.forward(*given))
"""Runs the operators of a program one by one."""


def build(kind: Callable[..., torch.optim.Optimizer], **options: object) -> tuple[fx.GraphModule, list[Tensor]]:
    """A step of a small model with batch norm, whose optimizer has state, and its inputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = kind(model.parameters(), lr=0.01, **options)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    traced = traced_step(model, functional.cross_entropy, x, y, optimizer, keep_grads=False)
    return traced.module, [tensor.detach() for tensor in traced.inputs]


OPTIMIZERS = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_a_composed_update_does_what_the_fused_one_does(
    kind: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    module, inputs = build(kind, **options)
    cleared = pipeline.run(module, pipeline.CLEARING)
    assert any(map(is_update, cleared.graph.nodes))
    composed = pipeline.run(cleared, (("compose updates", compose_updates),), verify=True)
    assert not any(map(is_update, composed.graph.nodes))
    assert difference(module, composed, inputs) is None


@pytest.mark.parametrize("stays", [is_update, lambda _: False])
def test_a_program_as_one_operator_does_the_same(stays: Callable[[fx.Node], bool]) -> None:
    module, inputs = build(torch.optim.Adam)
    cleared = pipeline.run(module, pipeline.CLEARING)
    taken = part(cleared, stays)
    made = taken.rebuilt(program_operator(taken.module, EAGER))
    namespaces = [node.target.namespace for node in made.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert namespaces.count(NAMESPACE) == 1
    assert pipeline.problem(cleared.graph, made.graph) is None
    assert dataflow.written_inputs(made.graph).keys() == dataflow.written_inputs(cleared.graph).keys()
    assert difference(module, made, inputs) is None


def test_what_must_come_after_an_operator_that_stays_stays_too() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        made = x.exp()
        y.mul_(2.0)
        return [made + 1, y.sin() + made]

    module = trace(function, [torch.randn(4), torch.randn(4)])
    taken = part(module, lambda node: node.target is torch.ops.aten.mul_.Tensor)
    assert {name.partition("_")[0] for name in taken.names} == {"exp", "add"}
    made = taken.rebuilt(program_operator(taken.module, EAGER))
    given = [[torch.ones(4), torch.full((4,), 0.5)] for _ in range(2)]
    for one, other in zip(module(*given[0]), made(*given[1]), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(*given)


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda x: [x], [torch.randn(3)], "new tensors"),
        (lambda x: [(y := x + 1), y[1:]], [torch.randn(3)], "memory of its own"),
        (lambda x, y: [x.add_(1).sum() + y.sum()], list(torch.randn(4).split(2)), "share no memory"),
    ],
)
def test_programs_that_could_not_be_told_apart_from_others_are_refused(
    function: Callable[..., list[Tensor]], inputs: list[Tensor], reason: str
) -> None:
    module = trace(function, inputs)
    with pytest.raises(ValueError, match=reason):
        program_operator(module, EAGER)


def test_deterministic_code_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    module = trace(lambda x: [x + 1], [torch.randn(3)])
    name = program_name(module, EAGER)
    torch.use_deterministic_algorithms(True)
    try:
        assert program_name(module, EAGER) != name
    finally:
        torch.use_deterministic_algorithms(False)
    assert program_name(module, EAGER) == name
