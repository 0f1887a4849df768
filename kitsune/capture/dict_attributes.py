"""Guards of what hangs on an empty dictionary: attributes of classes that derive from dict, a `default_factory`.

Dynamo has a manager of guards for the items of a dictionary whose keys it guards, and hangs the guards of attributes
there, too. Where there are no items the manager asks none of them. Here they hang on another one for the same
dictionary. The managers are private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._C._dynamo.guards import DictGuardManager
from torch._dynamo.guards import GuardBuilder, GuardManagerType, _get_closure_vars
from torch._dynamo.source import ConstDictKeySource, DictGetItemSource, DictSubclassGetItemSource
from torch._guards import ChainedSource

_OF_ITEMS = (ConstDictKeySource, DictGetItemSource, DictSubclassGetItemSource)


@contextmanager
def guarded() -> Iterator[None]:
    """Within, such guards are asked."""
    build: Callable[..., Any] = GuardBuilder.get_guard_manager_from_source

    def get_guard_manager_from_source(builder: Any, source: Any) -> Any:
        if source.name in builder._cached_guard_managers:  # before all that it hangs on is looked at anew
            return build(builder, source)
        hangs_there = isinstance(source, ChainedSource) and not isinstance(source, _OF_ITEMS)
        of_items = builder.get_guard_manager_from_source(source.base) if hangs_there else None
        if not isinstance(of_items, DictGuardManager) or not _is_empty(builder.get(source.base)):
            return build(builder, source)
        managers = builder._cached_guard_managers
        managers[source.base.name] = _beside(builder, source.base)
        try:
            return build(builder, source)
        finally:
            managers[source.base.name] = of_items

    with mock.patch.object(GuardBuilder, "get_guard_manager_from_source", get_guard_manager_from_source):
        yield


def _is_empty(value: object) -> bool:
    return isinstance(value, dict) and dict.__len__(value) == 0


def _beside(builder: Any, source: Any) -> Any:
    """The manager for what hangs on a dictionary, which is found anew at each call."""
    name = f"{source.name}, without items"
    managers = builder._cached_guard_managers
    if name not in managers:
        find = eval(f"lambda L: {source.name}", {**_get_closure_vars(), "G": builder.scope["G"]})  # as Dynamo does
        managers[name] = builder.guard_manager.root.lambda_manager(
            python_lambda=find,
            source=source.name,
            example_value=builder.get(source),
            guard_manager_enum=GuardManagerType.GUARD_MANAGER,
        )
    return managers[name]
