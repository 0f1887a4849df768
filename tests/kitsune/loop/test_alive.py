"""What an iteration may train, of all that is alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import kitsune
from kitsune.loop.alive import Alive, find_alive
from tests.kitsune.training import net_and_adam


@pytest.fixture(params=["hidden", "in sight"])
def _place(request: pytest.FixtureRequest) -> Iterator[None]:
    """What was loaded before is frozen, or it is not."""
    if request.param == "in sight":
        gc.unfreeze()
    yield
    if request.param == "in sight":
        gc.freeze()


def has(tensors: dict[str, Tensor], tensor: Tensor) -> bool:
    return any(one is tensor for one in tensors.values())


def test_frozen_objects_are_found() -> None:
    """Those that only variables of functions have, and those that only others of them have."""

    def find(model: nn.Module, optimizers: list[list[torch.optim.Optimizer]]) -> Alive:
        gc.freeze()
        try:
            return find_alive([], [])
        finally:
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    model, optimizer = net_and_adam()
    found = find(model, [[optimizer]])
    assert any(one is optimizer for one in found.owners)
    assert all(has(found.tensors, param) for param in model.parameters())


@pytest.mark.usefixtures("_place")
def test_optimizers_and_their_helpers_are_owners_but_wrappers_are_not() -> None:
    _, optimizer = net_and_adam()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    wrapper = kitsune.KitsuneOptimizer(optimizer)
    found = find_alive([], [optimizer])
    assert found.owners[0] is optimizer
    assert [any(one is owner for owner in found.owners) for one in (scheduler, scaler, wrapper)] == [True, True, False]
    assert sum(one is optimizer for one in found.owners) == 1


@pytest.mark.usefixtures("_place")
def test_only_outermost_modules_are_named_and_those_given_first() -> None:
    outer, inner = nn.Sequential(nn.Sequential(nn.Linear(2, 3))), nn.Sequential(nn.Linear(2, 3))
    found = find_alive([inner], [])
    assert found.modules[0] is inner
    assert any(one is outer for one in found.modules)
    assert not any(one is outer[0] for one in found.modules)
    assert found.tensors["0.weight"] is inner[0].weight
    assert has(found.tensors, outer[0][0].weight)


def test_what_is_frozen_is_only_watched() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    norm = model[1]
    found = find_alive([], [])
    assert has(found.tensors, norm.running_mean)
    assert has(found.others, norm.weight)
    model.eval()
    found = find_alive([], [])
    assert has(found.others, norm.running_mean)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    found = find_alive([], [])
    assert has(found.tensors, norm.weight)
    assert has(found.tensors, norm.running_mean)
    assert any(one is optimizer for one in found.owners)


def test_tensors_that_owners_hold_are_named_by_their_keys() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1), momentum=0.9)
    found = find_alive([], [optimizer])
    assert found.tensors["lr"] is optimizer.param_groups[0]["lr"]
    assert found.tensors["parameter 0 of the optimizer"] is optimizer.param_groups[0]["params"][0]


class Begun(nn.Module):
    """Its making was broken off."""

    def __init__(self) -> None:
        pass


def fake() -> nn.Module:
    with FakeTensorMode():
        return nn.Linear(2, 2)


def of(tensor: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("odd", tensor)
    return module


def inference() -> nn.Module:
    with torch.inference_mode():
        return of(torch.ones(2)).eval()


ODD: dict[str, Callable[[], nn.Module]] = {
    "begun": Begun,
    "meta": lambda: nn.Linear(2, 2, device="meta"),
    "fake": fake,
    "lazy": lambda: nn.LazyLinear(2),
    "script": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "sparse": lambda: of(torch.eye(2).to_sparse()),
    "quantized": lambda: of(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    "float8": lambda: of(torch.ones(2).to(torch.float8_e4m3fn)),
    "expanded": lambda: of(torch.ones(1).expand(2)),
    "complex": lambda: of(torch.ones(2, dtype=torch.complex64)),
    "inference": inference,
    "empty": lambda: of(torch.ones(0)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_odd_modules_are_in_the_way_of_none(kind: str) -> None:
    odd = ODD[kind]()
    model, optimizer = net_and_adam()
    wrapped = kitsune.KitsuneOptimizer(optimizer, mode="replay")

    def iteration(x: Tensor) -> None:
        wrapped.zero_grad()
        model(x).sum().backward()
        wrapped.step()

    for _ in range(4):
        iteration(torch.ones(3, 4))
    found = kitsune.verify(iteration, torch.ones(3, 4), optimizer=wrapped)
    assert found.agrees, found
    assert not found.written
    assert isinstance(odd, nn.Module)
