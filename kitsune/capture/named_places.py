"""Names, in words of the user's program, for the places that Dynamo's guards look at, and what is found there.

Dynamo writes a place as Python: `L['module']._modules['bn'].momentum` is `model.bn.momentum`. These texts are private:
one of another form has no name. To look runs no code of the user's: no property, no `__getattr__`, no `__repr__`.
"""

from __future__ import annotations

import ast
import collections
import inspect
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kitsune.capture.shown_values import class_name, function_name, is_a, shown

MISSING = object()
"""Stands for what is not there."""

UNREADABLE = object()
"""Stands for what cannot be read without running code of the user's."""

_PARTS = ("_modules", "_parameters", "_buffers")
_DEFAULTS = ("__defaults__", "__kwdefaults__")
_NAMES_OF_MODEL = ("module", "model")  # of variables of Kitsune's that hold it
_ITEM = ("dict.__getitem__", "list.__getitem__", "___odict_getitem")
_IMPORTED = "__import_"  # begins the names under which Dynamo has modules
_KEPT = "kitsune_kept"  # see `kept_results`
_AS_FOUND = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_OF_NAMED_TUPLE: type = type(vars(collections.namedtuple("Named", ["field"]))["field"])
_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType, _OF_NAMED_TUPLE)  # read a part of an object, in C


@dataclass(frozen=True)
class Place:
    """A place and what is there.

    Attributes:
        path: as the user would write it.
        value: what is found there, `MISSING` or `UNREADABLE`.
        kind: stands before the path.
        owner: stands behind it.
    """

    path: str
    value: object
    kind: str = ""
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{self.path}{self.owner}"


class Scope:
    """What the places are in.

    Args:
        variables: the local ones, by name.
        names: the global ones.
    """

    def __init__(self, variables: Mapping[str, object], names: Mapping[str, object]) -> None:
        self._variables, self._names = variables, names

    def told(self, text: str) -> str:
        """The place that is written as `text`, in words; `text` itself where it has no name here."""
        try:
            return str(self.find(ast.parse(text, mode="eval").body))
        except (LookupError, SyntaxError, ValueError, TypeError):
            return text

    def find(self, node: ast.expr) -> Place:
        """The place that is written as `node`.

        Raises:
            LookupError: it has no name here.
        """
        match node:
            case ast.Attribute(
                value=ast.Subscript(value=ast.Attribute(value=function, attr="__closure__"), slice=number)
            ):
                return self._cell(function, number, node.attr)
            case ast.Attribute(value=base, attr=name):
                return self._attribute(base, name)
            case ast.Subscript(value=ast.Name(id=space), slice=name):
                return self._variable(space, str(_constant(name)))
            case ast.Subscript(value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant("args" | "kwargs"))):
                container = self.find(node.value)
                key = _constant(node.slice)
                return Place(str(key), read_item(container.value, key), "argument ")
            case ast.Subscript(value=ast.Call(func=ast.Name("list"), args=[members]), slice=number):
                return self._member(members, number)
            case ast.Subscript(value=base, slice=index):
                return self._item(base, index)
            case ast.Call(args=[base], func=ast.Name("type")):
                found = self.find(base)
                return replace(found, kind=f"the class of {found.kind}", value=_class_of(found.value))
            case ast.Call(args=[base, ast.Constant(str(name))], func=function) if ast.unparse(function) in _ATTRIBUTE:
                return self._attribute(base, name)
            case ast.Call(args=[base, index], func=function) if ast.unparse(function) in _ITEM:
                return self._item(base, index)
            case ast.Call(args=[], func=reference):
                found = self.find(reference)
                is_weak = type(found.value) is weakref.ref
                return replace(found, value=found.value() if is_weak else UNREADABLE)  # type: ignore[operator]
        raise LookupError(ast.unparse(node))

    def _variable(self, space: str, name: str) -> Place:
        if space == "L":
            return _named_variable(name, self._variables.get(name, MISSING))
        value = self._names.get(name, MISSING)
        if space != "G":
            raise LookupError(space)
        if name.startswith(_KEPT):
            return Place("what a function keeps", value)
        if name.startswith(_IMPORTED) and is_a(value, types.ModuleType):
            return Place(str(vars(value).get("__name__")), value, "the module ")
        return Place(name, value, "the global ", f" of module {self._names.get('__name__')}")

    def _attribute(self, base: ast.expr, name: str) -> Place:
        owner = self.find(base)
        value = read_attribute(owner.value, name)
        if is_a(owner.value, types.ModuleType):
            return Place(name, value, "the global ", f" of module {vars(owner.value).get('__name__')}")
        if is_a(owner.value, type):
            return Place(f"{class_name(owner.value)}.{name}", value)
        if name == "__code__":
            return replace(owner, kind=f"the code of {owner.kind}", value=value)
        return replace(owner, path=f"{owner.path}.{name}", value=value)

    def _cell(self, function: ast.expr, number: ast.expr, field: str) -> Place:
        """The variable of a closure."""
        owner, place = _function(self.find(function).value), _constant(number)
        if not is_a(owner, types.FunctionType) or not isinstance(place, int) or field != "cell_contents":
            raise LookupError(ast.unparse(function))
        name = owner.__code__.co_freevars[place]
        value = read_attribute(read_item(owner.__closure__, place), field)
        if owner.__globals__.get("__name__", "").partition(".")[0] == "kitsune":
            return _named_variable(name, value)
        return Place(name, value, "the variable ", f" of {function_name(owner)}()")

    def _item(self, base: ast.expr, index: ast.expr) -> Place:
        if isinstance(base, ast.Call) and ast.unparse(base.func) == "dict":  # of a class
            base = base.args[0]
        key = self._key(index)
        container = self.find(base)
        value = read_item(container.value, key)
        if not isinstance(base, ast.Attribute) or base.attr not in ("__dict__", *_DEFAULTS, *_PARTS):
            return replace(container, path=f"{container.path}[{shown(key)}]", value=value)
        owner = self.find(base.value)
        if base.attr in _DEFAULTS:
            function = _function(owner.value)
            return Place(_parameter(function, key), value, "the default of ", f" in {function_name(function)}()")
        if is_a(owner.value, type):
            return Place(f"{class_name(owner.value)}.{key}", value)
        return replace(owner, path=f"{owner.path}.{key}", value=value)

    def _member(self, node: ast.expr, index: ast.expr) -> Place:
        """A key of a dictionary or a member of a set, by its number."""
        kind: type[Any] = set
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.keys":
            kind, node = dict, node.args[0]
        container, number = self.find(node), _constant(index)
        members = list(kind.__iter__(container.value)) if is_a(container.value, kind) else []
        found = members[number] if isinstance(number, int) and 0 <= number < len(members) else MISSING
        word = "key" if kind is dict else "member"
        return replace(container, kind=f"{word} {number} of {container.kind}", value=found)

    def _key(self, node: ast.expr) -> object:
        try:
            return _constant(node)
        except LookupError:
            return self.find(node).value


_ATTRIBUTE = ("getattr", "object.__getattribute__")


def read_attribute(owner: object, name: str) -> object:
    """What an attribute is; `MISSING` or `UNREADABLE` where it is not there, or not known without running code."""
    if owner is MISSING or owner is UNREADABLE or is_a(owner, torch.Tensor):
        return UNREADABLE
    if is_a(owner, types.ModuleType):
        return vars(owner).get(name, MISSING)
    if is_a(owner, type):
        return _read_of_class(owner, name)
    if is_a(owner, types.MethodType) and name not in ("__func__", "__self__"):
        return read_attribute(owner.__func__, name)
    try:
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        return _read_part(owner, name)
    if is_a(found, *_FIELDS):
        try:
            return found.__get__(owner)  # type: ignore[attr-defined]
        except (AttributeError, ValueError):  # an empty slot, an empty cell
            return MISSING
    if is_a(found, types.FunctionType) and read_item(read_attribute(owner, "__dict__"), name) is not found:
        return types.MethodType(found, owner)
    return found if _is_as_found(found) else UNREADABLE


def _is_as_found(value: object) -> bool:
    """Whether an attribute is what the dictionary of an object or of a class has for it."""
    return is_a(value, *_AS_FOUND) or not any("__get__" in _names_of(kind) for kind in type(value).__mro__)


def _read_of_class(kind: type, name: str) -> object:
    if name == "__dict__":
        return dict(_names_of(kind))
    order: tuple[type, ...] = type.__dict__["__mro__"].__get__(kind)
    if name == "__mro__":
        return order
    found = next((names[name] for names in map(_names_of, order) if name in names), MISSING)
    return found if _is_as_found(found) else UNREADABLE


def _names_of(kind: type) -> Mapping[str, object]:
    names: Mapping[str, object] = type.__dict__["__dict__"].__get__(kind)
    return names


def _read_part(owner: object, name: str) -> object:
    for part in _PARTS if is_a(owner, torch.nn.Module) else ():
        found = read_item(read_attribute(owner, part), name)
        if found is not MISSING and found is not UNREADABLE:
            return found
    return MISSING


def read_item(container: object, key: object) -> object:
    """As `read_attribute`, of an item."""
    if is_a(container, dict):
        try:
            return dict.get(container, key, MISSING)  # without `__missing__`
        except TypeError:  # a key that is not hashable
            return UNREADABLE
    kinds: tuple[type[Any], ...] = (list, tuple, collections.deque)
    kind = next((kind for kind in kinds if is_a(container, kind)), None)
    if kind is not None and isinstance(key, int):
        size = kind.__len__(container)
        return kind.__getitem__(container, key) if -size <= key < size else MISSING
    return UNREADABLE


def _named_variable(name: str, value: object) -> Place:
    """A variable of the function that is captured, or of one of Kitsune's around it."""
    if is_a(value, torch.nn.Module):
        return Place("model" if name in _NAMES_OF_MODEL else name, value)
    return Place(name, value, "the variable ")


def _parameter(function: object, key: object) -> str:
    """The name of that which has the default `key` of a function."""
    if not is_a(function, types.FunctionType) or not isinstance(key, int):
        return str(key)
    code = function.__code__
    first = code.co_argcount - len(function.__defaults__ or ())
    return code.co_varnames[first + key]


def _function(value: object) -> object:
    """What a method is of; all else itself."""
    return value.__func__ if is_a(value, types.MethodType) else value


def _class_of(value: object) -> object:
    return value if value is MISSING or value is UNREADABLE else type(value)


def _constant(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise LookupError(ast.unparse(node)) from error
