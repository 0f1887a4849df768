"""Calls of what Dynamo has compiled, past its interception of frames.

Dynamo's cache entries and guard managers are private.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._dynamo import eval_frame

from kitsune.capture.changes import Change, Names, of_duplicates, of_guards
from kitsune.capture.named_places import Scope
from kitsune.capture.reads import reads_of
from kitsune.native.facts import Fact, attribute

_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


@dataclass(frozen=True)
class Repetition:
    """When a function of `args` and `kwargs` would only run its graph again, and on what.

    Attributes:
        facts: must hold, before the guards are asked.
        guards: Dynamo's, about the function's variables by name; they hold if it returns True.
        variables: what the guards must be told beside the arguments.
        names: the variables of the two arguments.
        sources: see `Reads`.
        answers: must hold, and are to be looked at last: to ask for them may change something.
    """

    facts: tuple[Fact, ...]
    guards: Callable[[dict[str, Any]], bool]
    variables: dict[str, Any]
    names: tuple[str, str]
    sources: tuple[object, ...]
    answers: tuple[Fact, ...] = ()


class DirectCall:
    """What Dynamo has compiled, behind Dynamo's guards, called without its interception of frames.

    That takes several times as long as the guards, and would end in the same code. Dynamo's cache entries are private;
    where they are not as expected, calls take the long way.

    Attributes:
        run: what Dynamo made of the function, side effects on Python objects included.
    """

    def __init__(self, function: types.FunctionType, entry: Any) -> None:
        code = function.__code__
        self.run = types.FunctionType(
            entry.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self._guards = entry.guard_manager
        self._names = code.co_varnames[: code.co_argcount]
        self._free = tuple(zip(code.co_freevars, function.__closure__ or (), strict=True))

    @classmethod
    def of(cls, function: types.FunctionType) -> DirectCall | None:
        """The one way in which `function` is compiled; None if there is none, or it cannot be called like this."""
        code = function.__code__
        entries = eval_frame._debug_get_cache_entry_list(code)
        if len(entries) != 1 or code.co_flags & _VARIADIC or code.co_kwonlyargcount:
            return None
        compiled = entries[0].code
        if compiled is None:  # what a guard was about no longer exists
            return None
        return cls(function, entries[0]) if compiled.co_freevars == code.co_freevars else None

    @property
    def is_void(self) -> bool:
        """Whether something that is guarded no longer exists: others may have come to its address."""
        return self._guards.cache_entry is None

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Whether all guards hold for a call with these arguments."""
        variables = None if self.is_void else self._variables(args)
        return variables is not None and bool(self._guards.check(variables))

    def change(self, args: tuple[Any, ...], names: Names) -> Change | None:
        """What has changed where a call with these arguments does not fit; None where that cannot be told.

        Args:
            names: of what is guarded.
        """
        if self.is_void:
            return Change("what the model uses", "something that the model used no longer exists")
        variables = self._variables(args)
        if variables is None:
            return None
        scope = Scope(variables, self.run.__globals__)
        parts = self._guards.check_verbose(variables).verbose_code_parts
        return of_guards(parts, scope, names) or of_duplicates(self._guards.no_tensor_aliasing_sources, scope)

    def _variables(self, args: tuple[Any, ...]) -> dict[str, Any] | None:
        """What the guards must be told of a call; None if it is none of the function's."""
        if len(args) != len(self._names):
            return None
        local = dict(zip(self._names, args, strict=True))
        try:
            for name, cell in self._free:
                local[name] = cell.cell_contents
        except ValueError:  # it is empty
            return None
        return local

    def repetition(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Repetition | None:
        """See `GuardedFunction.repetition`."""
        reads = reads_of(self.run, args, tuple(kwargs))
        if reads is None or len(self._names) != 2 or self.is_void:
            return None
        return Repetition(
            facts=(attribute(self._guards, "cache_entry"), *reads.facts),
            guards=self._guards.root.check,
            variables={name: cell.cell_contents for name, cell in self._free},
            names=(self._names[0], self._names[1]),
            sources=reads.sources,
        )
