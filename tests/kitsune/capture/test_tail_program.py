"""The program from what a loop makes of a call's outputs to the gradients, against autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitsune.capture.following import followed, plainly
from kitsune.capture.operations import Operation, described
from kitsune.capture.split_program import trace_split
from kitsune.capture.tail_program import TailProgram, trace_tail
from kitsune.errors import RefusedError
from kitsune.kernels.pack_bucket import PACK_BUCKET, pack_bucket
from tests.kitsune.capture.graphs import flat_graph
from tests.kitsune.capture.test_split_program import MODULES, Together

X, LABELS = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])

SINGLE = [name for name in MODULES if name not in ("heads", "saved outputs", "nested", "nested twice")]
"""Their backward passes have one part, as those of tails must; saved outputs may be written to."""


class Recorder:
    """Gives each result of torch's functions a place, and remembers how it was made."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.values = list(outputs)
        self.operations: list[Operation] = []
        self.given: list[list[Tensor]] = []

    def outputs(self) -> list[Tensor]:
        return [followed(value, self, place) for place, value in enumerate(self.values)]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        found = described(function, args, kwargs, self, "cpu")
        assert found is not None
        with plainly():
            result = function(*args, **kwargs)
        self.operations.append(found[0])
        self.given.append(found[1])
        self.values.append(result)
        return followed(result, self, len(self.values) - 1)

    def value(self, place: int) -> Tensor:
        return self.values[place]


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    """Of one or two outputs; some of what is computed is of no use."""
    first = outputs[0].flatten(1)
    _ = first.exp().cpu()
    loss = functional.cross_entropy(first, LABELS) / 2
    return loss + outputs[1].square().mean() if len(outputs) > 1 else loss


def traced(
    module: nn.Module,
    loss: Callable[[Sequence[Tensor]], Tensor],
    pack: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None,
) -> tuple[list[Tensor], TailProgram, Recorder]:
    """The flat inputs of a call, its tail, and what was done."""
    graph, flat = flat_graph(module, X)
    program = trace_split(graph, flat)
    values = program.forward(*flat)
    count = len(program.differentiable)
    recorder = Recorder([value.detach() for value in values[:count]])
    needed = [output for output, needs in zip(recorder.outputs(), program.differentiable, strict=True) if needs]
    result = loss(needed)
    place = result.place  # type: ignore[attr-defined]
    tail = trace_tail(program, recorder.operations, place, (), recorder.given, pack=pack)
    outputs = tail.module(*recorder.values[:count], *values[count:], *(one for some in recorder.given for one in some))
    recorder.values.append(outputs)
    return flat, tail, recorder


@pytest.mark.parametrize("name", SINGLE)
def test_loss_and_gradients_are_those_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double().float()
    flat, tail, recorder = traced(module, loss_of)
    found, *grads = recorder.values[-1]
    outputs = [one for one in _flat_outputs(module(X)) if one.requires_grad]
    wanted = loss_of(outputs)
    places = [flat[place] for place in tail.gradient_places]
    torch.testing.assert_close(found, wanted.detach())
    expected = torch.autograd.grad(wanted, places, allow_unused=True)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other)
    trained = {id(param) for param in module.parameters() if param.requires_grad}
    reached = {id(place) for place in places}
    rest = [param for param in module.parameters() if id(param) in trained - reached]
    if rest:
        again = loss_of([one for one in _flat_outputs(module(X)) if one.requires_grad])
        assert torch.autograd.grad(again, rest, allow_unused=True) == (None,) * len(rest)


def test_what_the_loss_does_not_need_is_left_out() -> None:
    _, tail, _ = traced(MODULES["linear"](), loss_of)
    assert not [node for node in tail.module.graph.nodes if "exp" in str(node.target)]


def test_parameters_of_an_unused_output_have_no_gradient() -> None:
    module = Together()
    flat, tail, _ = traced(module, lambda outputs: functional.cross_entropy(outputs[0], LABELS))
    reached = {id(flat[place]) for place in tail.gradient_places}
    assert id(module.right.weight) not in reached
    assert id(module.trunk.weight) in reached


def test_gradients_are_packed_as_soon_as_they_are_there() -> None:
    def pack(grads: Sequence[Tensor]) -> list[Tensor]:
        return [pack_bucket([grad], [list(range(grad.dim()))], 0.5, None) for grad in reversed(grads)]

    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    flat, tail, recorder = traced(module, loss_of, pack)
    _, *packed = recorder.values[-1]
    wanted = torch.autograd.grad(loss_of([module(X)]), [flat[place] for place in tail.gradient_places])
    for bucket, grad in zip(packed, reversed(wanted), strict=True):
        torch.testing.assert_close(bucket, grad.flatten() / 2)
    computed = [node.target for node in tail.module.graph.nodes if node.op == "call_function"]
    places = [place for place, target in enumerate(computed) if target is PACK_BUCKET]
    products = [place for place, target in enumerate(computed) if target is torch.ops.aten.mm.default]
    assert sum(place < products[-1] for place in places) >= 3


def test_all_gradients_that_are_packed_have_to_be_there() -> None:
    with pytest.raises(RefusedError, match="wait for gradients of parameters that have none"):
        traced(Together(), lambda outputs: functional.cross_entropy(outputs[0], LABELS), pack=list)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda outputs: functional.dropout(outputs[0], 0.5).sum(), "random numbers"),
        (lambda outputs: outputs[0][LABELS > 0].sum(), "a size that depends on data"),
    ],
)
def test_refusals(loss: Callable[[Sequence[Tensor]], Tensor], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        traced(MODULES["linear"](), loss)


def _flat_outputs(outputs: Any) -> Sequence[Tensor]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
