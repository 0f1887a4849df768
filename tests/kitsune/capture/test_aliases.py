"""One object that a call reaches in two ways, and that one of them leads to another one."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kitsune.capture.changing import Build, Holder, model, noticed
from tests.kitsune.training import FORMS, Net, Training, adam, compare

SHARED: Any = None
"""The global through which an object is reached; each case sets it."""


class Mode(enum.Enum):
    DOUBLE = 2.0
    FIVEFOLD = 5.0


class Factor:
    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.k


class Slots:
    __slots__ = ("k",)

    def __init__(self, k: float) -> None:
        self.k = k


@dataclasses.dataclass(frozen=True)
class Frozen:
    k: float


class Scale(nn.Module):
    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return x * self.k


Pair = collections.namedtuple("Pair", "k")


class Items(dict[str, float]):
    """A class of the model's own."""


def key(subject: Any) -> float:
    return float(subject["k"])


def first(subject: Any) -> float:
    return float(subject[0])


def attribute(subject: Any) -> float:
    return float(subject.k)


def module(k: float) -> types.ModuleType:
    made = types.ModuleType("made")
    made.k = k  # type: ignore[attr-defined]
    return made


KINDS: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "object": (Factor, attribute),
    "object without a dictionary": (Slots, attribute),
    "frozen dataclass": (Frozen, attribute),
    "namespace": (lambda k: types.SimpleNamespace(k=k), attribute),
    "named tuple": (Pair, attribute),
    "class": (lambda k: type("Made", (), {"k": k}), attribute),
    "Python module": (module, attribute),
    "member of an enumeration": (Mode, lambda member: float(member.value)),
    "module": (Scale, attribute),
    "dictionary": (lambda k: {"k": k}, key),
    "subclass of a dictionary": (lambda k: Items(k=k), key),
    "ordered dictionary": (lambda k: collections.OrderedDict(k=k), key),
    "default dictionary": (lambda k: collections.defaultdict(float, k=k), key),
    "counter": (lambda k: collections.Counter(k=int(k)), key),
    "chain": (lambda k: collections.ChainMap({"k": k}), key),
    "proxy": (lambda k: types.MappingProxyType({"k": k}), key),
    "list": (lambda k: [k], first),
    "queue": (lambda k: collections.deque([k]), first),
    "set": (lambda k: {k}, lambda subject: 2.0 if 2.0 in subject else 5.0),
}


def reach(make: Callable[[float], Any]) -> tuple[Any, Any]:
    """An object, by now a global, and another one."""
    global SHARED
    SHARED = make(2.0)
    return SHARED, make(5.0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute_leads_to_another_object(kind: str) -> None:
    make, read = KINDS[kind]

    def build() -> Any:
        one, other = reach(make)
        made = model(lambda self, x: x * read(SHARED) * read(self.own), own=one)
        return made, lambda: setattr(made, "own", other)

    noticed(build)


@pytest.mark.parametrize("kind", KINDS)
def test_a_global_leads_to_another_object(kind: str) -> None:
    make, read = KINDS[kind]

    def build() -> Any:
        one, other = reach(make)
        made = model(lambda self, x: x * read(self.own) * read(SHARED), own=one)
        return made, lambda: globals().update(SHARED=other)

    noticed(build)


def scaled_by_default(x: Tensor, factor: Any = None) -> Tensor:
    return x * factor.k


def through_a_dictionary() -> Any:
    one, other = reach(Factor)
    held = {"a": one}
    return model(lambda self, x: x * SHARED.k * held["a"].k), lambda: held.update(a=other)


def through_a_list() -> Any:
    one, other = reach(Factor)
    held = [one]
    return model(lambda self, x: x * SHARED.k * held[0].k), lambda: held.__setitem__(0, other)


def through_a_tuple() -> Any:
    one, other = reach(Factor)
    made = model(lambda self, x: x * SHARED.k * self.held[0].k, held=(one,))
    return made, lambda: setattr(made, "held", (other,))


def through_a_closure() -> Any:
    one, other = reach(Factor)

    def change() -> None:
        nonlocal one
        one = other

    return model(lambda self, x: x * SHARED.k * one.k), change


def through_a_class() -> Any:
    one, other = reach(Factor)
    made = model(lambda self, x: x * SHARED.k * self.own.k)
    type(made).own = one  # type: ignore[assignment]
    return made, lambda: setattr(type(made), "own", other)


def through_a_property() -> Any:
    one, other = reach(Factor)
    made = model(lambda self, x: x * SHARED.k * self.own.k)
    type(made).own = property(lambda self: self.__dict__["_own"])  # type: ignore[assignment]
    made._own = one  # type: ignore[assignment]
    return made, lambda: setattr(made, "_own", other)


def through_a_default() -> Any:
    one, other = reach(Factor)
    scale = types.FunctionType(scaled_by_default.__code__, globals(), argdefs=(one,))
    return model(lambda self, x: scale(x) * SHARED.k), lambda: globals().update(SHARED=other)


def through_a_default_of_a_keyword() -> Any:
    one, other = reach(Factor)

    def scale(x: Tensor, *, factor: Any = one) -> Tensor:
        return x * factor.k

    return model(lambda self, x: SHARED.k * scale(x)), lambda: setattr(scale, "__kwdefaults__", {"factor": other})


def through_an_attribute_of_a_function() -> Any:
    one, other = reach(Factor)

    def scale(x: Tensor) -> Tensor:
        return x * scale.factor.k  # type: ignore[attr-defined]

    scale.factor = one  # type: ignore[attr-defined]
    return model(lambda self, x: SHARED.k * scale(x)), lambda: setattr(scale, "factor", other)


def through_a_partial() -> Any:
    one, other = reach(Factor)
    made = model(lambda self, x: SHARED.k * self.scale(x), scale=functools.partial(scaled_by_default, factor=one))
    return made, lambda: setattr(made, "scale", functools.partial(scaled_by_default, factor=other))


def through_keywords_of_a_partial() -> Any:
    one, other = reach(Factor)
    scale = functools.partial(scaled_by_default, factor=one)
    return model(lambda self, x: SHARED.k * scale(x)), lambda: scale.keywords.update(factor=other)


def through_a_weak_reference() -> Any:
    one, other = reach(Factor)
    made = model(lambda self, x: x * SHARED.k * self.own().k, own=weakref.ref(one))
    return made, lambda: setattr(made, "own", weakref.ref(other))


def through_another_object() -> Any:
    one, other = reach(Factor)
    holder = Holder(own=one)
    made = model(lambda self, x: x * SHARED.k * self.own.k * holder.own.k, own=one)  # type: ignore[attr-defined]
    return made, lambda: setattr(holder, "own", other)


def called() -> Any:
    one, other = reach(Factor)
    made = model(lambda self, x: SHARED(x) + self.own(x), own=one)
    return made, lambda: setattr(made, "own", other)


def a_part_that_a_helper_reaches() -> Any:
    one, other = reach(Scale)

    def helper(x: Tensor) -> Tensor:
        return SHARED(x)

    return model(lambda self, x: self.own(x) + helper(x), own=one), lambda: globals().update(SHARED=other)


def a_parameter() -> Any:
    one, other = reach(lambda k: nn.Parameter(torch.full((2,), k)))
    made = model(lambda self, x: x * SHARED * self.own, own=one)
    return made, lambda: setattr(made, "own", other)


def a_tensor() -> Any:
    one, other = reach(lambda k: torch.full((2,), k))
    made = model(lambda self, x: x * self.own * SHARED, own=one)
    return made, lambda: globals().update(SHARED=other)


def a_function_made_anew() -> Any:
    """Of the same code, with another closure."""

    def make(k: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * k

    one, other = reach(make)
    made = model(lambda self, x: SHARED(x) + self.own(x), own=one)
    return made, lambda: setattr(made, "own", other)


def a_function_made_anew_around_an_object() -> Any:
    def make(k: float) -> Callable[[Tensor], Tensor]:
        factor = Factor(k)
        return lambda x: x * factor.k

    one, other = reach(make)
    made = model(lambda self, x: self.own(x) + SHARED(x), own=one)
    return made, lambda: globals().update(SHARED=other)


WAYS: list[Build] = [
    through_a_dictionary,
    through_a_list,
    through_a_tuple,
    through_a_closure,
    through_a_class,
    through_a_property,
    through_a_default,
    through_a_default_of_a_keyword,
    through_an_attribute_of_a_function,
    through_a_partial,
    through_keywords_of_a_partial,
    through_a_weak_reference,
    through_another_object,
    called,
    a_part_that_a_helper_reaches,
    a_parameter,
    a_tensor,
    a_function_made_anew,
    a_function_made_anew_around_an_object,
]


@pytest.mark.parametrize("build", WAYS)
def test_another_way_leads_to_another_object(build: Build) -> None:
    noticed(build)


class Configured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.own = SHARED

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SHARED.k * self.own.k


class Layered(Net):
    """Computes with its last layer in two ways."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SHARED(torch.relu(self.first(x)))


@pytest.mark.support("Models", "a layer that is also reached through a global, where it is replaced", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_that_is_also_a_global(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Layered()
        reach(lambda _: made.last)
        return made, adam(made)

    def edit(training: Training, index: int) -> None:
        if index == 6:
            torch.manual_seed(3)
            globals().update(SHARED=nn.Linear(8, 3).requires_grad_(False))

    compare(form, build, steps=12, edit=edit, replays=7)


@pytest.mark.support("Models", "one object under two names, of which one comes to name another object", "replayed")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["the attribute", "the global"])
def test_a_configuration_under_two_names(form: str, name: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        reach(Factor)
        made = Configured()
        return made, adam(made)

    def edit(training: Training, index: int) -> None:
        if index == 6 and name == "the attribute":
            training.model.own = Factor(0.5)  # type: ignore[assignment]
        if index == 6 and name == "the global":
            globals().update(SHARED=Factor(0.5))

    assert compare(form, build, steps=12, edit=edit, replays=7).status().mode == "replay"
