"""Guards that an object which a call reaches in two ways, as `self.cfg` and as the global `DEFAULT`, is still one.

Dynamo knows an object by the way in which it met it first, and guards what is read of it there. That the second way
leads to the same object it guards only where both begin at an argument, or both at a global. Of functions it compares
the code alone, and takes a cell of a closure that it knows for the cell of every function of that code. Its builder,
its list of known objects and its functions are private.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._dynamo import guards
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import ClosureSource, GetItemSource, is_from_skip_guard_source
from torch._dynamo.variables import builder
from torch._dynamo.variables.functions import UserFunctionVariable


@contextmanager
def guarded() -> Iterator[None]:
    """Within, Dynamo guards every further way to an object that it knows."""
    objects = mock.patch.object(builder, "make_dupe_guard", guard_of_alias)
    cells = mock.patch.object(UserFunctionVariable, "bind_args", _guard_cells())
    with objects, cells:
        yield


def guard_of_alias(source: Any, known: Any) -> Any:
    """The guard for `source`, where an object was found that is known from `known`; None if that is the same place."""
    if known == source:
        return None
    if known is None or is_from_skip_guard_source(known):  # nothing can be compared with what is found there
        return GuardBuilder.ID_MATCH
    guards.make_dupe_guard(source, known)  # raises where Dynamo refuses aliases
    return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=known)


def _guard_cells() -> Callable[..., Any]:
    bind: Callable[..., Any] = UserFunctionVariable.bind_args

    def bind_args(function: Any, parent: Any, *args: Any) -> Any:
        source, known = function.get_source(), parent.output.side_effects
        for place, cell in enumerate(function.fn.__closure__ or ()):
            if source is not None and cell in known:
                found = GetItemSource(ClosureSource(source), place)
                guard = guard_of_alias(found, known[cell].source)
                if guard is not None:
                    install_guard(found.make_guard(guard))
        return bind(function, parent, *args)

    return bind_args
