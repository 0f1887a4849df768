"""The two programs of a call against autograd on the call itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.capture import split_program
from kitsune.capture.split_program import SplitProgram, trace_split
from kitsune.capture.trace import trace
from kitsune.errors import RefusedError
from kitsune.graph import dataflow
from tests.kitsune.capture.graphs import flat_graph
from tests.kitsune.training import Net


class Heads(nn.Module):
    """Three outputs: from a trunk, from a layer of its own, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.alone = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu(self.trunk(x))
        return self.left(hidden), self.alone(x), hidden.argmax(1)


class Square(nn.Module):
    """An output that its own backward pass needs, and a saved intermediate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.exp(x * self.weight))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": Net,
    "batch norm": lambda: Net(batch_norm=True),
    "heads": Heads,
    "saved outputs": Square,
    "views": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 3)),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten()),
    "recomputed": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Softmax(1)),
}


def run_program(
    program: SplitProgram, flat: list[Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """Outputs, gradients, and the saved values."""
    count = len(program.differentiable)
    with torch.no_grad():
        values = list(program.forward(*flat))
        saved = values[count:]
        return values[:count], list(program.backward(*saved, *tangents)), saved


@pytest.mark.parametrize("input_gradient", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_forward_and_backward_are_those_of_autograd(name: str, input_gradient: bool) -> None:
    torch.manual_seed(3)
    module = MODULES[name]()
    reference = copy.deepcopy(module)
    x = torch.randn(5, 4, requires_grad=input_gradient)
    graph, flat = flat_graph(copy.deepcopy(module), x)
    names = {id(tensor): key for key, tensor in module.named_parameters()}
    graph, flat = flat_graph(module, x)
    module.load_state_dict(reference.state_dict())
    program = trace_split(graph, flat)

    outputs = reference(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert program.differentiable == tuple(output.requires_grad for output in outputs)
    roots = [output for output in outputs if output.requires_grad]
    tangents = [torch.randn_like(root) for root in roots]
    wanted = [*reference.parameters(), *([x] if input_gradient else [])]
    keys = [*(key for key, _ in reference.named_parameters()), *(["x"] if input_gradient else [])]
    expected = dict(zip(keys, torch.autograd.grad(roots, wanted, tangents, allow_unused=True), strict=True))

    found, grads, _ = run_program(program, flat, tangents)
    for one, other in zip(found, outputs, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-7)
    places = {names.get(id(flat[place]), "x"): grad for place, grad in zip(program.gradient_places, grads, strict=True)}
    assert places.keys() == {key for key, grad in expected.items() if grad is not None}
    for key, grad in places.items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-6, msg=key)
    for (key, buffer), (_, other) in zip(module.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=key)


def test_each_gradient_knows_the_outputs_it_depends_on() -> None:
    module = Heads()
    graph, flat = flat_graph(module, torch.randn(5, 4))
    program = trace_split(graph, flat)
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    depends = {
        names[id(flat[place])]: set(needs)
        for place, needs in zip(program.gradient_places, program.depends, strict=True)
    }
    assert depends == {
        "trunk.weight": {0},
        "trunk.bias": {0},
        "left.weight": {0},
        "left.bias": {0},
        "alone.weight": {1},
        "alone.bias": {1},
    }


def test_the_layouts_of_the_gradients_of_the_outputs() -> None:
    module = Heads()
    graph, flat = flat_graph(module, torch.randn(5, 4))
    program = trace_split(graph, flat)
    assert [layout.size for layout in program.tangents] == [torch.Size([5, 3]), torch.Size([5, 2])]
    for layout in program.tangents:
        empty = layout.empty()
        assert (empty.size(), empty.stride(), empty.dtype) == (layout.size, layout.stride, layout.dtype)


@pytest.mark.parametrize("name", MODULES)
def test_saved_inputs_are_those_in_whose_memory_saved_values_lie(name: str) -> None:
    graph, flat = flat_graph(MODULES[name](), torch.randn(5, 4))
    program = trace_split(graph, flat)
    _, _, saved = run_program(program, flat, [torch.randn(layout.size) for layout in program.tangents])
    memory = {value.untyped_storage().data_ptr() for value in saved}
    places = {place for place, tensor in enumerate(flat) if tensor.untyped_storage().data_ptr() in memory}
    assert set(program.saved_inputs) == places


@pytest.mark.parametrize("name", MODULES)
def test_the_backward_program_can_run_again(name: str) -> None:
    """It writes to nothing that it was given."""
    graph, flat = flat_graph(MODULES[name](), torch.randn(5, 4))
    program = trace_split(graph, flat)
    tangents = [torch.randn(layout.size) for layout in program.tangents]
    _, first, saved = run_program(program, flat, tangents)
    assert not dataflow.written_inputs(program.backward.graph)
    with torch.no_grad():
        second = program.backward(*saved, *tangents)
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "repeatable"),
    [(Net, True), (lambda: Net(dropout=0.5), False), (lambda: Net(batch_norm=True), False), (Heads, True)],
)
def test_repeatable_calls(kind: Callable[[], nn.Module], repeatable: bool) -> None:
    graph, flat = flat_graph(kind(), torch.randn(5, 4))
    assert trace_split(graph, flat).repeatable == repeatable


def test_randomness_stays_in_the_forward_program() -> None:
    graph, flat = flat_graph(Net(dropout=0.5), torch.randn(5, 4))
    program = trace_split(graph, flat)
    assert any(map(dataflow.draws_random_numbers, program.forward.graph.nodes))
    assert not any(map(dataflow.draws_random_numbers, program.backward.graph.nodes))


class Identity(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.view(-1)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = x * 2
        return output, output[0]


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).float()


@pytest.mark.parametrize(
    ("kind", "x", "words"),
    [
        (Identity, torch.randn(2, 3, requires_grad=True), "shares memory|computed from"),
        (Twice, torch.randn(2, 3, requires_grad=True), "shares memory|computed from"),
        (Constant, torch.randn(2, 3, requires_grad=True), "requires a gradient"),
        (Net, torch.randn(1, 4).expand(3, 4), "overlaps itself"),
    ],
)
def test_calls_that_are_refused(kind: Callable[[], nn.Module], x: Tensor, words: str) -> None:
    graph, flat = flat_graph(kind(), x)
    with pytest.raises(RefusedError, match=words):
        trace_split(graph, flat)


def test_autocast_around_the_call_is_part_of_the_programs() -> None:
    module = Net()
    x = torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        graph, flat = flat_graph(module, x)
        program = trace_split(graph, flat)
        expected = module(x)
    tangent = torch.randn(5, 3, dtype=torch.bfloat16)
    grads: list[Any] = list(torch.autograd.grad(expected, list(module.parameters()), tangent))
    (output,), found, _ = run_program(program, flat, [tangent])
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, expected.detach())
    wanted = {id(param): grad for param, grad in zip(module.parameters(), grads, strict=True)}
    for place, grad in zip(program.gradient_places, found, strict=True):
        torch.testing.assert_close(grad, wanted[id(flat[place])], rtol=1e-2, atol=1e-3)
        assert grad is not None
        assert grad.dtype is torch.float32


def test_further_inputs_are_copied_where_the_forward_pass_ends() -> None:
    """Also those of which a view is taken in the midst of the backward pass."""

    def joint(x: Tensor, shift: Tensor, tangent: Tensor) -> list[Tensor]:
        doubled = tangent * 2
        return [x + shift, doubled * shift.view(1, 4)]

    x, shift, tangent = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
    module = trace(joint, [x, shift, tangent])
    split_program._copy_further_inputs(module.graph, 2, ())
    parts = split_program._partition(module, 2, 1)
    expected = joint(x, shift, tangent)
    output, *saved = parts.forward(x, shift)
    shift.zero_()
    (grad,) = parts.backward(*saved, tangent)
    assert torch.equal(output, expected[0])
    assert torch.equal(grad, expected[1])
