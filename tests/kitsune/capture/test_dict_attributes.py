"""What hangs on a dictionary beside its items: the next call after it has changed is no replay."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kitsune.capture.changing import Holder, model, noticed
from tests.kitsune.training import FORMS, Net, Training, adam, compare


class Slotted(dict[str, Any]):
    __slots__ = ("factor",)


class WithProperty(dict[str, Any]):
    """Has a property that is set by way of another attribute."""

    @property
    def factor(self) -> float:
        return float(self._factor)

    @factor.setter
    def factor(self, value: float) -> None:
        self._factor = value


class ItsOwnAttributes(dict[str, Any]):
    """Items are attributes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__ = self


KINDS: list[Any] = [
    *(type(f"Own{kind.__name__}", (kind,), {}) for kind in (dict, OrderedDict, defaultdict, Counter)),
    Slotted,
    WithProperty,
    ItsOwnAttributes,
]


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute(kind: Any, is_replaced: bool) -> None:
    def settings(factor: float) -> Any:
        made = kind()
        made.factor = factor
        return made

    def build() -> Any:
        made = model(lambda self, x: x * self.settings.factor, settings=settings(1.0))

        def change() -> None:
            if is_replaced:
                made.settings = settings(2.0)
            else:
                made.settings.factor = 2.0

        return made, change

    assert "factor" in noticed(build)


@pytest.mark.parametrize(
    "ask",
    [
        lambda settings: getattr(settings, "factor", 1.0),
        lambda settings: 2.0 if hasattr(settings, "factor") else 1.0,
        lambda settings: settings.__dict__.get("factor", 1.0),
        lambda settings: vars(settings).get("factor", 1.0),
        lambda settings: settings.part.factor,
        lambda settings: settings.parts[0]["a"].factor,
        lambda settings: settings["item"].factor,
    ],
)
def test_what_is_further_below_or_missing(ask: Callable[[Any], float]) -> None:
    def build() -> Any:
        settings: Any = KINDS[0](item=Holder(factor=1.0))
        settings.part, settings.parts = Holder(factor=1.0), [{"a": Holder(factor=1.0)}]
        made = model(lambda self, x: x * ask(self.settings), settings=settings)

        def change() -> None:
            for one in (settings, settings.part, settings.parts[0]["a"], settings["item"]):
                one.factor = 2.0

        return made, change

    noticed(build)


def returning(value: float) -> Callable[[], float]:
    return lambda: value


@pytest.mark.support("Models", "the default_factory of a defaultdict, which is replaced", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_the_factory_of_a_defaultdict(form: str) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.factors = defaultdict(returning(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factors["one"]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Model()
        return made, adam(made)

    def edit(training: Training, index: int) -> None:
        if index == 6:
            training.model.factors.clear()
            training.model.factors.default_factory = returning(2.0)

    compare(form, build, steps=12, edit=edit, replays=6)
