"""Tensors that tell a follower what is done with them, some of them before they have a value.

This is the only module that makes tensor subclasses. `_make_wrapper_subclass` and `DisableTorchFunctionSubclass` are
what torch's documentation of subclasses uses; they have no public names. Nor has the mark by which Dynamo leaves out
what calls of torch's functions do with them: the public decorator calls a dozen functions more in each.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from kitsune.capture.layout import TensorLayout

_Function = TypeVar("_Function", bound=Callable[..., Any])

GOING_ON = -1
"""The key of the hook of a pending tensor that goes on to what it is computed from."""

plainly = torch._C.DisableTorchFunctionSubclass
"""Inside, followed tensors are tensors like others."""


class Follower(Protocol):
    """Is asked instead of torch where a followed tensor is an argument."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function of torch, which may be a method or the getter of an attribute."""

    def backward(
        self,
        loss: FollowedTensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """What `Tensor.backward` does."""

    def value(self, place: int) -> Tensor:
        """The plain tensor that a pending one stands for."""

    def reveal(self) -> None:
        """A function that torch does not tell of takes a pending tensor: backward passes may come by several ways."""

    def close(self) -> None:
        """Computes what is pending, and follows no further."""


def _never_compiled(function: _Function) -> _Function:
    """Has Dynamo run a function, and whatever that calls, as Python does, as `torch.compiler.disable` has it."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class FollowedTensor(Tensor):
    """A tensor of which `follower` knows by the name `place`. It is a tensor like others in all else.

    Without a `place` it lies in the memory of one that has one, or is known by nothing but that it is followed. What
    `torch.compile` makes of functions calls torch's functions with it as ever.

    `is_edited` of one that is pending tells that its value may have got another shape, or have been detached, since.
    """

    follower: Follower
    place: int | None
    is_edited = False

    @classmethod
    @_never_compiled
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_known = function in _METADATA and not (args and args[0].is_edited)
        follower = None if is_known else _follower((*args, *kwargs.values()))
        if follower is None:
            with plainly():
                return function(*args, **kwargs)
        if not _OWN_TYPES.issuperset(types):
            follower.close()
            return function(*unfollowed(args), **unfollowed(kwargs))  # another subclass has its own way
        return follower.call(function, args, kwargs)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """As ever. Torch's own way here asks whom to ask, which takes as long as to begin; it is left for modes."""
        is_told = torch._C._is_torch_function_enabled() and not torch._C._is_torch_function_mode_enabled()
        if is_told and gradient is None and inputs is None:
            self.follower.backward(self, None, retain_graph, create_graph)
        else:
            super().backward(gradient, retain_graph, create_graph, inputs)  # type: ignore[no-untyped-call]


class PendingTensor(FollowedTensor):
    """A tensor without storage: its value is computed when it is asked for.

    Code that torch does not tell of (script functions, extensions) reaches `__torch_dispatch__`, and gets the value.
    The gradient that autograd has for it, after a function that torch does not tell of, goes on from the value.
    """

    place: int

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs leave an argument out
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        follower = _follower(args) or _follower(tuple((kwargs or {}).values()))
        if follower is not None:
            follower.reveal()
        with torch.no_grad():
            return function(*valued(args), **valued(kwargs or {}))


_OWN_TYPES = frozenset((Tensor, FollowedTensor, PendingTensor))


def followed(tensor: Tensor, follower: Follower, place: int | None) -> FollowedTensor:
    """The same tensor, followed."""
    result = tensor.as_subclass(FollowedTensor)
    result.follower, result.place = follower, place
    return result


def pending(layout: TensorLayout, follower: Follower, place: int) -> PendingTensor:
    """A tensor to be computed later, which requires a gradient."""
    result: PendingTensor = Tensor._make_wrapper_subclass(
        PendingTensor, layout.size, layout.stride, dtype=layout.dtype, device=layout.device, requires_grad=True
    )
    result.follower, result.place = follower, place
    # What `register_hook` does takes as long as all of the above. It counts its hooks from 0 on.
    with plainly():
        result._backward_hooks = hooks = OrderedDict()
    hooks[GOING_ON] = partial(_go_on, follower, place)
    return result


def valued(argument: Any) -> Any:
    """`argument` with values for pending tensors, in lists, tuples and dictionaries too."""
    return _mapped(argument, lambda one: one.follower.value(one.place) if isinstance(one, PendingTensor) else one)


def note_edit(arguments: tuple[Any, ...]) -> None:
    """A function that takes them may change them in place."""
    for argument in arguments:
        if isinstance(argument, PendingTensor):
            argument.is_edited = True


def unfollowed(argument: Any) -> Any:
    """`argument` with plain tensors for followed ones, in lists, tuples and dictionaries too."""
    with plainly():
        return _mapped(
            argument,
            lambda one: one.follower.value(one.place) if isinstance(one, PendingTensor) else one.as_subclass(Tensor),
        )


def _mapped(argument: Any, function: Callable[[FollowedTensor], Any]) -> Any:
    if isinstance(argument, FollowedTensor):
        return function(argument)
    kind = type(argument)
    if kind is dict:
        items = {name: _mapped(item, function) for name, item in argument.items()}
        return argument if all(items[name] is item for name, item in argument.items()) else items
    if kind is list or isinstance(argument, tuple):
        found = [_mapped(item, function) for item in argument]
        if all(map(operator.is_, found, argument)):
            return argument
        return kind(*found) if hasattr(argument, "_fields") else kind(found)
    return argument


def _go_on(follower: Follower, place: int, gradient: Tensor) -> None:
    """A hook of a pending tensor: what reaches it has come by a way that was not followed.

    More may come by the ways that were, or from another one: all of them go through the same nodes.
    """
    create_graph = torch.is_grad_enabled()  # as the backward pass does that has come here
    torch.autograd.backward(follower.value(place), gradient, retain_graph=True, create_graph=create_graph)


def _follower(arguments: tuple[Any, ...]) -> Follower | None:
    for argument in arguments:
        if isinstance(argument, FollowedTensor):
            return argument.follower
        if isinstance(argument, (list, tuple)):
            found = _follower(tuple(argument))
            if found is not None:
                return found
    return None


_METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "itemsize")
} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.element_size,
    Tensor.nelement,
    Tensor.ndimension,
    Tensor.__len__,
    Tensor.get_device,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""What tensors can tell of themselves without a value, and what tells nobody how to change them."""
