"""Where the tensors come from that Dynamo's code passes to its graph, found by running that code on stand-ins."""

from __future__ import annotations

import dis
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kitsune.native.facts import Fact, attribute, item

# Instructions of Python 3.10 to 3.13 that change nothing outside of the function, and do not branch.
_READING = {
    *("RESUME", "NOP", "CACHE", "PRECALL", "PUSH_NULL", "KW_NAMES", "COPY_FREE_VARS", "EXTENDED_ARG", "RETURN_VALUE"),
    *("LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_FAST", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_CHECK"),
    *("STORE_FAST", "STORE_FAST_STORE_FAST", "STORE_FAST_LOAD_FAST", "DELETE_FAST", "BINARY_SUBSCR"),
    *("BUILD_LIST", "BUILD_TUPLE", "LIST_EXTEND", "UNPACK_SEQUENCE"),
    *("COPY", "SWAP", "POP_TOP", "DUP_TOP", "DUP_TOP_TWO", "ROT_TWO", "ROT_THREE", "ROT_FOUR", "ROT_N"),
}


@dataclass(frozen=True)
class Argument:
    """An argument of a call as a whole, by its place: positional arguments come first, then those by name."""

    place: int


@dataclass(frozen=True)
class Reads:
    """What a function reads before it calls a graph, as long as it gets as many arguments, of the same names.

    Attributes:
        facts: hold as long as it would read the same objects again.
        sources: for each argument of the graph, the object that it is, or the `Argument` of the function.
    """

    facts: tuple[Fact, ...]
    sources: tuple[object, ...]


def reads_of(function: types.FunctionType, args: Sequence[object], names: Sequence[str]) -> Reads | None:
    """What calling `function(args, kwargs)` would read, `names` being those of `kwargs`; it is not called.

    None if it does more than to read, to call a graph with what it has read, and to return the graph's only result.
    """
    code = function.__code__
    instructions = list(dis.get_instructions(code))
    calls = [each.opname for each in instructions if each.opname.startswith("CALL") and "INTRINSIC" not in each.opname]
    if len(calls) != 1 or not all(each.opname in _READING or each.opname in calls for each in instructions):
        return None
    run = _Run()
    try:
        cells = [types.CellType(_Place(run, cell).cell_contents) for cell in function.__closure__ or ()]
        namespace = _Place(run, function.__globals__)
        used = {each.argval for each in instructions if each.opname == "LOAD_GLOBAL"}
        stand_ins = {"__builtins__": {}, **{name: namespace[name] for name in sorted(used)}}
        twin = types.FunctionType(code, stand_ins, closure=tuple(cells))
        positional = tuple(Argument(place) for place in range(len(args)))
        by_name = {name: Argument(len(args) + place) for place, name in enumerate(names)}
        result = twin(positional, by_name)
    except Exception:  # noqa: BLE001 - a stand-in was used in a way that is not foreseen, or a property raised
        return None
    inputs, run.inputs = run.inputs, None  # they hold `run`
    if inputs is None or result is not run.result:
        return None
    return Reads(tuple(run.facts.values()), tuple(map(_source, inputs)))


class _Run:
    """What a run on stand-ins has read; `inputs` is what it has called the graph with."""

    def __init__(self) -> None:
        self.facts: dict[tuple[int, int, object], Fact] = {}
        self.inputs: tuple[object, ...] | None = None
        self.result = object()

    def read(self, fact: Fact) -> _Place:
        self.facts[fact.kind, id(fact.subject), fact.key] = fact
        return _Place(self, fact.expected)


class _Place:
    """Stands for an object that is not an argument; reading from it gives stand-ins for what is found there."""

    __slots__ = ("_run", "_value")
    __iter__ = None  # or Python would call `__getitem__`

    def __init__(self, run: _Run, value: object) -> None:
        self._run, self._value = run, value

    def __getattribute__(self, name: str) -> Any:
        return _run(self).read(attribute(_value(self), name))

    def __getitem__(self, key: object) -> Any:
        return _run(self).read(item(_value(self), key))

    def __call__(self, *inputs: object) -> tuple[object]:
        run = _run(self)
        run.inputs = inputs
        return (run.result,)


def _run(place: _Place) -> _Run:
    run: _Run = object.__getattribute__(place, "_run")
    return run


def _value(place: _Place) -> Any:
    return object.__getattribute__(place, "_value")


def _source(stand_in: object) -> object:
    return _value(stand_in) if type(stand_in) is _Place else stand_in
