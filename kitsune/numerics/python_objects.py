"""Finds the Python objects that a run may change, and tells how each kind is read and put back.

A model may keep counters, caches and histories in attributes, containers, closures, classes and globals. All of these
are *holders* of other objects; they are reached from named roots. Objects of torch, Kitsune, the standard library and
installed packages are not looked into, unless they are modules, containers or roots.
"""

from __future__ import annotations

import array
import functools
import random
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Content = tuple[tuple[Any, Any], ...]
"""Keys and values of a holder, in its order. Members of a list have their index as key, those of a set themselves."""

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
_NOT_OPENED = frozenset({"torch", "kitsune", "builtins"})
_OPENED = frozenset({"collections", "argparse", "types"})
"""Modules of the standard library whose objects hold what users put there."""

_PARTS_OF_MODULES = frozenset({"_modules", "_parameters", "_buffers"})

_OF_CLASSES = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__slots__", "__annotations__", "__slotnames__"}
)


@dataclass(frozen=True)
class Holder:
    """An object whose contents may change.

    Attributes:
        name: from the root on, such as `"model.cache"`.
        subject: the object.
        aspect: which of its contents are meant: members, attributes, a global of that name, ...
        read: gives the contents of `subject`.
        write: puts contents back. What stays is there all the time.
    """

    name: str
    subject: Any
    aspect: str
    read: Callable[[Any], Content]
    write: Callable[[Any, Content], None]

    @property
    def key(self) -> tuple[int, str]:
        """The same for all holders of these contents."""
        return id(self.subject), self.aspect

    def member(self, key: object) -> str:
        """The name of a member."""
        if self.aspect in ("attributes", "slots", "class"):
            return f"{self.name}.{key}"
        owner, _, part = self.name.rpartition(".")
        if part in _PARTS_OF_MODULES and isinstance(self.subject, dict):
            return f"{owner}.{key}"
        return f"{self.name}[{key!r}]" if self.aspect == "members" else self.name


def reachable(roots: Iterable[tuple[str, object]]) -> Iterator[tuple[Holder, Content]]:
    """All holders that are reached from named roots, each once, with what they hold now."""
    opened: set[int] = set()
    known: set[tuple[int, str]] = set()
    waiting = [(name, root, True) for name, root in roots]
    for name, subject, is_root in waiting:  # it grows meanwhile
        if id(subject) in opened or type(subject) in _PLAIN:
            continue
        opened.add(id(subject))
        waiting += [(name, one, False) for one in _parts(subject)]
        for holder in holders(name, subject, is_root=is_root):
            if holder.key not in known:
                known.add(holder.key)
                content = holder.read(holder.subject)
                waiting += [(holder.member(key), value, False) for key, value in content]
                yield holder, content


def holders(name: str, subject: object, *, is_root: bool = False) -> Iterator[Holder]:
    """What a single object holds."""
    container = _container(name, subject)
    if container is not None:
        yield container
    if isinstance(subject, types.FunctionType):
        yield from _of_function(name, subject)
    elif is_root or isinstance(subject, torch.nn.Module) or _is_users(type(subject)):
        yield from _of_instance(name, subject)


def _container(name: str, subject: object) -> Holder | None:
    if isinstance(subject, OrderedDict):
        order = tuple(dict.keys(subject))
        return Holder(name, subject, "members", _read_ordered, functools.partial(_write_ordered, order))
    for kind, read, write in _CONTAINERS:
        if isinstance(subject, kind):
            return Holder(name, subject, "members", read, write)
    return None


def is_plain(value: object) -> bool:
    """Whether a value is told by what it is written as."""
    return type(value) in _PLAIN


_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size, torch.layout}
)


def _parts(subject: object) -> tuple[Any, ...]:
    """Objects in one that cannot change itself."""
    if isinstance(subject, (tuple, frozenset)):
        return tuple(subject)
    if isinstance(subject, (staticmethod, classmethod)):
        return (subject.__func__,)
    if isinstance(subject, property):
        return (subject.fget, subject.fset)
    if isinstance(subject, functools.partial):
        return (subject.func, subject.args, subject.keywords)
    if isinstance(subject, types.MethodType):
        return (subject.__func__, subject.__self__)
    if isinstance(subject, types.FunctionType):
        return (subject.__defaults__, subject.__kwdefaults__)
    return ()


def _of_instance(name: str, subject: Any) -> Iterator[Holder]:
    try:
        object.__getattribute__(subject, "__dict__")
    except AttributeError:
        pass
    else:
        yield Holder(name, subject, "attributes", _read_attributes, _write_attributes)
    for kind in type(subject).__mro__:
        if _is_users(kind) and kind.__module__ not in _OPENED:
            if "__slots__" in vars(kind):
                yield Holder(name, subject, "slots", _read_slots, _write_slots)
            yield Holder(kind.__qualname__, kind, "class", _read_class, _write_class)


def _of_function(name: str, function: types.FunctionType) -> Iterator[Holder]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield Holder(variable, cell, "cell", _read_cell, _write_cell)
    if vars(function):
        yield Holder(name, function, "attributes", _read_attributes, _write_attributes)
    if function.__code__.co_filename.startswith(_INSTALLED) or not _is_users_module(function.__module__):
        return
    for key in sorted(set(_names(function.__code__))):
        found = function.__globals__.get(key)
        yield _global(key, function.__globals__, key)
        if isinstance(found, types.ModuleType) and _is_users_module(found.__name__):
            yield from (_global(f"{key}.{inner}", vars(found), inner) for inner in sorted(_names(function.__code__)))


def _global(name: str, namespace: dict[str, Any], key: str) -> Holder:
    def read(names: dict[str, Any]) -> Content:
        return ((key, names[key]),) if key in names else ()

    def write(names: dict[str, Any], content: Content) -> None:
        names.update(content) if content else names.pop(key, None)

    return Holder(name, namespace, f"global {key}", read, write)


def _names(code: types.CodeType) -> set[str]:
    """The globals that code may use, with that of functions defined in it; attributes may have such names, too."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return {*code.co_names, *(name for one in inner for name in _names(one))}


def _is_users(kind: type) -> bool:
    """Whether a class is written in a file that belongs to no installed package."""
    return not issubclass(kind, (torch.Tensor, type, types.ModuleType, BaseException)) and _is_users_module(
        kind.__module__
    )


def _is_users_module(name: str | None) -> bool:
    package = (name or "").partition(".")[0]
    if package in _NOT_OPENED or package in _OPENED:
        return package in _OPENED
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return file is None or not file.startswith(_INSTALLED)


def _read_items(mapping: dict[Any, Any]) -> Content:
    return tuple(dict.items(mapping))


def _write_items(mapping: dict[Any, Any], content: Content) -> None:
    kept = {key for key, _ in content}
    for key in [key for key in dict.keys(mapping) if key not in kept]:
        dict.__delitem__(mapping, key)
    for key, value in content:
        dict.__setitem__(mapping, key, value)
    if [*dict.keys(mapping)] != [key for key, _ in content]:  # the order is another one
        dict.clear(mapping)
        dict.update(mapping, content)


def _read_ordered(mapping: OrderedDict[Any, Any]) -> Content:
    return tuple(OrderedDict.items(mapping))


def _write_ordered(order: tuple[Any, ...], mapping: OrderedDict[Any, Any], content: Content) -> None:
    """Puts back also the `order` of the dictionary beneath, which Dynamo guards and `move_to_end` leaves alone."""
    values = dict(content)
    OrderedDict.clear(mapping)
    for key in order:
        OrderedDict.__setitem__(mapping, key, values[key])
    for key, _ in content:
        OrderedDict.move_to_end(mapping, key)


def _read_sequence(sequence: Iterable[Any]) -> Content:
    return tuple(enumerate(sequence))


def _write_list(sequence: list[Any], content: Content) -> None:
    list.__setitem__(sequence, slice(None), [value for _, value in content])


def _write_deque(sequence: deque[Any], content: Content) -> None:
    deque.clear(sequence)
    deque.extend(sequence, [value for _, value in content])


def _read_set(members: set[Any]) -> Content:
    return tuple((member, member) for member in set.__iter__(members))


def _write_set(members: set[Any], content: Content) -> None:
    kept = {key for key, _ in content}
    set.intersection_update(members, kept)
    set.update(members, kept)


def _read_numbers(numbers: Any) -> Content:
    return (("numbers", bytes(numbers)),)


def _write_bytes(numbers: bytearray, content: Content) -> None:
    numbers[:] = content[0][1]


def _write_array(numbers: array.array[Any], content: Content) -> None:
    del numbers[:]
    numbers.frombytes(content[0][1])


def _read_random(generator: random.Random) -> Content:
    return (("state", generator.getstate()),)


def _write_random(generator: random.Random, content: Content) -> None:
    generator.setstate(content[0][1])


def _read_generator(generator: torch.Generator) -> Content:
    return (("state", generator.get_state().tolist()),)


def _write_generator(generator: torch.Generator, content: Content) -> None:
    generator.set_state(torch.tensor(content[0][1], dtype=torch.uint8))


_CONTAINERS: tuple[tuple[type, Callable[[Any], Content], Callable[[Any, Content], None]], ...] = (
    (dict, _read_items, _write_items),
    (list, _read_sequence, _write_list),
    (deque, _read_sequence, _write_deque),
    (set, _read_set, _write_set),
    (bytearray, _read_numbers, _write_bytes),
    (array.array, _read_numbers, _write_array),
    (random.Random, _read_random, _write_random),
    (torch.Generator, _read_generator, _write_generator),
)


def _read_attributes(subject: object) -> Content:
    return _read_items(object.__getattribute__(subject, "__dict__"))


def _write_attributes(subject: object, content: Content) -> None:
    _write_items(object.__getattribute__(subject, "__dict__"), content)


def _slots(subject: object) -> Iterator[tuple[str, Any]]:
    for kind in type(subject).__mro__:
        yield from ((name, one) for name, one in vars(kind).items() if isinstance(one, types.MemberDescriptorType))


def _read_slots(subject: object) -> Content:
    found = []
    for name, slot in _slots(subject):
        try:
            found.append((name, slot.__get__(subject)))
        except AttributeError:  # it is empty
            continue
    return tuple(found)


def _write_slots(subject: object, content: Content) -> None:
    kept = dict(content)
    for name, slot in _slots(subject):
        if name in kept:
            slot.__set__(subject, kept[name])
        elif any(name == key for key, _ in _read_slots(subject)):
            slot.__delete__(subject)


def _read_class(kind: type) -> Content:
    return tuple((name, value) for name, value in vars(kind).items() if name not in _OF_CLASSES)


def _write_class(kind: type, content: Content) -> None:
    kept, present = dict(content), dict(_read_class(kind))
    for name in present.keys() - kept.keys():
        type.__delattr__(kind, name)
    for name, value in kept.items():
        if name not in present or present[name] is not value:
            type.__setattr__(kind, name, value)


def _read_cell(cell: types.CellType) -> Content:
    try:
        return (("value", cell.cell_contents),)
    except ValueError:  # it is empty
        return ()


def _write_cell(cell: types.CellType, content: Content) -> None:
    if content:
        cell.cell_contents = content[0][1]
    elif _read_cell(cell):
        del cell.cell_contents
