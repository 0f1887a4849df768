"""Calls of torch's functions that are described, compared, and run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitsune.capture.following import followed, plainly
from kitsune.capture.operations import Operation, described


class Recorder:
    """Describes whatever is done with its tensors, and does it.

    Args:
        known: an operation to compare it with.
    """

    def __init__(self, known: Operation | None = None) -> None:
        self.found: list[tuple[Operation, list[Tensor]] | None] = []
        self.given_again: list[Tensor] | None = None
        self._known = known

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.found.append(described(function, args, kwargs, self, "cpu"))
        if self._known is not None:
            self.given_again = self._known.given_again(function, args, kwargs, self, "cpu")
        with plainly():
            return function(*args, **kwargs)

    def value(self, place: int) -> Tensor:
        raise AssertionError(place)


def done(action: Callable[[Tensor], Any], value: Tensor) -> tuple[Operation, list[Tensor]] | None:
    """The one operation of an action."""
    recorder = Recorder()
    action(followed(value, recorder, 0))
    (found,) = recorder.found
    return found


def is_again(known: Operation, action: Callable[[Tensor], Any], value: Tensor) -> bool:
    """Whether an action is found to be `known` again, in the quick way, which must agree with its description."""
    recorder = Recorder(known)
    action(followed(value, recorder, 0))
    (found,) = recorder.found
    if recorder.given_again is None:
        assert found is None or found[0] != known
        return False
    assert found is not None
    assert found[0] == known
    for one, other in zip(recorder.given_again, found[1], strict=True):
        assert type(one) is Tensor
        assert (one.data_ptr(), one.stride()) == (other.data_ptr(), other.stride())
    return True


OTHER = torch.arange(6.0).view(2, 3)
LABELS = torch.tensor([0, 2])

ACTIONS: dict[str, Callable[[Tensor], Any]] = {
    "a function": lambda x: torch.tanh(x),
    "a method": lambda x: x.sum(0, keepdim=True),
    "an operator": lambda x: x * 2.5,
    "a reflected one": lambda x: 1 - x,
    "a module": lambda x: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(x, LABELS),
    "an outer tensor": lambda x: torch.where(OTHER > 1, x, OTHER),
    "a list": lambda x: torch.cat([x, OTHER, x], 1),
    "slices": lambda x: x[..., 1:],
    "an index": lambda x: x[:, LABELS],
    "a name": lambda x: functional.mse_loss(x, OTHER, reduction="sum"),
    "a dtype": lambda x: x.to(torch.float64),
    "a view": lambda x: x.T,
}


@pytest.mark.parametrize("name", ACTIONS)
def test_what_was_done_is_done_again(name: str) -> None:
    action, x = ACTIONS[name], torch.randn(2, 3)
    found = done(action, x)
    assert found is not None
    operation, given = found
    torch.testing.assert_close(operation.run({0: x}, given), action(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ACTIONS)
def test_the_same_is_equal_and_nothing_else(name: str) -> None:
    x = torch.randn(2, 3)
    found = done(ACTIONS[name], x)
    assert found is not None
    again = done(ACTIONS[name], torch.zeros(2, 3))
    assert again is not None
    assert again[0] == found[0]
    assert is_again(found[0], ACTIONS[name], torch.zeros(2, 3))
    others = [action for other, action in ACTIONS.items() if other != name]
    assert not any(is_again(found[0], other, x) for other in others)


UNLIKE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "a number": (lambda x: x * 2.0, lambda x: x * 3.0),
    "its kind": (lambda x: x * 2.0, lambda x: x * 2),
    "its sign": (lambda x: x * 0.0, lambda x: x * -0.0),
    "a truth value": (lambda x: x.sum(0, keepdim=True), lambda x: x.sum(0, keepdim=False)),
    "a shape": (lambda x: x + OTHER, lambda x: x + OTHER[:1]),
    "a data type": (lambda x: x + OTHER, lambda x: x + OTHER.double()),
    "strides": (lambda x: x + OTHER, lambda x: x + OTHER.T.contiguous().T),
    "a list": (lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x, x])),
    "a tuple": (lambda x: torch.cat([x, x]), lambda x: torch.cat((x, x))),
    "a slice": (lambda x: x[1:], lambda x: x[:1]),
    "a name": (lambda x: torch.sum(x, 0), lambda x: torch.sum(x, dim=0)),
    "another name": (lambda x: torch.sum(x, dim=0), lambda x: torch.sum(x, axis=0)),
    "one argument more": (lambda x: torch.sum(x, 0), lambda x: torch.sum(x, 0, True)),
    "which argument is followed": (lambda x: x - OTHER, lambda x: OTHER - x),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_differences(name: str) -> None:
    first, second = (done(action, torch.randn(2, 3)) for action in UNLIKE[name])
    assert first is not None
    assert second is not None
    assert first[0] != second[0]
    assert not is_again(first[0], UNLIKE[name][1], torch.randn(2, 3))


def test_autocast_belongs_to_it() -> None:
    def product(x: Tensor) -> Tensor:
        return x @ OTHER.T

    x = torch.randn(2, 3)
    usual = done(product, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = done(product, x)
        wanted = product(x)
    assert usual is not None
    assert low is not None
    assert usual[0] != low[0]
    assert not is_again(low[0], product, x)
    torch.testing.assert_close(low[0].run({0: x}, low[1]), wanted, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert usual[0].run({0: x}, usual[1]).dtype == torch.float32


def test_another_calls_tensor_cannot_be_described() -> None:
    other = followed(OTHER, Recorder(), 0)
    assert done(lambda x: x + other, torch.randn(2, 3)) is None
    own = done(lambda x: x + x, torch.randn(2, 3))
    assert own is not None
    assert not is_again(own[0], lambda x: x + other, torch.randn(2, 3))


def test_equal_arguments_that_are_other_objects() -> None:
    def clamped(most: float) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.clamp(x, -most, max=most)

    found = done(clamped(1234.5), torch.randn(2, 3))
    assert found is not None
    assert is_again(found[0], clamped(float("1234.5")), torch.randn(2, 3))
    assert not is_again(found[0], clamped(1234.0), torch.randn(2, 3))


@pytest.mark.parametrize(
    "argument", [torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3)), torch.eye(3).to_sparse()]
)
def test_tensors_that_are_more_than_numbers_cannot_be_described(argument: Tensor) -> None:
    assert done(lambda x: torch.mul(x, argument), torch.randn(3, 3)) is None
    numbers = argument.detach().to_dense()
    found = done(lambda x: torch.mul(x, numbers), torch.randn(3, 3))
    assert found is not None
    assert not is_again(found[0], lambda x: torch.mul(x, argument), torch.randn(3, 3))
