"""Hooks that torch runs at the call of every module: the user's, and Kitsune's own, which only look for models.

There is no public reader in `torch`; this module is where its dicts are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.modules import module as torch_module
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
_own: set[int] = set()


def note_own(handle: RemovableHandle) -> None:
    """A forward pre-hook is Kitsune's own, which a replay need not run."""
    _own.add(handle.id)


def remove_own(handle: RemovableHandle) -> None:
    """Removes a hook that was noted. It takes no lock: it may be called while garbage is collected."""
    handle.remove()
    _own.discard(handle.id)


def num_own() -> int:
    """How many hooks are Kitsune's own."""
    return len(_own)


def refuse_global_hooks() -> Refusal | None:
    """None if nobody has global hooks but Kitsune."""
    for hooks in _HOOKS.values():
        if hooks and hooks.keys() - _own:
            return Refusal("global module hooks are registered, which a replay would not run")
    return None


def global_hook_facts() -> list[Fact]:
    """What must stay for `refuse_global_hooks` to answer as it does."""
    return [contents(hooks) for hooks in _HOOKS.values()]


def is_of_global_hooks(guard: str) -> bool:
    """Whether a guard, given by what it looks at, asks for what `refuse_global_hooks` does."""
    return any(f".{name}" in guard for name in _HOOKS)


@contextmanager
def without_own() -> Iterator[None]:
    """Meanwhile Kitsune's own hooks are not there: Dynamo would look into them."""
    hooks = _HOOKS["_global_forward_pre_hooks"]
    taken = {key: hooks.pop(key) for key in tuple(_own) if key in hooks}
    try:
        yield
    finally:
        hooks.update((key, hook) for key, hook in taken.items() if key in _own)
