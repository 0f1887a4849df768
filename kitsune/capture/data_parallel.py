"""What a `DistributedDataParallel` does around its module, and how gradients are averaged in place of its reducer.

None of that has a public reader in `torch`; this module is where it is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from kitsune.errors import Refusal, first_line
from kitsune.kernels.casts import is_dense
from kitsune.kernels.pack_bucket import Ready, pack_bucket
from kitsune.native.facts import Fact, attribute, result

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)  # which may be `sparse`; the reducer asks them, too
_GONE = Refusal("the DistributedDataParallel is gone")
_HOOKED = Refusal("the DistributedDataParallel has a communication hook, which its reducer calls")


def refuse_reducer(wrapper: DistributedDataParallel) -> Refusal | None:
    """None if `wrapper` reduces gradients as they arrive at the parameters, however they have been computed."""
    place = "the DistributedDataParallel"
    if wrapper.find_unused_parameters or wrapper.static_graph:
        name = "static_graph" if wrapper.static_graph else "find_unused_parameters"
        problem = f"{place} has {name}: it looks at autograd's graph, of which a replay is one node"
        return Refusal(problem, remedy=f"{name}=False")
    if wrapper._delay_all_reduce_params:
        problem = f"{place} has delay_all_reduce_named_params, and sends their gradients at that of another parameter"
        return Refusal(f"{problem}, which in a replay may come before theirs")
    if wrapper.mixed_precision is not None or wrapper._use_python_reducer:
        return Refusal(f"{place} casts parameters or has hooks on them, which a replay would not run")
    return None


def active_wrapper() -> DistributedDataParallel | None:
    """The one that is calling its module at present."""
    return DistributedDataParallel._active_ddp_module  # Dynamo's own way to know


def is_reduced() -> bool:
    """Whether a `DistributedDataParallel` is calling its module at present."""
    return active_wrapper() is not None


def reduced_facts() -> list[Fact]:
    """What must stay for `is_reduced` to answer as it does. They keep no wrapper alive."""
    return [result(is_reduced)] if is_reduced() else [attribute(DistributedDataParallel, "_active_ddp_module")]


def bucket_bytes() -> int | None:
    """In how many bytes of gradients at a time the `DistributedDataParallel` that is calling its module sends them."""
    wrapper = active_wrapper()
    return None if wrapper is None else int(wrapper.bucket_bytes_cap)


class _Slot(NamedTuple):
    """Where the gradient of a parameter, which is known by its `id`, lies in a bucket, and as what."""

    param: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """The dimensions, from that with the greatest stride on."""
        return sorted(range(len(self.size)), key=lambda place: self.stride[place], reverse=True)


class Buckets:
    """The flat tensors in which a reducer sums gradients up, one after the other: the same ones in all processes.

    Args:
        wrapper: has rebuilt its buckets, and leaves them as they are from now on.

    Attributes:
        params: whose gradients they hold, by `id`.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._slots: list[list[_Slot]] = []
        for bucket in wrapper.reducer._get_zeros_like_grad_buckets():
            places = zip(bucket.parameters(), bucket.gradients(), strict=True)
            slots = [_Slot(id(param), int(at.storage_offset()), param.shape, param.stride()) for param, at in places]
            if not all(map(is_dense, bucket.parameters())):
                raise ValueError("a parameter has gaps between its elements")
            self._slots.append(slots)
        self.params = frozenset(slot.param for slots in self._slots for slot in slots)
        self._share = 1 / dist.get_world_size(wrapper.process_group)
        on_cuda = wrapper.device_type == "cuda"
        self._ready = [Ready() if on_cuda else None for _ in self._slots]
        self._stream = torch.cuda.Stream(next(wrapper.parameters()).device) if on_cuda else None

    def packed(self, grads: Mapping[int, Tensor]) -> list[Tensor]:
        """What each bucket sums up: the share of this process, whose gradients are given by `id` of their parameters.

        As the reducer does, these are multiplied before they are summed up. It may be traced.
        """
        return [
            pack_bucket([grads[slot.param] for slot in slots], [slot.order for slot in slots], self._share, ready)
            for slots, ready in zip(self._slots, self._ready, strict=True)
        ]

    def sum_up(self, buckets: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Sums up what has been packed over all processes, each bucket as soon as it is there."""
        if self._stream is None:
            for bucket in buckets:
                dist.all_reduce(bucket, group=group)
            return
        with torch.cuda.stream(self._stream):
            for bucket, ready in zip(buckets, self._ready, strict=True):
                assert ready is not None
                self._stream.wait_event(ready.event)
                dist.all_reduce(bucket, group=group)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def unpacked(self, buckets: Sequence[Tensor]) -> dict[int, Tensor]:
        """The gradients in `buckets`, as views of them, by `id` of their parameters."""
        return {
            slot.param: bucket.as_strided(slot.size, slot.stride, bucket.storage_offset() + slot.offset)
            for bucket, slots in zip(buckets, self._slots, strict=True)
            for slot in slots
        }


class Reduction:
    """Averages gradients over the processes of a `DistributedDataParallel` where they reach no node of autograd's.

    After a call that is to be followed by a reduction, the wrapper arms its reducer: the gradients that come next to
    autograd's nodes are reduced, and disarm it. Replays that leave gradients in `.grad` themselves come to none. So the
    reducer must not be armed before them, or it would reduce in a later backward pass that nobody wants to be reduced:
    arming is put off, until either gradients have been averaged here, or some are about to come to the nodes.

    The collective operations are those of the reducer in its order: the other processes may run either.

    Attributes:
        may_be_armed: whether the reducer is armed, as far as is known.
        is_owed: whether it would be, if that had not been put off: the next gradients are to be averaged.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.may_be_armed, self.is_owed = True, False
        self._wrapper = weakref.ref(wrapper, self._forget)
        nodes = [get_gradient_edge(param).node for param in wrapper.parameters() if param.requires_grad]
        self._hooks = [node.register_prehook(self._expect) for node in nodes]  # the reducer keeps the nodes
        self._buckets: Buckets | None = None
        self._left_alone: Refusal | None = None  # the reducer is, for good

    @classmethod
    def of(cls, wrapper: DistributedDataParallel) -> Reduction:
        """The one for `wrapper`, whoever asks."""
        if wrapper not in _reductions:
            _reductions[wrapper] = cls(wrapper)
        return _reductions[wrapper]

    @property
    def buckets(self) -> Buckets:
        """Those of the gradients that are owed."""
        assert self._buckets is not None
        return self._buckets

    def refuse(self) -> Refusal | None:
        """None if the reducer does no more than to average gradients."""
        wrapper = self._wrapper()
        if wrapper is None:
            return _GONE
        if not wrapper._has_rebuilt_buckets:
            self._buckets = None
        if self._left_alone is None:
            self._left_alone = self._look_at(wrapper)
        return self._left_alone

    def _look_at(self, wrapper: DistributedDataParallel) -> Refusal | None:
        if wrapper.gradient_as_bucket_view:
            return Refusal("the DistributedDataParallel has gradient_as_bucket_view: its reducer sets the gradients")
        if wrapper._comm_hooks:
            return _HOOKED
        if wrapper._join_config.enable:
            return Refusal("the DistributedDataParallel joins processes with fewer batches: its reducer counts them")
        if self._buckets is None and wrapper._has_rebuilt_buckets:
            if "comm_hook" in wrapper._get_ddp_logging_data():  # one of torch's own
                return _HOOKED
            if any(isinstance(part, _EMBEDDINGS) and part.sparse for part in wrapper.module.modules()):
                return Refusal("the buckets of the DistributedDataParallel are left to it: gradients are sparse")
            try:
                self._buckets = Buckets(wrapper)
            except (ValueError, RuntimeError) as error:  # there is too little memory, say
                return Refusal(f"the buckets of the DistributedDataParallel are left to it: {first_line(error)}")
        return None

    def begin(self, trained: Collection[int] = ()) -> None:
        """A call is being replayed, of which the parameters `trained`, by `id`, may get gradients without any node."""
        wrapper = active_wrapper()
        if wrapper is None:
            return
        if wrapper is not self._wrapper():  # but another one that the module was given to since
            self.may_be_armed = True
            return
        _put_back(wrapper)
        if self.refuse() is not None or self._buckets is None:
            self.arm()
        if not wrapper.require_backward_grad_sync:
            return
        if self.may_be_armed or self.buckets.params != trained:
            self.may_be_armed, self.is_owed = True, False
        else:
            wrapper.reducer = _Unarmed(self, wrapper.reducer)  # type: ignore[assignment]

    def begin_plainly(self) -> None:
        """A call runs as it is: its gradients come to nodes of which nobody tells here."""
        self.refuse()
        self.arm()

    def arm(self) -> None:
        """Arms the reducer if that is owed; from now on it may be armed."""
        self.may_be_armed = True
        wrapper = self._wrapper()
        if wrapper is None:
            return
        _put_back(wrapper)
        if self.is_owed:
            self.is_owed = False
            wrapper.reducer.prepare_for_backward([])

    def go_back(self, node: Any) -> None:
        """`node`, in which gradients of all parameters are about to be computed for autograd, goes back."""
        self._expect()
        if self.may_be_armed and _reaches_all(node):
            Variable._execution_engine.queue_callback(self._disarmed)  # where no hook raises

    def _expect(self, *_gradients: object) -> None:
        """Gradients are about to come to nodes of parameters, perhaps past those of replayed calls."""
        if self.is_owed:
            self.arm()

    def _disarmed(self) -> None:
        self.may_be_armed = False

    def _forget(self, _wrapper: object) -> None:
        """Its reducer is gone with the wrapper: nothing is reduced any more."""
        self.may_be_armed = self.is_owed = False
        for hook in self._hooks:
            hook.remove()

    def average(self, buckets: Sequence[Tensor]) -> None:
        """Sums up what has been packed over all processes, in its place."""
        wrapper = self._wrapper()
        assert wrapper is not None
        self.is_owed = False
        self.buckets.sum_up(buckets, wrapper.process_group)

    def average_gradients(self, params: Sequence[Tensor]) -> None:
        """Averages what is in `.grad` of all that the buckets are for, in place: sums of several backward passes."""
        grads = {id(param): param.grad for param in params if param.grad is not None}
        with torch.no_grad():
            buckets = self.buckets.packed(grads)
            self.average(buckets)
            averaged = self.buckets.unpacked(buckets)
            torch._foreach_copy_(list(grads.values()), [averaged[param] for param in grads])


class _Unarmed:
    """Stands in for the reducer of a wrapper until it would be armed, at the end of the call."""

    def __init__(self, reduction: Reduction, reducer: Any) -> None:
        self.reduction, self.reducer = reduction, reducer

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        wrapper = self.reduction._wrapper()
        assert wrapper is not None and not outputs
        wrapper.reducer = self.reducer
        self.reduction.is_owed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


def _reaches_all(node: Any) -> bool:
    """Whether gradients go on from a node, which is going back, to all that follow it."""
    following = [one for one, _ in node.next_functions if one is not None]
    try:
        return all(map(torch._C._will_engine_execute_node, following))
    except RuntimeError:  # in torch.autograd.grad(): they go to no leaf
        return False


def _put_back(wrapper: DistributedDataParallel) -> None:
    """Lets `wrapper` have its reducer, if a call that was interrupted has left another one there."""
    if isinstance(wrapper.reducer, _Unarmed):
        wrapper.reducer = wrapper.reducer.reducer


def begin_unfollowed() -> None:
    """A call, perhaps of a wrapper, runs as it is, and nobody answers those of its module any more."""
    reduction = _reductions.get(wrapper) if (wrapper := active_wrapper()) is not None else None
    if reduction is not None:
        reduction.begin_plainly()


_reductions: weakref.WeakKeyDictionary[DistributedDataParallel, Reduction] = weakref.WeakKeyDictionary()
