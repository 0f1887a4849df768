"""Guards for constants that Python calls equal though they are not the same: `(1, 0.0)` and `(1.0, -0.0)`.

Dynamo compares constants by `==`, and asks for the type of the outermost object alone. Private are its guard builder
and guard managers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch._dynamo.guards import GuardBuilder


def strict() -> AbstractContextManager[Any]:
    """Within, Dynamo's guards for constants tell them from others that are only equal."""
    guard_equality: Callable[..., None] = GuardBuilder.EQUALS_MATCH

    @functools.wraps(guard_equality)  # Dynamo goes by its name
    def guard_identity(builder: GuardBuilder, guard: Any, *args: Any, **kwargs: Any) -> None:
        guard_equality(builder, guard, *args, **kwargs)
        value = builder.get(guard)
        if _has_equals(value):
            told = [f"{builder.arg_ref(guard)} is written {value!r}"]
            builder.get_guard_manager(guard).add_lambda_guard(_is_same(value), told, guard.user_stack)

    return mock.patch.object(GuardBuilder, "EQUALS_MATCH", guard_identity)


def _has_equals(value: Any) -> bool:
    """Whether there may be other values of the type of `value` that are equal to it."""
    if isinstance(value, (tuple, frozenset)):
        return any(isinstance(one, (int, float, complex)) or _has_equals(one) for one in value)
    return isinstance(value, (float, complex, slice, set, list)) and not (isinstance(value, float) and value)


def _is_same(constant: Any) -> Callable[[Any], bool]:
    """Whether a value that is equal to `constant`, and of its type, is written as that."""
    written = repr(constant)
    if isinstance(constant, (set, list)):  # the value may be the same object, and has changed
        return lambda value: repr(value) == written
    return lambda value: value is constant or repr(value) == written
