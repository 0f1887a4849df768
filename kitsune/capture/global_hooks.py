"""Hooks that torch runs at the call of every module: the user's, and Kitsune's own, which only looks for models.

There is no public reader in `torch`; this module is where its dicts are read.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from kitsune.errors import Refusal
from kitsune.native.facts import Fact, contents

_HOOKS = {
    name: vars(torch_module)[name]
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
}

Look = Callable[[torch.nn.Module, Any], None]
"""Is called with a module that is about to run, and its positional arguments."""


class _Own:
    """Kitsune's own hook: there while somebody looks for a model, but for captures, as Dynamo would look into it.

    What captures meanwhile is one thread; others may begin and end to look, also where garbage is collected.
    """

    def __init__(self) -> None:
        self._looks: dict[int, Look] = {}
        self._numbers = itertools.count()
        self._handle: RemovableHandle | None = None
        self._num_captures = 0  # one within the other
        self.absences = 0  # so far
        self._changing = threading.RLock()

    @property
    def ids(self) -> set[int]:
        """Those that torch knows it by."""
        handle = self._handle
        return set() if handle is None else {handle.id}

    def look(self, look: Look) -> Callable[[], None]:
        """Calls `look` at every module's call, until what is returned is called."""
        number = next(self._numbers)
        with self._changing:
            self._looks[number] = look
            self._settle()

        def stop() -> None:
            with self._changing:
                self._looks.pop(number, None)
                self._settle()

        return stop

    def is_away(self) -> bool:
        """Whether something is being captured, so that calls are not seen."""
        return self._num_captures > 0

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within, it is not there."""
        with self._changing:
            self._num_captures += 1
            self.absences += 1
            self._settle()
        try:
            yield
        finally:
            with self._changing:
                self._num_captures -= 1
                self._settle()

    def _settle(self) -> None:
        is_wanted = bool(self._looks) and not self._num_captures
        if is_wanted and self._handle is None:
            self._handle = register_module_forward_pre_hook(self._on_call)
        elif not is_wanted and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_call(self, module: torch.nn.Module, args: Any) -> None:
        for look in tuple(self._looks.values()):
            look(module, args)


_own = _Own()
look_at_calls = _own.look
without_own = _own.away
is_own_away = _own.is_away


def num_absences() -> int:
    """How often Kitsune's hook has not been there for a while, so that calls in other threads were not seen."""
    return _own.absences


def refuse_global_hooks() -> Refusal | None:
    """None if nobody has global hooks but Kitsune."""
    for hooks in _HOOKS.values():
        if hooks and hooks.keys() - _own.ids:
            return Refusal("global module hooks are registered, which a replay would not run")
    return None


def global_hook_facts() -> list[Fact]:
    """What must stay for `refuse_global_hooks` to answer as it does."""
    return [contents(hooks) for hooks in _HOOKS.values()]


def is_of_global_hooks(guard: str) -> bool:
    """Whether a guard, given by what it looks at, asks for what `refuse_global_hooks` does."""
    return any(f".{name}" in guard for name in _HOOKS)
