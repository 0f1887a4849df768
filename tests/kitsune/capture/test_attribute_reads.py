"""What is read of functions, classes, enumerations and arrays: the next call does not go by what it was."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch

from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import Holder, model, noticed
from tests.kitsune.capture.test_frontend import guarded


def function() -> Any:
    """A function, made anew."""

    def documented(x: int) -> int:
        """It has a text."""
        return x

    return documented


def kind() -> Any:
    """A class, made anew."""
    return type("Kind", (), {"__doc__": "It has a text.", "method": lambda self: None})


def mode() -> Any:
    """An enumeration, made anew."""
    return enum.Enum("Mode", {"ONE": 1.0, "TWO": 2.0})


def replaced(make: Callable[[], Any], name: str, value: object) -> Any:
    def build() -> Any:
        it = make()
        return model(lambda self, x: x * len(str(getattr(it, name)))), lambda: setattr(it, name, value)

    return build


def written(make: Callable[[], Any], value: str) -> Any:
    """As `replaced`, where the program names the attribute itself."""

    def build() -> Any:
        it = make()
        return model(lambda self, x: x * len(it.__name__)), lambda: setattr(it, "__name__", value)

    return build


def of_a_member(read: Callable[[Any], Any], change: Callable[[Any], object]) -> Any:
    def build() -> Any:
        it = mode()
        it.ONE.factor = 2.0
        return model(lambda self, x: x * read(it)), lambda: change(it)

    return build


def of_a_function_of_torch() -> Any:
    def change() -> None:
        torch.nn.functional.relu.factor = 3.0  # type: ignore[attr-defined]

    torch.nn.functional.relu.factor = 2.0  # type: ignore[attr-defined]
    return model(lambda self, x: x * torch.nn.functional.relu.factor), change  # type: ignore[attr-defined]


def edited_annotations() -> Any:
    it = function()
    return model(lambda self, x: x * len(it.__annotations__)), lambda: it.__annotations__.pop("x")


CHANGES: dict[str, Callable[[], Any]] = {
    "name of a function": replaced(function, "__name__", "other"),
    "name of a function, written": written(function, "other"),
    "module of a function": replaced(function, "__module__", "other"),
    "text of a function": replaced(function, "__doc__", "other"),
    "name of a class": replaced(kind, "__name__", "OtherKind"),
    "name of a class, written": written(kind, "OtherKind"),
    "long name of a class": replaced(kind, "__qualname__", "OtherKind"),
    "annotations": replaced(function, "__annotations__", {"other": int}),
    "what is in the annotations": edited_annotations,
    "value of a member": of_a_member(lambda it: it.ONE.value, lambda it: setattr(it.ONE, "_value_", 5.0)),
    "attribute of a member": of_a_member(lambda it: it.ONE.factor, lambda it: setattr(it.ONE, "factor", 5.0)),
    "attribute of a function of torch": of_a_function_of_torch,
}


SETTINGS: dict[str, tuple[Callable[[], int], Callable[[int], None]]] = {
    "getrecursionlimit": (lambda: sys.getrecursionlimit(), sys.setrecursionlimit),
}
if sys.version_info >= (3, 11):  # before, Dynamo does not know this one, and refuses the call
    SETTINGS["get_int_max_str_digits"] = (lambda: sys.get_int_max_str_digits(), sys.set_int_max_str_digits)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    limits = {name: read() for name, (read, _) in SETTINGS.items()}
    yield
    for name, (_, change) in SETTINGS.items():
        change(limits[name])
    if hasattr(torch.nn.functional.relu, "factor"):
        del torch.nn.functional.relu.factor


@pytest.mark.parametrize("what", CHANGES)
def test_another_attribute_is_noticed(what: str) -> None:
    noticed(CHANGES[what])


def test_it_is_told_what_has_changed() -> None:
    assert "Kind.__name__ was 'Kind', is 'OtherKind'" in noticed(replaced(kind, "__name__", "OtherKind"))


@pytest.mark.parametrize("name", SETTINGS)
def test_another_limit_of_python_is_noticed(name: str) -> None:
    read, change = SETTINGS[name]

    def build() -> Any:
        change(5000)
        return model(lambda self, x: x * read()), lambda: change(5001)

    assert noticed(build).endswith(f"sys.{name}() was 5000, is 5001")


class AnyClass:
    """Says that it is of whatever class it is told."""

    told: type = int

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.told


class Lenient(enum.Enum):
    ONE = 1.0

    @classmethod
    def _missing_(cls, value: object) -> Lenient:
        return cls.ONE


class Ended:
    def __del__(self) -> None:
        """Here it would be counted."""


ARRAY = numpy.ones((3, 2))
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "long name": (lambda it: len(str(it.function.__qualname__)), "__qualname__ of the function documented"),
    "shape": (lambda it: it.array.shape[0], "the shape or the length of an array"),
    "dtype": (lambda it: len(str(it.array.dtype)), "the shape or the length of an array"),
    "class by a property": (lambda it: isinstance(it.any_class, int), "has a __class__ of its own"),
    "unknown member": (lambda it: Lenient(7.0).value, r"has a _missing_\(\) of its own"),
    "end of an object": (lambda it: 1.0 if Ended() else 2.0, r"has a __del__\(\) of its own"),
    "list of attributes": (lambda it: len(dir(sys)), r"dir\(\) is called"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_guarded_is_refused(name: str) -> None:
    read, reason = REFUSED[name]
    it = Holder(function=function(), array=ARRAY, any_class=AnyClass())
    call, _ = guarded(lambda x: x * read(it))
    with pytest.raises(RefusedError, match=reason):
        call(torch.ones(2))


OF_TENSORS: dict[str, Callable[[torch.Tensor], object]] = {
    "hooks": lambda weight: weight._backward_hooks,
    "later hooks": lambda weight: weight._post_accumulate_grad_hooks,  # type: ignore[attr-defined]
    "view": lambda weight: weight._base,
    "kept gradient": lambda weight: weight.retains_grad,
    "number": lambda weight: weight.output_nr,
}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_what_no_guard_of_a_tensor_tells_is_refused(name: str) -> None:
    read, weight = OF_TENSORS[name], torch.ones(2, requires_grad=True)
    call, _ = guarded(lambda x: x * weight * (2.0 if read(weight) else 1.0))
    with pytest.raises(RefusedError, match="of a tensor is read, which may be another one at each call"):
        call(torch.ones(2))


class Layout(enum.Enum):
    WIDE = 1.0


def test_what_a_member_of_an_enumeration_has_changes_in_place() -> None:
    """It is noticed; before torch 2.13 it is not read at all."""
    Layout.WIDE.sizes = [1.0]  # type: ignore[attr-defined]
    call, _ = guarded(lambda x: x * Layout.WIDE.sizes[0])  # type: ignore[attr-defined]
    with suppress(RefusedError):
        assert call(torch.ones(1)).item() == 1.0
    Layout.WIDE.sizes[0] = 2.0  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match=r"may change in place|has changed"):
        call(torch.ones(1))


def test_what_a_capture_reads_of_a_tensor_is_nothing_to_later_ones() -> None:
    """Dynamo has one variable for all that is True, and notes there where it was found."""
    held = {"one": torch.ones(2, requires_grad=True), "other": torch.ones(2)}

    def asking(x: torch.Tensor) -> torch.Tensor:
        factor = 2.0 if held["one"].requires_grad and not held["other"].requires_grad else 1.0
        return x * (factor if held["one"].grad is None else 3.0)

    call, _ = guarded(asking)
    assert call(torch.ones(1)).item() == 2.0

    def assigning(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.settings.update(yes=True, no=False, none=None)
        self.yes, self.no, self.none = True, False, None
        return x * 2

    made: Any = model(assigning, settings={}, yes=None, no=None, none=1)
    call, runner = guarded(lambda x: made(x))
    for _ in range(2):
        made.settings.clear()
        made.yes = made.no = made.none = 1
        call(torch.ones(1))
        assert made.settings == {"yes": True, "no": False, "none": None}
        assert (made.yes, made.no, made.none) == (True, False, None)
    assert len(runner.graphs) == 2
