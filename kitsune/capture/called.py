"""What decides which functions a captured call runs, beside what Dynamo guards.

Dynamo takes it that functions keep their code, that classes stay as they are defined, that no global comes to hide a
builtin, that modules stay those in `sys.modules`, that no class joins an abstract one (`ABC.register`), and that the
environment of the process stays as it is. Where it meets these is private.
"""

from __future__ import annotations

import abc
import enum
import functools
import operator
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, get_args
from unittest import mock

from torch._dynamo.source import is_from_skip_guard_source
from torch._dynamo.symbolic_convert import (
    InliningInstructionTranslator,
    InstructionTranslatorBase,
    _import_module,
)
from torch._dynamo.variables import (
    BuiltinVariable,
    NumpyVariable,
    PolyfilledFunctionVariable,
    UserDefinedClassVariable,
    UserFunctionVariable,
    builtin,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import NumpyNdarrayVariable

from kitsune.capture.refusing import refuse
from kitsune.native.facts import Fact, absence, attribute, contents, definition, item, result

IMMUTABLE = 1 << 8  # `Py_TPFLAGS_IMMUTABLETYPE`: nobody can give such a class an attribute

NUMPY = "the type, the shape or the length of an array or a number of NumPy's is asked, of which Dynamo guards nothing"

READS: Any = getattr(builtin, "GetAttrBuiltinVariable", BuiltinVariable)
"""What an attribute is read by, where the program writes `it.name` as where it calls `getattr`."""

ASSIGNMENTS: Any = getattr(builtin, "SetAttrBuiltinVariable", BuiltinVariable)
"""The same for assignments."""

IS_BEFORE_2_13 = READS is BuiltinVariable

SETTINGS = (sys.getrecursionlimit, *([sys.get_int_max_str_digits] if hasattr(sys, "get_int_max_str_digits") else ()))
"""Functions that Dynamo runs once, while it captures."""

_ASKED_OF_MEMBERS = ("__bool__", "__format__", "__str__", "__repr__", "__eq__", "__hash__", "__len__", "__add__")

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_ARITHMETIC = (
    *(f"__{prefix}{name}__" for name in _OPERATORS for prefix in ("", "r")),
    *(f"__{name}__" for name in ("neg", "pos", "abs", "eq", "lt", "le", "gt", "ge")),
)

IN_PLACE = frozenset(getattr(operator, f"i{name}") for name in (*_OPERATORS, "lshift", "rshift"))
"""What Dynamo calls while it captures, where it is given constants."""

_OF_DEFINITIONS = frozenset(
    {"__delattr__", "__doc__", "__firstlineno__", "__init__", "__module__", "__new__", "__prepare__", "__qualname__"}
    | {"__setattr__", "__static_attributes__"}
)
"""What of a metaclass runs only where a class is defined, or where its attributes are assigned, which is refused."""

_NOT_THE_MODELS = sys.stdlib_module_names | {"pybind11_builtins", "torch"}


class Called:
    """What a call has met while it was captured."""

    def __init__(self) -> None:
        self._functions: dict[types.FunctionType, None] = {}
        self._unguarded: dict[types.FunctionType, None] = {}
        self._classes: dict[type, None] = {}
        self._builtins: dict[tuple[int, str], dict[str, Any]] = {}
        self._modules: dict[str, None] = {}
        self._settings: dict[Callable[[], int], None] = {}
        self._attributes: dict[tuple[int, str], object] = {}
        self._mappings: dict[int, dict[Any, Any]] = {}
        self._answers: dict[tuple[object, ...], Callable[[], object]] = {}
        self._facts: list[Fact] = []
        self._asks_abstract_classes = False
        self._warns = False

    def note_function(self, function: types.FunctionType) -> None:
        """It was run."""
        self._functions[function] = None

    def note_unguarded(self, function: types.FunctionType) -> None:
        """It was run, and Dynamo guards neither its defaults nor what its closure holds."""
        self._unguarded[function] = None

    def note_class(self, kind: type) -> None:
        """An object of it was met, or the class itself."""
        self._classes |= dict.fromkeys(kind.__mro__)
        meta: type = type(kind)
        self._classes |= dict.fromkeys(meta.__mro__)

    def note_builtin(self, namespace: dict[str, Any], name: str) -> None:
        """It was read by a function whose globals do not have the name."""
        self._builtins[id(namespace), name] = namespace

    def note_module(self, name: str) -> None:
        """It was imported."""
        self._modules[name] = None

    def note_warnings(self) -> None:
        """A warning was left out, as such warnings are shown once."""
        self._warns = True

    def note_setting(self, ask: Callable[[], int]) -> None:
        """It is one of `SETTINGS`, and was asked."""
        self._settings[ask] = None

    def note_attribute(self, subject: object, name: str) -> None:
        """It was read, and is no guard's matter."""
        if hasattr(subject, name):
            self._attributes[id(subject), name] = subject

    def note_contents(self, mapping: dict[Any, Any]) -> None:
        """It was read."""
        self._mappings[id(mapping)] = mapping

    def note_answer(self, ask: functools.partial[Any]) -> None:
        """It was called, and decides by what it gives."""
        self._answers[ask.func, tuple(map(id, ask.args)), tuple(ask.keywords)] = ask

    def note_facts(self, facts: Iterable[Fact]) -> None:
        """They must stay."""
        self._facts += facts

    def note_question(self, kinds: object) -> None:
        """Whether something is of a class of these was asked, by `isinstance` or `issubclass`."""
        if isinstance(kinds, tuple):
            for kind in kinds:
                self.note_question(kind)
        elif isinstance(kinds, types.UnionType):
            self.note_question(get_args(kinds))
        elif getattr(kinds, "_is_protocol", False):
            refuse("whether an object has what a Protocol names is asked")
        elif not isinstance(kinds, type) or isinstance(kinds, abc.ABCMeta):
            self._asks_abstract_classes = True

    def facts(self) -> Iterator[Fact]:
        """What must stay for a call to run the same functions again."""
        for function in self._functions:
            yield attribute(function, "__code__")
        for function in self._unguarded:
            yield attribute(function, "__defaults__")
            yield attribute(function, "__kwdefaults__")
            if function.__kwdefaults__ is not None:
                yield contents(function.__kwdefaults__)
            for cell in _assigned(function):
                yield attribute(cell, "cell_contents")
        for kind in self._classes:
            if not kind.__flags__ & IMMUTABLE:
                yield definition(kind)
        for (_, name), namespace in self._builtins.items():
            yield absence(namespace, name)
        for name in self._modules:
            if name in sys.modules:
                yield item(sys.modules, name)
        yield from map(result, self._settings)
        for (_, name), subject in self._attributes.items():
            yield attribute(subject, name)
        yield from map(contents, self._mappings.values())
        yield from self._facts
        if self._asks_abstract_classes:
            yield result(abc.get_cache_token)
        if os._Environ in self._classes:
            yield result(environment)
        if self._warns:
            yield result(filters_of_warnings)

    def answers(self) -> Iterator[Fact]:
        """What must be given to it, beside. To ask may change what is kept, so all else is to be looked at before."""
        return map(result, self._answers.values())


def environment() -> tuple[tuple[Any, Any], ...]:
    """All of the process's, to be compared by value: captures set some of it anew, to what it is."""
    return tuple(os.environ._data.items())  # type: ignore[attr-defined]  # nothing public shows it in microseconds


def filters_of_warnings() -> tuple[object, ...]:
    """Those that are set, to be compared by value: `warnings.catch_warnings` sets the same ones anew."""
    return tuple(warnings.filters)


@contextmanager
def noting() -> Iterator[Called]:
    """Within, what Dynamo meets is noted down."""
    called = Called()
    patches = (
        mock.patch.object(VariableBuilder, "_wrap", _noting_classes(called)),
        mock.patch.object(InliningInstructionTranslator, "inline_call", _noting_functions(called)),
        mock.patch.object(InstructionTranslatorBase, "load_builtin", _noting_builtins(called)),
        mock.patch.object(InstructionTranslatorBase, "import_source", _noting_modules(called)),
        mock.patch.object(
            InliningInstructionTranslator, "get_globals_source_and_value", _refusing_namespaces_of_others()
        ),
        mock.patch.object(BuiltinVariable, "call_function", _noting_questions(called)),
        mock.patch.object(UserDefinedClassVariable, "call_function", _refusing_what_is_made()),
        mock.patch.object(PolyfilledFunctionVariable, "call_function", _noting_settings(called)),
        mock.patch.object(NumpyVariable, "as_python_constant", _refusing_constants()),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield called


def _noting_classes(called: Called) -> Callable[..., Any]:
    wrap: Callable[..., Any] = VariableBuilder._wrap

    def noting_classes(builder: Any, value: Any) -> Any:
        if value is warnings.warn:
            called.note_warnings()
        if isinstance(value, slice) and any(map(_is_numpy, (value.start, value.stop, value.step))):
            refuse(NUMPY)
        refuse_own_rules(value)
        called.note_class(value if isinstance(value, type) else type(value))
        return wrap(builder, value)

    return noting_classes


def refuse_own_rules(value: object) -> None:
    """Of classes, enumerations and numbers, whose own methods Dynamo runs once while it captures, or leaves out."""
    kind = type(value)
    if any("__class__" in vars(one) and _is_own(one) for one in kind.__mro__):
        refuse(f"the class {kind.__name__} has a __class__ of its own")
    if isinstance(value, type):
        if any(_is_own(meta) and vars(meta).keys() - _OF_DEFINITIONS for meta in _metaclasses(value)):
            refuse(f"the class {value.__name__} has a metaclass of its own")
        if own_method(value, "__class_getitem__"):
            refuse(f"the class {value.__name__} has a __class_getitem__() of its own")
    elif isinstance(value, enum.Enum):
        for name in _ASKED_OF_MEMBERS:
            if own_method(kind, name):
                refuse(f"the enumeration {kind.__name__} has a {name}() of its own")
        if isinstance(value.value, (list, dict, set)):
            refuse(f"a member of the enumeration {kind.__name__} stands for a container")
    elif isinstance(value, (int, float)):
        for name in _ARITHMETIC:
            if own_method(kind, name):
                refuse(f"the number of class {kind.__name__} has a {name}() of its own")
        if value != value:
            refuse("a NaN is read, which containers know by its identity")


def own_method(kind: type, name: str) -> bool:
    """Whether a class has a method that is written in Python, outside of Python's library and torch."""
    method = getattr(kind, name, None)
    function = getattr(method, "__func__", method)
    return isinstance(function, types.FunctionType) and _is_own(function)


def _metaclasses(kind: type) -> tuple[type, ...]:
    meta: type = type(kind)
    return meta.__mro__


def _is_own(subject: Any) -> bool:
    """Whether a class or a function is neither of Python's library nor torch's."""
    return (subject.__module__ or "").partition(".")[0] not in _NOT_THE_MODELS


def _noting_functions(called: Called) -> Callable[..., Any]:
    inline: Callable[..., Any] = InliningInstructionTranslator.inline_call

    def inline_call(parent: Any, function: Any, args: Sequence[Any], kwargs: Any, **options: Any) -> Any:
        with suppress(NotImplementedError):  # what the call itself makes, and what has no class
            called.note_function(function.get_function())
            if isinstance(function, UserFunctionVariable) and function.get_source() is None:
                _note_what_it_holds(called, function.get_function())
            owner = _owner(getattr(function, "obj", None) or (args[0] if args else None))
            if owner is not None:
                called.note_class(owner)
        return inline(parent, function, args, kwargs, **options)

    return inline_call


def _note_what_it_holds(called: Called, function: types.FunctionType) -> None:
    """Of a function that Dynamo has found by itself, such as the `__init__()` of a class that is called."""
    if not _is_own(function):
        return
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [cell.cell_contents for cell in _assigned(function)]
    if any(map(_may_change, held)):
        refuse(f"{function.__qualname__}() has a container in its defaults or in its closure")
    called.note_unguarded(function)


def _assigned(function: types.FunctionType) -> Iterator[types.CellType]:
    """The cells of its closure that hold something."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            cell.cell_contents  # noqa: B018 - raises where there is nothing
            yield cell


def _may_change(value: object) -> bool:
    return isinstance(value, (list, dict, set)) or (
        isinstance(value, (tuple, frozenset)) and any(map(_may_change, value))
    )


def _owner(subject: Any) -> type | None:
    """The class of what a function is called on, or that itself if it is a class; it is not looked at closer."""
    if subject is None:
        return None
    if isinstance(subject, LazyVariableTracker) and not subject.is_realized():
        kind: type = subject.peek_type()
        return subject.peek_value() if issubclass(kind, type) else kind
    kind = subject.python_type()
    return subject.as_python_constant() if issubclass(kind, type) else kind


def _noting_builtins(called: Called) -> Callable[..., Any]:
    load: Callable[..., Any] = InstructionTranslatorBase.load_builtin

    def load_builtin(frame: Any, instruction: Any) -> None:
        called.note_builtin(frame.f_globals, instruction.argval)
        load(frame, instruction)

    return load_builtin


def _noting_modules(called: Called) -> Callable[..., Any]:
    import_source: Callable[..., Any] = InstructionTranslatorBase.import_source

    def noting_modules(frame: Any, name: str) -> Any:
        if name in sys.modules:
            _forget_exchanged(name, frame.output.global_scope)
        called.note_module(name)
        return import_source(frame, name)

    return noting_modules


def _forget_exchanged(name: str, namespace: dict[str, Any]) -> None:
    """Dynamo goes on with the module that it met first. What was captured with that is not replayed any more."""
    module, alias = sys.modules[name], f"__import_{name.replace('.', '_dot_')}"
    if _import_module(name) is not module:
        _import_module.cache_clear()
    if namespace.get(alias, module) is not module:
        del namespace[alias]


def _refusing_namespaces_of_others() -> Callable[..., Any]:
    """What Dynamo calls for a global of a function, but that it is refused where it would look into another module."""
    look_up: Callable[..., Any] = InliningInstructionTranslator.get_globals_source_and_value

    def get_globals_source_and_value(frame: Any, name: str) -> Any:
        found = look_up(frame, name)
        is_guarded = isinstance(found[0], types.ModuleType) and not is_from_skip_guard_source(found[2])
        if is_guarded and vars(found[0]) is not frame.f_globals:
            module = frame.f_globals["__name__"]
            refuse(f"a function is called of a module {module!r} that is not the one in sys.modules")
        return found

    return get_globals_source_and_value


def _refusing_what_is_made() -> Callable[..., Any]:
    """What Dynamo calls for a class that is called."""
    make: Callable[..., Any] = UserDefinedClassVariable.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        kind = variable.value
        if issubclass(kind, enum.Enum) and own_method(kind, "_missing_"):
            refuse(f"the enumeration {kind.__name__} has a _missing_() of its own, and is called")
        if own_method(kind, "__del__"):
            refuse(f"an object is made of the class {kind.__name__}, which has a __del__() of its own")
        return make(variable, tx, args, kwargs)

    return call_function


def _noting_settings(called: Called) -> Callable[..., Any]:
    """What Dynamo calls for a function that it has written itself, of which some it runs once while it captures."""
    call: Callable[..., Any] = PolyfilledFunctionVariable.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if variable.fn in SETTINGS:
            called.note_setting(variable.fn)
        return call(variable, tx, args, kwargs)

    return call_function


def _is_of_numpy(variable: Any) -> bool:
    if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
        return _is_numpy(variable.peek_value())
    return is_array(realized(variable))


def is_array(variable: Any) -> bool:
    """Whether a variable that Dynamo has looked at stands for an array or a number of NumPy's."""
    if isinstance(variable, NumpyVariable):  # a function, else
        return _is_numpy(variable.value) and hasattr(variable.value, "__array_interface__")
    return isinstance(variable, NumpyNdarrayVariable)


def _refusing_constants() -> Callable[..., Any]:
    """What Dynamo calls for something of NumPy's as it is while it captures, which is guarded for functions alone."""
    take: Callable[..., Any] = NumpyVariable.as_python_constant

    def as_python_constant(variable: Any) -> Any:
        if is_array(variable):
            raise NotImplementedError
        return take(variable)

    return as_python_constant


def realized(variable: Any) -> Any:
    """A variable that Dynamo has looked at."""
    return variable.realize() if isinstance(variable, LazyVariableTracker) else variable


def _is_numpy(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy"


def _noting_questions(called: Called) -> Callable[..., Any]:
    call: Callable[..., Any] = BuiltinVariable.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if variable.fn is dir:
            refuse("dir() is called")
        if variable.fn in (isinstance, type, len) and args and _is_of_numpy(args[0]):
            refuse(NUMPY)
        if variable.fn in IN_PLACE and _is_of_numpy(args[0]):
            refuse("an array of NumPy is changed in place")
        if variable.fn in (isinstance, issubclass) and len(args) == 2:
            try:
                called.note_question(args[1].as_python_constant())
            except NotImplementedError:
                called.note_question(None)
        return call(variable, tx, args, kwargs)

    return call_function
