"""What a model looks up in vain at the capture, and objects that it compares by identity, become others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kitsune.training import Net, Training, adam, compare

FACTORS: dict[str, float] = {}


class Defaults:
    scale = 0.5


class Settings(Defaults):
    """Inherits all that it has."""


class Thing:
    """Without any attribute."""


class Reading(Net):
    """Scales what it computes by what it reads."""

    def __init__(self, read: Callable[[Reading], float]) -> None:
        super().__init__()
        self.read = read
        self.thing, self.settings, self.factors = Thing(), Settings(), dict[str, float]()
        self.one, self.other = Thing(), Thing()
        self.act, self.other_act = nn.Tanh(), nn.Tanh()
        self.things, self.others = [1], [1]
        self.some, self.acts = [Thing()], [nn.Tanh()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.read(self)


class Delegating(nn.Module):
    """Has the attributes of the model inside, as the wrappers of adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


def tried(read: Callable[[], Any]) -> float:
    try:
        return float(read())
    except (AttributeError, KeyError):
        return 1.0


READS: dict[str, tuple[Callable[[Any], float], Callable[[Any], object]]] = {
    "an attribute of the module": (
        lambda model: tried(lambda: model.late),
        lambda model: setattr(model, "late", 2.0),
    ),
    "a buffer of the module": (
        lambda model: 2.0 if tried(lambda: model.late.numel()) == 3 else 1.0,
        lambda model: model.register_buffer("late", torch.ones(3)),
    ),
    "an attribute of an object": (
        lambda model: tried(lambda: model.thing.late),
        lambda model: setattr(model.thing, "late", 2.0),
    ),
    "a key": (lambda model: tried(lambda: model.factors["late"]), lambda model: model.factors.update(late=2.0)),
    "a key of a global": (lambda model: tried(lambda: FACTORS["late"]), lambda model: FACTORS.update(late=2.0)),
    "an inherited attribute": (lambda model: model.settings.scale, lambda model: setattr(Settings, "scale", 2.0)),
}

IDENTITIES: dict[str, tuple[Callable[[Any], float], Callable[[Any], object]]] = {
    "objects": (
        lambda model: 2.0 if model.one is model.other else 1.0,
        lambda model: setattr(model, "other", model.one),
    ),
    "equal objects": (
        lambda model: 2.0 if model.one == model.other else 1.0,
        lambda model: setattr(model, "other", model.one),
    ),
    "modules": (
        lambda model: 2.0 if model.act is model.other_act else 1.0,
        lambda model: setattr(model, "other_act", model.act),
    ),
    "objects in a list": (
        lambda model: 2.0 if model.one in model.some else 1.0,
        lambda model: model.some.__setitem__(0, model.one),
    ),
    "modules in a list": (
        lambda model: 2.0 if model.act in model.acts else 1.0,
        lambda model: model.acts.__setitem__(0, model.act),
    ),
    "lists": (
        lambda model: 2.0 if model.things is model.others else 1.0,
        lambda model: setattr(model, "others", model.things),
    ),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    FACTORS.clear()
    if "scale" in vars(Settings):
        del Settings.scale


def changed_in_mid_training(build: Callable[[], nn.Module], change: Callable[[Any], object]) -> Training:
    """Compares a training in which a change comes at the sixth step."""

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        FACTORS.clear()
        if "scale" in vars(Settings):
            del Settings.scale
        model = build()
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        if index == 5:
            change(training.model)

    training = compare("drop_in", built, steps=10, edit=edit, replays=6)
    assert training.status().mode == "replay"
    return training


@pytest.mark.support("Models", "attributes and keys that were missing, and come later", "replayed")
@pytest.mark.parametrize("what", READS)
def test_what_was_looked_up_in_vain_is_noticed_when_it_is_there(what: str) -> None:
    read, change = READS[what]
    changed_in_mid_training(lambda: Reading(read), change)


def test_an_attribute_that_hides_that_of_the_model_inside() -> None:
    changed_in_mid_training(lambda: Delegating(Net()), lambda model: setattr(model, "gain", 2.0))


@pytest.mark.support("Models", "objects that are compared by identity, and become one", "replayed")
@pytest.mark.parametrize("what", IDENTITIES)
def test_objects_that_become_one_are_noticed(what: str) -> None:
    read, change = IDENTITIES[what]
    changed_in_mid_training(lambda: Reading(read), change)


def test_objects_that_are_asked_for_none_may_be_others() -> None:
    """They are compared with nothing that could be they."""

    def edit(training: Training, index: int) -> None:
        training.model.things, training.model.one = [1], Thing()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Reading(lambda model: 1.0 if model.things is None or model.one is None else 2.0)
        return model, adam(model)

    assert compare("drop_in", build, steps=8, edit=edit).status().mode == "replay"


@functools.lru_cache
def kept() -> float:
    return FACTORS["kept"]


@pytest.mark.support(
    "Models", "functools.lru_cache around a function that reads what may change", "plain PyTorch, with a reason"
)
def test_results_that_a_function_keeps_are_not_computed_anew() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        FACTORS["kept"] = 1.0
        kept.cache_clear()
        model = Reading(lambda _model: kept())
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        if index == 5:
            FACTORS["kept"] = 2.0

    training = compare("drop_in", build, steps=8, edit=edit, replays=0)
    assert "keeps results that depend on more than its arguments" in training.status().reason


@functools.lru_cache
def doubled(number: int) -> float:
    return number * 2.0


def test_results_that_depend_on_the_arguments_alone_are() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Reading(lambda _model: doubled(1))
        return model, adam(model)

    assert compare("drop_in", build).status().mode == "replay"
