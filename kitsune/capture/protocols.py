"""Iteration and what else Python does by itself, where Dynamo does otherwise: mended, or refused.

An iterator of a list is used up by whatever reads all of it. Refused are methods by which the model's own objects are
iterated, where they change something and something other than a `for` loop calls them; generators that are given up
where `finally` or `with` has something left to do; `__ne__` where members of containers are compared, which Python
does by `==`; `__getattr__` where a property may raise an `AttributeError`. Dynamo's translators and variables are
private.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import (
    BuiltinVariable,
    ItertoolsVariable,
    ListIteratorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
    builtin,
)
from torch._dynamo.variables.base import AsPythonConstantNotImplementedError, ValueMutationNew
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable

from kitsune.capture.called import IS_BEFORE_2_13, READS, own_method, realized
from kitsune.capture.refusing import refuse

_ITERATING = {"__iter__": "GET_ITER", "__next__": "FOR_ITER", "__getitem__": "BINARY_SUBSCR"}
"""Methods by which an object is iterated, and the instructions that call each of them once."""

_COMPARING = ("__eq__", "__ne__")
_NOTED = frozenset({*_ITERATING, *_COMPARING})

_ASKED = ("__iter__", "__len__", "__length_hint__")
"""Those that Python and Dynamo ask more or less often, where they make a list of an object, or sum it up."""

_STORES = (
    *("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL"),
    *("STORE_SLICE", "STORE_DEREF", "DELETE_DEREF"),  # the first since Python 3.12
)
_CHANGING = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem"}
    | {"popleft", "remove", "reverse", "rotate", "setdefault", "sort", "update"}
)
"""Methods of Python's containers that change them."""

_ASKS: Any = getattr(builtin, "HasAttrBuiltinVariable", BuiltinVariable)


@contextmanager
def refused() -> Iterator[None]:
    """Within, captures of such calls are refused."""
    generators: list[Any] = []
    patches = [
        (InliningInstructionTranslator, "inline_call", _refusing_methods()),
        (LocalGeneratorObjectVariable, "__init__", _noting_generators(generators)),
        (SideEffects, "codegen_update_mutated", _refusing_what_was_given_up(generators)),
        *((kind, "call_function", _refusing_properties(kind)) for kind in {_ASKS, READS}),
        (ListIteratorVariable, "unpack_var_sequence", _using_up()),
        (ListIteratorVariable, "as_python_constant", _no_constant),
        (ItertoolsVariable, "call_function", _refusing_groups()),
        *_before_torch_2_13(),
    ]
    with ExitStack() as stack:
        for kind, name, patch in patches:
            stack.enter_context(mock.patch.object(kind, name, patch))
        yield


def _refusing_methods() -> Callable[..., Any]:
    inline: Callable[..., Any] = InliningInstructionTranslator.inline_call

    def inline_call(parent: Any, function: Any, args: Sequence[Any], kwargs: Any, **options: Any) -> Any:
        try:
            name = function.get_name()
        except NotImplementedError:  # what the call itself makes
            name = ""
        is_own = "_dynamo" not in parent.f_code.co_filename
        instruction = parent.current_instruction.opname if is_own else ""
        owner = _class_of(getattr(function, "obj", None) or (args[0] if args else None)) if name in _NOTED else object
        if name in _ITERATING and instruction != _ITERATING[name]:
            _refuse_changing(owner)
        is_asked = name in _COMPARING and instruction != "COMPARE_OP" and own_method(owner, name)
        if is_asked and name == "__ne__":
            refuse("members of containers are compared, which have a __ne__() of their own")
        if is_asked and len(args) > 1 and _are_the_same(*args[:2]):
            refuse("a member of a container is compared with itself, whose __eq__() Python does not ask")
        return inline(parent, function, args, kwargs, **options)

    return inline_call


def _refuse_changing(kind: type) -> None:
    for name in _ASKED:
        if own_method(kind, name) and _changes(getattr(kind, name)):
            refuse(f"{kind.__name__}.{name}() changes something, and is not called by a for loop alone")


def _changes(function: types.FunctionType) -> bool:
    """Whether a function assigns anything but its own variables, as far as can be seen from its instructions."""
    instructions = list(dis.get_instructions(function))
    return any(
        one.opname in _STORES or (one.opname.startswith("LOAD_") and one.argval in _CHANGING) for one in instructions
    )


def _are_the_same(left: Any, right: Any) -> bool:
    first, second = realized(left), realized(right)
    return first is second or (
        isinstance(first, UserDefinedObjectVariable) and first.value is getattr(second, "value", None)
    )


def _class_of(variable: Any) -> type:
    """Of an object of the model's; `object` for all others."""
    inside = realized(variable)
    return type(inside.value) if isinstance(inside, UserDefinedObjectVariable) else object


def _using_up() -> Callable[..., Any]:
    """What Dynamo calls to have all that is left; some look at the index alone, and not whether there is more."""
    unpack: Callable[..., Any] = ListIteratorVariable.unpack_var_sequence

    def unpack_var_sequence(iterator: Any, tx: Any) -> Any:
        items = unpack(iterator, tx)
        iterator.index = len(iterator.items)
        return items

    return unpack_var_sequence


def _no_constant(iterator: Any) -> Any:
    """A copy would be used up in its place."""
    raise AsPythonConstantNotImplementedError(iterator)


def _refusing_groups() -> Callable[..., Any]:
    call: Callable[..., Any] = ItertoolsVariable.call_function

    def call_function(variable: Any, *args: Any) -> Any:
        if variable.value is itertools.groupby:
            refuse("itertools.groupby is called, whose groups end where the next one begins")
        return call(variable, *args)

    return call_function


def _before_torch_2_13() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """`reversed` gives a tuple there, `map` and `filter` read all of an iterator, and operators ask the wrong one."""
    if not IS_BEFORE_2_13:
        return
    for name in ("call_map", "call_filter"):
        yield BuiltinVariable, name, _refusing_iterators(getattr(BuiltinVariable, name))
    make: Callable[..., Any] = BuiltinVariable.call_reversed

    def call_reversed(variable: Any, tx: Any, *args: Any) -> Any:
        made = make(variable, tx, *args)
        if isinstance(made, TupleVariable):
            return ListIteratorVariable(list(made.items), mutation_type=ValueMutationNew())
        return made

    yield BuiltinVariable, "call_reversed", call_reversed
    call: Callable[..., Any] = UserDefinedObjectVariable.call_method

    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__contains__" and getattr(type(variable.value), name, ...) is None:
            refuse(f"the class {type(variable.value).__name__} says that nothing can be in it")
        return call(variable, tx, name, args, kwargs)

    yield UserDefinedObjectVariable, "call_method", call_method


def _refusing_iterators(use: Callable[..., Any]) -> Callable[..., Any]:
    def use_one(variable: Any, tx: Any, function: Any, *iterables: Any, **kwargs: Any) -> Any:
        if any(isinstance(realized(one), ListIteratorVariable) for one in iterables):
            refuse(f"{variable.fn.__name__}() is given an iterator, of which it would take all at once")
        return use(variable, tx, function, *iterables, **kwargs)

    return use_one


def _refuse_operator(function: Any, left: type, right: type) -> None:
    """Before torch 2.13, where Python asks the right one first."""
    is_derived = left is not object and right is not left and issubclass(right, left)
    name = getattr(function, "__name__", "")
    if is_derived and own_method(right, f"__r{name.removeprefix('i')}__") | own_method(right, f"__r{name}__"):
        refuse(f"the class {right.__name__} derives from {left.__name__}, and is asked first")


def _noting_generators(generators: list[Any]) -> Callable[..., None]:
    make: Callable[..., None] = LocalGeneratorObjectVariable.__init__

    def noting(generator: Any, *args: Any, **kwargs: Any) -> None:
        make(generator, *args, **kwargs)
        generators.append(generator)

    return noting


def _refusing_what_was_given_up(generators: Sequence[Any]) -> Callable[..., Any]:
    """What Dynamo calls once it has run all of the call."""
    write: Callable[..., Any] = SideEffects.codegen_update_mutated

    def codegen_update_mutated(effects: Any, *args: Any, **kwargs: Any) -> Any:
        graph = effects.output_graph_weakref()  # another one where Dynamo has begun anew
        for generator in generators:
            if (
                generator.inline_tracer.output is graph
                and not generator.inline_tracer.generator_exhausted
                and _has_an_end(generator.inline_tracer)
            ):
                problem = (
                    f"the generator {generator.get_name()}() is given up where finally or with has something to do"
                )
                refuse(problem)
        return write(effects, *args, **kwargs)

    return codegen_update_mutated


def _has_an_end(tracer: Any) -> bool:
    """Whether the `yield` at which a generator waits is in a block, and one of the function has an end of its own.

    `except` of an exception by its name is none: what closes a generator is a `GeneratorExit`.
    """
    blocks = [one.target for one in tracer.block_stack]
    blocks += [entry.target] if (entry := getattr(tracer.current_instruction, "exn_tab_entry", None)) else []
    if not blocks:
        return False
    entries = (getattr(one, "exn_tab_entry", None) for one in tracer.instructions)  # from Python 3.11 on
    targets = {id(target): target for target in (*blocks, *(entry.target for entry in entries if entry is not None))}
    return any(_is_an_end(tracer.instructions, target) for target in targets.values())


def _is_an_end(instructions: Sequence[Any], target: Any) -> bool:
    """Whether code for an exception is that of `finally` or `with`, or of an `except` that takes every exception."""
    first = next((place for place, one in enumerate(instructions) if one is target), None)
    if first is None:  # that of a `with` that Dynamo runs itself
        return True
    following = instructions[first : first + 6]
    if sys.version_info >= (3, 11) and following[0].opname != "PUSH_EXC_INFO":
        return False  # Python adds some for itself: for generators, and to leave an `except`
    names = {one.opname for one in following} | {one.argval for one in following if isinstance(one.argval, str)}
    is_by_name = not names.isdisjoint({"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"})
    return not is_by_name or not names.isdisjoint({"BaseException", "GeneratorExit"})


def _refusing_properties(kind: Any) -> Callable[..., Any]:
    """What Dynamo calls for `getattr` with a default, or `hasattr`: a property that raises leads to `__getattr__`."""
    call: Callable[..., Any] = kind.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        function = variable.fn if kind is BuiltinVariable else kind._fn
        if kind is BuiltinVariable and len(args) == 2:
            _refuse_operator(function, *map(_class_of, args))
        is_asked = function is hasattr or (function is getattr and len(args) > 2)
        if is_asked and args[1].is_python_constant():
            owner, name = _class_of(args[0]), args[1].as_python_constant()
            if own_method(owner, "__getattr__"):
                _refuse_getattr(owner, name)
        return call(variable, tx, args, kwargs)

    return call_function


def _refuse_getattr(owner: type, name: str) -> None:
    if isinstance(inspect.getattr_static(owner, name, None), property):
        refuse(f"{name}, a property, is asked for, where {owner.__name__} has a __getattr__() of its own")
    if _changes(owner.__getattr__):  # type: ignore[attr-defined]
        refuse(f"{owner.__name__}.__getattr__() changes something, and guards would call it")
