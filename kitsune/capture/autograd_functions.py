"""Functions with a backward pass of their own (`torch.autograd.Function`), as plain PyTorch runs them.

Dynamo would make an operator of each call of one, from what it has seen of the function's methods. That differs from
the function: all gradients are there, `ctx` is another object, nothing is saved, and where Dynamo sees no gradient, as
within the transforms of `torch.func`, nothing is left of the function's own backward pass.

Here Dynamo looks into the methods for what a replay has to know of: what they read is guarded, and what they change in
Python is refused. The graph calls the function itself (`kitsune.capture.applied_functions`), and autograd does what it
always does. Dynamo's variables, and how it looks into a function, are private.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
    is_side_effect_safe,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import AutogradFunctionContextVariable, AutogradFunctionVariable, CellVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Source
from torch.autograd import Function, forward_ad

from kitsune.capture.applied_functions import name_of
from kitsune.capture.called import IS_BEFORE_2_13, Called, realized
from kitsune.capture.function_looks import FunctionLook, Look, add_call, by_place
from kitsune.capture.late_reads import ArgumentReadError, LateReads, facts_about, is_close_look, late_reads, read_late
from kitsune.capture.refusing import refuse

_METHODS = ("forward", "setup_context", "backward", "vjp")

_OF_CTX = frozenset(
    {
        *("save_for_backward", "save_for_forward", "mark_dirty", "mark_non_differentiable", "set_materialize_grads"),
        *("saved_tensors", "needs_input_grad", "dirty_tensors"),
    }
)
"""What Dynamo's `ctx` has in common with autograd's, beside the attributes that a function gives it."""

_Original = Callable[..., Any]


@contextmanager
def called_themselves(called: Called) -> Iterator[None]:
    """Within, Dynamo's graphs call autograd's functions themselves; what is run of them is noted in `called`."""
    inspector = _Inspector(called)
    patches: Sequence[tuple[Any, str, Callable[..., Any]]] = (
        (AutogradFunctionVariable, "call_method", inspector.call_method),
        (AutogradFunctionContextVariable, "var_getattr", inspector.read_ctx),
        (SideEffects, "check_allowed_side_effect", inspector.change),
        (SideEffects, "store_attr", inspector.store),
        (SideEffects, "load_attr", inspector.read_changed),
        (VariableBuilder, "__call__", inspector.build),
        (TensorVariable, "_method_register_hook", inspector.register_hook),
        (CheckpointHigherOrderVariable, "_call_function", inspector.checkpoint),
    )
    with ExitStack() as stack:
        for owner, name, method in patches:
            stack.enter_context(mock.patch.object(owner, name, _instead(method, getattr(owner, name))))
        makers: list[tuple[Any, str, Callable[..., Any]]] = [
            (VariableTracker, "build", inspector.noting(VariableTracker.build))
        ]
        if IS_BEFORE_2_13:  # where attributes of objects are made so
            makers.append((LazyVariableTracker, "create", inspector.noting_later(LazyVariableTracker.create)))
        for owner, name, maker in makers:
            stack.enter_context(mock.patch.object(owner, name, staticmethod(maker)))
        yield


def _instead(method: Callable[..., Any], original: _Original) -> Callable[..., Any]:
    """`method`, called with `original`, bound to the object, the object, and the arguments."""

    def replaced(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return method(functools.partial(original, owner), owner, *args, **kwargs)

    return replaced


class _Inspector:
    """What Dynamo calls in place of its own methods, for which see `_instead`."""

    def __init__(self, called: Called) -> None:
        self._called = called
        self._looks: list[Look] = []  # the innermost is the last
        self._checkpoints: list[dict[Source, None]] = []  # what those read that are being traced
        self._read_late: set[Source] = set()

    def call_method(
        self, original: _Original, variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if name != "apply":
            return original(tx, name, args, kwargs)
        function: type[Function] = variable.fn_cls
        _refuse(tx, function)
        args, kwargs = by_place(tx, function, *LazyVariableTracker.realize_all((list(args), dict(kwargs))))
        look = FunctionLook(tx, function, _source_of(tx, variable), args, kwargs)
        with self._looking(look):
            look.at_forward(args, kwargs)
            call = add_call(tx, function, args, kwargs, look.results)
            if call.applied.differentiable:
                look.at_backward(call.applied)
        self._called.note_class(function)
        for name in _METHODS:
            method = getattr(function, name)
            if isinstance(method, types.FunctionType):
                self._called.note_function(method)
        self._note_late(look, call.node, tx.output, look.kept())
        return call.returned

    def register_hook(self, original: _Original, variable: Any, tx: Any, name: str, hook: Any) -> Any:
        """A hook of a tensor that the call makes: Dynamo looks into it, and runs it outside of a transform it is in."""
        if torch._C._are_functorch_transforms_active():
            refuse("a hook is put on a tensor within a transform of torch.func")
        look = Look("a hook of a tensor", late={})
        with self._looking(look):
            handle = original(tx, name, hook)
        look.early = look.late or {}  # what it finds is part of the graph
        if not variable.source:
            self._note_late(look, variable.as_proxy().node, tx.output, [hook])
        return handle

    def checkpoint(self, original: _Original, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """What runs again in the backward pass, and reads the same then."""
        read: dict[Source, None] = {}
        self._checkpoints.append(read)
        try:
            returned = original(tx, *args, **kwargs)
        finally:
            self._checkpoints.pop()
        if not self._checkpoints:
            nodes = reversed(tx.output.current_tracer.graph.nodes)
            node = next(node for node in nodes if node.target is variable.value)
            read |= dict.fromkeys(_sources_in((args, kwargs), tx.output.side_effects))
            try:
                self._go_by(node, LateReads(shared=facts_about(read, tx.output)))
            except ArgumentReadError as error:
                _refuse_argument("a checkpoint", error)
        return returned

    def _note_late(self, look: Look, node: fx.Node, output: Any, kept: Iterable[Any]) -> None:
        """`kept` is where the backward pass may have variables from, beside those that it builds."""
        known = dict.fromkeys(_sources_in(kept, output.side_effects))
        late = {**(look.late or {}), **known}
        try:
            early = {**look.early, **known}
            reads = late_reads(late, early, output, runs_again=isinstance(look, FunctionLook))
        except ArgumentReadError as error:
            _refuse_argument(look.name, error)
        self._read_late.update(late)
        self._go_by(node, reads)

    def _go_by(self, node: fx.Node, reads: LateReads) -> None:
        """The backward pass of a node. What Dynamo does not guard, each call goes by as well, as it was captured so."""
        read_late(node, reads)
        self._called.note_facts(filter(is_close_look, (*reads.alone, *reads.shared)))

    @contextmanager
    def _looking(self, look: Look) -> Iterator[None]:
        self._looks.append(look)
        try:
            yield
        finally:
            self._looks.pop()

    def read_ctx(self, original: _Original, ctx: Any, tx: Any, name: str) -> Any:
        if name not in _OF_CTX and not tx.output.side_effects.has_pending_mutation_of_attr(ctx, name):
            refuse(f"an autograd.Function reads ctx.{name}")
        return original(tx, name)

    def change(self, original: _Original, _effects: SideEffects, item: Any) -> Any:
        """A container is to be changed."""
        self._refuse_change(item)
        if getattr(item, "source", None) in self._read_late:
            refuse("the backward pass of an autograd.Function reads a container, which is changed before it runs")
        return original(item)

    def _refuse_change(self, item: Any) -> None:
        """Only what was made in the function may be changed, and `ctx` in the forward pass."""
        if not self._looks or is_side_effect_safe(item.mutation_type):
            return
        if not any(look.may_change(item) for look in self._looks):
            refuse(f"{self._looks[-1].name} changes objects of Python, which replays would not")

    def store(self, original: _Original, _effects: SideEffects, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """An attribute is to be set."""
        self._refuse_change(item)
        source = getattr(item, "source", None)
        if source is not None and not self._read_late.isdisjoint((source, AttrSource(source, name))):
            refuse(f"the backward pass of an autograd.Function reads {name}, which is set before it runs")
        return original(item, name, *args, **kwargs)

    def read_changed(
        self, original: _Original, _effects: SideEffects, item: Any, name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """The function would not find what the call has set before, when it runs while it is traced."""
        if self._looks and isinstance(item.mutation_type, AttributeMutationExisting):
            refuse(f"{self._looks[-1].name} depends on {name}, which the same call has set before")
        return original(item, name, *args, **kwargs)

    def build(self, original: _Original, builder: Any, value: Any) -> Any:
        self._note(builder.source)
        return original(value)

    def noting(self, original: _Original) -> Callable[..., Any]:
        """`VariableTracker.build`, which belongs to no object."""

        def build(tx: Any, value: Any, source: Source | None = None, *args: Any, **kwargs: Any) -> Any:
            self._note(source)
            return original(tx, value, source, *args, **kwargs)

        return build

    def noting_later(self, original: _Original) -> Callable[..., Any]:
        """`LazyVariableTracker.create`, likewise."""

        def create(value: Any, source: Source | None, **options: Any) -> Any:
            self._note(source)
            return original(value, source, **options)

        return create

    def _note(self, source: Source | None) -> None:
        if source is None:
            return
        for look in self._looks:
            (look.early if look.late is None else look.late)[source] = None
        for read in self._checkpoints:
            read[source] = None


def _refuse_argument(name: str, error: ArgumentReadError) -> NoReturn:
    refuse(f"{name} reads in backward() what may be another object then: {error}")


def _sources_in(variables: Iterable[Any], effects: SideEffects) -> Iterator[Source]:
    """Where Dynamo found the objects that can be reached from variables, those of enclosing functions included."""
    known: dict[int, Any] = {}
    waiting = [list(variables)]
    while waiting:
        reached: list[Any] = []
        VariableTracker.visit(reached.append, waiting.pop(), known)
        for one in map(realized, reached):
            if isinstance(one, CellVariable):
                contents = [one.pre_existing_contents, *effects.store_attr_mutations.get(one, {}).values()]
                waiting.append([each for each in contents if each is not None])
                yield from (each.source for each in map(realized, waiting[-1]) if each.source is not None)
            elif one.source is not None and not isinstance(one, (TensorVariable, ConstantVariable)):
                yield one.source


def _refuse(tx: Any, function: type[Function]) -> None:
    name = name_of(function)
    if torch._C._are_functorch_transforms_active():
        refuse(f"{name} is called within a transform of torch.func, where it has rules of its own")
    if forward_ad._current_level >= 0:
        refuse(f"{name} is called in forward-mode differentiation, where it has a rule of its own")
    if getattr(function.apply, "__func__", None) is not Function.apply.__func__:  # type: ignore[attr-defined]
        refuse(f"{name} has an apply() of its own")
    kept = tx.output.side_effects.id_to_variable.values()
    if any(isinstance(one.mutation_type, ValueMutationExisting) and one.mutation_type.is_modified for one in kept):
        refuse(f"{name} is called after the same call has changed a container, which it may look at")


def _source_of(tx: Any, variable: Any) -> Source:
    """Where the function comes from."""
    function = variable.fn_cls
    if variable.source is not None:
        source: Source = variable.source
        return source
    refuse(f"{name_of(function)} comes from nowhere that can be looked at again")
