"""The graphs of a call, and the node of the user's autograd graph that replays them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import fx

from kitsune.capture.ambient import autocast_dtype, regions_left
from kitsune.capture.data_parallel import Reduction
from kitsune.capture.layout import TensorLayout, cloned, copied
from kitsune.capture.partition import BackwardPart
from kitsune.capture.split_program import SplitProgram
from kitsune.engine.recording import Recording
from kitsune.errors import KitsuneError
from kitsune.graph import dataflow
from kitsune.loop.backward_graph import BackwardGraph, Record
from kitsune.loop.deferring import Deferral, DeferredCall
from kitsune.loop.following import SPENT, Following, Tail, Tails
from kitsune.loop.tail_step import TailStep
from kitsune.native.build import facts_type


class Listener(Protocol):
    """Is told of backward passes for which the captured one is no use."""

    def refuse_backward(self) -> None:
        """One is to be differentiated or batched."""

    def note_autocast(self, dtype: torch.dtype | None) -> None:
        """One ran while autocast computed in `dtype`; None outside of it."""

    def refuse_late_change(self) -> None:
        """What one reads of Python's objects has changed since the call."""


class CallGraphs:
    """The captured forward and backward pass of a call.

    Outputs belong to the user.

    Args:
        program: the two passes.
        forward: a recording of the forward pass.
        backwards: the parts of the backward pass, as in `program`.
        stable: positions of inputs that stay the same tensors from call to call.
        again: runs the call once more, inside autograd; None where that would differ.
        step: is told; it is not kept alive.
        tail_step: replays backward passes from the loss on, if that is wanted.
        reduction: is told of calls, and of backward passes through autograd's nodes.

    Attributes:
        has_replayed_loss: in the backward pass of the latest call.
        has_gone_back: by a node of autograd's graph, since counts were taken: else there is nothing to count or record.
    """

    def __init__(
        self,
        program: SplitProgram,
        forward: Recording,
        backwards: Sequence[BackwardGraph],
        stable: Collection[int],
        again: fx.GraphModule | None,
        step: Listener,
        tail_step: TailStep | None,
        reduction: Reduction | None,
    ) -> None:
        self.program = program
        self.reduction = reduction
        self.tail_step = tail_step
        self.forward = forward
        self.again = again
        self.stable = frozenset(stable)
        self._step = weakref.ref(step)
        self.has_replayed_loss = False
        self.has_gone_back = False
        late = program.late_reads
        self._late = facts_type()(late.alone) if late.alone or late.shared else None
        self._late_shared = facts_type()(late.shared)
        self._backwards = backwards
        self._outputs = [place for place, needs in enumerate(program.differentiable) if needs]  # of the first roots
        layouts = [TensorLayout.of(node.meta["val"]) for node in dataflow.outputs(program.forward.graph) if node]
        self._tails = Tails(layouts[: len(program.differentiable)])
        # Nodes of several wrapped modules must be made in the order of the calls: they send gradients in that order.
        self._deferral = None if tail_step is None or reduction is not None else Deferral(tail_step, self.stable)
        self._contexts: list[weakref.ref[Any]] = []  # the nodes of the latest call

    def call(self, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The outputs of a call as the loop gets them."""
        self.has_replayed_loss = False
        tails = self._tails
        if self.reduction is not None:
            self.reduction.begin(self.tail_step.trained if self.tail_step is not None and tails.are_usable() else ())
        if self._deferral is not None and self._deferral.may_begin(tails):
            self._contexts = []
            following = Following(DeferredCall(self, self._deferral, flat), tails)
            tails.lend(following)
            return following.pending_outputs()
        followed = self.call_now(flat)
        if self.tail_step is None or (tails.known and not tails.are_usable()):
            return followed.outputs()
        return Following(followed, tails).outputs(self.program.differentiable)

    def call_now(self, flat: Sequence[torch.Tensor]) -> _FollowedCall:
        """Runs a call."""
        run = _Run(flat, [*flat, *[None] * len(self.program.tangents)])
        self._contexts = []
        for graph in reversed(self._backwards):
            inputs = [run.ends[place] for place in graph.part.gradient_places]
            results = _Replay.apply(self, graph, run, *inputs)  # type: ignore[no-untyped-call]
            self._link(run, graph.part.roots, results)
        return _FollowedCall(self, run.outputs, self._contexts[0]())

    def run_forward(self, run: _Run) -> None:
        """Runs the forward pass. To be called where autograd records nothing."""
        values = list(self.forward(run.flat))
        count = len(self.program.differentiable)
        run.outputs, run.saved = values[:count], values[count:]
        if self.forward.executor.keeps_outputs:
            run.outputs = list(map(cloned, run.outputs))

    def results(self, run: _Run, roots: Sequence[int]) -> list[torch.Tensor]:
        """The results of a node of autograd's graph: an output if that is its only root, else what stands for each."""
        if len(roots) == 1 and roots[0] < len(self._outputs):
            return [run.outputs[self._outputs[roots[0]]]]
        return [self.program.tangents[root].without_memory() for root in roots]

    def _link(self, run: _Run, roots: Sequence[int], results: Sequence[torch.Tensor]) -> None:
        """Gives the results of a node to the user, and to the nodes that come later."""
        for root, result in zip(roots, results, strict=True):
            end = result
            if root < len(self._outputs):
                place = self._outputs[root]
                if len(roots) > 1:
                    end = _Output.apply(result, [run.outputs[place]])  # type: ignore[no-untyped-call]
                run.outputs[place] = end
            run.ends[len(run.flat) + root] = end

    def replay_tail(
        self, node: Any, tail: Tail, outputs: Sequence[torch.Tensor], wanted: Sequence[int]
    ) -> Mapping[int, torch.Tensor] | None:
        """See `kitsune.loop.following.FollowedCall`; `node` is the call's in autograd's graph."""
        assert self.tail_step is not None
        try:
            saved = node.saved_tensors[: node.num_values]
        except RuntimeError:  # edited in place, or freed
            return None
        if node.static is not None:
            saved, outputs = node.static, self.forward.executor.static_outputs()[: len(outputs)]
        results = self.tail_step.replay(tail, [*outputs, *saved], wanted)
        if results is not None:
            node.is_spent = self.has_replayed_loss = True
            node.kept = None
            self._backwards[0].drop_recording()
        return results

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

    @property
    def has_new_cases(self) -> bool:
        """See `BackwardGraph`."""
        return self.has_gone_back and True in [graph.has_new_cases for graph in self._backwards]

    @property
    def wants_recordings(self) -> bool:
        """See `BackwardGraph`."""
        return True in [graph.wants_recordings for graph in self._backwards]

    def record_cases(self, record: Record) -> None:
        """See `BackwardGraph`."""
        for graph in self._backwards:
            graph.record_cases(record)

    def take_counts(self) -> tuple[int, int, int]:
        """The sums of `num_copied`, `num_kept` and `num_partial` of its backward graphs, since this was last asked."""
        copied = kept = partial = 0
        self.has_gone_back = self.wants_recordings
        for graph in self._backwards:
            copied += graph.num_copied
            kept += graph.num_kept
            partial += graph.num_partial
            graph.num_copied = graph.num_kept = graph.num_partial = 0
        return copied, kept, partial

    def refuse_backward(self) -> None:
        """A backward pass is to be differentiated or batched.

        Raises:
            KitsuneError: there is no way to do that.
        """
        if (step := self._step()) is not None:
            step.refuse_backward()
        if self.again is None:
            raise KitsuneError(
                "create_graph or is_grads_batched came after a replay that cannot be repeated (random numbers, "
                "buffers, autocast, or an output computed from another one); later calls of this model run eagerly, or "
                "use mode='eager' from the beginning"
            )

    def suits_autocast(self, kind: str) -> bool:
        """Whether the captured backward pass is what autograd would run now."""
        dtype = autocast_dtype(kind)
        if dtype == self.program.autocast:
            return True
        if (step := self._step()) is not None:
            step.note_autocast(dtype)
        return False

    def has_changed_since(self) -> bool:
        """Whether what the backward pass reads of Python's objects is not what it was at the call.

        Raises:
            KitsuneError: it has, and the call cannot run again as it did.
        """
        if self._late is None or (self._late.hold() and self._late_shared.hold()):
            return False
        if (step := self._step()) is not None:
            step.refuse_late_change()
        if self.again is None or not self._late_shared.hold():
            raise KitsuneError(
                "what the backward pass of an autograd.Function or a checkpoint of the model reads has changed since "
                "the model was called; later calls of this model run eagerly, or use mode='eager' from the beginning"
            )
        return True

    def backward_again(
        self, part: BackwardPart, flat: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of `part`, from the inputs of the call and by autograd, as it would at present."""
        assert self.again is not None
        with regions_left(), torch.enable_grad(), torch.autocast(flat[0].device.type, enabled=False):
            # Where one input is computed from another, the way between them is not this call's.
            entries = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in flat]
            outputs = self.again(*entries)
        roots = [outputs[self._outputs[root]] for root in part.roots]
        used = [index for index, tangent in enumerate(tangents) if tangent is not None]
        inputs = [entries[place] for place in part.gradient_places]
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

        Where a part of it ran already, and another may follow, they are moved to memory of their own: then nothing is.
        If it was put off and somebody still refers to its outputs, it runs now.
        """
        self._tails.settle()
        if not (self._contexts and self.forward.executor.keeps_outputs):
            return False
        contexts = [context for reference in self._contexts if (context := reference()) is not None]
        waiting = [context for context in contexts if not context.is_spent and _can_go_back(context)]
        if not any(context.has_gone_back and context not in waiting for context in contexts):
            return bool(waiting)
        with torch.no_grad():
            for context in waiting:
                context.static, context.has_moved = [copied(tensor) for tensor in context.static], True
        self._contexts = []
        return False

    def settle(self) -> None:
        """Has the latest call run, if that was put off and somebody still refers to its outputs."""
        self._tails.settle()

    def goes_back(self) -> None:
        """A node of autograd's graph is about to go back through a part of the call."""
        self.has_gone_back = True

    def now_pending(self, context: Any) -> None:
        self._contexts.append(weakref.ref(context))

    def release(self) -> None:
        for graph in self._backwards:
            graph.forget_gradients()
        if not self.is_pending():
            self.forward.release()
            for graph in self._backwards:
                graph.release()
            if self.tail_step is not None:
                self.tail_step.release()


class _Run:
    """A call.

    Attributes:
        flat: its inputs.
        outputs, saved: the caller's to keep, and the saved values, once the forward pass has run.
        ends: what gets gradients: the flat inputs, then the roots, None until there is a node for them.
    """

    def __init__(self, flat: Sequence[torch.Tensor], ends: list[Any]) -> None:
        self.flat, self.ends = flat, ends
        self.outputs: list[torch.Tensor] = []
        self.saved: list[torch.Tensor] = []


class _FollowedCall:
    """A call that has run; see `kitsune.loop.following.FollowedCall`.

    `node` is the one of autograd's graph that goes back, if there is one alone.
    """

    def __init__(self, graphs: CallGraphs, outputs: Sequence[torch.Tensor], node: Any) -> None:
        self._graphs, self._outputs, self._node = graphs, outputs, node

    def outputs(self) -> Sequence[torch.Tensor]:
        return self._outputs

    def keep(self) -> None:
        if self._node.kept is None:
            with suppress(RuntimeError):  # they are gone: a backward pass has been here
                self._node.kept = self._node.saved_tensors

    def accepts(self, tail: Tail) -> bool:
        return self._graphs.tail_step is not None and self._graphs.tail_step.accepts(tail)

    def replay(self, tail: Tail, wanted: Sequence[int]) -> Mapping[int, torch.Tensor] | None:
        return self._graphs.replay_tail(self._node, tail, self._outputs, wanted)


class _Replay(torch.autograd.Function):
    """A node of the user's autograd graph that stands for a part of a call of the module, or for all of it."""

    @staticmethod
    def forward(
        ctx: Any, graphs: CallGraphs, graph: BackwardGraph, run: _Run, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        part = graph.part
        if not run.outputs:  # of the nodes of a call, this is the first
            graphs.run_forward(run)
        ctx.graphs, ctx.graph = graphs, graph
        ctx.kept = None  # all that is saved, where autograd may let go of it too early
        ctx.is_spent = False  # set when a replay has done what `backward` would
        ctx.has_gone_back = ctx.has_moved = False
        ctx.set_materialize_grads(False)
        results = graphs.results(run, part.roots)
        saved = [run.saved[index] for index in part.saved]
        ctx.static = saved if graphs.forward.executor.keeps_outputs else None
        # Outputs may be among them. Those of other nodes would keep these alive, and this one with them.
        values = [] if ctx.static is not None else saved if len(results) == 1 else [one.detach() for one in saved]
        checked = [run.flat[place] for place in part.saved_inputs]
        ctx.num_values, ctx.num_saved = len(values), len(values) + len(checked)
        stable, arguments = graphs.divide(run.flat)
        ctx.stable = stable
        ctx.versions = [(weakref.ref(tensor), tensor._version) for tensor in (*stable, *arguments)]
        # Eager may not need the arguments afterwards, so the user may edit them: `.data` has a version of its own.
        again = [tensor if tensor.requires_grad else tensor.data for tensor in arguments]
        ctx.save_for_backward(*values, *checked, *again)
        graphs.now_pending(ctx)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        graphs: CallGraphs = ctx.graphs
        if ctx.is_spent:
            raise RuntimeError(SPENT)
        graphs.goes_back()
        if graphs.reduction is not None:
            graphs.reduction.go_back(ctx)
        runs_once = ctx.graph.part.keeps or graphs.again is not None
        saved = ctx.kept or (ctx.saved_tensors if runs_once else ())
        ctx.has_gone_back = True
        values, arguments = saved[: ctx.num_values], saved[ctx.num_saved :]
        is_again = torch.is_grad_enabled() or any(tangent is not None and _is_batched(tangent) for tangent in tangents)
        if is_again:
            graphs.refuse_backward()
        elif graphs.has_changed_since():
            is_again = True
        elif not graphs.suits_autocast(graphs.program.tangents[0].device.type):
            is_again = graphs.again is not None and not _were_edited(ctx.versions)
        if is_again:
            if _were_edited(ctx.versions):
                raise KitsuneError("an input of the model was edited before its backward pass had to run again")
            grads = graphs.backward_again(ctx.graph.part, graphs.unite(ctx.stable, arguments), tangents)
        else:
            grads = ctx.graph(values if ctx.static is None else ctx.static, tangents, have_moved=ctx.has_moved)
        return (None, None, None, *grads)


class _Output(torch.autograd.Function):
    """A node for one of several outputs of another node: its hooks run only where a gradient comes to this output."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, output: list[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return tangents[0], None


def _can_go_back(context: Any) -> bool:
    """Whether a backward pass through `context` of an `autograd.Function` would find all that was saved, unedited."""
    try:
        _ = context.saved_tensors
    except RuntimeError:
        return False
    return True


def _were_edited(versions: Sequence[tuple[weakref.ref[torch.Tensor], int]]) -> bool:
    return any((tensor := reference()) is not None and tensor._version != version for reference, version in versions)


def _is_batched(tangent: torch.Tensor) -> bool:
    functorch = torch._C._functorch  # vmap has no public test for its tensors
    return functorch.is_batchedtensor(tangent) or functorch.is_legacy_batchedtensor(tangent)
