"""Iterations that are compared with plain PyTorch, and what else they train: all of it is as it was afterwards."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

import kitsune
from kitsune.loop import loop_comparison
from kitsune.loop.backward_graph import BackwardGraph
from kitsune.loop.verifying import compare
from tests.kitsune.training import adam, batch


def net(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, outputs))


class Game:
    """A generator with a `KitsuneOptimizer`, and a critic without one.

    Attributes:
        train_critic: on what is real and what is not.
        finish: what each iteration ends with.
        kept: what has a state beside the two models and their optimizers.
    """

    def __init__(self, change: Callable[[Game], None] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = net(4), net(1)
        self.plain = adam(self.generator)
        self.optimizer = kitsune.KitsuneOptimizer(self.plain, **{"mode": "replay", **options})
        self.critic_optimizer: torch.optim.Optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.05)
        self.train_critic: Callable[[Tensor, Tensor], None] = self.step_critic
        self.finish: Callable[[], None] = lambda: None
        self.kept: list[Any] = []
        self.num_iterations = 0
        if change is not None:
            change(self)

    def critic_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        return functional.softplus(-self.critic(real)).mean() + functional.softplus(self.critic(fake)).mean()

    def step_critic(self, real: Tensor, fake: Tensor) -> None:
        self.critic_optimizer.zero_grad()
        self.critic_loss(real, fake).backward()
        self.critic_optimizer.step()

    def iteration(self, x: Tensor) -> Tensor:
        fake = self.generator(x)
        self.train_critic(x, fake.detach())
        self.optimizer.zero_grad()
        loss = functional.softplus(-self.critic(fake)).mean()
        loss.backward()
        self.optimizer.step()
        self.finish()
        return loss.detach()

    def run(self, num: int) -> list[float]:
        losses = []
        for _ in range(num):
            losses.append(float(self.iteration(batch(self.num_iterations)[0][0])))
            self.num_iterations += 1
        return losses

    def verify(self) -> kitsune.Verification:
        return kitsune.verify(self.iteration, batch(self.num_iterations)[0][0], optimizer=self.optimizer)

    def observe(self) -> list[Any]:
        """Copies of all that may change."""
        models = [self.generator, self.critic, *(one for one in self.kept if isinstance(one, nn.Module))]
        states = [one.state_dict() for one in (*models, self.plain, self.critic_optimizer, *self.kept)]
        grads = [param.grad for model in models for param in model.parameters()]
        return pytree.tree_leaves(copy.deepcopy([states, grads, torch.get_rng_state()]))


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
        for one, other in zip(found, expected, strict=True)
    )


def in_several_steps(game: Game) -> None:
    def train(real: Tensor, fake: Tensor) -> None:
        for _ in range(3):
            game.step_critic(real, fake)

    game.train_critic = train


def by_a_search_along_lines(game: Game) -> None:
    """Which calls the model often, and keeps lists."""
    optimizer = game.critic_optimizer = torch.optim.LBFGS(game.critic.parameters(), lr=0.1, max_iter=3)

    def train(real: Tensor, fake: Tensor) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = game.critic_loss(real, fake)
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    game.train_critic = train


def with_a_schedule(game: Game) -> None:
    for optimizer in (game.critic_optimizer, game.optimizer):
        game.kept.append(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9))

    def finish() -> None:
        for scheduler in game.kept:
            scheduler.step()

    game.finish = finish


def with_a_learning_rate_that_is_a_tensor(game: Game) -> None:
    optimizer = game.critic_optimizer = torch.optim.SGD(game.critic.parameters(), lr=torch.tensor(0.1))
    game.finish = lambda: optimizer.param_groups[0]["lr"].mul_(0.9)


def with_a_gradient_scaler(game: Game) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    game.kept.append(scaler)

    def train(real: Tensor, fake: Tensor) -> None:
        game.critic_optimizer.zero_grad()
        scaler.scale(game.critic_loss(real, fake)).backward()
        scaler.step(game.critic_optimizer)
        scaler.update()

    game.train_critic = train


def together_with_a_layer_of_the_generator(game: Game) -> None:
    params = [*game.critic.parameters(), *game.generator[3].parameters()]
    game.critic_optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)


def with_gradients_that_stay(game: Game) -> None:
    def train(real: Tensor, fake: Tensor) -> None:
        game.critic_loss(real, fake).backward()
        game.critic_optimizer.step()
        game.critic_optimizer.zero_grad(set_to_none=False)

    game.train_critic = train


def with_gradients_that_add_up(game: Game) -> None:
    def train(real: Tensor, fake: Tensor) -> None:
        game.critic_loss(real, fake).backward()
        game.critic_optimizer.step()

    game.train_critic = train


def for_the_first_time(game: Game) -> None:
    """It has no state yet when it is verified."""

    def train(real: Tensor, fake: Tensor) -> None:
        if game.num_iterations >= 7:
            game.step_critic(real, fake)

    game.train_critic = train


def frozen_in_between(game: Game) -> None:
    def train(real: Tensor, fake: Tensor) -> None:
        game.critic.requires_grad_(True)
        game.step_critic(real, fake)
        game.critic.requires_grad_(False)

    game.train_critic = train


def by_hand(game: Game) -> None:
    def train(real: Tensor, fake: Tensor) -> None:
        params = list(game.critic.parameters())
        grads = torch.autograd.grad(game.critic_loss(real, fake), params)
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param -= 0.05 * grad

    del game.critic_optimizer
    game.critic_optimizer, game.train_critic = torch.optim.SGD([torch.zeros(1)]), train


def by_an_optimizer_of_its_own_each_time(game: Game) -> None:
    def train(real: Tensor, fake: Tensor) -> None:
        optimizer = torch.optim.Adam(game.critic.parameters(), lr=0.05)
        optimizer.zero_grad()
        game.critic_loss(real, fake).backward()
        optimizer.step()

    game.train_critic = train


class Counting(torch.optim.SGD):
    """Has numbers where torch's own optimizers have none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self.param_groups[0]["count"] = 0
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] += 1
        self.rates.append(0.2 / (1 + len(self.rates)))
        self.param_groups[0]["lr"] = self.rates[-1]
        return super().step(closure)


def by_an_optimizer_that_counts(game: Game) -> None:
    game.critic_optimizer = Counting(game.critic.parameters())


def with_a_mean_of_the_generator(game: Game) -> None:
    mean = AveragedModel(game.generator, use_buffers=True)
    game.kept.append(mean)
    game.finish = lambda: mean.update_parameters(game.generator)


def with_features_of_a_frozen_model(game: Game) -> None:
    features = net(4).requires_grad_(False)
    game.kept.append(features)
    game.train_critic = lambda real, fake: game.step_critic(features(real), features(fake))


def by_a_train_step(game: Game) -> None:
    step = kitsune.TrainStep(
        game.critic,
        optimizer=game.critic_optimizer,
        forward=lambda _, real, fake: game.critic_loss(real, fake),
        mode="replay",
        accumulate=3,
    )
    game.train_critic = lambda real, fake: (step(real, fake), None)[1]


CHANGES: list[Callable[[Game], None] | None] = [
    None,
    in_several_steps,
    by_a_search_along_lines,
    with_a_schedule,
    with_a_learning_rate_that_is_a_tensor,
    with_a_gradient_scaler,
    together_with_a_layer_of_the_generator,
    with_gradients_that_stay,
    with_gradients_that_add_up,
    for_the_first_time,
    frozen_in_between,
    by_hand,
    by_an_optimizer_of_its_own_each_time,
    by_an_optimizer_that_counts,
    with_a_mean_of_the_generator,
    with_features_of_a_frozen_model,
    by_a_train_step,
]


@pytest.mark.support("Failure", "verify: optimizers in the iteration that are not Kitsune's", "replayed")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__ if change else "plainly")
def test_what_else_an_iteration_trains_is_put_back(change: Callable[[Game], None] | None) -> None:
    expected = Game(change)
    losses, later = expected.run(7), expected.run(4)
    game = Game(change)
    assert game.run(7) == losses
    before = game.observe()
    grads = [param.grad for param in game.critic.parameters()]
    found = game.verify()
    assert found.agrees, found
    assert not found.written
    assert same(game.observe(), before)
    assert all(param.grad is grad for param, grad in zip(game.critic.parameters(), grads, strict=True))
    assert game.run(4) == later
    assert same(game.observe(), expected.observe())


def test_a_difference_is_found_beside_an_optimizer_that_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of one that trained on from run to run would pass for rounding."""
    game = Game(in_several_steps)
    game.run(6)
    run_backward = BackwardGraph.__call__

    def wrong(graph: Any, *args: Any, **options: Any) -> Any:
        grads = run_backward(graph, *args, **options)
        return [*grads[:-1], grads[-1] * 1.05]

    monkeypatch.setattr(BackwardGraph, "__call__", wrong)
    found = game.verify()
    assert found.replayed
    assert any(one.name.endswith(".grad") for one in found.differences)


@pytest.mark.parametrize("change", [None, in_several_steps, together_with_a_layer_of_the_generator])
def test_a_comparison_in_passing_trains_nothing_twice(
    change: Callable[[Game], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the loop nothing but a replay is repeated."""
    differences: list[Any] = []

    def counted(*args: Any) -> Any:
        differences.append(compare(*args))
        return differences[-1]

    monkeypatch.setattr(loop_comparison, "compare", counted)
    verified = Game(change, verify=3)
    assert verified.run(8) == pytest.approx(Game(change, mode="eager").run(8), rel=1e-5)
    assert differences.count([]) == 6


def test_a_training_that_is_over_is_not_looked_at() -> None:
    game = Game()
    game.run(5)
    gc.disable()
    try:
        critic = weakref.ref(Game().critic)
        assert critic() is not None  # it waits for the collector
        assert game.verify().agrees
        assert critic() is None
    finally:
        gc.enable()


def test_where_the_iteration_raises_all_is_put_back_too() -> None:
    def interrupted() -> None:
        raise OSError("the disk is full")

    expected = Game()
    losses = expected.run(10)
    game = Game()
    assert game.run(6) == losses[:6]
    before = game.observe()
    game.finish = interrupted
    with pytest.raises(OSError, match="the disk is full"):
        game.verify()
    assert same(game.observe(), before)
    game.finish = lambda: None
    assert game.run(4) == losses[6:]
    assert game.verify().agrees


class Mean(nn.Module):
    """Of a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.mean = nn.Parameter(weight.detach().clone(), requires_grad=False)


def test_what_is_not_put_back_is_told() -> None:
    """As nothing tells it from a frozen model, which may be large."""
    game = Game()
    weight = game.generator[0].weight
    kept = Mean(weight)

    def finish() -> None:
        with torch.no_grad():
            kept.mean.lerp_(weight, 0.1)

    game.finish = finish
    game.run(6)
    found = game.verify()
    assert found.agrees
    assert found.written == ("mean",)
    assert str(found).endswith("\nwritten to besides, and not put back:\n  mean")
