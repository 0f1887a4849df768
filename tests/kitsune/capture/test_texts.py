"""Texts of objects: those that Dynamo words otherwise, or does not guard, are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import Holder, model
from tests.kitsune.capture.test_frontend import guarded

ASK: dict[str, Callable[[Any], str]] = {
    "f-string": lambda one: f"{one}",
    "f-string of repr": lambda one: f"{one!r}",
    "str": str,
    "repr": repr,
    "format": lambda one: format(one),
    "method format": lambda one: "{}".format(one),  # noqa: UP032 - it is another way for Dynamo
    "percent": lambda one: "%s" % one,  # noqa: UP031 - as above
    "in a list": lambda one: str([one]),
    "in a dictionary": lambda one: str({"a": one}),
}


def refused(forward: Callable[[Any, Tensor], Tensor], reason: str | None, **attributes: object) -> None:
    made = model(forward, **attributes)
    call, runner = guarded(lambda x: made(x))
    with pytest.raises(RefusedError, match=reason):
        call(torch.ones(2))
    assert not runner.graphs


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("value", [numpy.array([1.0, 2.0]), numpy.float64(1.0)], ids=["array", "number"])
def test_an_array(ask: str, value: object) -> None:
    refused(lambda self, x: x * len(ASK[ask](self.value)), None, value=value)


def look_up(_: object) -> None:
    {}["k"]  # type: ignore[var-annotated]


RAISING: dict[str, Callable[[Any], object]] = {
    "KeyError": look_up,
    "TypeError": len,
    "AttributeError": lambda one: one.nothing,
}


@pytest.mark.parametrize("ask", ["f-string", "f-string of repr", "str", "repr", "format"])
@pytest.mark.parametrize("kind", RAISING)
def test_an_exception_that_python_raises(kind: str, ask: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        try:
            RAISING[kind](self.one)
        except (KeyError, TypeError, AttributeError) as error:
            self.said = ASK[ask](error)
        return x * len(self.said)

    refused(forward, "an exception is turned into text", one=3)


def test_the_arguments_of_an_exception() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        try:
            return x * len(self.one)
        except TypeError as error:
            self.said = error.args
        return x

    refused(forward, "the arguments of an exception are read", one=3)


class Worded(Holder):
    def __str__(self) -> str:
        return str(self.word)  # type: ignore[attr-defined]

    def __format__(self, how: str) -> str:
        return f"{self.word}{how}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("ask", ["f-string", "format", "method format"])
def test_an_object_with_words_of_its_own(ask: str) -> None:
    refused(lambda self, x: x * (2.0 if ASK[ask](self.one) == "new" else 1.0), None, one=Worded(word="old"))
