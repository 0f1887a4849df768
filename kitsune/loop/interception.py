"""Finds the modules that a loop calls, and takes over their calls.

A module is found by a global forward pre-hook, which is removed as soon as all parameters are
accounted for. Its calls are taken over through `Module._compiled_call_impl`, the place that
`Module.compile()` uses: unlike a patched `forward` it is dropped by deepcopy and pickle, and leaves
`forward` and the hooks as they are.

A module that several optimizers train is left as it is, and its parts are found in its place, if it has a few of them
for each optimizer, and calls them.

What is compiled as a whole is found before it is called: the hook would be compiled with it, and all again without.
What `torch.compile` has wrapped is called as `forward` of the wrapper, whose own hooks run around that.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from kitsune.capture.compilations import compilations
from kitsune.capture.data_parallel import begin_unfollowed
from kitsune.capture.frontend import compiled_inside
from kitsune.capture.global_hooks import is_own_away, look_at_calls, num_absences
from kitsune.capture.watch import Interceptor, interceptor_in, is_compiled
from kitsune.errors import Refusal
from kitsune.loop.alive import all_modules, outermost_modules

# A module is seen as parts for optimizers that train no more of them: many small calls are no faster when replayed.
_MOST_PARTS = 4

# So many calls show whether a module calls its parts.
_CALLS_OF_PARTS = 2

# Looking costs a hook at every module call, so it ends even if some parameters belong to no module.
PATIENCE_STEPS = 20

_REPLACED = Refusal("a KitsuneOptimizer that was made later has all of these parameters, too, and replays the calls")
_UNCALLED = Refusal(
    f"no module that owns the optimizer's parameters was called in the first {PATIENCE_STEPS} steps, unless by its "
    "forward(), or within a function that torch.compile has compiled",
    remedy="call the module itself, outside of compiled functions",
)
_UNOWNED = Refusal("the optimizer's parameters are parts of no module, and what is replayed are calls of modules")


class CallTaker(Protocol):
    """What takes over the calls of found modules."""

    def found(self, module: torch.nn.Module, *, is_running: bool) -> None:
        """`module` is the loop's. If it is being called already, for the first time, that call runs as it is."""

    def wraps(self, wrapper: DistributedDataParallel) -> None:
        """`wrapper` is being called for the first time, and calls its module next."""

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls `module`."""

    def call_eagerly(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The same where it is known to run eagerly."""

    @property
    def is_plain(self) -> bool:
        """Whether calls that run eagerly are what they would be without the taker."""


class ModuleFinder:
    """Tells `taker` of the outermost modules that own any of `params`, each at its first call.

    Of a `DistributedDataParallel` that is its module: the wrapper reduces the gradients that arrive at the parameters.

    Args:
        only: of these modules, each by itself; None for whichever are outermost.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        taker: CallTaker,
        only: Iterable[torch.nn.Module] | None = None,
    ) -> None:
        self._only = None if only is None else weakref.WeakSet(map(_inside, only))
        self._params = frozenset(map(id, params))
        self._missing = set(self._params)
        if self._only is not None:
            self._missing &= {id(param) for module in self._only for param in module.parameters()}
        _takers.take(self._missing, taker)
        self._taker = weakref.ref(taker)
        self._wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._parted: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()  # with their calls
        self._steps_left = PATIENCE_STEPS
        self._absences = num_absences()
        self._has_looked_at_compiled = False  # since there was an iteration
        self._given_up: Refusal | None = None
        self._finalizer = weakref.finalize(taker, look_at_calls(self._on_call))
        self._look_at_compiled()

    def refusal(self) -> Refusal | None:
        """Of a finder that has found nothing: why there is nothing to be found any more."""
        taker = self._taker()
        if self._params and all(_takers.of(param) not in (taker, None) for param in self._params):
            return _REPLACED
        if self._given_up is None and self._missing and not self._steps_left:
            owned = {id(param) for module in outermost_modules() for param in module.parameters()}
            self._given_up = _UNOWNED if self._missing.isdisjoint(owned) else _UNCALLED
        return self._given_up

    def stop(self) -> None:
        """Looks no further."""
        self._finalizer()

    def count_step(self) -> None:
        """To be called once an iteration: the search ends when nothing more is found for long.

        While a thread captures, calls in others are not seen, or look as if they were traced and are passed over. So
        iterations in which that may have been do not count.
        """
        if not self._steps_left or is_own_away() or torch.compiler.is_compiling():
            return
        if not self._has_looked_at_compiled:
            self._has_looked_at_compiled = True
            self._look_at_compiled()
        if self._absences != num_absences():
            self._absences = num_absences()
            return
        self._steps_left -= 1
        if not self._steps_left:
            self.stop()

    def _on_call(self, module: torch.nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._examine(module, is_running=True)

    def _look_at_compiled(self) -> None:
        """Finds what is compiled as a whole, and part of nothing else.

        Of several wrappers of one module the loop may call either.
        """
        if not self._missing or not compilations.any_among(all_modules):
            return
        found = [module for module in outermost_modules() if is_compiled(module)]
        num_wrappers = Counter(map(compiled_inside, found))
        for module in found:
            if num_wrappers[compiled_inside(module)] == 1 and interceptor_in(_call_of(module)) is None:
                self._examine(module, is_running=False)

    def _examine(self, module: torch.nn.Module, *, is_running: bool) -> None:
        taker = self._taker()
        if taker is None or not self._missing:
            return
        if isinstance(module, DistributedDataParallel):
            if module not in self._wrappers:
                self._wrappers.add(module)
                taker.wraps(module)
            return
        if self._only is not None and compiled_inside(module) not in self._only:
            return
        # There may be none in this call and some in the next one, as others stand in for them in a functional_call.
        present = self._missing & set(map(id, module.parameters()))
        if present and self._is_parted(module):
            return
        self._missing -= present
        if not self._missing:
            self.stop()
        if any(_takers.of(param) in (taker, None) for param in present):
            taker.found(module, is_running=is_running)

    def _is_parted(self, module: torch.nn.Module) -> bool:
        """Whether the parts of `module` are looked for in its place."""
        if self._only is not None or is_compiled(module) or any(one.module is module for one in self._wrappers):
            return False
        if not _may_be_parted(module):
            return False
        calls = self._parted[module] = self._parted.get(module, 0) + 1
        return calls <= _CALLS_OF_PARTS or any(
            interceptor_in(part._compiled_call_impl) is not None for part in module.modules()
        )


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    """Of a wrapper the module that it calls."""
    return compiled_inside(module.module if isinstance(module, DistributedDataParallel) else module)


class _Takers:
    """Who looked last for the modules of parameters: a new optimizer over a model, or over a part, replaces an old one.

    Attributes:
        changes: how often that has changed.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._newest: weakref.WeakValueDictionary[int, CallTaker] = weakref.WeakValueDictionary()

    def take(self, params: Iterable[int], taker: CallTaker) -> None:
        """From now on `taker` is the one for `params`, given by `id`."""
        self._newest.update(dict.fromkeys(params, taker))
        self.changes += 1

    def of(self, param: int) -> CallTaker | None:
        """The one for a parameter."""
        return self._newest.get(param)


_takers = _Takers()


def _place(module: torch.nn.Module) -> str:
    """The attribute that `module` runs by, if it is there, instead of what its class defines."""
    return "_compiled_call_impl" if compiled_inside(module) is module else "forward"


def _call_of(module: torch.nn.Module) -> Any:
    """What is in that place."""
    return getattr(module, _place(module))


def _set_call(module: torch.nn.Module, call: Any) -> None:
    """Puts it there. Of `module` alone: wrappers pass on what is set of them to the module inside."""
    torch.nn.Module.__setattr__(module, _place(module), call)


def _function_of(interceptor: Interceptor) -> Callable[..., Any]:
    """Calls `interceptor`, and names it. `torch.jit.script` passes over functions there, and over nothing else."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return interceptor(*args, **kwargs)

    call.interceptor = interceptor  # type: ignore[attr-defined]
    return call


def own_parts(module: torch.nn.Module, taker: CallTaker) -> dict[str, torch.nn.Module]:
    """The largest parts of `module` that hold parameters of `taker` and of no other, by name."""
    return dict(_own_parts(module, taker, ""))


def others_of(module: torch.nn.Module, taker: CallTaker) -> list[CallTaker]:
    """Who beside `taker` looked last for the modules of any parameters of `module`."""
    return [other for other in _takers_of(module) if other is not taker]


def _takers_of(module: torch.nn.Module) -> list[CallTaker]:
    found = {id(taker): taker for param in module.parameters() if (taker := _takers.of(id(param))) is not None}
    return list(found.values())


def _own_parts(module: torch.nn.Module, taker: CallTaker, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    takers = _takers_of(module)
    if taker not in takers:
        return
    forward = inspect.getattr_static(type(module), "forward")  # that of a ScriptModule cannot be asked of its class
    if len(takers) == 1 and forward is not torch.nn.Module.forward:  # lists of modules are not called
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _own_parts(child, taker, f"{name}.{child_name}" if name else child_name)


def _may_be_parted(module: torch.nn.Module) -> bool:
    """Whether there are several takers, each of which has parts of its own, but a few."""
    takers = _takers_of(module)
    return len(takers) > 1 and all(1 <= len(own_parts(module, taker)) <= _MOST_PARTS for taker in takers)


class TakenOver(Interceptor):
    """Stands in for the call of one module, until another taker comes for any of the parameters.

    Args:
        module: as the loop calls it, which may be a wrapper of `torch.compile`'s.
        taker: answers the calls of what is inside of that.

    Attributes:
        compiled: what `torch.compile` has made of the call; None if it is not compiled.
    """

    def __init__(self, module: torch.nn.Module, taker: CallTaker) -> None:
        before = _call_of(module)
        earlier = interceptor_in(before)
        self.compiled: Callable[..., Any] | None = earlier.compiled if isinstance(earlier, TakenOver) else before
        self._owner, self._module = weakref.ref(module), weakref.ref(compiled_inside(module))
        self._taker = weakref.ref(taker)
        self._params = [id(param) for param in module.parameters() if _takers.of(id(param)) is taker]
        self._changes = _takers.changes
        self._function = _function_of(self)  # one: whoever compiles a call of the module has guards for it
        self._is_aside = False
        _set_call(module, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, taker = self._module(), self._taker()
        assert module is not None
        if taker is None or (self._changes != _takers.changes and not self._is_newest(taker)):
            self.give_back()
            begin_unfollowed()
            return call_module(module, args, kwargs) if self.compiled is None else self.compiled(*args, **kwargs)
        return (taker.call_eagerly if self._is_aside else taker.call)(module, args, kwargs)

    def gives_way(self) -> bool:
        """Gives the calls back if nobody is there any more to answer them; whether it did.

        A taker that was dropped may wait for the collector.
        """
        if self._taker() is not None:
            gc.collect()
        taker = self._taker()
        if taker is not None and self._is_newest(taker):
            return False
        self.give_back()
        return True

    def stand_aside(self) -> None:
        """Has calls run eagerly until `come_back`, past the taker if they are to be what they were without it."""
        self._is_aside = True
        taker = self._taker()
        if taker is not None and taker.is_plain:
            self.give_back()

    def come_back(self) -> None:
        """Has the taker answer calls again, unless somebody else has taken them over since."""
        self._is_aside = False
        owner, taker = self._owner(), self._taker()
        if owner is None or taker is None or _call_of(owner) is not self.compiled:
            return
        if self._changes == _takers.changes or self._is_newest(taker):
            _set_call(owner, self._function)

    def give_back(self) -> None:
        """Lets calls be what they were, unless somebody else has taken them over since."""
        owner = self._owner()
        if owner is not None and interceptor_in(_call_of(owner)) is self:
            _set_call(owner, self.compiled)

    def _is_newest(self, taker: CallTaker) -> bool:
        if not all(_takers.of(param) is taker for param in self._params):
            return False
        self._changes = _takers.changes
        return True


def call_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What `module(*args, **kwargs)` does where its calls are not taken over."""
    return module._call_impl(*args, **kwargs)
