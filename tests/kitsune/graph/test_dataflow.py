"""What aliases and what is written, against what really happens to memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional

from kitsune.capture.trace import trace
from kitsune.graph import dataflow
from tests.kitsune.graph import programs


def observed_writes(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> set[int]:
    before = [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        graph(*inputs)
    pairs = enumerate(zip(inputs, before, strict=True))
    return {place for place, (now, then) in pairs if not torch.equal(now, then)}


@given(programs.programs)
def test_written_inputs_are_those_whose_memory_changes(program: programs.Program) -> None:
    graph = programs.traced(program)
    assert set(dataflow.written_inputs(graph.graph)) == observed_writes(graph, programs.inputs())


@given(programs.programs)
def test_values_share_a_key_where_they_share_memory(program: programs.Program) -> None:
    """Against the addresses of a real run, with every value kept alive."""
    graph = programs.traced(program)
    real: dict[torch.fx.Node, int] = {}
    kept = []

    class Watching(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            value = super().run_node(node)
            if isinstance(value, Tensor):
                kept.append(value)
                real[node] = value.untyped_storage().data_ptr()
            return value

    Watching(graph, garbage_collect_values=False).run(*programs.inputs())
    keys = {node: dataflow.storages(node) for node in real}
    assert all(len(key) == 1 for key in keys.values())
    for first in real:
        for second in real:
            assert (keys[first] == keys[second]) == (real[first] == real[second]), (first, second)


def test_the_first_writer_is_named() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        y.mul_(2)
        x.view(-1)[0].add_(y.sum())
        x.zero_()
        return [x]

    graph = trace(function, [torch.ones(2, 2), torch.ones(2)])
    writers = dataflow.written_inputs(graph.graph)
    assert {place: node.target for place, node in writers.items()} == {
        0: torch.ops.aten.add_.Tensor,
        1: torch.ops.aten.mul_.Tensor,
    }


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics(kind: Callable[..., nn.Module], training: bool) -> None:
    """Their operators' schemas do not tell that they write."""
    norm = kind(3, affine=True, track_running_stats=True).train(training)
    state = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
    names = list(state)

    def function(x: Tensor, *values: Tensor) -> list[Tensor]:
        return [torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (x,))]

    inputs = [torch.randn(4, 3, 5), *(value.detach() for value in state.values())]
    graph = trace(function, inputs)
    written = set(dataflow.written_inputs(graph.graph))
    assert written == observed_writes(graph, inputs)
    assert bool(written) == training


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_fused_updates(kind: type[torch.optim.Optimizer]) -> None:
    """They write parameters and state, and leave gradients alone unless they unscale them."""
    lr, step = torch.tensor(0.1, dtype=torch.float64), torch.ones(())

    def adam(update: Callable[..., None]) -> Callable[..., list[Tensor]]:
        def function(
            param: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: Tensor
        ) -> list[Tensor]:
            update(
                [param], [grad], [first], [second], [], [step], lr=lr, beta1=0.9, beta2=0.99, weight_decay=0.1,
                eps=1e-8, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
            )  # fmt: skip
            return []

        return function

    def sgd(param: Tensor, grad: Tensor, momentum: Tensor, lr: Tensor) -> list[Tensor]:
        torch._fused_sgd_(
            [param], [grad], [momentum], weight_decay=0.1, momentum=0.9, lr=lr, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
        return []

    tensors = [torch.rand(3) + 1 for _ in range(4)]
    if kind is torch.optim.SGD:
        graph, inputs = trace(sgd, [*tensors[:3], lr]), [*tensors[:3], lr]
    else:
        update = torch._fused_adam_ if kind is torch.optim.Adam else torch._fused_adamw_
        graph, inputs = trace(adam(update), [*tensors, step, lr]), [*tensors, step, lr]
    assert 1 not in dataflow.written_inputs(graph.graph)
    assert observed_writes(graph, inputs) <= set(dataflow.written_inputs(graph.graph))
    assert 0 in dataflow.written_inputs(graph.graph)


@pytest.mark.parametrize(
    ("function", "random"),
    [
        (lambda x: [torch.nn.functional.dropout(x, 0.5)], True),
        (lambda x: [torch.randn_like(x)], True),
        (lambda x: [x.clone().bernoulli_(0.5)], True),
        (lambda x: [torch.multinomial(x, 2)], True),
        (lambda x: [torch.relu(x) + x.sum()], False),
    ],
)
def test_operators_that_draw_random_numbers(function: Callable[[Tensor], list[Tensor]], random: bool) -> None:
    graph = trace(function, [torch.rand(5)])
    assert any(map(dataflow.draws_random_numbers, graph.graph.nodes)) == random


def test_outputs_keep_their_gaps() -> None:
    graph = trace(lambda x: [x + 1, None, x * 2], [torch.ones(2)])
    outputs = dataflow.outputs(graph.graph)
    assert [output is None for output in outputs] == [False, True, False]
    assert len(dataflow.placeholders(graph.graph)) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_random_numbers_for_dropout_alone(dropout: float) -> None:
    def attend(x: Tensor) -> list[Tensor]:
        return [functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)]

    graph = trace(attend, [torch.randn(2, 2, 8, 8)]).graph
    assert any(map(dataflow.draws_random_numbers, graph.nodes)) == (dropout > 0)
