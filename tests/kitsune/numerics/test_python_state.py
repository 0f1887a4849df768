"""What runs do to Python objects is put back as it was, and told apart."""

from __future__ import annotations

import array
import copy
import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kitsune.numerics.python_state import PythonState, changes

STEPS = 0
SEEN: dict[str, list[int]] = {"first": [1]}


@dataclass
class Settings:
    factor: float = 1.0
    names: list[str] = field(default_factory=lambda: ["a"])


class Slotted:
    __slots__ = ("count", "empty")

    def __init__(self) -> None:
        self.count = 1


class Model(nn.Module):
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.settings = Settings()
        self.slotted = Slotted()
        self.recent = OrderedDict([("a", 1), ("b", 2), ("c", 3)])
        self.by_default: dict[str, list[int]] = defaultdict(list, {"x": [1]})
        self.counts = Counter("aab")
        self.queue = deque([1, 2, 3], maxlen=3)
        self.members = {1, 2}
        self.history = [[1], [2]]
        self.numbers, self.letters = array.array("d", [1.0, 2.0]), bytearray(b"abc")
        self.namespace, self.user = SimpleNamespace(step=1), UserDict({"k": 1})
        self.dice, self.generator = random.Random(3), torch.Generator().manual_seed(3)
        self.pair = (Settings(), 1)
        self.last: torch.Tensor | None = None
        self.closure = counting()
        self.bound = partial(note, SEEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global STEPS
        STEPS += 1
        return self.layer(x) * len(SEEN)


def counting() -> Callable[[], int]:
    count = 0

    def add() -> int:
        nonlocal count
        count += 1
        return count

    return add


def note(seen: dict[str, list[int]], value: int) -> None:
    seen["first"].append(value)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "an attribute": lambda m: setattr(m, "new", 1),
    "an attribute that goes": lambda m: delattr(m, "bound"),
    "an object's attribute": lambda m: setattr(m.settings, "factor", 2.0),
    "a list in an object": lambda m: m.settings.names.append("b"),
    "an object in a tuple": lambda m: setattr(m.pair[0], "factor", 2.0),
    "a slot": lambda m: setattr(m.slotted, "count", 2),
    "an empty slot": lambda m: setattr(m.slotted, "empty", 2),
    "a slot that goes": lambda m: delattr(m.slotted, "count"),
    "the order of keys": lambda m: m.recent.move_to_end("a"),
    "the order of keys, to the front": lambda m: m.recent.move_to_end("c", last=False),
    "the oldest key": lambda m: m.recent.popitem(last=False),
    "a key by default": lambda m: m.by_default["y"],
    "a count": lambda m: m.counts.update("a"),
    "a full queue": lambda m: m.queue.append(4),
    "a queue turned round": lambda m: m.queue.rotate(),
    "a set": lambda m: m.members.add(3),
    "a list in a list": lambda m: m.history[0].append(3),
    "a list turned round": lambda m: m.history.reverse(),
    "an array": lambda m: m.numbers.append(3.0),
    "bytes": lambda m: m.letters.extend(b"d"),
    "a namespace": lambda m: setattr(m.namespace, "step", 2),
    "a user's dictionary": lambda m: m.user.update(k=2),
    "a generator of Python's": lambda m: m.dice.random(),
    "a generator of torch's": lambda m: torch.rand(1, generator=m.generator),
    "a variable of a closure": lambda m: m.closure(),
    "a global container": lambda m: m.bound(2),
    "a global": lambda m: m(torch.ones(1, 2)),
    "a class variable": lambda m: setattr(Model, "total", 3),
    "a new class variable": lambda m: setattr(Model, "other", 3),
    "a parameter": lambda m: setattr(m.layer, "weight", nn.Parameter(torch.ones(2, 2))),
    "a hook": lambda m: m.layer.register_forward_hook(lambda *_: None),
    "training": lambda m: m.layer.eval(),
    "a tensor": lambda m: setattr(m, "last", torch.ones(2)),
    "minus zero": lambda m: setattr(m.settings, "factor", 1),
}


def told(model: Model) -> str:
    """Everything that may change, as text."""
    state = {**vars(model), "_modules": None, "_parameters": None, "closure": None, "bound": None}
    inner = [model.layer.weight, dict(model.layer._forward_hooks), model.layer.training]
    objects = [vars(model.settings), vars(model.pair[0]), vars(model.namespace), dict(model.user), model.letters]
    slots = [getattr(model.slotted, name, None) for name in ("count", "empty")]
    generators = [model.dice.getstate(), model.generator.get_state().tolist()]
    assert model.closure.__closure__ is not None
    code = [model.closure.__closure__[0].cell_contents, STEPS, SEEN, Model.total, hasattr(Model, "other")]
    kept = {name: value for name, value in state.items() if name not in ("dice", "generator", "settings", "slotted")}
    return repr([sorted(vars(model)), kept, inner, objects, slots, generators, code])


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_run_has_changed_is_put_back_and_told(name: str) -> None:
    model = Model()
    before, parts = told(model), {key: id(value) for key, value in vars(model).items()}
    state = PythonState([("model", model)])
    kept = state.save()
    untouched = state.save(beside=kept)
    assert changes(kept, untouched, state.save(beside=kept)) == changes(kept, untouched, untouched)
    CHANGES[name](model)
    assert told(model) != before
    changed = state.save(beside=kept)
    state.load(kept)
    assert told(model) == before
    assert {key: id(value) for key, value in vars(model).items()} == parts
    found = changes(kept, changed, untouched)
    assert found.names or found.numbers
    assert changes(kept, changed, changed).names == ()


@pytest.mark.parametrize("change", ["the order of keys", "the oldest key", "a key that was taken out"])
def test_ordered_dictionaries_have_both_of_their_orders_back(change: str) -> None:
    """The dictionary beneath keeps the order in which keys were put there; guards of Dynamo look at that."""
    model = Model()
    model.recent.move_to_end("a")
    both = [*OrderedDict.keys(model.recent)], [*dict.keys(model.recent)]
    assert both[0] != both[1]
    state = PythonState([("model", model)])
    kept = state.save()
    if change == "a key that was taken out":
        model.recent["b"] = model.recent.pop("b")
    else:
        CHANGES[change](model)
        CHANGES[change](model)
    state.load(kept)
    assert ([*OrderedDict.keys(model.recent)], [*dict.keys(model.recent)]) == both


def test_names_tell_the_way() -> None:
    model = Model()
    state = PythonState([("model", model)])
    kept = state.save()
    untouched = state.save(beside=kept)
    model.settings.factor, model.history[1][0], Model.total = 3.0, 5, 1
    note(SEEN, 3)
    changed = state.save(beside=kept)
    state.load(kept)
    names = changes(kept, changed, untouched).names
    assert set(names) == {"model.settings.factor", "model.history[1][0]", "Model.total", "SEEN['first']"}


def test_new_objects_are_compared_by_what_they_hold() -> None:
    """Each run makes its own: they are alike if what is in them is."""

    def run(model: Model, factor: float) -> None:
        model.settings = Settings(1.0, ["a"])
        model.history = [[1], [int(factor)]]
        model.pair = (Settings(factor), 1)
        model.last = torch.full((2,), factor)

    model = Model()
    state = PythonState([("model", model)])
    kept = state.save()
    found = []
    for factor in (2.0, 2.0, 3.0):
        run(model, factor)
        found.append(state.save(beside=kept))
        state.load(kept)
    same, other = changes(kept, found[0], found[1]), changes(kept, found[0], found[2])
    assert same.names == ()
    assert [torch.equal(*pair) for pair in same.numbers.values()] == [True]
    assert set(other.names) == {"model.history[1][0]", "model.pair[0].factor"}
    assert [torch.equal(*other.numbers[name]) for name in ("model.last",)] == [False]


def test_tensors_that_were_there_are_no_new_ones() -> None:
    model, kept_tensor = Model(), torch.ones(2)
    model.last = kept_tensor
    state = PythonState([("model", model)])
    kept = state.save()
    untouched = state.save(beside=kept)
    model.last = torch.ones(2)
    changed = state.save(beside=kept)
    state.load(kept)
    assert model.last is kept_tensor
    assert changes(kept, changed, untouched).names == ("model.last",)


def test_installed_packages_are_not_looked_into() -> None:
    class Holder:
        def __init__(self) -> None:
            self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    holder = Holder()
    state = PythonState([("holder", holder)])
    kept = state.save()
    holder.optimizer.param_groups[0]["lr"] = 0.5
    state.load(kept)
    assert holder.optimizer.param_groups[0]["lr"] == 0.5
    root = PythonState([("optimizer", holder.optimizer)])
    kept = root.save()
    holder.optimizer.param_groups[0]["lr"] = 0.9
    root.load(kept)
    assert holder.optimizer.param_groups[0]["lr"] == 0.5


def test_objects_that_hold_each_other_end() -> None:
    one: list[Any] = []
    one.append({"itself": one, "copied": copy.copy(one)})
    kept = PythonState([("one", one)]).save()
    assert changes(kept, kept, kept).names == ()
