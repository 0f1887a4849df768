"""What must stay for a call to run the functions that it ran when it was captured."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from kitsune.capture.called import called_facts
from kitsune.native.facts import Facts, PythonFacts


class Base:
    def method(self) -> int:
        return 1

    def inherited(self) -> int:
        return 1

    @property
    def value(self) -> int:
        return 1

    @classmethod
    def of_class(cls) -> int:
        return 1

    @staticmethod
    def static() -> int:
        return 1


class Derived(Base):
    def method(self) -> int:
        return super().method() + 1


def facts(function: Any, owner: type | None) -> Facts:
    found = list(called_facts(function, owner))
    assert found
    return PythonFacts(found)


def another(*_: Any) -> int:
    return 2


@pytest.mark.parametrize(
    ("function", "owner", "place", "name", "instead"),
    [
        (Derived.method, Derived, Derived, "method", another),
        (Base.method, Derived, Base, "method", another),
        (Base.inherited, Derived, Base, "inherited", another),
        (Base.inherited, Derived, Derived, "inherited", another),
        (Base.value.fget, Base, Base, "value", property(another)),
        (Base.of_class.__func__, Base, Base, "of_class", classmethod(another)),
        (Base.static, None, Base, "static", staticmethod(another)),
    ],
    ids=["own", "by super", "inherited", "overridden later", "property", "class method", "static method"],
)
def test_another_method_is_noticed(
    function: Callable[..., Any], owner: type | None, place: type, name: str, instead: object
) -> None:
    present = facts(function, owner)
    assert present.hold()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, instead, raising=False)
        assert not present.hold()


def test_a_method_by_another_name() -> None:
    class Renamed:
        forward = Base.inherited

    present = facts(Base.inherited, Renamed)
    assert present.hold()
    Renamed.forward = another  # type: ignore[assignment]
    assert not present.hold()


def test_what_is_no_method_depends_on_nothing_here() -> None:
    assert list(called_facts(another, int)) == []
    assert list(called_facts(another, None)) == []


def test_the_environment_is_noticed_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_TEST", "1")
    present = facts(os._Environ.__getitem__, os._Environ)
    assert present.hold()
    monkeypatch.setenv("KITSUNE_TEST", "2")
    assert not present.hold()
