"""The short way to repeat a call of a drop-in loop: whatever has changed since the latest one makes it a long one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kitsune
from kitsune.errors import Refusal
from kitsune.loop.split_step import SplitStep
from tests.kitsune.training import Net, adam, batch

STEPS = 6


@pytest.fixture(params=[False, True], ids=["loss not deferred", "loss deferred"])
def step(request: pytest.FixtureRequest) -> Iterator[SplitStep]:
    """Of a loop that has settled, and takes the short way."""
    torch.manual_seed(0)
    model = Net()
    optimizer = kitsune.KitsuneOptimizer(adam(model), mode="replay", defer_loss=request.param)
    for index in range(STEPS):
        (x, y), _ = batch(index)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert optimizer._loop is not None
    step = optimizer._loop._latest
    assert step is not None
    yield step
    optimizer.hand_over()


def takes_it(step: SplitStep, *args: Any, **kwargs: Any) -> bool:
    return step.repeat(args, kwargs) is not None


def patched(target: Callable[[SplitStep], Any], name: str, value: Any) -> Callable[[SplitStep], Any]:
    @contextmanager
    def change(step: SplitStep) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(target(step), name, value)
            yield

    return change


@contextmanager
def hooked(step: SplitStep) -> Any:
    handle = step.module.first.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    yield
    handle.remove()


@contextmanager
def frozen(step: SplitStep) -> Any:
    step.module.last.requires_grad_(False)  # type: ignore[union-attr]
    yield
    step.module.last.requires_grad_(True)  # type: ignore[union-attr]


@contextmanager
def moved(step: SplitStep) -> Any:
    weight = step.module.last.weight  # type: ignore[union-attr]
    data = weight.data
    weight.data = data.clone()  # type: ignore[union-attr]
    yield
    weight.data = data  # type: ignore[union-attr]


CHANGES: dict[str, Callable[[SplitStep], AbstractContextManager[Any]]] = {
    "steps are being timed again": patched(lambda step: step.chooser, "settled", False),
    "they are refused": patched(lambda step: step.chooser, "refusal", Refusal("something")),
    "the module is being wrapped": patched(lambda _: DistributedDataParallel, "_active_ddp_module", object()),
    "its mode": patched(lambda step: step.module, "training", False),
    "a number of its own": patched(lambda step: step.module, "gain", 2.0),
    "another part": patched(lambda step: step.module, "first", nn.Linear(4, 8)),
    "a hook": hooked,
    "what is trained": frozen,
    "where it lies": moved,
    "autocast": lambda _: torch.autocast("cpu", dtype=torch.bfloat16),
    "no gradients": lambda _: torch.no_grad(),
    "hooks of saved tensors": lambda _: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_since_the_latest_call(name: str, step: SplitStep) -> None:
    (x, _), _ = batch(0)
    assert takes_it(step, x)
    with CHANGES[name](step):
        assert not takes_it(step, x)


@pytest.mark.parametrize(
    "args", [(), (torch.randn(3, 4),), (torch.randn(5, 4).double(),), (torch.randn(4, 5).t(),), (torch.randn(5, 4), 1)]
)
def test_other_arguments(args: tuple[Any, ...], step: SplitStep) -> None:
    assert not takes_it(step, *args)


def test_the_same_argument_by_name(step: SplitStep) -> None:
    (x, _), _ = batch(0)
    assert not takes_it(step, x=x)
