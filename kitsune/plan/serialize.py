"""A plan as JSON text and back. What is read must have exactly the fields and types that a plan has.

The fields are those of the dataclasses, by their names; tuples are arrays, absent values null. Whoever changes a
field changes `VERSION`. Floats are written with the digits that give the same float again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

FORMAT = "kitsune plan"
VERSION = 2

T = TypeVar("T")


def encode(plan: Any) -> str:
    """JSON text for a dataclass of numbers, texts, None, tuples and dataclasses.

    Raises:
        ValueError: a number is not finite.
    """
    try:
        return json.dumps(
            {"format": FORMAT, "version": VERSION, "plan": dataclasses.asdict(plan)},
            allow_nan=False,
            separators=(",", ":"),
        )
    except ValueError as error:
        raise ValueError(f"the plan cannot be written as JSON: {error}") from error


def decode(document: str, cls: type[T]) -> T:
    """The dataclass `cls` that `encode` was given.

    Raises:
        ValueError: the text is no JSON, of another version, or its fields are not those of `cls`.
    """
    try:
        whole = json.loads(document, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a plan: not valid JSON ({error})") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ValueError(f"not a plan: expected an object with the format {FORMAT!r}")
    version = whole.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(f"the plan is of version {version!r}; this Kitsune reads version {VERSION}")
    decoded: T = _decode(cls, whole.get("plan"), "plan")
    return decoded


def _decode(kind: Any, value: object, where: str) -> Any:
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin is tuple:
        return _tuple(get_args(kind), value, where)
    if origin in (UnionType, Union):
        (present,) = (choice for choice in get_args(kind) if choice is not type(None))
        return None if value is None else _decode(present, value, where)
    if origin is Literal:
        if value in get_args(kind) and isinstance(value, str):
            return value
        _refuse(where, " or ".join(map(repr, get_args(kind))), value)
    if kind is float:
        return _float(value, where)
    assert kind in (int, str, bool), f"a plan holds no {kind}"
    if type(value) is not kind:
        _refuse(where, f"a value of type {kind.__name__}", value)
    return value


def _dataclass(cls: Any, value: object, where: str) -> Any:
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(value, dict):
        _refuse(where, f"an object that describes a {cls.__name__}", value)
    if set(value) != set(names):
        _refuse(where, f"the fields {', '.join(names)}", ", ".join(value))
    hints = _hints(cls)
    return cls(**{name: _decode(hints[name], value[name], f"{where}.{name}") for name in names})


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _tuple(kinds: Sequence[Any], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        _refuse(where, "an array", value)
    if kinds[-1] is Ellipsis:
        kinds = [kinds[0]] * len(value)
    if len(value) != len(kinds):
        _refuse(where, f"an array of {len(kinds)}", value)
    entries = enumerate(zip(kinds, value, strict=True))
    return tuple(_decode(kind, entry, f"{where}[{index}]") for index, (kind, entry) in entries)


def _float(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(where, "a number", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _refuse(where, "a finite number", value)
    return number


def _refuse(where: str, expected: str, value: object) -> NoReturn:
    shown = repr(value)
    raise ValueError(f"not a plan: {where}: expected {expected}, got {shown if len(shown) <= 60 else shown[:59] + '…'}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")
