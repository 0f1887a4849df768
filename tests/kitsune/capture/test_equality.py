"""Numbers that a model reads, and that become others which Python calls equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.capture.equality import has_lookalikes, is_written_as
from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import Holder, model, noticed
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import Net, Training, adam, batch, compare
from tests.kitsune.versions import skip_before_2_13

SETTINGS: tuple[Any, ...] = (1, 0.0)


class Reading(Net):
    """A model whose Python code tells integers from floats, and one zero from the other."""

    def __init__(self, read: Callable[[Reading], tuple[Any, ...]]) -> None:
        super().__init__()
        self.read = read
        self.set((1, 0.0))

    def set(self, numbers: tuple[Any, ...]) -> None:
        global SETTINGS
        self.numbers = SETTINGS = numbers
        self.by_name = {"both": numbers}
        self.nested = (numbers, "name")
        self.whole, self.zero = numbers

    def forward(self, x: Tensor) -> Tensor:
        whole, zero = self.read(self)
        factor = 0.5 if isinstance(whole, float) else 1.0
        return super().forward(x) * factor * math.copysign(1.0, zero)


READS: dict[str, Callable[[Reading], tuple[Any, ...]]] = {
    "a tuple": lambda model: model.numbers,
    "in a dict": lambda model: model.by_name["both"],
    "in a tuple": lambda model: model.nested[0],
    "a global": lambda model: SETTINGS,
    "alone": lambda model: (model.whole, model.zero),
}


@pytest.mark.parametrize("numbers", [(1.0, 0.0), (1, -0.0), (True, 0.0)], ids=str)
@pytest.mark.parametrize("place", READS)
def test_equal_numbers_that_are_others_are_noticed(place: str, numbers: tuple[Any, ...]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Reading(READS[place])
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        if index == 5:
            assert isinstance(training.model, Reading)
            training.model.set(numbers)

    compare("drop_in", build, steps=9, edit=edit, replays=6)


class Naming(Net):
    """A model whose Python code depends on the keys of a dictionary, and on their order."""

    def __init__(self, last: Callable[[dict[Any, int]], Any]) -> None:
        super().__init__()
        self.last_of = last
        self.names: dict[Any, int] = {"a": 1, "b": 2}

    def forward(self, x: Tensor) -> Tensor:
        name = self.last_of(self.names)
        return super().forward(x) * {"a": 1.0, "b": 0.5}.get(name, 2.0 if isinstance(name, bool) else 0.25)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param({"b": 2, "a": 1}, id="in another order"),
        pytest.param({"c": 1, "d": 2}, id="other keys"),
        pytest.param({"a": 1, True: 2}, id="of another type"),
    ],
)
@pytest.mark.parametrize(
    "last",
    [
        pytest.param(lambda names: list(names)[-1], id="list"),
        pytest.param(lambda names: [*names][-1], id="unpacked"),
        pytest.param(lambda names: tuple(names)[-1], id="tuple"),
        pytest.param(lambda names: next(reversed(names)), id="iterator"),
        pytest.param(lambda names: list({**names})[-1], id="copied"),
        pytest.param(lambda names: sorted(names, key=lambda name: 0)[-1], id="sorted"),
    ],
)
def test_other_keys_and_another_order_of_them_are_noticed(
    last: Callable[[dict[Any, int]], Any], names: dict[Any, int]
) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Naming(last)
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        if index == 5:
            assert isinstance(training.model, Naming)
            training.model.names = names

    compare("drop_in", build, steps=9, edit=edit, replays=6)


def test_the_same_numbers_made_anew_are_no_others() -> None:
    model = Reading(READS["a tuple"])
    training = Training("drop_in", model, adam(model))
    for index in range(8):
        model.set((int("1"), float("0")))
        training.step(*batch(index)[0])
    assert training.status().replays == 6
    assert not training.status().refusals


@pytest.mark.parametrize(
    ("constant", "other"),
    [
        ((1, 2), (1.0, 2)),
        ((1, (2, 1)), (1, (2, True))),
        (0.0, -0.0),
        (0j, -0.0j),
        (frozenset({1}), frozenset({1.0})),
        (slice(0, 1), slice(0, True)),
        ({1}, {True}),
        ({1: 0}.keys(), {True: 0}.keys()),
    ],
    ids=str,
)
def test_which_constants_are_told_from_equal_ones(constant: Any, other: Any) -> None:
    assert constant == other
    assert has_lookalikes(constant)
    assert is_written_as(constant)(constant)
    assert not is_written_as(constant)(other)


def test_a_set_that_has_changed_is_another() -> None:
    constant = {1}
    is_same = is_written_as(constant)
    constant.clear()
    constant.add(True)
    assert not is_same(constant)


@pytest.mark.parametrize("constant", [1, 0.5, True, "name", ("both", None), None, torch.float32], ids=str)
def test_others_need_no_more_than_their_type(constant: Any) -> None:
    assert not has_lookalikes(constant)


class Real(float):
    """A number of the model's own."""


def sign(number: float) -> float:
    return 2.0 + math.copysign(1.0, number)


LOOKALIKES: dict[str, tuple[Any, Any, Callable[[Any], float]]] = {
    "subclass of float": (Real(0.0), Real(-0.0), sign),
    "key that is a zero": ({0.0: 1}, {-0.0: 1}, lambda it: sign(next(iter(it)))),
    "key that is a tuple": ({(1, 0.0): 1}, {(1, -0.0): 1}, lambda it: sign(next(iter(it))[1])),
    "order, written": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, lambda it: 2.0 if str(it).startswith("{'a'") else 1.0),
    "order, greatest": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, lambda it: 2.0 if max(it, key=len) == "a" else 1.0),
}


@pytest.mark.parametrize("what", LOOKALIKES)
def test_what_looks_alike_is_noticed(what: str) -> None:
    skip_before_2_13(what, {"subclass of float"})
    before, after, read = LOOKALIKES[what]

    def build() -> Any:
        holder = Holder(it=before)
        return model(lambda self, x: x * read(holder.it)), lambda: setattr(holder, "it", after)  # type: ignore[attr-defined]

    noticed(build)


IN_TUPLES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], object]]] = {
    "list": (lambda: ([1.0], "a"), lambda held: held[0][0], lambda held: held[0].__setitem__(0, 2.0)),
    "length of a list": (lambda: ([1.0], "a"), lambda held: len(held[0]), lambda held: held[0].append(2.0)),
    "set": (lambda: ({1.0}, "a"), lambda held: len(held[0]), lambda held: held[0].add(2.0)),
    "list in a tuple in a tuple": (
        lambda: (("a", [1.0]), "a"),
        lambda held: held[0][1][0],
        lambda held: held[0][1].__setitem__(0, 2.0),
    ),
}


@pytest.mark.parametrize("what", IN_TUPLES)
@pytest.mark.parametrize(
    "place", ["attribute", "attribute of an object", "value of a dictionary", "attribute of a class"]
)
def test_what_is_in_a_tuple_changes_in_place(what: str, place: str) -> None:
    make, read, change = IN_TUPLES[what]

    def build() -> Any:
        held = make()
        if place == "attribute":
            made = model(lambda self, x: x * read(self.held), held=held)
        elif place == "attribute of an object":
            made = model(lambda self, x: x * read(self.own.held), own=Holder(held=held))
        elif place == "value of a dictionary":
            made = model(lambda self, x: x * read(self.own["held"]), own={"held": held})
        else:
            made = model(lambda self, x: x * read(self.held))
            type(made).held = held  # type: ignore[assignment]
        return made, lambda: change(held)

    noticed(build)


def test_what_is_in_a_tuple_is_written_in_the_same_call() -> None:
    held = ([1.0], "a")

    def written(self: Any, x: Tensor) -> Tensor:
        self.inside.append(1.0)
        return x * len(self.held[0])

    made: Any = model(written, held=held, inside=held[0])
    call, _ = guarded(lambda x: made(x))
    assert call(torch.ones(1)).item() == 2.0
    held[0].pop()
    assert call(torch.ones(1)).item() == 2.0


@dataclass
class Settings:
    k: float


def test_the_text_of_an_object() -> None:
    def build() -> Any:
        settings = Settings(1.0)
        made = model(lambda self, x: x * (2.0 if "1.0" in str(settings) else 1.0))
        return made, lambda: setattr(settings, "k", 5.0)

    function, _ = build()
    call, runner = guarded(lambda x: function(x))
    with suppress(RefusedError):
        call(torch.ones(2))
    if runner.graphs:
        noticed(build)
