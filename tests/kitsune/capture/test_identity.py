"""Objects that a model tells from one another, and that become one, or two."""

from __future__ import annotations

import copy
import functools
import operator
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import Holder, model, noticed
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import FORMS, Net, Training, adam, compare


def function() -> Callable[[Any], Any]:
    """Another one each time, of the same code."""
    return lambda x: x


def text() -> str:
    """Another one each time, of the same letters."""
    return "".join(["a", "name"])


MAKES: dict[str, Callable[[], Any]] = {
    "object": object,
    "object of a class": Holder,
    "lock": threading.Lock,
    "function": function,
    "partial": lambda: functools.partial(max, 1),
    "cached function": lambda: functools.lru_cache(function()),
    "class": lambda: type("Kind", (), {}),
    "Python module": lambda: types.ModuleType("made"),
    "module": nn.Tanh,
    "method": lambda: nn.Tanh().forward,
    "tensor": lambda: torch.ones(2),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "text": text,
    "number": lambda: int("123456789"),
    "float": lambda: float("2.5"),
    "tuple": lambda: tuple(iter([1, 2.5])),
    "frozen set": lambda: frozenset([1, "a"]),
    "list": list,
    "dictionary": dict,
    "set": set,
    "slice": lambda: slice(1, 2),
    "size": lambda: torch.Size([1, 2]),
    "range": lambda: range(3),
}

REFUSED = {"lock"}
"""Objects of which Dynamo makes no variable, in some versions."""


def compared(make: Callable[[], Any], is_one: bool, ask: Callable[[Any], bool]) -> Callable[[], Any]:
    def build() -> Any:
        holder = Holder(one=make(), another=make())
        holder.__dict__["other"] = holder.__dict__["one" if is_one else "another"]
        instead = holder.__dict__["another" if is_one else "one"]
        made = model(lambda self, x: x * (2.0 if ask(holder) else 1.0))
        return made, lambda: holder.__dict__.update(other=instead)

    return build


@pytest.mark.parametrize("is_one", [True, False], ids=["become two", "become one"])
@pytest.mark.parametrize("kind", MAKES)
def test_objects_are_told_apart(kind: str, is_one: bool) -> None:
    try:
        noticed(compared(MAKES[kind], is_one, lambda holder: holder.one is holder.other))
    except RefusedError:
        assert kind in REFUSED


@pytest.mark.parametrize("is_one", [True, False], ids=["become two", "become one"])
@pytest.mark.parametrize("kind", ["object of a class", "function", "partial", "module", "method"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda holder: holder.one is not holder.other,
        lambda holder: holder.one == holder.other,
        lambda holder: holder.one != holder.other,
        lambda holder: holder.one in [holder.other],
        lambda holder: holder.one in (1, holder.other),
        lambda holder: any(one is holder.one for one in [holder.other]),
    ],
    ids=["is not", "==", "!=", "in a list", "in a tuple", "any"],
)
def test_other_ways_to_tell_objects_apart(kind: str, is_one: bool, ask: Callable[[Any], bool]) -> None:
    noticed(compared(MAKES[kind], is_one, ask))


KEYED: dict[str, Callable[[Any, Any], float]] = {
    "in a dictionary": lambda key, it: 2.0 if key in {it: 1} else 1.0,
    "value": lambda key, it: {it: 2.0}.get(key, 1.0),
    "in a set": lambda key, it: 2.0 if key in {it} else 1.0,
    "in a frozen set": lambda key, it: 2.0 if key in frozenset([it]) else 1.0,
}


@pytest.mark.parametrize("is_held", [True, False], ids=["leaves", "comes"])
@pytest.mark.parametrize("kind", ["object of a class", "function", "partial", "module", "class"])
@pytest.mark.parametrize("way", KEYED)
def test_a_key_is_another_object(way: str, kind: str, is_held: bool) -> None:
    def build() -> Any:
        one, another = MAKES[kind](), MAKES[kind]()
        held = {one: 2.0}
        holder = Holder(key=one if is_held else another)
        read = KEYED[way]
        made = model(lambda self, x: x * (read(holder.key, one) + held.get(holder.key, 1.0)))  # type: ignore[attr-defined]
        return made, lambda: setattr(holder, "key", another if is_held else one)

    noticed(build)


@pytest.mark.parametrize("kind", ["function", "partial"])
@pytest.mark.parametrize(
    "read",
    [lambda it, key: 3.0 + it.count(key), lambda it, key: 3.0 + it.index(key) if key in it else 1.0],
    ids=["count", "index"],
)
def test_a_place_in_a_list(kind: str, read: Callable[[list[Any], Any], float]) -> None:
    def build() -> Any:
        one, another = MAKES[kind](), MAKES[kind]()
        holder = Holder(key=one, all=[1, one])
        made = model(lambda self, x: x * read(holder.all, holder.key))  # type: ignore[attr-defined]
        return made, lambda: setattr(holder, "key", another)

    noticed(build)


def test_a_method_that_is_a_key_is_refused() -> None:
    holder = Holder(run=nn.Tanh().forward)
    call, _ = guarded(lambda x: x * {holder.run: 2.0}[holder.run])  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match=r"a method of an object is a key|hash"):
        call(torch.ones(2))


def test_objects_made_anew_stay_two() -> None:
    """That they are not one is guarded, not which ones they are."""
    holder = Holder(one=Holder(), other=Holder())
    call, runner = guarded(lambda x: x * (2.0 if holder.one is holder.other else 1.0))  # type: ignore[attr-defined]
    for _ in range(3):
        assert call(torch.ones(2)).tolist() == [1.0, 1.0]
        holder.one, holder.other = Holder(), Holder()  # type: ignore[attr-defined]
    assert len(runner.graphs) == 3


def test_arguments_that_are_compared_with_what_is_kept_may_be_others() -> None:
    holder = Holder(last=torch.ones(2))
    call, runner = guarded(lambda x: x * (2.0 if x is holder.last else 1.0))  # type: ignore[attr-defined]
    for value in range(4):
        assert call(torch.full((2,), float(value))).tolist() == [value, value]
    assert len(runner.graphs) == 4


class Sharing(Net):
    """Counts twice what its two parts have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = function(), function()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self.one is self.other else 1.0)


def test_a_class_in_a_closure() -> None:
    def build() -> Any:
        kind, other = type("Kind", (), {}), type("Other", (), {})
        subject = kind()

        def change() -> None:
            nonlocal kind
            kind = other

        return model(lambda self, x: x * (2.0 if isinstance(subject, kind) else 1.0)), change

    noticed(build)


@pytest.mark.support("Models", "functions that are compared by identity, and become one", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_functions_become_one(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Sharing()
        return made, adam(made)

    def edit(training: Training, index: int) -> None:
        if index == 6:
            training.model.other = training.model.one

    compare(form, build, steps=12, edit=edit, replays=7)


class Copying(Net):
    """Copies a set, which is another object at each call."""

    kept = frozenset[int]()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(copy.deepcopy(self.kept))


@pytest.mark.parametrize("form", FORMS)
def test_what_a_guard_is_about_may_be_gone_before_the_first_replay(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Copying()
        return made, adam(made)

    def edit(training: Training, _: int) -> None:
        training.model.kept = {1}

    compare(form, build, steps=8, edit=edit, replays=0)


@pytest.mark.parametrize("look_up", [dict.get, operator.contains, operator.getitem])
@pytest.mark.parametrize("key", [numpy.int64(1), numpy.float64(1), numpy.bool_(True)], ids=["int", "float", "bool"])
def test_a_number_of_numpy_is_no_key(key: Any, look_up: Callable[..., Any]) -> None:
    made = model(lambda self, x: x * (2.0 if look_up({1: 1.5}, self.key) else 1.0), key=key)
    call, runner = guarded(lambda x: made(x))
    with pytest.raises(RefusedError):
        call(torch.ones(2))
    assert not runner.graphs


@pytest.mark.parametrize("look_up", [dict.get, operator.contains, operator.getitem])
@pytest.mark.parametrize("key", [[1, 2], {1, 2}, {1: 2}, bytearray(b"12")], ids=["list", "set", "dict", "bytes"])
def test_what_has_no_hash_is_no_key(key: Any, look_up: Callable[..., Any]) -> None:
    made = model(lambda self, x: x * (2.0 if look_up({(1, 2): 1.5}, self.key) else 1.0), key=key)
    call, _ = guarded(lambda x: made(x))
    with pytest.raises((RefusedError, TypeError)):
        call(torch.ones(2))
