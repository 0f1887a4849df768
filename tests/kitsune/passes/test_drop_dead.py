"""What nobody sees is dropped, and only that."""

from __future__ import annotations

import torch
from hypothesis import given
from torch import Tensor

from kitsune.capture.trace import trace
from kitsune.passes.drop_dead import drop_dead
from kitsune.passes.pipeline import problem
from tests.kitsune.graph import programs
from tests.kitsune.passes.running import names, results
from tests.kitsune.steps import model_step


@given(programs.programs_of(programs.WIDER_OPERATORS))
def test_a_program_does_the_same(program: programs.Program) -> None:
    module = programs.traced(program)
    dropped = drop_dead(module)
    assert problem(module.graph, dropped.graph) is None
    assert results(dropped, programs.inputs()) == results(module, programs.inputs())


def test_what_is_dropped_and_what_has_effects() -> None:
    def function(x: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        torch.empty(3)
        (x + 1).t().detach()
        torch.nn.functional.batch_norm(x, mean, var, training=True)
        torch.rand(2)
        (x * 2).add_(1)
        return [x.sin()]

    module = trace(function, [torch.rand(4, 3), torch.zeros(3), torch.ones(3)])
    before = list(names(module))
    kept = ["native_batch_norm", "rand", "mul", "add_", "sin"]
    assert names(drop_dead(module)) == [name for name in before if name in kept]
    assert names(module) == before


def test_resnet_loses_its_empty_tensors() -> None:
    step = model_step("resnet18")
    dropped = drop_dead(step.module)
    targets = {node.target for node in dropped.graph.nodes}
    assert torch.ops.aten.empty.memory_format not in targets
    assert all(node.users or node.target is not torch.ops.aten.detach.default for node in dropped.graph.nodes)
