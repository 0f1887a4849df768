"""The captured update, where gradients come to lie elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitsune.config import Config
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import RefusalLog
from kitsune.loop.update_step import UpdateStep
from tests.kitsune.training import Net, adam, sgd

GENERATIONS = 8


def begun() -> tuple[Net, torch.optim.Adam]:
    """A model after one step: its optimizer has a state."""
    model = Net().double()
    optimizer = adam(model)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


def reads_in_place(update: UpdateStep, static: list[Tensor]) -> bool:
    assert update._latest is not None
    return [slot.data_ptr() for slot in update._latest.slots] == [tensor.data_ptr() for tensor in static]


def elsewhere(model: Net) -> Callable[[int], list[Tensor]]:
    """Gradients in memory of their own, which nobody gives back."""
    kept = list[list[Tensor]]()

    def make(_generation: int) -> list[Tensor]:
        kept.append([torch.empty_like(param) for param in model.parameters()])
        return kept[-1]

    return make


def in_turn(model: Net) -> Callable[[int], list[Tensor]]:
    """Gradients that change their places with one another."""
    params = list(model.parameters())
    places = [torch.empty(max(param.numel() for param in params), dtype=torch.float64) for _ in params]

    def make(generation: int) -> list[Tensor]:
        moved = [*places[generation % len(places) :], *places]
        return [place[: param.numel()].view_as(param) for place, param in zip(moved, params, strict=False)]

    return make


@pytest.mark.parametrize("places", [elsewhere, in_turn])
def test_gradients_recorded_anew_are_read_where_they_are(
    places: Callable[[Net], Callable[[int], list[Tensor]]],
) -> None:
    """Static gradients are released when a backward pass is recorded again; then others take their place.

    However often that is: a loop passes through several recordings until it has settled.
    """
    model, optimizer = begun()
    gradients = dict[int, Tensor]()
    reference = copy.deepcopy(model)
    wanted = adam(reference)
    wanted.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    update = UpdateStep(optimizer, gradients, config=Config(), streams=StreamPool(), log=RefusalLog("it"))
    make = places(model)
    for generation in range(GENERATIONS):
        static = make(generation)
        gradients.clear()
        gradients.update((tensor.data_ptr(), tensor) for tensor in static)
        for _ in range(3):
            for param, other, slot in zip(model.parameters(), reference.parameters(), static, strict=True):
                param.grad = slot.normal_().detach()
                other.grad = slot.clone()
            assert update.replay(), update.refusal
            wanted.step()
        assert reads_in_place(update, static)
    assert len(update._updates) == (1 if places is elsewhere else 4)
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other)


def test_of_gradients_that_stay_only_so_many_are_read_where_they_are() -> None:
    """Several calls may leave theirs in turn: each update that reads them there is a capture of its own."""
    model, optimizer = begun()
    gradients = dict[int, Tensor]()
    update = UpdateStep(optimizer, gradients, config=Config(), streams=StreamPool(), log=RefusalLog("it"))
    calls = [[torch.randn_like(param) for param in model.parameters()] for _ in range(GENERATIONS)]
    gradients.update((tensor.data_ptr(), tensor) for static in calls for tensor in static)
    in_place = []
    for static in calls:
        for param, slot in zip(model.parameters(), static, strict=True):
            param.grad = slot.detach()
        assert update.replay(), update.refusal
        in_place.append(reads_in_place(update, static))
    assert in_place == [True] * 2 + [False] * (GENERATIONS - 2)


@pytest.mark.parametrize("other", [lambda grad: None, Tensor.to_sparse, lambda grad: grad.t().contiguous().t()])
def test_a_gradient_that_is_missing_or_laid_out_otherwise_is_not_taken_for_what_was_there(
    other: Callable[[Tensor], Tensor | None],
) -> None:
    """Nor is any other, until it is as it was."""
    model = Net().double()
    optimizer = sgd(model, momentum=0.0, fused=None)
    gradients = {(slot := torch.empty_like(param)).data_ptr(): slot for param in model.parameters()}
    update = UpdateStep(optimizer, gradients, config=Config(), streams=StreamPool(), log=RefusalLog("it"))
    replayed = []
    for index in range(6):
        before = [param.detach().clone() for param in model.parameters()]
        for param, slot in zip(model.parameters(), gradients.values(), strict=True):
            param.grad = slot.normal_().detach()
        if index == 3:
            model.first.weight.grad = other(model.first.weight.grad)
        grads = [param.grad for param in model.parameters()]
        replayed.append(update.replay())
        if not replayed[-1]:
            optimizer.step()
        for param, value, grad in zip(model.parameters(), before, grads, strict=True):
            torch.testing.assert_close(param.detach(), value if grad is None else value - 0.1 * grad.to_dense())
    assert all(replayed[:3] + replayed[4:])


def test_how_far_apart_the_elements_of_one_are_does_not_matter() -> None:
    """The second pass of a convolution of one channel strides over it as it likes."""
    param = torch.nn.Parameter(torch.randn(4, 1, 3, 3))
    optimizer = sgd(torch.nn.ParameterList([param]))
    update = UpdateStep(optimizer, {}, config=Config(), streams=StreamPool(), log=RefusalLog("it"))
    param.grad = torch.ones(4, 1, 3, 3).as_strided(param.shape, (9, 1, 3, 1))
    optimizer.step()
    assert update.replay(), update.refusal


@pytest.mark.parametrize("kind", [sgd, adam])
@pytest.mark.parametrize("is_of_state", [False, True])
def test_a_gradient_where_the_update_writes_to(kind: Callable[..., torch.optim.Optimizer], is_of_state: bool) -> None:
    """As of a penalty on the parameter itself: torch reads it operator by operator, each in its turn."""
    model = Net().double()
    optimizer = kind(model, fused=None, foreach=False)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    update = UpdateStep(optimizer, {}, config=Config(), streams=StreamPool(), log=RefusalLog("it"))
    assert update.replay(), update.refusal
    weight = model.first.weight
    state = next(value for value in optimizer.state[weight].values() if value.shape == weight.shape)
    weight.grad = state if is_of_state else weight.detach()
    assert not update.replay()
    weight.grad = weight.grad.clone()
    assert update.replay(), update.refusal


@pytest.mark.parametrize("kind", [sgd, adam])
def test_a_gradient_that_two_parameters_share_when_the_update_is_captured(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    """They share none afterwards."""
    first, second = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = kind(torch.nn.ParameterList([first, second]))
    first.grad = second.grad = torch.randn(3, dtype=torch.float64)
    optimizer.step()
    update = UpdateStep(optimizer, {}, config=Config(), streams=StreamPool(), log=RefusalLog("it"))
    assert update.replay(), update.refusal
    assert torch.equal(first, second)
    first.grad, second.grad = first.grad * 2, first.grad * -3
    twins = copy.deepcopy([first, second])
    wanted = kind(torch.nn.ParameterList(twins))
    wanted.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for twin, param in zip(twins, [first, second], strict=True):
        twin.grad = param.grad
    wanted.step()
    assert update.replay(), update.refusal
    torch.testing.assert_close([first, second], twins)
