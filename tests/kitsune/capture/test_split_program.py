"""The two programs of a call against autograd on the call itself."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.capture import split_program
from kitsune.capture.partition import TracedPart, partition
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


class Together(nn.Module):
    """Two outputs from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.trunk(x))
        return self.left(hidden), self.right(hidden)


class Nested(nn.Module):
    """Logits, and a loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        return logits, logits.logsumexp(1).mean()


class NestedTwice(nn.Module):
    """Three outputs, of which each is computed from the one before and from other values; one layer is used throughout.

    Half of the values that are passed on get a gradient, the others none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.tied = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = self.trunk(x).chunk(2, 1)
        bound = right.detach().exp()
        first = self.tied(left).tanh()
        second = self.tied(first * left) + bound
        total = (second * first + right).square().mean() + left.sum()
        return second, total, first


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
    "together": Together,
    "nested": Nested,
    "nested twice": NestedTwice,
    "saved outputs": Square,
    "views": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 3)),
    "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten()),
    "recomputed": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Softmax(1)),
}


def run_program(
    program: SplitProgram, flat: list[Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """Outputs, the gradients of the flat inputs, and the saved values."""
    count = len(program.differentiable)
    ends: list[Tensor | None] = [*[None for _ in flat], *tangents, *[None for _ in program.tangents[len(tangents) :]]]
    with torch.no_grad():
        values = list(program.forward(*flat))
        saved = values[count:]
        for part in program.parts:
            weights = [ends[len(flat) + root] for root in part.roots]
            grads = part.backward(*(saved[index] for index in part.saved), *weights)
            for place, grad in zip(part.gradient_places, grads, strict=True):
                before = ends[place]
                ends[place] = grad if before is None else before + grad
    return values[:count], ends[: len(flat)], saved


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
    places = {names.get(id(one), "x"): grad for one, grad in zip(flat, grads, strict=True) if grad is not None}
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
        names[id(flat[place])]: {part.roots[index] for index in needs}
        for part in program.parts
        for place, needs in zip(part.gradient_places, part.depends, strict=True)
    }
    assert depends == {
        "trunk.weight": {0},
        "trunk.bias": {0},
        "left.weight": {0},
        "left.bias": {0},
        "alone.weight": {1},
        "alone.bias": {1},
    }


def test_parts_of_the_backward_pass() -> None:
    """One for each output, or for those that have something in common; what it gives gradients to comes later."""

    def parts(module: nn.Module) -> list[tuple[int, ...]]:
        graph, flat = flat_graph(module, torch.randn(5, 4))
        program = trace_split(graph, flat)
        done: set[int] = set()
        for part in program.parts:
            assert done.isdisjoint(part.gradient_places)
            done |= {len(flat) + root for root in part.roots}
        return [part.roots for part in program.parts]

    assert parts(Together()) == [(0, 1)]
    assert parts(Heads()) == [(1,), (0,)]
    assert parts(Nested()) == [(1,), (0,)]
    assert parts(NestedTwice()) == [(1,), (0,), (3, 4, 2)]


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
    assert {place for part in program.parts for place in part.saved_inputs} == places


@pytest.mark.parametrize("name", MODULES)
def test_the_backward_program_can_run_again(name: str) -> None:
    """It writes to nothing that it was given."""
    graph, flat = flat_graph(MODULES[name](), torch.randn(5, 4))
    program = trace_split(graph, flat)
    tangents = [torch.randn(layout.size) for layout in program.tangents]
    _, _, saved = run_program(program, flat, tangents)
    for part in program.parts:
        inputs = [*(saved[index] for index in part.saved), *(tangents[root] for root in part.roots)]
        assert not dataflow.written_inputs(part.backward.graph)
        with torch.no_grad():
            first, second = part.backward(*inputs), part.backward(*inputs)
        assert all(map(torch.equal, first, second))


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
    assert not any(map(dataflow.draws_random_numbers, program.parts[0].backward.graph.nodes))


class Twice(nn.Module):
    """Shares memory by an operator of several tensors, of which Dynamo does not tell what is a view of which."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = x * 2
        return output, torch.meshgrid(output[0], x[1], indexing="ij")[0]


class InPlace(nn.Module):
    """Autograd knows that the loss is computed from the logits; the graph does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = torch.zeros(1), self.layer(x)
        loss.add_(logits.square().mean())
        return loss, logits


class Gap(nn.Module):
    """Two losses that have a layer in common, of which one is computed from the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.layer(x)
        loss = logits.exp().mean()
        other = self.last(x).exp()
        return logits, loss * other.mean(), other.sum()


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).float()


@pytest.mark.parametrize(
    ("kind", "x", "words"),
    [
        (Twice, torch.randn(2, 3, requires_grad=True), "shares memory|computed from"),
        (InPlace, torch.randn(2, 3), "computed from another"),
        (Gap, torch.randn(2, 3), "computed from a third"),
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
    for place in program.parts[0].gradient_places:
        grad = found[place]
        assert grad is not None
        torch.testing.assert_close(grad, wanted[id(flat[place])], rtol=1e-2, atol=1e-3)
        assert grad.dtype is torch.float32


def test_further_inputs_are_copied_where_the_forward_pass_ends() -> None:
    """Also those of which a view is taken in the midst of the backward pass."""

    def joint(x: Tensor, shift: Tensor, tangent: Tensor) -> list[Tensor]:
        doubled = tangent * 2
        return [x + shift, doubled * shift.view(1, 4)]

    x, shift, tangent = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
    module = trace(joint, [x, shift, tangent])
    split_program._copy_further_inputs(module.graph, 2, (), (0,))
    forward, (part,) = partition(module, 2, 1, [TracedPart((0,), (1,), keeps=True)])
    expected = joint(x, shift, tangent)
    output, *saved = forward(x, shift)
    shift.zero_()
    (grad,) = part.backward(*saved, tangent)
    assert torch.equal(output, expected[0])
    assert torch.equal(grad, expected[1])


def test_copies_of_further_inputs_are_made_together() -> None:
    def joint(x: Tensor, *rest: Tensor) -> list[Tensor]:
        *shifts, tangent = rest
        return [x, sum(((tangent.sum() * shift).sum() for shift in shifts), tangent)]

    shifts = [torch.randn(4), torch.randn(3, 2).t(), torch.randn(5).double(), torch.randn(8)[::2]]
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    module = trace(joint, [x, *shifts, tangent])
    split_program._copy_further_inputs(module.graph, 1 + len(shifts), (), (0,))
    forward, (part,) = partition(module, 1 + len(shifts), 1, [TracedPart((0,), (1,), keeps=True)])
    called = Counter(str(node.target) for node in forward.graph.nodes if node.op == "call_function")
    assert called["kitsune.cast_many.default"] == 1  # of those in float32 that are dense
    assert called["aten.clone.default"] == 2
    expected = joint(x, *shifts, tangent)
    _, *saved = forward(x, *shifts)
    for shift in shifts:
        shift.zero_()
    (grad,) = part.backward(*saved, tangent)
    assert torch.equal(grad, expected[1])
