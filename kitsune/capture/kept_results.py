"""What functions give that keep their results (`functools.lru_cache`), as einops and transformers have them.

Dynamo traces what is inside, and so gives what the function would compute now. Plain PyTorch gives what it has kept,
whatever the function reads has become. So the function itself is asked, when a call is captured and before each replay:
what it then reads, keeps and forgets is what it would in plain PyTorch. How Dynamo calls such a function is private.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch.utils import _pytree as pytree

from kitsune.capture.called import Called
from kitsune.capture.equality import is_written_as
from kitsune.capture.identity import UNKNOWN, object_of, pinned_object
from kitsune.capture.refusing import refuse


@contextmanager
def answered(called: Called) -> Iterator[None]:
    """Within, Dynamo takes for the result of such a function what the function gives, which `called` is told."""
    call: Callable[..., Any] = WrapperUserFunctionVariable.call_function

    def call_function(function: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kept = function.wrapper_obj
        if not hasattr(kept, "cache_info") or (kept.__module__ or "").partition(".")[0] == "torch":
            return call(function, tx, args, kwargs)
        if object_of(tx, function) is kept:  # that classes keep their methods, `called` sees
            install_guard(function.source.make_guard(GuardBuilder.ID_MATCH))
        given = [_argument(tx, kept, one) for one in (*_bound(function), *args)]
        named = {name: _argument(tx, kept, one) for name, one in kwargs.items()}
        return _answer(tx, called, functools.partial(kept, *given, **named))

    with mock.patch.object(WrapperUserFunctionVariable, "call_function", call_function):
        yield


def _bound(function: Any) -> Sequence[Any]:
    """What such a function is bound to as a method; torch 2.11 takes for one what an object itself has, too."""
    given: Sequence[Any] = function.self_args()
    owner = getattr(given[0], "value", None) if given else None
    is_own = owner is not None and any(one is function.wrapper_obj for one in getattr(owner, "__dict__", {}).values())
    return () if is_own else given


def _argument(tx: Any, kept: Any, variable: Any) -> Any:
    """The object that is given to a function, which is guarded to be that."""
    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    found = pinned_object(tx, variable)
    if found is UNKNOWN or isinstance(found, torch.Tensor):
        refuse(f"{kept.__name__}() keeps results, and is given what the call makes")
    return found


def _answer(tx: Any, called: Called, ask: functools.partial[Any]) -> Any:
    name = ask.func.__name__
    try:
        value = ask()
    except Exception as error:  # noqa: BLE001 - whatever it raises, plain PyTorch is to raise
        refuse(f"{name}() keeps results, and raised {type(error).__name__}")
    if any(isinstance(leaf, (torch.Tensor, torch.nn.Module)) for leaf in pytree.tree_leaves(value)):
        refuse(f"{name}() keeps tensors that it makes")
    called.note_answer(functools.partial(_gives, ask, value, _same(value)))
    # What is in it is guarded like any other object's contents.
    return VariableBuilder(tx, GlobalSource(tx.output.install_global_by_id("kitsune_kept", value)))(value)


def _same(value: object) -> Callable[[object], bool]:
    """Tells the result of a function from others. One that cannot change may have been forgotten, and made again."""
    if ConstantVariable.is_literal(value) and not isinstance(value, (list, set)):
        return is_written_as(value)
    return lambda found: found is value


def _gives(ask: Callable[[], object], value: object, is_same: Callable[[object], bool]) -> bool:
    found = ask()
    return type(found) is type(value) and is_same(found)
