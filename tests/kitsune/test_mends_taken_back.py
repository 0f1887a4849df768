"""Each mend, taken back: replays go wrong then, and verification finds it, in passing and on request.

With the mend in place the same programs run as plain PyTorch does, and nothing is found.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kitsune
from kitsune.loop import alive
from tests.kitsune.capture.test_autograd_functions import (
    HEADS,
    READING,
    SETTINGS,
    built,
    changing_before_backward,
    doubles,
    loss_of,
)
from tests.kitsune.differential.peculiar import PECULIAR, Peculiar
from tests.kitsune.mends import FORMS, MENDS, NEEDED, forms_of, take_back
from tests.kitsune.test_double_backward import DETOURS, looping, smooth
from tests.kitsune.test_storage import by_set, exchanging
from tests.kitsune.training import Batch, Build, Training, adam, batch, compare, plain_loop
from tests.kitsune.versions import skip_before_2_13

_CHANGED_AT, _STEPS = 3, 5


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 3), layer, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)))


@dataclass(frozen=True)
class Program:
    """A training that goes wrong without some mends.

    Attributes:
        mends: these, by name.
        edit: called before each step, with its number.
        steps: how many there are.
        verified_after: so many steps, `kitsune.verify` is called.
        in_passing: whether a comparison of the call alone shows it; else what the loop does beside is part of it.
    """

    mends: tuple[str, ...]
    build: Build
    edit: Callable[[nn.Module, int], None] = lambda model, index: None
    forms: tuple[str, ...] = FORMS
    options: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[int], Batch] = batch
    steps: int = _STEPS
    verified_after: int = _STEPS
    in_passing: bool = True

    def training(self, form: str, **options: Any) -> Training:
        torch.manual_seed(0)
        options = {} if form == "eager" else options
        deferred = {"defer_loss": True} if form == "deferred" else {}
        form = "drop_in" if form == "deferred" else form
        step = {"keep_grads": True} if form == "train_step" else None
        return Training(form, *self.build(), step=step, **self.options, **options, **deferred)

    def run(self, training: Training, steps: int | None = None) -> dict[str, Tensor]:
        """What is left behind, but for gradients: not all forms keep them."""
        losses: list[float] = []
        for index in range(self.steps if steps is None else steps):
            self.edit(training.model, index)
            losses += training.run(1, self.batches, start=index)
        numbers = [one.numbers() for one in training.model.modules() if isinstance(one, Peculiar)]
        left = {name: value for name, value in training.observe().items() if not name.endswith(".grad")}
        return {"losses": torch.tensor(losses, dtype=torch.float64), "numbers": torch.tensor(numbers), **left}

    def verification(self, training: Training) -> kitsune.Verification:
        """Of the step that comes next; where nothing fits it, of its capture."""
        found = self._verification(training)
        return found if found.replayed else self._verification(training)

    def _verification(self, training: Training) -> kitsune.Verification:
        args, _ = self.batches(self.verified_after)
        if training.train_step is not None:
            return kitsune.verify(training.train_step, *args)
        assert isinstance(training.optimizer, kitsune.KitsuneOptimizer)
        return kitsune.verify(self.options.get("loop", plain_loop), training, *args, optimizer=training.optimizer)


def of_layer(name: str) -> Program:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Around(PECULIAR[name]())
        return model, adam(model)

    def edit(model: nn.Module, index: int) -> None:
        if index == _CHANGED_AT:
            model.layer.change()

    # Of steps that give tensors other memory, some are replayed at first.
    verified_after = 2 if name == "exchanged memory" else _STEPS
    return Program(NEEDED[name], build, edit, forms_of(name), verified_after=verified_after)


IN_LOOPS = ("drop_in", "deferred")

PROGRAMS = {
    **{name: of_layer(name) for name in NEEDED},
    "results without a gradient": Program(
        ("missing gradients",),
        built(HEADS["zeros for some results"]),
        forms=IN_LOOPS,
        options={"loss_fn": loss_of(0)},
        batches=doubles,
    ),
    "settings that backward() reads": Program(
        ("late reads",),
        built(READING["a function"]),
        forms=IN_LOOPS,
        options={"loop": changing_before_backward},
        batches=doubles,
        in_passing=False,
    ),
    "gradients that go through a detour": Program(
        ("detours",),
        smooth(),
        forms=("deferred",),
        options={"loop": looping(DETOURS["grad, by two ways"], 6)},
        batches=doubles,
        steps=8,
        verified_after=6,
        in_passing=False,
    ),
}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() >= {"losses"}
    return [
        name for name in {**one, **other} if name not in one or name not in other or not close(one[name], other[name])
    ]


def close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return False
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def told(training: Training) -> list[str]:
    return [one for one in training.status().refusals if "differed from plain PyTorch" in one]


@pytest.fixture(autouse=True)
def _settings() -> None:
    SETTINGS.__init__()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests have left is frozen, and takes seconds to go through."""
    monkeypatch.setattr(alive, "_objects", gc.get_objects)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, one in PROGRAMS.items() for form in one.forms])
def test_verification_finds_what_a_mend_keeps_right(name: str, form: str) -> None:
    skip_before_2_13(name, {"assigns to a class", "key by value"})
    program = PROGRAMS[name]
    plain = program.run(program.training("eager"))
    with pytest.MonkeyPatch.context() as patch:
        take_back(patch, *program.mends)
        wrong = program.training(form)
        assert differing(program.run(wrong), plain), "the mend keeps nothing right, or this shows nothing"
        if program.verified_after < program.steps:
            wrong = program.training(form)
            program.run(wrong, program.verified_after)
        found = program.verification(wrong)
        assert found.replayed, found
        assert found.differences
        if program.in_passing:
            verified = program.training(form, verify=program.steps)
            assert not differing(program.run(verified), plain), "what plain PyTorch does stands"
            assert told(verified)
    right = program.training(form, verify=program.steps)
    assert not differing(program.run(right), plain)
    assert not told(right)
    assert not program.verification(right).differences


def test_a_mend_of_steps_that_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification compares replays, and this call has none: what plain PyTorch leaves tells."""
    take_back(monkeypatch, "gradients of what was exchanged")
    with pytest.raises(AssertionError, match=r"first.weight.exp_avg"):
        compare("train_step", exchanging(by_set, "after"), steps=2, replays=0)


def test_each_mend_is_taken_back() -> None:
    taken = {name for program in PROGRAMS.values() for name in program.mends}
    assert taken | {"gradients of what was exchanged"} == MENDS.keys()
