"""Calls of a model before the backward passes of earlier ones: each of them has graphs of its own, up to a bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitsune import fallback
from tests.kitsune import static_memory
from tests.kitsune.clock import Clock
from tests.kitsune.training import Training, batch, compare, sgd


class Embedding(nn.Module):
    """Has what a call leaves behind for the next: statistics, and random numbers."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def triplet(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.triplet_margin_loss(model(x), model(x + 0.1), model(x.flip(0)))


def contrastive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    one, two = functional.normalize(model(x + 0.1)), functional.normalize(model(x - 0.1))
    return functional.cross_entropy(one @ two.T / 0.2, torch.arange(len(x), device=x.device))


def critic(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    real, fake = model(x), model(x.roll(1, 1))
    return functional.softplus(-real).mean() + functional.softplus(fake).mean()


def recurrent(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    state = x
    for _ in range(3):
        state = functional.pad(model(state), (0, 1)).tanh()
    return functional.cross_entropy(state[:, :3], y)


def of_two_sizes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = [functional.cross_entropy(model(part), y[: len(part)]) for part in (x, x[:4], x + 1, x[:4] + 1)]
    return torch.stack(losses).mean()


LOSSES: dict[Loss, int] = {triplet: 3, contrastive: 2, critic: 2, recurrent: 3, of_two_sizes: 4}
"""Each with its calls of the model."""


def loop_of(loss_of: Loss, backward_passes: int = 1) -> Callable[..., Tensor]:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        losses = []
        for part in range(backward_passes):
            loss = loss_of(training.model, x + part, y) / backward_passes
            loss.backward()
            losses.append(loss.detach())
        training.optimizer.step()
        return torch.stack(losses).sum()

    return loop


def same(place: str, loop: Callable[..., Tensor], *, steps: int = 12, **options: Any) -> Training:
    """Compares with plain PyTorch; on a CPU bit by bit."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Embedding(0.0 if place == "cuda" else 0.2).to(place)  # eager and replays draw other numbers there
        return model, sgd(model, lr=0.05)

    rounding = {"rtol": 1e-4, "atol": 1e-5} if place == "cuda" else {}
    settings = {"steps": steps, "replays": 0, "batches": partial(batch, device=place), **rounding, **options}
    return compare("drop_in", build, loop=loop, **settings)


@pytest.mark.support("Models", "several calls before a backward pass: pairs, triplets, time steps", "replayed")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("defer_loss", [False, True])
@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda loss_of: loss_of.__name__)
def test_all_calls_are_replayed(place: str, loss_of: Loss, defer_loss: bool, passes: int) -> None:
    num_calls = LOSSES[loss_of]
    training = same(place, loop_of(loss_of, passes), defer_loss=defer_loss)
    status = training.status()
    assert status.mode == "replay", status
    eager_steps = 1 + num_calls  # one more for each further call, before its graphs are made
    assert status.replays >= (12 - eager_steps) * num_calls * passes
    for index in range(2):
        before = training.status()
        training.run(1, partial(batch, device=place), start=20 + index)
        assert training.status().replays == before.replays + num_calls * passes
        assert training.status().fallbacks == before.fallbacks


def test_replays_of_some_of_the_calls_are_measured_faster(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than eager iterations with as many calls, and so each further call is replayed in turn."""
    static_memory.install(monkeypatch)
    monkeypatch.setattr(fallback, "_REVIEWS_SECONDS", ())

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        graphs = 0 if training.form == "eager" else training.status().graphs
        loss = triplet(training.model, x, y)
        training.optimizer.zero_grad()
        loss.backward()
        clock.now += 6.0 - graphs
        training.optimizer.step()
        return loss.detach()

    training = same("cpu", loop, steps=40, mode="auto")
    status = training.status()
    assert status.graphs == 3
    assert status.mode == "replay"
    assert status.eager_seconds is not None
    assert status.eager_seconds <= 2.0, "of the three calls each"


def test_more_calls_than_graphs(place: str) -> None:
    """Those beyond half of `max_graphs` run eagerly, and so may what is left of their signature."""

    def many(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([functional.cross_entropy(model(x + index), y) for index in range(6)]).mean()

    training = same(place, loop_of(many), max_graphs=4)
    status = training.status()
    assert status.graphs <= 2
    if status.executor != "in order":  # whose outputs have memory of their own
        assert any("called again before the backward pass" in refusal for refusal in status.refusals), status


def test_an_output_without_a_backward_pass(place: str) -> None:
    """It is kept, as by a loop that evaluates without `no_grad`: later calls do without its memory."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        if training.memo.get("steps", 0) == 6:
            training.memo["kept"] = training.model(x)
        training.memo["steps"] = training.memo.get("steps", 0) + 1
        return loop_of(triplet)(training, x, y)

    training = same(place, loop, steps=16)
    value = training.memo["kept"].detach().clone()
    before = training.status().replays
    training.run(2, partial(batch, device=place), start=30)
    assert torch.equal(training.memo["kept"], value)
    assert training.status().replays == before + 2 * 3


def test_calls_in_turn_with_backward_passes(place: str) -> None:
    """Where none waits for another, one graph serves all of them."""

    training = same(place, loop_of(lambda model, x, y: functional.cross_entropy(model(x), y), 4))
    assert training.status().graphs == 1
    assert training.status().replays >= 9 * 4
