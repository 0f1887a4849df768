"""Guards for constants that Python calls equal though they are not the same: `(1, 0.0)` and `(1.0, -0.0)`.

Dynamo compares constants by `==`, and asks for the type of the outermost object alone. The keys of dictionaries, and
instances of subclasses of `float`, it compares elsewhere, and so still does. Its guard builder is private, as are the
guard managers that it fills.
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
    def guard_sameness(builder: GuardBuilder, guard: Any, *args: Any, **kwargs: Any) -> None:
        guard_equality(builder, guard, *args, **kwargs)
        value = builder.get(guard)
        if has_lookalikes(value):
            parts = [f"{builder.arg_ref(guard)} is written {value!r}"]
            builder.get_guard_manager(guard).add_lambda_guard(is_written_as(value), parts, guard.user_stack)

    return mock.patch.object(GuardBuilder, "EQUALS_MATCH", guard_sameness)


def has_lookalikes(value: Any) -> bool:
    """Whether there may be other values that are equal to it, and of its type."""
    if isinstance(value, float):
        return value == 0
    if isinstance(value, (tuple, frozenset)):
        return any(isinstance(one, (int, float, complex)) or has_lookalikes(one) for one in value)
    return isinstance(value, (complex, slice, set, list))


def is_written_as(constant: Any) -> Callable[[Any], bool]:
    """Tells whether a value that is equal to `constant`, and of its type, is written as that by `repr`."""
    written = repr(constant)
    if isinstance(constant, (set, list)):  # the value may be the same object, and have changed
        return lambda value: repr(value) == written
    return lambda value: value is constant or repr(value) == written
