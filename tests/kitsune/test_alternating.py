"""State that alternates: a capture for each, which is kept while the state is another one. Counted, not timed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitsune.errors import Refusal, RefusedError
from kitsune.fallback import Choice, Chooser
from kitsune.loop import cache, guarded_step
from kitsune.loop.cache import StepCache
from kitsune.loop.guarded_step import GuardedStep
from kitsune.loop.variants import MOST_USELESS, REFUSALS_UNTIL_GIVEN_UP
from tests.kitsune.clock import Clock
from tests.kitsune.training import Training, adam, batch, compare, plain_loop, sgd

FORMS = {"train_step": {}, "drop_in": {}, "deferred": {"defer_loss": True}}
STEPS = 24

SCALE = 1.0
SETTINGS = {"scale": 1.0}


class Settings:
    scale = 1.0


class Switching(nn.Module):
    """A model that does something else for each of a number of things that loops change."""

    settings: Any = SETTINGS

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 3)
        self.active, self.is_gated, self.gain = 0, True, 1.0
        self.config, self.act = Settings(), torch.relu

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.first(x)))
        hidden = self.experts[self.active](self.drop(hidden))
        if self.is_gated:
            hidden = hidden * torch.sigmoid(hidden)
        wide = 2.0 if "KITSUNE_TEST_WIDE" in os.environ else 1.0
        return self.scaled(self.last(hidden)) * SCALE * self.settings["scale"] * self.config.scale * self.gain * wide

    def scaled(self, x: Tensor) -> Tensor:
        return x * 0.5


OTHER_CONFIG = Settings()
OTHER_CONFIG.scale = 3.0


def set_environment(index: int) -> None:
    if index % 2:
        os.environ["KITSUNE_TEST_WIDE"] = "1"
    else:
        os.environ.pop("KITSUNE_TEST_WIDE", None)


def set_global(index: int) -> None:
    global SCALE
    SCALE = 1.0 + index % 2


def add_hook(model: Switching, index: int) -> None:
    model.last._forward_hooks.clear()
    if index % 2:
        model.last.register_forward_hook(triple)


def triple(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 3


CONFIGS = (Settings(), OTHER_CONFIG)
FUNCTIONS = (torch.relu, torch.tanh)

Edit = Callable[[Switching, int], object]

EDITS: dict[str, tuple[int, Edit]] = {
    "momentum of batch norm": (2, lambda model, index: setattr(model.norm, "momentum", (0.1, 0.0)[index % 2])),
    "experts in turn": (4, lambda model, index: setattr(model, "active", index % 4)),
    "a switch": (2, lambda model, index: setattr(model, "is_gated", index % 2 == 0)),
    "a number": (3, lambda model, index: setattr(model, "gain", 1.0 + index % 3)),
    "a part in evaluation mode": (2, lambda model, index: model.norm.train(index % 2 == 0)),
    "dropout that is switched off": (2, lambda model, index: setattr(model.drop, "p", 0.3 * (index % 2))),
    "a part that is frozen": (2, lambda model, index: model.first.requires_grad_(index % 2 == 0)),
    "all but the last layer frozen": (
        2,
        lambda model, index: [param.requires_grad_(index % 2 == 0) for param in list(model.parameters())[:-2]],
    ),
    "a global number": (2, lambda _, index: set_global(index)),
    "a number in a dictionary": (3, lambda _, index: SETTINGS.update(scale=1.0 + index % 3)),
    "an object that is exchanged": (2, lambda model, index: setattr(model, "config", CONFIGS[index % 2])),
    "a function that is exchanged": (
        2,
        lambda model, index: setattr(model, "act", (torch.relu, torch.tanh)[index % 2]),
    ),
    "a hook that comes and goes": (2, add_hook),
    "the environment": (2, lambda _, index: set_environment(index)),
}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[GuardedStep]:
    """The steps that were captured, in order."""
    steps: list[GuardedStep] = []
    enter = StepCache.enter

    def entered(cache: StepCache[Any], step: GuardedStep) -> None:
        steps.append(step)
        enter(cache, step)

    monkeypatch.setattr(StepCache, "enter", entered)
    return steps


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    yield
    set_environment(0)
    set_global(0)
    SETTINGS["scale"] = 1.0


def build(**options: Any) -> tuple[Switching, torch.optim.Optimizer]:
    set_environment(0)
    set_global(0)
    SETTINGS["scale"] = 1.0
    model = Switching()
    return model, sgd(model, momentum=0.0, **options)


def same(form: str, edit: Edit, **arguments: Any) -> Training:
    """Compares with plain PyTorch."""
    kind = form if form == "train_step" else "drop_in"
    arguments = {"steps": STEPS, "replays": 0, "rtol": 1e-5, "atol": 1e-6, **FORMS[form], **arguments}
    return compare(kind, build, edit=lambda training, index: edit(training.model, index), **arguments)


@pytest.mark.support("Models", "state that alternates: settings, experts, frozen parts", "replayed")
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("form", FORMS)
def test_each_state_is_captured_once_and_replayed(form: str, name: str, captured: list[GuardedStep]) -> None:
    num_states, edit = EDITS[name]
    status = same(form, edit).status()
    assert status.mode == "replay", status
    assert status.graphs == num_states
    assert len(captured) == num_states
    eager = 2 + (
        form != "train_step"
    )  # the first of the signature, and of a state that was another one for the first time
    assert status.replays >= STEPS - eager - (num_states > 2) * num_states


@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_is_seldom_is_kept(form: str, captured: list[GuardedStep]) -> None:
    training = same(form, lambda model, index: setattr(model, "gain", 2.0 if index % 20 == 19 else 1.0), steps=81)
    assert training.status().replays >= 81 - 4
    assert len(captured) == 2


@pytest.mark.support("Models", "a number that is another one at every step", "plain PyTorch, with a reason")
@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_is_another_one_each_time_is_given_up(form: str, captured: list[GuardedStep]) -> None:
    steps = 2 + MOST_USELESS + REFUSALS_UNTIL_GIVEN_UP + 4
    status = same(form, lambda model, index: setattr(model, "gain", 1.0 + 0.01 * index), steps=steps).status()
    assert (status.mode, status.graphs) == ("eager", 0)
    assert "would have to be captured again" in status.reason
    assert len(captured) == MOST_USELESS


@pytest.mark.parametrize("form", FORMS)
def test_one_state_that_returns_among_others_that_do_not(form: str, captured: list[GuardedStep]) -> None:
    """It stays replayed, and the others cost no more than a few captures."""
    steps = 80

    def edit(model: Switching, index: int) -> None:
        model.gain = 1.0 if index % 2 else 1.0 + 0.01 * index

    status = same(form, edit, steps=steps).status()
    assert status.replays >= steps // 2 - 3
    assert len(captured) <= 1 + MOST_USELESS


@pytest.mark.parametrize("form", FORMS)
def test_states_of_several_shapes_share_the_graphs(form: str, captured: list[GuardedStep]) -> None:
    def edit(model: Switching, index: int) -> None:
        model.gain = 1.0 + index % 2

    training = same(form, edit, steps=60, max_graphs=3, batches=lambda index: batch(index, size=5 + (index // 2) % 2))
    assert training.status().graphs == len(captured) == 3
    assert training.status().replays >= 60 * 3 // 4 - 10


@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_is_over_gives_its_memory_back(
    form: str, captured: list[GuardedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a loop; the graphs of whole steps lie in the same memory."""
    monkeypatch.setattr(cache, "_REPLAYS_BETWEEN_LOOKS", 10)
    status = same(form, lambda model, index: setattr(model, "gain", 1.0 + (index >= 8)), steps=40).status()
    assert len(captured) == 2
    assert status.mode == "replay"
    assert status.graphs == (2 if form == "train_step" else 1)


@pytest.mark.parametrize("form", FORMS)
def test_other_states_make_room_where_memory_is_short(
    form: str, captured: list[GuardedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one model there may be memory for one capture, and the state before may be over for good."""
    trace, tried = guarded_step.GuardedFunction, 0

    def short(*args: Any) -> Any:
        nonlocal tried
        tried += 1
        if tried > 1 and captured[0].executor is not None:
            raise RefusedError(Refusal("there is too little device memory to capture the step"), for_memory=True)
        return trace(*args)

    monkeypatch.setattr(guarded_step, "GuardedFunction", short)
    training = same(form, lambda model, index: setattr(model, "gain", 1.0 + (index >= 8)))
    status = training.status()
    assert (status.mode, status.graphs) == ("replay", 1)
    assert status.replays >= STEPS - 6


@pytest.mark.parametrize("form", ["drop_in", "deferred"])
def test_sharpness_aware_minimization(form: str, captured: list[GuardedStep]) -> None:
    """Two passes an iteration; the second one leaves the statistics of batch norm alone."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        model, optimizer = training.model, training.optimizer
        model.norm.momentum = 0.1
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        moves = [
            0.05 * param.grad / (param.grad.norm() + 1e-9) for param in model.parameters() if param.grad is not None
        ]
        trained = [param for param in model.parameters() if param.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(trained, moves)
        model.norm.momentum = 0.0
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(trained, moves)
        optimizer.step()
        return loss.detach()

    status = same(form, lambda model, index: None, loop=loop).status()
    assert status.covered[-1] == "update", status
    assert len(captured) == status.graphs == 2
    assert status.replays >= 2 * STEPS - 6


OPTIONS = {
    "weight decay": lambda group, index: group.update(weight_decay=0.1 * (index % 2)),
    "maximize": lambda group, index: group.update(maximize=index % 2 == 1),
    "nesterov": lambda group, index: group.update(nesterov=index % 2 == 1),
    "momentum": lambda group, index: group.update(momentum=0.9 if index % 2 else 0.0),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_options_of_the_optimizer_alternate(form: str, name: str) -> None:
    def build_sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Switching()
        return model, sgd(model)

    kind = form if form == "train_step" else "drop_in"
    training = compare(
        kind,
        build_sgd,
        steps=STEPS,
        replays=STEPS - 8,
        rtol=1e-5,
        atol=1e-6,
        edit=lambda training, index: OPTIONS[name](training.plain.param_groups[0], index),
        **FORMS[form],
    )
    status = training.status()
    assert status.covered[-1] == "update", status
    assert not any("captured again" in refusal for refusal in status.refusals)


def test_options_of_half_precision_alternate() -> None:
    """Their update is torch's fused one, of which numbers are a part."""

    def build_half() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 3).bfloat16()
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        training.plain.param_groups[0]["weight_decay"] = 0.1 * (index % 2)

    def half(index: int) -> Any:
        return batch(index, dtype=torch.bfloat16)

    training = compare("drop_in", build_half, steps=STEPS, replays=STEPS - 2, edit=edit, batches=half)
    assert training.status().covered[-1] == "update", training.status()


FROZEN_CALLS: dict[str, Callable[[Training, Tensor], Tensor]] = {
    "no gradients": lambda training, x: training.model(x).sum(),
    "gradients of the input": lambda training, x: _input_gradient(training.model, x),
}


def _input_gradient(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad.sum()


@pytest.mark.support("Models", "calls of a model while it is frozen, between steps of its training", "replayed")
@pytest.mark.parametrize("kind", FROZEN_CALLS)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_is_also_called_frozen(form: str, kind: str) -> None:
    """As a critic is, and by Lightning's `toggle_optimizer`."""
    seen: dict[str, list[Tensor]] = {}

    def edit(training: Training, index: int) -> None:
        training.model.requires_grad_(False)
        (x, _), _ = batch(100 + index)
        seen.setdefault(training.form, []).append(FROZEN_CALLS[kind](training, x).detach())
        training.model.requires_grad_(True)

    name = form if form == "train_step" else "drop_in"
    training = compare(name, build, steps=12, replays=12 - 3, rtol=1e-5, atol=1e-6, edit=edit, **FORMS[form])
    assert training.status().mode == "replay"
    torch.testing.assert_close(seen[name], seen["eager"], rtol=1e-5, atol=1e-6)
    if form != "train_step" and kind == "gradients of the input":
        assert training.status().replays >= 2 * (12 - 3)


@pytest.mark.parametrize("form", ["drop_in", "deferred"])
def test_gradients_of_the_input_of_a_model_frozen_by_turns(form: str, captured: list[GuardedStep]) -> None:
    """With the same arguments: what tells the calls apart is what is frozen."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        training.model.requires_grad_(False)
        training.model(x).square().sum().backward()
        training.model.requires_grad_(True)
        assert x.grad is not None
        return plain_loop(training, x.detach().requires_grad_(), y) + x.grad.sum()

    status = same(form, lambda model, index: None, loop=loop).status()
    assert len(captured) == status.graphs == 2
    assert status.replays >= 2 * STEPS - 5


@pytest.mark.parametrize(("replay", "mode"), [(0.5, "replay"), (2.0, "eager")])
@pytest.mark.parametrize("form", FORMS)
def test_each_state_is_measured(
    form: str, replay: float, mode: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Chooser.finish

    def finished(chooser: Chooser, choice: Choice, steps: int = 1) -> None:
        clock.cost = 1.0 if choice == "eager" else replay
        finish(chooser, choice, steps)

    monkeypatch.setattr(Chooser, "finish", finished)
    training = Training(form if form == "train_step" else "drop_in", *build(), mode="auto", **FORMS[form])
    modes = []
    for index in range(50):
        training.model.is_gated = index % 2 == 0
        training.run(1, start=index)
        modes.append(training.status().mode)
    assert set(modes[-10:]) == {mode}
    assert training.status().graphs == (2 if mode == "replay" else 0)
