"""What a call does to Python objects that outlive it: replays do the same, or the call is refused.

Dynamo runs what a call does to lists, dictionaries and other objects on stand-ins, and has its code write what differs
at the end. It loses the order of dictionaries and what some methods do, and does not guard all that the outcome depends
on. Here a dictionary that is changed is guarded as a whole, and written as a whole where its order is another one. What
Dynamo is not known to write as Python does is refused. Its variables and its table of side effects are private.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import (
    DeletedVariable,
    TensorVariable,
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.base import ValueMutationExisting, VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.iter import IteratorVariable

from kitsune.capture.lookups import guard_absence
from kitsune.capture.refusing import refuse

_PARTS = ("_base_vt", "_dict_vt", "_list_vt", "_set_vt")
"""Where the stand-in for an object of a class that is made of a container has that for the container."""


class _Container(NamedTuple):
    """A container that was there before the call.

    Attributes:
        value: itself.
        owner: Dynamo's stand-in for it.
        stand_in: the part of that which holds its members.
        keys, members: what that held at first. Of lists there are members alone.
    """

    value: Any
    owner: Any
    stand_in: Any
    keys: Sequence[Any]
    members: Sequence[Any]

    @classmethod
    def of(cls, value: object, owner: Any, stand_in: Any) -> _Container:
        held = stand_in.items
        if isinstance(held, Mapping):
            return cls(value, owner, stand_in, list(held), list(held.values()))
        return cls(value, owner, stand_in, (), list(held))

    def is_changed(self) -> bool:
        """Whether it holds anything else by now, or in another order."""
        now = _Container.of(self.value, self.owner, self.stand_in)
        same_members = len(self.members) == len(now.members) and all(map(_are_same, self.members, now.members))
        return not same_members or list(self.keys) != list(now.keys)

    def is_reordered(self) -> bool:
        """Whether the keys that it had are not the first ones any more, in the order that they had."""
        return list(self.stand_in.items)[: len(self.keys)] != list(self.keys)

    def refuse(self, why: str) -> NoReturn:
        source = self.owner.source
        name = "" if source is None else f" ({_readable(source)})"
        refuse(f"the call changes a {type(self.value).__name__}{name}, {why}")


@contextmanager
def written_or_refused() -> Iterator[None]:
    """Within, Dynamo's code leaves objects that were there before as the call does, or Dynamo refuses the call."""
    containers: list[_Container] = []
    track = _keep(containers)
    patches = (
        mock.patch.object(SideEffects, "_track_obj", track),
        mock.patch.object(SideEffects, "track_mutable", track),
        mock.patch.object(SideEffects, "mutation", _guard_whole()),
        mock.patch.object(SideEffects, "codegen_update_mutated", _check(containers)),
        mock.patch.object(SideEffects, "store_attr", _refuse_attributes()),
        mock.patch.object(TensorVariable, "call_method", _refuse_setters()),
        *(mock.patch.object(kind, "reconstruct", _refuse_iterator) for kind in _iterators(IteratorVariable)),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _keep(containers: list[_Container]) -> Callable[..., Any]:
    """What Dynamo calls for each object that it meets. Containers are noted down."""
    track: Callable[..., Any] = SideEffects._track_obj

    def track_obj(effects: Any, value: Any, stand_in: Any, *args: Any, **options: Any) -> Any:
        tracked = track(effects, value, stand_in, *args, **options)
        if isinstance(value, OrderedDict) and len(value) > 1 and stand_in.source is not None:
            install_guard(stand_in.source.make_guard(_guard_order))
        for part in (stand_in, *(getattr(stand_in, name, None) for name in _PARTS)):
            if isinstance(value, (list, deque, dict, set)) and isinstance(
                getattr(part, "items", None), (Mapping, list)
            ):
                containers.append(_Container.of(value, stand_in, part))
                break
        return tracked

    return track_obj


def _guard_order(builder: GuardBuilder, guard: Any) -> None:
    """That the keys of an ordered dictionary come in the same order.

    Dynamo looks at the order in which they were put there. Its guards of dictionaries take no others beside them.
    """
    name, keys = builder.arg_ref(guard), _keys(builder.get(guard))
    told = [f"the order of {name} is {keys}"]
    names = {"___keys": _keys, "___expected": keys}
    builder.add_python_lambda_leaf_guard_to_root([f"___keys({name}) == ___expected"], told, names)


def _keys(ordered: Any) -> list[Any]:
    """Those of an ordered dictionary, in their order; objects of the user's are not kept."""
    return [key if type(key) in (str, int, bool, float, type(None)) else id(key) for key in OrderedDict.keys(ordered)]


def _guard_whole() -> Callable[..., None]:
    """What Dynamo calls before an object is changed. Of a dictionary it guards only the keys that it looks at."""
    note: Callable[..., None] = SideEffects.mutation

    def mutation(effects: Any, stand_in: Any) -> None:
        note(effects, stand_in)
        if isinstance(stand_in, ConstDictVariable) and isinstance(stand_in.mutation_type, ValueMutationExisting):
            stand_in.install_dict_keys_match_guard()

    return mutation


def _check(containers: Sequence[_Container]) -> Callable[..., Any]:
    """What Dynamo calls to have its code write what the call has changed."""
    write: Callable[..., Any] = SideEffects.codegen_update_mutated

    def codegen_update_mutated(effects: Any, *args: Any, **options: Any) -> Any:
        changed = [one for one in containers if one.is_changed()]
        for one in changed:
            _prepare(effects, one)
        _refuse_gradients([effects.store_attr_mutations, *(one.stand_in.items for one in changed)])
        return write(effects, *args, **options)

    return codegen_update_mutated


def _prepare(effects: Any, changed: _Container) -> None:
    """Has all of a container written where that is needed.

    Raises:
        Unsupported: it would not be left as the call leaves it.
    """
    if not effects.is_modified(changed.owner):
        changed.refuse("in a way that Dynamo does not note down")
    if changed.stand_in._contains_self_reference():
        changed.refuse("which is a member of itself")
    if type(changed.value) is set:
        if changed.stand_in.should_reconstruct_all or len(changed.stand_in.items) > len(changed.keys) + 1:
            changed.refuse("by more than one new member: its order would be another one")
    elif not _is_rewritten(changed.value):
        changed.refuse("of a class of its own, which may have others run in them")
    elif changed.is_reordered():
        changed.stand_in.should_reconstruct_all = True


def _is_rewritten(value: object) -> bool:
    """Whether Dynamo writes a container anew, whatever was done to it.

    Methods of ordered dictionaries call one another, which subclasses may have their own of.
    """
    return type(value) in (OrderedDict, deque) or (
        isinstance(value, (list, dict)) and not isinstance(value, OrderedDict)
    )


def _refuse_gradients(written: Any) -> None:
    """Raises `Unsupported` where something is to hold what is in `.grad`: a step has other gradients by then."""

    def look(variable: Any) -> None:
        if getattr(getattr(variable, "source", None), "member", None) in ("grad", "_grad"):
            refuse(f"the call keeps what is in {_readable(variable.source)}")

    VariableTracker.visit(look, written)


def _iterators(kind: type) -> Iterator[type]:
    """The classes of Dynamo's that can make an iterator anew."""
    for one in (kind, *kind.__subclasses__()):
        if "reconstruct" in vars(one):
            yield one
    for one in kind.__subclasses__():
        yield from (inner for inner in _iterators(one) if inner is not one)


def _refuse_iterator(variable: Any, _codegen: Any) -> None:
    """What Dynamo calls to have its code make an iterator: of another kind, over a copy of what is left."""
    refuse(f"an iterator that the call makes is kept ({variable.python_type().__name__})")


def _are_same(one: Any, other: Any) -> bool:
    """Whether two of Dynamo's variables stand for the same object."""
    return one is other or (one.is_realized() and other.is_realized() and one.realize() is other.realize())


def _refuse_attributes() -> Callable[..., Any]:
    """What Dynamo calls where an attribute, or a variable that is known by its name, is assigned or deleted."""
    store: Callable[..., Any] = SideEffects.store_attr

    def store_attr(effects: Any, stand_in: Any, name: str, value: Any, *args: Any, **options: Any) -> Any:
        if isinstance(stand_in, TensorVariable) and not _has_no_gradient_yet(stand_in, name, value):
            _refuse_setter(name)
        if isinstance(stand_in, UserDefinedClassVariable):  # its objects would have the old one until the call ends
            refuse(f"the attribute {name!r} of a class ({stand_in.value.__qualname__}) is assigned")
        before = effects.store_attr_mutations.get(stand_in, {}).get(name)
        is_object = isinstance(stand_in, UserDefinedObjectVariable) and stand_in.source is not None
        is_taken_back = before is not None and isinstance(value, DeletedVariable)
        if is_object and is_taken_back and not guard_absence(stand_in, name):
            refuse(f"{name!r}, which was there before, is assigned and deleted")
        if isinstance(before, DeletedVariable) and not isinstance(value, DeletedVariable):
            refuse(f"{name!r} is deleted and assigned again, which puts it last")
        return store(effects, stand_in, name, value, *args, **options)

    return store_attr


def _refuse_setters() -> Callable[..., Any]:
    """What Dynamo calls for a method of a tensor."""
    call: Callable[..., Any] = TensorVariable.call_method

    def call_method(tensor: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("__setattr__", "__delattr__"):
            refuse(f"{name}() of a tensor is called")
        return call(tensor, tx, name, args, kwargs)

    return call_method


def _has_no_gradient_yet(tensor: Any, name: str, value: Any) -> bool:
    """Whether None becomes the `grad` of a tensor that the call makes; Dynamo assigns it for `requires_grad_()`."""
    is_none = value.is_python_constant() and value.as_python_constant() is None
    return name == "grad" and tensor.source is None and is_none


def _refuse_setter(name: str) -> None:
    """Of a tensor's attributes that are part of it, as `grad`: replays would assign them at another moment."""
    if hasattr(type(getattr(torch.Tensor, name, None)), "__set__"):
        refuse(f"the attribute {name!r} of a tensor is assigned")


def _readable(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)
