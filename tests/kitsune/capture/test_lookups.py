"""What a model looks up in vain at the capture, and objects that it compares by identity, become others."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.capture import lookups
from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import Holder, model, noticed
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import FORMS, Net, Training, adam, compare

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


class Slots:
    __slots__ = ("late",)


class Property:
    @property
    def late(self) -> float:
        return self.__dict__.get("_late", 1.0)


class Descriptor:
    def __get__(self, holder: Any, kind: Any = None) -> float:
        return 2.0 if "_late" in holder.__dict__ else 1.0

    def __set__(self, holder: Any, value: object) -> None:
        raise AttributeError("late")


class Described:
    late = Descriptor()


class Fallback:
    def __getattr__(self, name: str) -> float:
        return self.__dict__.get("_late", 1.0)


OWN: dict[str, Callable[[Any], float]] = {
    "get": lambda it: it.__dict__.get("late", 1.0),
    "in": lambda it: 2.0 if "late" in it.__dict__ else 1.0,
    "not in": lambda it: 2.0 if "late" not in it.__dict__ else 1.0,
    "vars get": lambda it: vars(it).get("late", 1.0),
    "vars in": lambda it: 2.0 if "late" in vars(it) else 1.0,
    "number": lambda it: float(len(vars(it))),
    "names": lambda it: 1.0 + len(vars(it).keys()),
    "loop": lambda it: 1.0 + sum(1.0 for _ in vars(it)),
    "items": lambda it: 1.0 + sum(1.0 for _ in vars(it).items()),
    "values": lambda it: 1.0 + len(list(vars(it).values())),
    "list": lambda it: 1.0 + len(list(vars(it))),
    "copy": lambda it: 1.0 + len(vars(it).copy()),
    "new dictionary": lambda it: 1.0 + len(dict(vars(it))),
    "unpacked": lambda it: {"late": 1.0, **vars(it)}["late"],
    "tried": lambda it: tried(lambda: vars(it)["late"]),
}
"""What is read of the `__dict__` of something."""


@pytest.mark.parametrize("kind", [Thing, nn.Tanh], ids=["object", "module"])
@pytest.mark.parametrize("what", OWN)
def test_a_key_of_an_own_dictionary_comes_later(what: str, kind: type) -> None:
    def build() -> Any:
        it = kind()
        return model(lambda self, x: x * OWN[what](it)), lambda: setattr(it, "late", 5.0)

    noticed_or_refused(build)


@pytest.mark.parametrize("what", ["get", "in", "not in", "vars get", "vars in"])
def test_a_key_of_an_own_dictionary_goes(what: str) -> None:
    def build() -> Any:
        it: Any = Thing()
        it.late = 5.0
        return model(lambda self, x: x * OWN[what](it)), lambda: delattr(it, "late")

    noticed_or_refused(build)


@pytest.mark.parametrize("kind", [Property, Described, Fallback])
def test_a_property_that_reads_an_own_dictionary(kind: Callable[[], Any]) -> None:
    def build() -> Any:
        it = kind()
        return model(lambda self, x: x * it.late), lambda: vars(it).update(_late=5.0)

    noticed(build)


def test_a_key_that_the_call_itself_sets_is_no_other() -> None:
    it: Any = Thing()

    def function(x: Tensor) -> Tensor:
        it.latest = 1.0
        return x * (2.0 if "latest" in it.__dict__ else 1.0)

    it.latest = 0.0
    call, runner = guarded(function)
    for _ in range(3):
        assert call(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(runner.graphs) == 3


def plain(kind: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "function": lambda: lambda x: x,
        "Python module": lambda: types.ModuleType("made"),
        "tensor": lambda: torch.ones(2),
        "parameter": lambda: nn.Parameter(torch.ones(2)),
        "slots": Slots,
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["function", "Python module", "tensor", "parameter", "slots"])
@pytest.mark.parametrize(
    "read",
    [
        lambda it: 2.0 if hasattr(it, "late") else 1.0,
        lambda it: getattr(it, "late", 1.0),
        lambda it: tried(lambda: it.late),
    ],
    ids=["hasattr", "default", "tried"],
)
def test_an_attribute_of_something_else_comes_later(kind: str, read: Callable[[Any], float]) -> None:
    def build() -> Any:
        holder = Holder(it=plain(kind))
        return (
            model(lambda self, x: x * read(holder.it)),  # type: ignore[attr-defined]
            lambda: setattr(holder.it, "late", 5.0),  # type: ignore[attr-defined]
        )

    noticed_or_refused(build)


DICTIONARIES: dict[str, Callable[[], Any]] = {
    "dictionary": dict,
    "ordered": collections.OrderedDict,
    "default": lambda: collections.defaultdict(float),
    "counter": collections.Counter,
    "chain": lambda: collections.ChainMap({}),
    "subclass": lambda: type("Kind", (dict,), {})(),
}

KEYS: dict[str, Callable[[Any], float]] = {
    "get": lambda it: it.get("late", 1.0),
    "in": lambda it: 2.0 if "late" in it else 1.0,
    "in names": lambda it: 2.0 if "late" in (names := it.keys()) and names else 1.0,
    "truth": lambda it: 2.0 if it else 1.0,
    "number": lambda it: 1.0 + len(it),
    "loop": lambda it: 1.0 + sum(1.0 for _ in it),
    "greatest": lambda it: 2.0 if max(it, default="") == "late" else 1.0,
    "union": lambda it: 2.0 if "late" in set().union(it) else 1.0,
    "text": lambda it: 2.0 if "late" in str(it) else 1.0,
    "unpacked": lambda it: {"late": 1.0, **it}["late"],
    "copied": lambda it: 1.0 + len(dict(it)),
}


@pytest.mark.parametrize("kind", DICTIONARIES)
@pytest.mark.parametrize("what", KEYS)
def test_a_key_of_a_dictionary_comes_later(what: str, kind: str) -> None:
    def build() -> Any:
        it = DICTIONARIES[kind]()
        return model(lambda self, x: x * KEYS[what](it)), lambda: it.update(late=5)

    noticed_or_refused(build)


def noticed_or_refused(build: Any) -> None:
    """As `noticed`; what Dynamo cannot trace runs as plain PyTorch, and is no matter of guards."""
    function, _ = build()
    call, runner = guarded(lambda x: function(x))
    with suppress(RefusedError):
        call(torch.ones(2))
    if runner.graphs:
        noticed(build)


class Tuned(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.__dict__.get("late", 1.0)


def test_an_item_of_an_own_dictionary_in_python_3_13_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """There Dynamo's guards do not see it change."""
    monkeypatch.setattr(lookups, "_HIDES_OWN_VALUES", True)
    it: Any = Thing()
    it.late = 5.0
    for read in (OWN["get"], OWN["vars get"], OWN["tried"]):
        call, _ = guarded(lambda x, read=read: x * read(it))
        with pytest.raises(RefusedError, match=r"whose changes Python 3\.13\.0 hides"):
            call(torch.ones(2))
    call, runner = guarded(lambda x: x * OWN["in"](it) * it.late)
    call(torch.ones(2))
    assert runner.graphs


@pytest.mark.skipif(lookups._HIDES_OWN_VALUES, reason="what is read there is refused")
@pytest.mark.support("Models", "keys of `__dict__` that were missing, and come later", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_a_key_of_the_dictionary_of_the_model(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Tuned()
        return made, adam(made)

    def edit(training: Training, index: int) -> None:
        if index == 6:
            training.model.late = 0.5  # type: ignore[assignment]

    compare(form, build, steps=12, edit=edit, replays=7)


class Mode(enum.Enum):
    SLOW = 1
    FAST = 2


@pytest.mark.parametrize(("before", "after"), [(2.0, 3.0), (2, 3), (None, 3.0), ("2", "3"), (Mode.SLOW, Mode.FAST)])
def test_constants_that_are_read_of_a_class_itself(before: Any, after: Any) -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Callable[[], object]]:
        kind: Any = type("Settings", (), {"value": before})
        return lambda x: x * 2 if kind.value == before else x, lambda: setattr(kind, "value", after)

    noticed(build)


def test_constants_that_are_defaults_of_a_function() -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Callable[[], object]]:
        def scaled(x: Tensor, by: float = 2.0) -> Tensor:
            return x * by

        return lambda x: scaled(x), lambda: setattr(scaled, "__defaults__", (3.0,))

    noticed(build)


@pytest.mark.parametrize("change", [torch.Tensor.requires_grad_, lambda one: one.resize_(5).fill_(1.0)])
def test_a_tensor_in_a_dictionary_is_another_one_in_place(change: Callable[[Tensor], object]) -> None:
    def build() -> Any:
        made = model(
            lambda self, x: x * self.held["one"].sum() * (2.0 if self.held["one"].requires_grad else 1.0),
            held={"one": torch.ones(2)},
        )
        return made, lambda: change(made.held["one"])

    noticed(build)
