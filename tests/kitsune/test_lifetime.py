"""Whatever was captured lives as long as its owner, and no longer."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import kitsune
from kitsune.capture.frontend import GuardedFunction
from kitsune.collection import no_garbage_collection
from kitsune.execution.in_order import InOrder
from tests.kitsune.training import FORMS, Training, adam, batch, net_and_adam

KINDS = (GuardedFunction, InOrder, torch.fx.GraphModule)


def counts() -> list[int]:
    """How many objects of the kinds that a capture makes there are."""
    gc.collect()
    kinds = [kind for thing in gc.get_objects() if issubclass(kind := type(thing), KINDS)]
    return [sum(issubclass(kind, other) for kind in kinds) for other in KINDS]


@pytest.mark.parametrize("released", [False, True])
def test_a_dropped_train_step_frees_everything(released: bool) -> None:
    model, optimizer = net_and_adam()
    step = kitsune.TrainStep(model, functional.cross_entropy, optimizer, mode="replay")
    for index in range(4):
        step(*batch(index)[0])
    if released:
        step.release()
    references = [weakref.ref(thing) for thing in (step, model, optimizer, model.first.weight)]
    del step, model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.parametrize("form", FORMS)
def test_graphs_do_not_outlive_their_owner(form: str) -> None:
    before = counts()
    model, optimizer = net_and_adam()
    training = Training(form, model, optimizer)
    training.run(4)
    assert counts()[0] == before[0] + 1
    del training, model, optimizer
    assert counts() == before


@pytest.mark.parametrize("form", FORMS)
def test_a_dropped_model_needs_no_garbage_collection(form: str) -> None:
    """Its memory is free for the next one at once."""
    model, optimizer = net_and_adam()
    training = Training(form, model, optimizer)
    training.run(4)
    reference = weakref.ref(model.first.weight)
    with no_garbage_collection():
        del training, model, optimizer
        assert reference() is None


@pytest.mark.parametrize("form", FORMS)
def test_a_model_trained_again_and_again(form: str) -> None:
    """Captures in a row leave nothing behind."""
    model, _ = net_and_adam()

    def once(index: int) -> None:
        training = Training(form, model, adam(model))
        training.run(3, start=index)
        assert training.status().replays >= 1
        if training.train_step is not None:
            training.train_step.release()

    once(0)
    before = counts()
    for index in range(5):
        once(index)
    assert counts() == before


def test_a_copy_of_a_model_that_a_train_step_trains() -> None:
    model, optimizer = net_and_adam()
    training = Training("train_step", model, optimizer)
    training.run(4)
    twin = copy.deepcopy(model)
    (x, _), _ = batch(0)
    assert torch.equal(twin(x), model(x))
    training.run(2, start=4)
    assert training.status().replays == 5


@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_after_dynamo_was_reset(form: str) -> None:
    model, optimizer = net_and_adam()
    training = Training(form, model, optimizer)
    first: list[Any] = training.run(5)
    torch._dynamo.reset()
    assert all(isinstance(loss, float) for loss in [*first, *training.run(4, start=5)])
    assert training.status().mode == "replay"


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("form", FORMS)
def test_an_earlier_optimizer_that_waits_for_the_collector_is_in_the_way_of_none(form: str, steps: int) -> None:
    """As in a notebook whose cells are run again. Dynamo runs the collector in the midst of a capture."""
    model, optimizer = net_and_adam()
    earlier = Training("drop_in", model, adam(model))
    earlier.run(steps)
    earlier.memo["itself"] = earlier
    with no_garbage_collection():
        del earlier
        training = Training(form, model, optimizer)
        training.run(4)
    assert training.status().mode == "replay"
    assert training.status().replays > 0


def test_of_two_optimizers_before_training_the_later_one_is_accelerated() -> None:
    model, optimizer = net_and_adam()
    earlier = kitsune.KitsuneOptimizer(adam(model))
    training = Training("drop_in", model, optimizer)
    training.run(4)
    assert training.status().replays > 0
    assert earlier.status().mode == "eager"
    assert "made later" in earlier.status().reason


def test_gradients_outlive_their_graphs(place: str) -> None:
    """Each batch size releases the graphs of the other one; the user has kept gradients of both."""

    def kept(optimize: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(place)
        optimizer = optimize(torch.optim.SGD(model.parameters(), lr=0.1))
        grads = []
        for index in range(24):
            x = torch.randn(4 + 2 * (index // 4 % 2), 6, generator=torch.Generator().manual_seed(index)).to(place)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            grads.append([param.grad for param in model.parameters() if param.grad is not None])
            optimizer.step()
        if isinstance(optimizer, kitsune.KitsuneOptimizer):
            status = optimizer.status()
            assert status.graphs == 1
            assert status.replays >= 10, status
        return grads

    plain = kept(lambda optimizer: optimizer)
    found = kept(lambda optimizer: kitsune.KitsuneOptimizer(optimizer, mode="replay", max_graphs=1))
    assert found[0]
    for wanted, given in zip(plain, found, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-6)
