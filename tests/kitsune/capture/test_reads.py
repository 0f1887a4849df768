"""What a function is found to read before it calls a graph."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kitsune.capture.reads import Argument, Reads, reads_of
from kitsune.native.facts import PythonFacts

SOURCE: Any = SimpleNamespace(part="global")


def graph(*inputs: object) -> tuple[object]:
    return (inputs,)


def function_with(function: Callable[..., Any]) -> types.FunctionType:
    assert isinstance(function, types.FunctionType)
    return function


def reads(function: Callable[..., Any], num_args: int = 2, names: tuple[str, ...] = ()) -> Reads | None:
    return reads_of(function_with(function), [None] * num_args, names)


def test_sources_in_the_order_of_the_graph() -> None:
    holder = SimpleNamespace(parts={"one": "first"}, row=["second"])

    def function(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        return graph(args[1], holder.parts["one"], kwargs["by"], holder.row[0], SOURCE.part, args[0])[0]

    found = reads(function, 2, ("at", "by"))
    assert found is not None
    assert found.sources == (Argument(1), "first", Argument(3), "second", "global", Argument(0))
    assert PythonFacts(found.facts).hold()


def test_every_read_is_a_fact() -> None:
    inner = SimpleNamespace(part=object())
    holder = SimpleNamespace(parts={"one": inner})

    def function(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        return graph(holder.parts["one"].part, holder.parts["one"].part)[0]

    def broken() -> bool:
        return not facts.hold()

    found = reads(function)
    assert found is not None
    facts = PythonFacts(found.facts)
    assert len({(fact.kind, id(fact.subject), fact.key) for fact in found.facts}) == len(found.facts)
    part, parts = inner.part, holder.parts
    inner.part = object()
    assert broken()
    inner.part = part
    holder.parts = {"one": SimpleNamespace(part=part)}
    assert broken()
    holder.parts = parts
    assert not broken()
    holder = SimpleNamespace(parts=parts)
    assert broken()


class Counter:
    count = 0


COUNTER = Counter()


def twice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return graph(graph(args[0])[0])[0]


def never(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return args[0]


def other_result(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    graph(args[0])
    return args[0]


def second_result(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return graph(args[0])[1]


def writes_attribute(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    COUNTER.count = 1
    return graph(args[0])[0]


def writes_global(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    global SOURCE
    SOURCE = SOURCE
    return graph(args[0])[0]


def computes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return graph(COUNTER.count + 1)[0]


def branches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return graph(args[0] if COUNTER.count else args[1])[0]


def looks_into_an_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return graph(args[0]["x"])[0]


def unpacks(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    one, _ = SOURCE
    return graph(one)[0]


def missing(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return graph(SOURCE.nothing)[0]


def built_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return len(args)


@pytest.mark.parametrize(
    "function",
    [
        *(twice, never, other_result, second_result, writes_attribute, writes_global, computes, branches),
        *(looks_into_an_argument, unpacks, missing, built_in),
    ],
)
def test_functions_that_do_more(function: Callable[..., Any]) -> None:
    assert reads(function) is None
    assert COUNTER.count == 0
    assert SOURCE.part == "global"
