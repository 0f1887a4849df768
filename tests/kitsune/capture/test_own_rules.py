"""Code of the model's that Dynamo runs while it captures, without a look into it: such calls are refused."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy
import pytest
import torch
from torch import Tensor, nn

from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import model
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import FORMS, Net, Training, compare, sgd


class Meta(type):
    factor = 1.0

    def __getitem__(cls, key: str) -> float:
        return Meta.factor

    def __bool__(cls) -> bool:
        return Meta.factor > 1

    def __instancecheck__(cls, instance: object) -> bool:
        return Meta.factor > 1


class Registry(metaclass=Meta):
    pass


class Plain(enum.Enum):
    ONE = 1.0
    OTHER = 2.0


class Own(enum.Enum):
    ONE = 1

    def __bool__(self) -> bool:
        return Meta.factor > 1


class Written(enum.Enum):
    ONE = 1

    def __str__(self) -> str:
        return str(Meta.factor)


class Listed(enum.Enum):
    ONE = [1.0]  # noqa: RUF012 - which is the case


class ByName:
    def __class_getitem__(cls, key: str) -> float:
        return Meta.factor


class Rounded(int):
    def __mul__(self, other: Any) -> Any:
        return other * 1.0


NAN = float("nan")


@runtime_checkable
class HasFactor(Protocol):
    def factor(self) -> float: ...


REFUSED: dict[str, tuple[Callable[[Any], float], str]] = {
    "item of a class": (lambda self: Registry["a"], "has a metaclass of its own"),  # type: ignore[type-arg]
    "truth of a class": (lambda self: 2.0 if Registry else 1.0, "has a metaclass of its own"),
    "instance": (lambda self: 2.0 if isinstance(self.it, Registry) else 1.0, "has a metaclass of its own"),
    "attribute of the metaclass": (lambda self: Registry.factor, "has a metaclass of its own"),
    "truth of a member": (lambda self: 2.0 if Own.ONE else 1.0, r"has a __bool__\(\) of its own"),
    "text of a member": (lambda self: float(f"{Written.ONE}"), r"has a __str__\(\) of its own"),
    "container of a member": (lambda self: Listed.ONE.value[0], "stands for a container"),
    "protocol": (lambda self: 2.0 if isinstance(self.it, HasFactor) else 1.0, "what a Protocol names"),
    "registry": (lambda self: ByName["a"], r"has a __class_getitem__\(\) of its own"),
    "number of a class": (lambda self: self.rounded, r"has a __mul__\(\) of its own"),
    "not a number": (lambda self: 2.0 if self.nan in [self.nan] else 1.0, "NaN"),
    "length of an array": (lambda self: float(len(self.array)), "its length"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_guarded_is_refused(name: str) -> None:
    read, reason = REFUSED[name]
    asking = model(lambda self, x: x * read(self), it=Net(), array=numpy.ones(3), rounded=Rounded(2), nan=NAN)
    call, _ = guarded(lambda x: asking(x))
    with pytest.raises(RefusedError, match=reason):
        call(torch.ones(2))


def test_enumerations_without_methods_of_their_own_are_captured() -> None:
    asking = model(lambda self, x: x * (self.it.value if self.it is Plain.ONE else 3.0), it=Plain.ONE)
    call, runner = guarded(lambda x: asking(x))
    assert call(torch.ones(2)).tolist() == [1.0, 1.0]
    assert len(runner.graphs) == 1


class Renaming(type):
    """As `transformers` has one, for classes of results."""

    def __setattr__(cls, name: str, value: object) -> None:
        super().__setattr__(name, value)


class Result(metaclass=Renaming):
    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_a_metaclass_that_runs_where_classes_are_defined_is_captured() -> None:
    call, runner = guarded(lambda x: Result(x * 2.0).value)
    assert call(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(runner.graphs) == 1


class TakenBack(Net):
    """Has an attribute for the time of a call."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 2.0
        output = super().forward(x) * self.scale
        del self.scale
        return output


class TakenBackDefault(TakenBack):
    scale = 1.0


def building(kind: type[nn.Module]) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer]]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = kind()
        return made, sgd(made)

    return build


@pytest.mark.parametrize("form", FORMS)
def test_an_attribute_of_the_class_hidden_for_a_call(form: str) -> None:
    training = compare(form, building(TakenBackDefault), replays=0)
    assert "'scale', which was there before, is assigned and deleted" in training.status().reason


@pytest.mark.parametrize("form", FORMS)
def test_an_attribute_that_a_call_takes_back_is_there_before_another_one(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.model.scale = torch.tensor(5.0)

    training = compare(form, building(TakenBack), edit=edit, replays=2)
    assert not hasattr(training.model, "scale")


def test_a_step_in_which_no_parameter_takes_part_is_eager() -> None:
    class Apart(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 3)
            self.is_other = False

        def forward(self, x: Tensor) -> Tensor:
            return self.other(x) if self.is_other else super().forward(x)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Apart()
        return made, torch.optim.SGD([*made.first.parameters(), *made.last.parameters()], lr=0.1, fused=True)

    def edit(training: Training, index: int) -> None:
        training.model.is_other = 4 <= index < 6  # type: ignore[assignment]

    training = compare("train_step", build, edit=edit, steps=10, replays=3)
    assert any("no parameter that is trained takes part" in refusal for refusal in training.status().refusals)
