"""What a call changes is another object than what it reads elsewhere, until both are one."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import Holder
from tests.kitsune.capture.changing import model as made_of
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import FORMS, Net, Training, adam, compare

SHARED: Any = None


class Slots:
    __slots__ = ("k",)

    def __init__(self, k: float = 1.0) -> None:
        self.k = k


class Own(list[float]):
    """A class of the model's own."""


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0


def set_attribute(subject: Any) -> None:
    subject.k = 2.0


def set_key(subject: Any) -> None:
    subject["k"] = 2.0


def append(subject: Any) -> None:
    subject.append(2.0)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], float]]] = {
    "object": (lambda: Holder(k=1.0), set_attribute, lambda subject: float(subject.k)),
    "object without a dictionary": (Slots, set_attribute, lambda subject: float(subject.k)),
    "part": (Part, set_attribute, lambda subject: float(subject.k)),
    "dictionary": (lambda: {"k": 1.0}, set_key, lambda subject: float(subject["k"])),
    "ordered dictionary": (lambda: collections.OrderedDict(k=1.0), set_key, lambda subject: float(subject["k"])),
    "list": (lambda: [1.0], append, lambda subject: float(len(subject))),
    "subclass of a list": (lambda: Own([1.0]), append, lambda subject: float(len(subject))),
    "queue": (lambda: collections.deque([1.0]), append, lambda subject: float(len(subject))),
}


def noticed(made: nn.Module, to_one: Callable[[], object], renew: Callable[[], object] = lambda: None) -> str:
    """Demands that the call is captured again once two objects are one; the reason for that."""
    x = torch.full((2,), 3.0)
    model = made  # as the reason calls it
    call, runner = guarded(lambda x: model(x))
    for _ in range(3):
        renew()
        expected = made(x)
        renew()
        assert torch.equal(call(x), expected)
    assert len(runner.graphs) == 3
    renew()
    to_one()
    with pytest.raises(RefusedError, match="has changed") as caught:
        call(x)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_two_attributes_lead_to_one_object(kind: str) -> None:
    make, write, read = KINDS[kind]

    def forward(self: Any, x: Tensor) -> Tensor:
        write(self.written)
        return x * read(self.read)

    made = made_of(forward, written=make(), read=make())
    reason = noticed(made, lambda: setattr(made, "read", made.written), lambda: setattr(made, "written", make()))
    assert "model.written and model.read are one object now" in reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_global_leads_to_what_is_written(kind: str) -> None:
    make, write, read = KINDS[kind]
    globals()["SHARED"] = make()

    def forward(self: Any, x: Tensor) -> Tensor:
        write(self.written)
        return x * read(SHARED)

    made = made_of(forward, written=make())
    noticed(made, lambda: globals().update(SHARED=made.written), lambda: setattr(made, "written", make()))


def bump(holder: Any) -> None:
    holder.k = holder.k + 1.0


def bumping(holder: Any) -> Callable[[], None]:
    def bump_it() -> None:
        holder.k = holder.k + 1.0

    return bump_it


MAKERS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "a closure": bumping,
    "a partial": lambda holder: functools.partial(bump, holder),
    "a method": lambda holder: types.MethodType(bump, holder),
    "a default": lambda holder: types.FunctionType(bump.__code__, globals(), argdefs=(holder,)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_function_writes_becomes_what_is_read(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.bump()
        return x * self.own.k

    made: Any = made_of(forward, own=Holder(k=1.0), bump=MAKERS[name](Holder(k=1.0)))

    def renew() -> None:
        made.own = Holder(k=1.0)
        made.bump = MAKERS[name](Holder(k=1.0))

    noticed(made, lambda: setattr(made, "bump", MAKERS[name](made.own)), renew)


def test_what_is_only_read_may_be_one_object() -> None:
    made: Any = made_of(lambda self, x: x * len(self.own) * len(self.other), own=[1], other=[2])
    call, runner = guarded(lambda x: made(x))
    x = torch.ones(2)
    for _ in range(2):
        assert torch.equal(call(x), x)
    made.other = made.own
    assert torch.equal(call(x), x)
    assert len(runner.graphs) == 3


# An object, and the dictionary of its attributes


def set_attribute_of_own(self: Any, x: Tensor) -> Tensor:
    self.own.k = 2.0
    return x * self.names["k"]


def set_key_of_names(self: Any, x: Tensor) -> Tensor:
    self.names["k"] = 2.0
    return x * self.own.k


@pytest.mark.parametrize("forward", [set_attribute_of_own, set_key_of_names])
def test_an_object_and_its_dictionary(forward: Callable[..., Tensor]) -> None:
    made: Any = made_of(forward, own=Holder(k=1.0), names={"k": 1.0})

    def renew() -> None:
        made.own, made.names = Holder(k=1.0), {"k": 1.0}

    noticed(made, lambda: setattr(made, "names", vars(made.own)), renew)


@pytest.mark.parametrize("forward", [set_attribute_of_own, set_key_of_names])
def test_an_object_and_its_dictionary_from_the_beginning(forward: Callable[..., Tensor]) -> None:
    holder = Holder(k=1.0)
    made = made_of(forward, own=holder, names=vars(holder))
    call, _ = guarded(lambda x: made(x))
    with pytest.raises(RefusedError, match=r"made\.\S+ and made\.\S+ are one dictionary, which the call changes"):
        call(torch.ones(2))


STEP = 1.0
NAMES = globals()


def test_a_global_and_the_dictionary_of_globals() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        global STEP
        STEP = STEP + 1.0
        return x * NAMES["STEP"]

    made = made_of(forward)
    call, _ = guarded(lambda x: made(x))
    with pytest.raises(RefusedError, match="are one dictionary, which the call changes"):
        call(torch.ones(2))


class Noting(Net):
    """Counts its calls in one of two lists, and goes by the length of the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []
        self.read: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.written.append(1)
        return super().forward(x) * (1.0 + len(self.read))


@pytest.mark.support("Models", "two containers of a model, one of them written to, that become one", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_a_model_whose_lists_become_one(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Noting()
        return made, adam(made)

    def edit(training: Training, index: int) -> None:
        made: Any = training.model
        made.written = []
        made.read = made.written if index >= 4 else []

    compare(form, build, steps=10, edit=edit, replays=4)
