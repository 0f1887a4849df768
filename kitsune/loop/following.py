"""What the loop does between a replayed call and `backward()`: followed, and replayed as well once it comes back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kitsune.capture.detours import go_on_from_detours
from kitsune.capture.following import FollowedTensor, PendingTensor, followed, note_edit, pending, plainly, valued
from kitsune.capture.layout import TensorLayout
from kitsune.capture.operations import Operation, described
from kitsune.capture.watch import is_watched
from kitsune.device import on_stream, stream_reader
from kitsune.execution.copier import Copier

_MOST_TAILS = 4

# Of the getters of attributes, these compute; whoever uses the others may change the tensor unseen.
VIEWS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}

_REVEALING = {
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.storage,
    Tensor.apply_,
    Tensor.map_,
    Tensor.__setitem__,
    torch.autograd.grad,
}
"""Whoever calls them may change the tensor, or its gradient, unseen."""

_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.detach,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__index__,
}
"""Their results have no gradient."""

_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_IN_PLACE = {f"__i{name}__" for name in _OPERATORS}

AS_PLAIN = {Tensor.__repr__, Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__format__}
"""They tell of the class."""

SPENT = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an output of the "
    "model was written to after something was computed from it"
)


_ERRORS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
"""What functions of torch raise for values that they do not take."""


@dataclass(eq=False)
class Tail:
    """What a loop has done with the outputs of a call, up to the backward pass of a loss.

    Attributes:
        operations: the calls of torch's functions whose results need a gradient, in their order.
        layouts: of their results.
        is_view: for each, whether the result lies in the memory of an output; it is computed at once.
        copiers: for each operation, of its tensors that are not followed, to memory of the tail's own.
        root: the place of the loss: an output's index, or that of an operation, counted from the number of outputs.
        refused: whether it cannot be replayed.
    """

    operations: list[Operation] = field(default_factory=list)
    layouts: list[TensorLayout] = field(default_factory=list)
    is_view: list[bool] = field(default_factory=list)
    copiers: list[list[Copier]] = field(default_factory=list)
    root: int = 0
    refused: bool = False

    @property
    def given(self) -> list[list[Tensor]]:
        """That memory."""
        return [[one.memory for one in own] for own in self.copiers]

    def beginning(self, count: int) -> Tail:
        """The first so many operations, to be gone on with in another way."""
        return Tail(self.operations[:count], self.layouts[:count], self.is_view[:count], self.copiers[:count])

    def continues(self, index: int, operation: Operation) -> bool:
        """Whether `operation` was the one at `index`."""
        return not self.refused and index < len(self.operations) and self.operations[index] == operation


class Tails:
    """What was done with outputs of earlier calls, and whose call uses the memory of the `given` tensors at present.

    Args:
        layouts: of the outputs.
    """

    def __init__(self, layouts: Sequence[TensorLayout]) -> None:
        self.layouts, self.device = layouts, layouts[0].device
        self.kind, self.current_stream = self.device.type, stream_reader(self.device)
        self.known: tuple[Tail, ...] = ()
        self._user: weakref.ref[Following] | None = None

    def are_usable(self) -> bool:
        """Whether there are some that can be replayed."""
        return False in [tail.refused for tail in self.known]

    def settle(self) -> None:
        """Has the user's call run, if that was put off and somebody may still ask for its outputs."""
        if self._user is None:
            return
        user = self._user()
        if user is not None and user.is_put_off:
            user.close()

    def take_back(self, user: Following) -> None:
        """The memory is nobody's, if it was lent to `user`."""
        if self._user is not None and self._user() is user:
            self._user = None

    def lend(self, user: Following) -> None:
        """Gives `user` the memory; whoever had it computes what needs it, and leaves the rest to autograd."""
        before = None if self._user is None else self._user()
        if before is user:
            return
        if before is not None:
            before.close()
        self._user = weakref.ref(user)


class EditedError(RuntimeError):
    """A call that was put off cannot run any more: what it was to read has been written to."""


class FollowedCall(Protocol):
    """A call, and the backward passes of losses at the ends of its tails."""

    def outputs(self) -> Sequence[Tensor]:
        """As autograd knows them. A call that was put off runs now.

        Raises:
            EditedError: it cannot.
        """

    def keep(self) -> None:
        """Lets several backward passes go through the call, whichever comes first. It runs now, if it was put off."""

    def accepts(self, tail: Tail) -> bool:
        """Whether a tail can be replayed: it does the same with whatever values."""

    def replay(self, tail: Tail, wanted: Sequence[int]) -> Mapping[int, Tensor] | None:
        """The results at the root and at the places `wanted`, the caller's own; None, with nothing done, if it cannot.

        Parameters have their gradients afterwards.
        """


class Following:
    """Follows the outputs of one call.

    The first time that the loop does something with them, it is done at once, and remembered. When it does the same
    the next time, nothing is computed until `backward()`, which replays it with the backward pass, or until somebody
    asks for a value. Whatever was never done before is done at once.

    Args:
        call: the call.
        tails: what was done with outputs of earlier calls; added to.
    """

    def __init__(self, call: FollowedCall, tails: Tails) -> None:
        self._tails = tails
        self._call: FollowedCall | None = call
        self._layouts = tails.layouts
        self._outputs: Sequence[Tensor] = ()  # until the call has run
        self._stream = tails.current_stream()
        self._values: dict[int, Tensor] = {}
        self._candidates: Sequence[Tail] = tails.known  # begin with what has been done
        self._done = self._candidates[0] if self._candidates else Tail()  # begins with it, and is it without candidates
        self._num_done = 0
        self._versions: dict[int, int] = {}
        self._pending: dict[int, weakref.ref[PendingTensor]] = {}
        self._is_open = True
        self._is_spent = False
        self._without_gradient: set[int] = set()  # of the results of a replayed backward pass, those nobody has had
        self._failure: Exception | None = None  # why there are no results

    def outputs(self, differentiable: Sequence[bool]) -> list[Tensor]:
        """The outputs as the loop gets them. The call runs now, or has run."""
        self._run_call()
        pairs = enumerate(zip(self._outputs, differentiable, strict=True))
        return [self._followed(place, output) if needs else output for place, (output, needs) in pairs]

    @property
    def is_put_off(self) -> bool:
        """Whether its call has not run."""
        return self._call is not None and not self._outputs

    def pending_outputs(self) -> list[Tensor]:
        """Outputs of a call that has been put off, as the loop gets them; all of them have a gradient."""
        return [self._awaited(place, layout) for place, layout in enumerate(self._layouts)]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if function is Tensor.backward:
            return self.backward(*args, **kwargs)
        is_recorded = torch.is_grad_enabled()
        if not is_recorded:  # inside of an `autograd.Function`, perhaps
            self.reveal()
        if not self._is_open:
            return self._run(function, args, kwargs)
        if is_watched() or self._tails.current_stream() != self._stream:
            self.close()
            return self._run(function, args, kwargs)
        known = self._known(function, args, kwargs) if is_recorded else None
        if known is not None:
            return self._defer(known)
        if _may_change(function, kwargs):
            self.close()
            return self._run(function, args, kwargs)
        found = described(function, args, kwargs, self, self._tails.kind) if is_recorded else None
        if found is None:
            return self._with_aliases(self._run(function, args, kwargs))
        operation, given = found
        kept = [tensor.clone() for tensor in given]
        result = self._run(function, args, kwargs)
        if type(result) is not Tensor or not result.requires_grad:
            return self._with_aliases(result)
        if not all(map(torch.equal, kept, given)):  # batch norm, for one, writes without counting
            self._is_open = False
            return result
        if self._candidates:
            self._candidates, self._done = (), self._done.beginning(self._num_done)
        self._compute()
        self._is_open = len(self._tails.known) < _MOST_TAILS and self._is_unchanged()
        if not self._is_open:
            return result
        place = self._note(operation, TensorLayout.of(result), self._is_alias(result), list(map(Copier, kept)))
        return self._followed(place, result)

    def value(self, place: int) -> Tensor:
        """The plain tensor at a place, computed now if it has not been before."""
        if place < len(self._layouts):
            self._run_call()
        elif place not in self._values:
            self._compute()
        if place in self._without_gradient and torch.is_grad_enabled():
            self._without_gradient.remove(place)
            value = self._values[place].data  # with a version of its own: somebody may have saved the other
            self._values[place] = _Spent.apply(value, torch.empty((), requires_grad=True))  # type: ignore[no-untyped-call]
        return self._values[place]

    def reveal(self) -> None:
        go_on_from_detours()
        if self._call is not None:
            self._run_call()
            self._call.keep()

    def close(self) -> None:
        """Computes what is pending, and follows no further. What cannot be computed raises when asked for.

        Not here: this may be in the midst of another batch's call, as after an error that the loop has caught.
        """
        if self._is_open or self.is_put_off:
            try:
                self._compute()
            except _ERRORS as error:
                self._failure = error
            self._is_open = False

    def _known(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Tensor] | None:
        """The tensors that a call is given, if it is how known tails go on; they alone are candidates then."""
        index, kind = self._num_done, self._tails.kind
        for tail in self._candidates:
            if tail.refused or index >= len(tail.operations):
                continue
            given = tail.operations[index].given_again(function, args, kwargs, self, kind)
            if given is not None:
                self._done = tail
                if len(self._candidates) > 1:
                    self._candidates = [one for one in self._candidates if one.continues(index, tail.operations[index])]
                return given
        return None

    def _defer(self, given: list[Tensor]) -> Tensor:
        """The result of the next operation of known tails, as a tensor without a value."""
        tail, index = self._done, self._num_done
        operation, is_view, own = tail.operations[index], tail.is_view[index], tail.copiers[index]
        if is_view and not operation.places() <= self._values.keys():
            self._compute()
        self._tails.lend(self)
        _fill(own, given)
        for other in self._candidates:
            if other.copiers[index] is not own:  # tails that go on from one another have this memory in common
                _fill(other.copiers[index], given)
        self._num_done += 1
        place = len(self._layouts) + index
        if is_view:
            with plainly():
                return self._followed(place, operation.run(self._values, _copies(own)))
        return self._awaited(place, tail.layouts[index])

    def _awaited(self, place: int, layout: TensorLayout) -> Tensor:
        """A tensor to be computed later."""
        result = pending(layout, self, place)
        self._pending[place] = weakref.ref(result)
        return result

    def _run_call(self) -> None:
        """Has the call run, if it has not."""
        if not self.is_put_off:
            return
        with on_stream(self._stream, self._tails.device):
            if is_watched() or torch._C._len_torch_function_stack() > 0:
                with ThreadPoolExecutor(1) as other:  # no mode or hook that was entered since reaches another thread
                    self._outputs = other.submit(self._run_plainly).result()
            else:
                self._outputs = self._run_plainly()
        for place, output in enumerate(self._outputs):
            self._values[place], self._versions[place] = output, output._version

    def _run_plainly(self) -> Sequence[Tensor]:
        """The outputs of the call, in a thread that may have streams of its own."""
        assert self._call is not None
        with on_stream(self._stream, self._tails.device), plainly(), torch.inference_mode(False):
            return self._call.outputs()

    def _note(self, operation: Operation, layout: TensorLayout, is_view: bool, copiers: list[Copier]) -> int:
        """The place of the result."""
        done = self._done
        done.operations.append(operation)
        done.layouts.append(layout)
        done.is_view.append(is_view)
        done.copiers.append(copiers)
        self._num_done += 1
        return len(self._layouts) + self._num_done - 1

    def _followed(self, place: int, result: Tensor) -> Tensor:
        """As the loop gets it. What is computed from it goes through its hooks."""
        given = followed(result, self, place)
        with plainly():
            self._values[place] = given.as_subclass(Tensor)
        self._versions[place] = result._version
        return given

    def _with_aliases(self, result: Any) -> Any:
        """`result`; where it lies in the memory of an output, it is followed: who writes to it would change those."""
        if isinstance(result, Tensor):
            return followed(result, self, None) if type(result) is Tensor and self._is_alias(result) else result
        if type(result) in (list, tuple):
            return type(result)(map(self._with_aliases, result))
        return result

    def _is_alias(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        memory = tensor.untyped_storage().data_ptr()
        return any(memory == output.untyped_storage().data_ptr() for output in self._outputs)

    def _compute(self) -> None:
        """All results that have not been computed yet."""
        done, count = self._done, self._num_done
        if len(self._values) == len(self._layouts) + count:
            return
        if self._failure is not None:  # what was given has been overwritten since
            raise self._failure.with_traceback(None)
        if not self._is_unchanged():
            raise RuntimeError(CHANGED)
        self._run_call()
        with plainly(), torch.inference_mode(False):
            for index, operation, copiers in zip(range(count), done.operations, done.copiers, strict=False):
                place = len(self._layouts) + index
                if place not in self._values:
                    self._values[place] = operation.run(self._values, _copies(copiers))
                    self._versions[place] = self._values[place]._version

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with plainly():
            if function in _READS:
                with torch.no_grad():
                    return function(*valued(args), **valued(kwargs))
            if _may_change(function, kwargs):
                note_edit((*args, *kwargs.values()))
            args, kwargs = valued(args), valued(kwargs)
            if function in AS_PLAIN:
                args = (args[0].as_subclass(Tensor), *args[1:])
            return function(*args, **kwargs)

    def _is_unchanged(self) -> bool:
        """Whether nobody has written to a value since it was there."""
        return False not in [self._values[place]._version == version for place, version in self._versions.items()]

    def backward(
        self,
        loss: FollowedTensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if self._is_spent:
            raise RuntimeError(SPENT)
        is_usual = gradient is None and not retain_graph and not create_graph and inputs is None
        is_here = loss.follower is self and self._tails.current_stream() == self._stream
        root = -1 if loss.place is None else loss.place
        if self._is_open and is_usual and is_here and self._is_unchanged():
            for tail in self._candidates:
                is_done = not tail.refused and tail.root == root and len(tail.operations) == self._num_done
                if is_done and self._replay(tail):
                    return
        if self._is_open and self._alive():  # of which there is nothing to compute the values from afterwards
            self._compute()
        self._is_open, is_followed = False, self._is_open and is_usual
        with plainly():
            valued(loss).backward(gradient, retain_graph, create_graph, inputs)
        if is_followed and not self._candidates and len(self._tails.known) < _MOST_TAILS:
            assert self._call is not None
            self._done.root = root
            self._done.refused = not self._call.accepts(self._done)
            self._tails.known = (*self._tails.known, self._done)
        self._end(self._alive())

    def _replay(self, tail: Tail) -> bool:
        assert self._call is not None
        alive = self._alive()
        wanted = [place for place in alive if place != tail.root and place not in self._values]
        results = self._call.replay(tail, wanted)
        if results is None:
            return False
        values = {place: value.detach() for place, value in self._values.items()}
        self._values = {**results, **values}
        self._end(alive)
        self._is_spent, self._without_gradient = True, set(self._values)
        return True

    def _alive(self) -> list[int]:
        """The places of pending tensors that somebody still has."""
        return [place for place, reference in self._pending.items() if reference() is not None]

    def _end(self, alive: Sequence[int]) -> None:
        """Lets go of all but the results that somebody still has."""
        self._values = {place: self._values[place] for place in alive if place in self._values}
        self._versions = {}
        self._tails.take_back(self)
        self._is_open, self._call = False, None
        self._outputs, self._done, self._candidates, self._num_done = (), _NOTHING, (), 0


_NOTHING = Tail()


def _fill(copiers: Sequence[Copier], given: Sequence[Tensor]) -> None:
    for copy_in, tensor in zip(copiers, given, strict=True):
        copy_in(tensor)


def _copies(copiers: Sequence[Copier]) -> list[Tensor]:
    """Of what was copied, for autograd to keep: the memory is for the next call."""
    return [one.memory.clone() for one in copiers]


def _may_change(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function may write to a tensor, or let the caller do it."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return function not in VIEWS
    writes = name == "__set__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return writes or "out" in kwargs or bool(kwargs.get("inplace")) or function in _REVEALING


class _Spent(torch.autograd.Function):
    """A result whose backward pass has run: it needs a gradient, as `anchor` does, and has none any more."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(value)  # it is the same tensor from then on, which may be edited
        return value

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> None:
        raise RuntimeError(SPENT)
