"""The captured update, where gradients come to lie elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

import kitsune
from kitsune.budget import CaptureBudget
from kitsune.config import Config
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import RefusalLog
from kitsune.loop.update_step import UpdateStep
from tests.kitsune.training import FORMS, Net, adam, compare, sgd

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
    update = UpdateStep(
        optimizer,
        gradients,
        config=Config(),
        streams=StreamPool(),
        budget=CaptureBudget(Config()),
        log=RefusalLog("it"),
    )
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
    update = UpdateStep(
        optimizer,
        gradients,
        config=Config(),
        streams=StreamPool(),
        budget=CaptureBudget(Config()),
        log=RefusalLog("it"),
    )
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
    update = UpdateStep(
        optimizer,
        gradients,
        config=Config(),
        streams=StreamPool(),
        budget=CaptureBudget(Config()),
        log=RefusalLog("it"),
    )
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
    update = UpdateStep(
        optimizer, {}, config=Config(), streams=StreamPool(), budget=CaptureBudget(Config()), log=RefusalLog("it")
    )
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
    update = UpdateStep(
        optimizer, {}, config=Config(), streams=StreamPool(), budget=CaptureBudget(Config()), log=RefusalLog("it")
    )
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
    update = UpdateStep(
        optimizer, {}, config=Config(), streams=StreamPool(), budget=CaptureBudget(Config()), log=RefusalLog("it")
    )
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


NESTEROV = {"momentum": 0.9, "nesterov": True, "fused": None}


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"foreach": False},
        {"foreach": None},
        {"foreach": None, "fused": True},
        {"foreach": True, "maximize": True},
        {"foreach": True, "weight_decay": 0.1},
        {"foreach": True, "nesterov": False},
        {"foreach": True, "momentum": 0.0, "nesterov": False},
    ],
    ids=str,
)
def test_gradients_are_left_as_torch_leaves_them(
    options: dict[str, Any], dtype: torch.dtype, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's `foreach` form of SGD, its default on GPUs, adds Nesterov's momentum to them."""
    monkeypatch.setattr(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    model, twin = Net().to(dtype), Net().to(dtype)
    twin.load_state_dict(model.state_dict())
    optimizers = []
    for one in (model, twin):
        (first, second), rest = one.first.parameters(), list(one.last.parameters())
        groups = [{"params": [first]}, {"params": [second], "momentum": 0.5}, {"params": rest, "weight_decay": 0.2}]
        optimizers.append(torch.optim.SGD(groups, lr=0.1, **{**NESTEROV, **options}))
    optimizer, wanted = optimizers
    static = [torch.empty_like(param) for param in model.parameters()]
    gradients = {} if is_copied else {slot.data_ptr(): slot for slot in static}
    update = UpdateStep(
        optimizer,
        gradients,
        config=Config(),
        streams=StreamPool(),
        budget=CaptureBudget(Config()),
        log=RefusalLog("it"),
    )
    for index in range(7):
        for param, other, slot in zip(model.parameters(), twin.parameters(), static, strict=True):
            param.grad = slot.normal_().detach()
            other.grad = slot.clone()
        if index == 5:
            for group in (*optimizer.param_groups, *wanted.param_groups):
                group["foreach"] = not group["foreach"]
        if index:
            assert update.replay(), update.refusal
        else:
            optimizer.step()
        wanted.step()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param, other)
            torch.testing.assert_close(param.grad, other.grad)


def test_gradients_that_share_memory_to_which_the_update_writes() -> None:
    """torch's update of the second parameter reads what that of the first has written; which is left to torch."""
    params, twins = ([torch.nn.Parameter(torch.ones(6)) for _ in range(2)] for _ in range(2))
    optimizer, wanted = (torch.optim.SGD(one, lr=0.1, foreach=True, **NESTEROV) for one in (params, twins))
    update = UpdateStep(
        optimizer, {}, config=Config(), streams=StreamPool(), budget=CaptureBudget(Config()), log=RefusalLog("it")
    )
    replayed = []
    for index in range(8):
        memory = torch.randn(12)
        for (first, second), values in ((params, memory), (twins, memory.clone())):
            first.grad = values[:6]
            second.grad = first.grad if index in (1, 4) else values[4:10] if index == 6 else values[6:]
        replayed.append(bool(index) and update.replay())
        if not replayed[-1]:
            optimizer.step()
        wanted.step()
        for param, twin in zip(params, twins, strict=True):
            torch.testing.assert_close([param.detach(), param.grad], [twin.detach(), twin.grad])
    assert replayed == [False, False, True, True, False, True, False, True]


def test_a_gradient_that_cannot_be_written_to_is_compared_as_ever() -> None:
    param = torch.nn.Parameter(torch.ones(6))
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD([param], lr=0.1), mode="replay", verify=3)
    for _ in range(3):
        param.grad = torch.full((1,), torch.nan).expand(6)
        optimizer.step()
    assert param.isnan().all()


def test_gradients_that_the_update_writes_to_are_compared_and_put_back() -> None:
    def build() -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)

    for form in FORMS:
        done = compare(form, build, steps=8, replays=None, verify=2, rtol=1e-5, atol=1e-6)
        assert done.status().mode == "replay"
        assert not done.status().refusals
