"""The graphs of a call, and the node of the user's autograd graph that replays them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from kitsune.capture.ambient import autocast_dtype
from kitsune.capture.layout import TensorLayout
from kitsune.capture.split_program import SplitProgram, without_tangents
from kitsune.errors import KitsuneError
from kitsune.execution.in_order import InOrder
from kitsune.execution.ownership import HandedOut
from kitsune.loop.following import SPENT, Following, Tail, Tails
from kitsune.loop.kept import Kept, can_go_back, is_freed
from kitsune.loop.recording import Recording
from kitsune.loop.tail_step import TailStep


class Listener(Protocol):
    """Is told of backward passes for which the captured one is no use."""

    def refuse_backward(self) -> None:
        """One is to be differentiated or batched."""

    def note_autocast(self, dtype: torch.dtype | None) -> None:
        """One ran while autocast computed in `dtype`; None outside of it."""


class CallGraphs:
    """The captured forward and backward pass of a call.

    Outputs belong to the user. Gradients alias the graph's memory where the graph keeps its outputs; while any of them
    is still referred to, the backward pass runs operator by operator into new memory instead.

    Args:
        program: the two passes.
        forward, backward: recordings of them; there is none of the backward pass where a recording keeps no memory.
        gradients: static gradients by address; entries are added here.
        stable: positions of inputs that stay the same tensors from call to call.
        again: runs the call once more, inside autograd; None where that would differ.
        step: is told; it is not kept alive.
        tail_step: replays backward passes from the loss on, if that is wanted.
    """

    def __init__(
        self,
        program: SplitProgram,
        forward: Recording,
        backward: Recording | None,
        gradients: dict[int, torch.Tensor],
        stable: Collection[int],
        again: fx.GraphModule | None,
        step: Listener,
        tail_step: TailStep | None,
    ) -> None:
        self.program = program
        self.tail_step = tail_step
        self._tails = Tails()
        self.forward = forward
        self.again = again
        self.stable = frozenset(stable)
        self._step = weakref.ref(step)
        self.copied_backwards = 0
        self.has_replayed_loss = False  # in the backward pass of the latest call
        self._backward = backward
        self._backwards_in_order = {frozenset[int](): InOrder(program.backward)}
        self._pending: weakref.ref[Any] | None = None
        self._gradients = gradients
        self._static = backward.executor.static_outputs() if backward is not None else []
        gradients.update((tensor.data_ptr(), tensor) for tensor in self._static)
        self._handed_out = HandedOut(self._static)

    def run_forward(self, flat: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs, the caller's to keep, and saved values."""
        values = list(self.forward(flat))
        count = len(self.program.differentiable)
        outputs = values[:count]
        if self.forward.executor.keeps_outputs:
            outputs = [output.clone() for output in outputs]
        return outputs, values[count:]

    def call(self, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The outputs of a call as the loop gets them."""
        return self._followed(_Replay.apply(self, *flat))  # type: ignore[no-untyped-call]

    def _followed(self, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.has_replayed_loss = False
        if self.tail_step is None or self._tails.are_refused():
            return outputs
        node = next(output.grad_fn for output in outputs if output.grad_fn is not None)
        following = Following(outputs, self._tails, _TailsOfCall(self, node))
        return following.outputs(self.program.differentiable)

    def replay_tail(
        self, node: Any, tail: Tail, outputs: Sequence[torch.Tensor], wanted: Sequence[int]
    ) -> Mapping[int, torch.Tensor] | None:
        """See `kitsune.loop.following.Backward`; `node` is the call's in autograd's graph."""
        assert self.tail_step is not None
        if autocast_dtype(outputs[0].device.type) is not None:
            return None
        try:
            saved = node.saved_tensors[: node.num_values]
        except RuntimeError:  # edited in place, or freed
            return None
        if node.static is not None:
            saved, outputs = node.static, self.forward.executor.static_outputs()[: len(outputs)]
        results = self.tail_step.replay(tail, saved, outputs, wanted)
        if results is not None:
            node.is_spent = self.has_replayed_loss = True
            self._drop_backward()
        return results

    def _drop_backward(self) -> None:
        """Gives up the graph of backward passes from the outputs on: those from the loss on take its place."""
        if self._backward is None or self._handed_out.in_use():
            return
        self._backward.release()
        self._backward = None
        for tensor in self._static:
            self._gradients.pop(tensor.data_ptr(), None)
        self._static = []
        self._handed_out = HandedOut([])

    def divide(self, flat: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The stable inputs, and the arguments, of a call that may have to be run again; none of one that cannot be."""
        if self.again is None:
            return [], []
        stable = [tensor for place, tensor in enumerate(flat) if place in self.stable]
        return stable, [tensor for place, tensor in enumerate(flat) if place not in self.stable]

    def unite(self, stable: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of a call that was divided."""
        parts = iter(stable), iter(arguments)
        count = len(stable) + len(arguments)
        return [next(parts[place not in self.stable]) for place in range(count)]

    def run_backward(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs at `program.gradient_places`; None for those that depend on unused outputs only."""
        layouts = self.program.tangents
        dense = [_in_layout(tangent, layout) for tangent, layout in zip(tangents, layouts, strict=True)]
        inputs = [*saved, *dense]
        missing = frozenset(index for index, tangent in enumerate(tangents) if tangent is None)
        if self._backward is not None and not missing and not self._handed_out.in_use():
            grads = self._backward(inputs)
        else:
            self.copied_backwards += self._backward is not None and not missing
            grads = self._in_order(missing)(inputs)
        return [
            None if needs and needs <= missing else grad.detach()
            for grad, needs in zip(grads, self.program.depends, strict=True)
        ]

    def _in_order(self, missing: frozenset[int]) -> InOrder:
        if missing not in self._backwards_in_order:
            self._backwards_in_order[missing] = InOrder(without_tangents(self.program.backward, missing))
        return self._backwards_in_order[missing]

    def refuse_backward(self) -> None:
        """A backward pass is to be differentiated or batched.

        Raises:
            KitsuneError: there is no way to do that.
        """
        if (step := self._step()) is not None:
            step.refuse_backward()
        if self.again is None:
            raise KitsuneError(
                "create_graph or is_grads_batched came after a replay that cannot be repeated (random numbers, buffers "
                "or autocast); later calls of this model run eagerly, or use mode='eager' from the beginning"
            )

    def suits_autocast(self, kind: str) -> bool:
        """Whether the captured backward pass is what autograd would run now."""
        dtype = autocast_dtype(kind)
        if dtype == self.program.autocast:
            return True
        if (step := self._step()) is not None:
            step.note_autocast(dtype)
        return False

    def backward_again(
        self, flat: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """As `run_backward`, from the inputs of the call and by autograd, as it would at present."""
        assert self.again is not None
        with torch.enable_grad(), torch.autocast(flat[0].device.type, enabled=False):
            outputs = self.again(*flat)
        roots = [output for output, needs in zip(outputs, self.program.differentiable, strict=True) if needs]
        used = [index for index, tangent in enumerate(tangents) if tangent is not None]
        inputs = [flat[place] for place in self.program.gradient_places]
        weights = [tangents[index] for index in used]
        return list(
            torch.autograd.grad(
                [roots[index] for index in used],
                inputs,
                weights,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        )

    def is_pending(self) -> bool:
        """Whether the saved values of the last call may still be needed by its backward pass.

        Where a part of it ran already, and another may follow, they get memory of their own.
        """
        context = None if self._pending is None else self._pending()
        if context is None or context.is_spent or not self.forward.executor.keeps_outputs:
            return False
        if context.kept is None:
            return can_go_back(context)
        if not is_freed(context):
            return True
        if not context.kept.is_over():
            with torch.no_grad():
                context.static, self._pending = [tensor.clone() for tensor in context.static], None
        return False

    def now_pending(self, context: Any) -> None:
        self._pending = weakref.ref(context)

    def release(self) -> None:
        for tensor in self._static:
            self._gradients.pop(tensor.data_ptr(), None)
        if not self.is_pending():
            self.forward.release()
            if self._backward is not None:
                self._backward.release()
            if self.tail_step is not None:
                self.tail_step.release()


class _TailsOfCall:
    """Replays what follows one call; see `kitsune.loop.following.Backward`."""

    def __init__(self, graphs: CallGraphs, node: Any) -> None:
        self._graphs, self._node = graphs, node

    def accepts(self, tail: Tail) -> bool:
        return self._graphs.tail_step is not None and self._graphs.tail_step.accepts(tail)

    def replay(
        self, tail: Tail, outputs: Sequence[torch.Tensor], wanted: Sequence[int]
    ) -> Mapping[int, torch.Tensor] | None:
        return self._graphs.replay_tail(self._node, tail, outputs, wanted)


class _Replay(torch.autograd.Function):
    """A node of the user's autograd graph that stands for a whole call of the module."""

    @staticmethod
    def forward(ctx: Any, graphs: CallGraphs, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved = graphs.run_forward(flat)
        ctx.graphs = graphs
        ctx.is_spent = False  # set when a replay has done what `backward` would
        ctx.num_inputs = len(flat)
        stable, arguments = graphs.divide(flat)
        ctx.stable = stable
        ctx.set_materialize_grads(False)
        differentiable = graphs.program.differentiable
        ctx.mark_non_differentiable(
            *(output for output, needs in zip(outputs, differentiable, strict=True) if not needs)
        )
        program = graphs.program
        ctx.static = saved if graphs.forward.executor.keeps_outputs else None
        values = saved if ctx.static is None else []
        checked = [flat[place] for place in program.saved_inputs]
        ctx.num_values, ctx.num_saved = len(values), len(values) + len(checked)
        ctx.versions = [(weakref.ref(tensor), tensor._version) for tensor in (*stable, *arguments)]
        # Eager may not need the arguments afterwards, so the user may edit them: `.data` has a version of its own.
        again = [tensor if tensor.requires_grad else tensor.data for tensor in arguments]
        ctx.save_for_backward(*values, *checked, *again)
        ctx.kept = None
        if len(set(program.groups)) > 1:
            of_values, of_checked = program.readers[: len(saved)], program.readers[len(saved) :]
            readers = [*(of_values if ctx.static is None else ()), *of_checked, *(frozenset[int]() for _ in again)]
            ctx.kept = Kept(program.groups, [*values, *checked, *again], readers)
        graphs.now_pending(ctx)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        graphs: CallGraphs = ctx.graphs
        differentiable = graphs.program.differentiable
        given = [tangent for tangent, needs in zip(tangents, differentiable, strict=True) if needs]
        saved = _saved(ctx, given)
        values, arguments = saved[: ctx.num_values], saved[ctx.num_saved :]
        is_again = torch.is_grad_enabled() or any(tangent is not None and _is_batched(tangent) for tangent in given)
        if is_again:
            graphs.refuse_backward()
        elif not graphs.suits_autocast(graphs.program.tangents[0].device.type):
            is_again = graphs.again is not None and not _were_edited(ctx.versions)
        if is_again:
            if _were_edited(ctx.versions):
                raise KitsuneError("an input of the model was edited before its backward pass had to run again")
            grads = graphs.backward_again(graphs.unite(ctx.stable, arguments), given)
        else:
            grads = graphs.run_backward(values if ctx.static is None else ctx.static, given)
        result: list[torch.Tensor | None] = [None] * (ctx.num_inputs + 1)
        for place, grad in zip(graphs.program.gradient_places, grads, strict=True):
            result[place + 1] = grad
        return tuple(result)


def _saved(ctx: Any, tangents: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
    """What was saved for a backward pass that starts from the outputs with `tangents`.

    Raises:
        RuntimeError: an input was edited in place, or the backward pass ran already.
    """
    if ctx.is_spent:
        raise RuntimeError(SPENT)
    if ctx.kept is None:
        saved: Sequence[torch.Tensor] = ctx.saved_tensors
        return saved
    return ctx.kept.take(ctx, {index for index, tangent in enumerate(tangents) if tangent is not None})  # type: ignore[no-any-return]


def _in_layout(tangent: torch.Tensor | None, layout: TensorLayout) -> torch.Tensor:
    if tangent is None:
        return layout.empty().zero_()
    if tangent.stride() == layout.stride:
        return tangent
    return layout.empty().copy_(tangent)


def _were_edited(versions: Sequence[tuple[weakref.ref[torch.Tensor], int]]) -> bool:
    return any((tensor := reference()) is not None and tensor._version != version for reference, version in versions)


def _is_batched(tangent: torch.Tensor) -> bool:
    functorch = torch._C._functorch  # vmap has no public test for its tensors
    return functorch.is_batchedtensor(tangent) or functorch.is_legacy_batchedtensor(tangent)
