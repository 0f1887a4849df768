"""Replays the calls of a module, forward and backward, inside the user's own autograd graph."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.capture.ambient import autocast_dtype
from kitsune.capture.layout import TensorLayout
from kitsune.capture.split_program import SplitProgram, trace_split, without_tangents
from kitsune.config import Config
from kitsune.device import refuse_fusion
from kitsune.errors import KitsuneError, Refusal, RefusedError, first_line
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.in_order import InOrder
from kitsune.execution.ownership import HandedOut
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import Chooser, RefusalLog
from kitsune.loop.call_fusing import fused_call
from kitsune.loop.following import SPENT, Following, Tail, Tails
from kitsune.loop.guarded_step import Call, GuardedStep
from kitsune.loop.kept import Kept, can_go_back, is_freed
from kitsune.loop.recording import Recording
from kitsune.loop.rounding import rounding
from kitsune.loop.shortcut import CallShortcut, call_facts, may_try_shortcut, same_tensors
from kitsune.loop.tail_step import TailStep

# A call that has to be captured again and again is not rewritten again and again.
_REPLAYS_BEFORE_MORE_TRIALS = 1000


class SplitStep(GuardedStep):
    """Replays calls of one signature: a forward graph at the call, a backward graph in `backward()`.

    Outputs belong to the user. Gradients alias the graph's memory where the graph keeps its
    outputs; while any of them is still referred to, the backward pass runs operator by operator
    into new memory instead.

    Args:
        module: the module.
        call: runs the module eagerly; called with its positional and keyword arguments.
        gradients: static gradients by address, for the optimizer's update to read in place;
            entries are added here.
        chooser: decides whether calls of this signature are replayed.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        call: Call,
        gradients: dict[int, torch.Tensor],
        *,
        config: Config,
        streams: StreamPool,
        chooser: Chooser,
        log: RefusalLog,
    ) -> None:
        super().__init__(module, call, config=config, chooser=chooser, log=log)
        self._gradients, self._streams = gradients, streams
        self._graphs: _Graphs | None = None
        self.verified = 0  # replays of the present graphs that were compared with plain PyTorch
        self._shortcut: CallShortcut | None = None
        self._num_shortcuts = 0  # so far
        self._may_fuse = False  # the present graphs, once replay has proved faster than eager
        self._captured_at = 0  # replays
        self._unfused: SplitProgram | None = None  # until the fused one has proved faster
        self._flat: Sequence[torch.Tensor] = ()  # of the call that is being answered in the long way
        self._autocast: torch.dtype | None = None  # what autocast computes in during the latest backward pass
        self._seen_autocast: tuple[torch.dtype | None, ...] = ()  # the same of an eager one, once there was one
        self._has_moved = False  # into autocast or out of it, since the capture

    @property
    def executor(self) -> str | None:
        """What runs the captured graphs; None while there are none."""
        return None if self._graphs is None else self._graphs.forward.executor.name

    @property
    def covered(self) -> tuple[str, ...]:
        """What of the latest call and its backward pass was replayed, as a `Status` names it."""
        if self._graphs is None:
            return ()
        return ("forward", "loss", "backward") if self._graphs.has_replayed_loss else ("forward", "backward")

    @property
    def is_fused(self) -> bool:
        """Whether operators of the captured graphs have been fused."""
        return self._graphs is not None and self._graphs.program.is_rewritten

    def watch_backward(self, output: Any) -> None:
        """Learns from the backward pass of an eager call, before a replay meets that.

        Where it is differentiated, or runs inside of autocast at one time and outside at another, the signature is
        refused.
        """
        if self.chooser.settled:
            return
        for leaf in _leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(self._on_eager_backward)

    def _on_eager_backward(self, tangents: Any) -> None:
        if torch.is_grad_enabled():
            self.refuse_backward()
        given = next((tangent for tangent in tangents if tangent is not None), None)
        if given is None or self._graphs is not None:
            return
        seen = (autocast_dtype(given.device.type),)
        if self._seen_autocast not in ((), seen):
            self._refuse_autocast()
        self._seen_autocast, self._autocast = seen, seen[0]

    def refuse_backward(self) -> None:
        """The backward pass of a replayed call is needed in a form that no graph of it has."""
        refusal = Refusal("the backward pass is differentiated or batched (create_graph, is_grads_batched)")
        self._log.add(refusal)
        self.chooser.refuse(refusal)

    @property
    def autocast(self) -> torch.dtype | None:
        """What autocast computes in during the loop's backward passes; None outside of it."""
        return self._autocast

    def note_autocast(self, dtype: torch.dtype | None) -> None:
        """The backward pass of a replayed call ran inside of autocast to `dtype`, unlike the captured one."""
        if self._has_moved:
            self._refuse_autocast()
        self._autocast, self._shortcut, self._has_moved = dtype, None, True
        self._log.add(RefusedError(_other_autocast(), passing=True))

    def _refuse_autocast(self) -> None:
        refusal = Refusal("backward() runs inside of autocast at times, or in other data types")
        self._log.add(refusal)
        self.chooser.refuse(refusal)

    def rounding(self) -> float:
        """The coarsest rounding of a value of the captured call and its backward pass."""
        if self._graphs is None:
            return 0.0
        program = self._graphs.program
        return max(rounding(program.forward.graph), rounding(program.backward.graph))

    def end_iteration(self) -> int:
        """To be called after each; how many of its backward passes ran one by one to spare gradients still in use."""
        if self._graphs is None:
            return 0
        if self._graphs.tail_step is not None:
            self.setup_seconds += self._graphs.tail_step.take_setup_seconds()
        if not self._graphs.copied_backwards:
            return 0
        count, self._graphs.copied_backwards = self._graphs.copied_backwards, 0
        refusal = Refusal("gradients of an earlier backward pass are kept", remedy="use zero_grad(set_to_none=True)")
        self._log.add(RefusedError(refusal, passing=True))
        return count

    def replay(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        try:
            done, output = super().replay(args, kwargs)
        finally:
            flat, self._flat = self._flat, ()
        if done and flat:  # a call in another thread may have taken it
            self._shortcut = self._find_shortcut(args, kwargs, flat)
        return done, output

    def repeat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Answers a call as `replay` would, in a shorter way; None, with nothing done, where that cannot be."""
        graphs = self._graphs
        flat = None if self._shortcut is None or self._fuses_next() else self._shortcut.inputs(args, kwargs)
        if flat is None or graphs is None or graphs.is_pending():
            return None
        self.replays += 1
        self.declined = None
        return graphs.call(flat)[0]

    def _find_shortcut(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], flat: Sequence[torch.Tensor]
    ) -> CallShortcut | None:
        """A shorter way to repeat the call that was just replayed, of `flat`, if there is one."""
        if not self.chooser.settled or self.chooser.refusal is not None:
            return None
        if self._shortcut is not None and self._shortcut.inputs(args, kwargs) is not None:
            return self._shortcut
        if not may_try_shortcut(self._num_shortcuts, self.replays):
            return None
        self._num_shortcuts += 1
        started = time.perf_counter()
        shortcut = self._make_shortcut(args, kwargs, flat)
        self.setup_seconds += time.perf_counter() - started
        if shortcut is None or self._refuse_call() is not None:
            return None
        inputs = shortcut.inputs(args, kwargs)
        return shortcut if inputs is not None and same_tensors(inputs, flat) else None

    def _make_shortcut(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], flat: Sequence[torch.Tensor]
    ) -> CallShortcut | None:
        graphs, guarded = self._graphs, self._guarded
        repetition = None if guarded is None else guarded.repetition(args, kwargs)
        if repetition is None or graphs is None:
            return None
        facts = [*call_facts(self.module, flat[0].device), *graphs.forward.facts(len(flat))]
        try:
            return CallShortcut(repetition, facts, args, kwargs, graphs.stable)
        except LookupError:
            return None

    def _drop(self) -> None:
        if self._graphs is not None:
            self._graphs.release()
        self._graphs = self._shortcut = None

    def _run(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._graphs is None:
            self._graphs = self._record(graph, flat)
        elif not self._graphs.forward.fits(flat):
            self.release()
            raise RefusedError(Refusal("a parameter or a buffer changed since the capture"), passing=True)
        elif self._graphs.program.autocast != self._autocast:
            self.release()
            raise RefusedError(_other_autocast(), passing=True)
        elif self._graphs.is_pending():
            raise RefusedError(
                Refusal("the model is called again before the backward pass of its last call"), passing=True
            )
        self._consider_fusing(graph, flat)
        self._flat = flat
        return self._graphs.call(flat)

    def _record(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> _Graphs:
        self._captured_at, self._unfused = self.replays, None
        self._may_fuse = self._config.fuses() and refuse_fusion(flat[0].device) is None
        return self._recorded(trace_split(graph, flat, self._autocast), graph, flat)

    def _consider_fusing(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> None:
        """Has the graphs rewritten, if that has not been tried and is worth it; or takes that back."""
        if self._unfused is not None and self.chooser.settled:
            if self.chooser.has_lost:
                self._exchange(self._unfused, self._unfused, graph, flat)
                self._log.do_without(Refusal("the call was measured to be no faster when it is fused"))
            self._unfused = None
        if not self._fuses_next():
            return
        assert self._graphs is not None
        self._may_fuse = False
        program, started = self._graphs.program, time.perf_counter()
        try:
            fused = fused_call(program, flat, self._log.do_without)
        except Exception as error:  # noqa: BLE001 - operators that cannot be timed, compilers, too little memory
            kind = type(error).__name__
            self._log.do_without(Refusal(f"the call is not fused ({kind}: {first_line(error)})"))
            fused = None
        except BaseException:  # an interrupt: it may be tried again
            self._may_fuse = True
            raise
        if fused is not None and self._exchange(fused, program, graph, flat):
            self._unfused = program
            self.chooser.reopen(self.chooser.replay_seconds)
        self.setup_seconds += time.perf_counter() - started

    def _fuses_next(self) -> bool:
        """Whether the next call that goes the long way has the graphs rewritten."""
        if not (self._may_fuse and self.chooser.settled):
            return False
        return self._budget.captures == 1 or self.replays - self._captured_at >= _REPLAYS_BEFORE_MORE_TRIALS

    def _exchange(
        self, program: SplitProgram, other: SplitProgram, graph: fx.GraphModule, flat: Sequence[torch.Tensor]
    ) -> bool:
        """Records `program` in place of the present graphs; False where that cannot be, but of `other`."""
        assert self._graphs is not None
        self._graphs.release()
        self._graphs = self._shortcut = None
        try:
            self._graphs = self._recorded(program, graph, flat)
        except (RefusedError, torch.OutOfMemoryError) as error:
            too_little = Refusal("there is too little device memory for the fused call")
            self._log.do_without(error.refusal if isinstance(error, RefusedError) else too_little)
            self._graphs = self._recorded(other, graph, flat)
            return False
        return True

    def _recorded(self, program: SplitProgram, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> _Graphs:
        self.verified = 0
        known = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        stable = {position for position, tensor in enumerate(flat) if id(tensor) in known}
        forward = Recording(
            program.forward, flat, stable=stable, config=self._config, pool=GraphPool(self._streams), log=self._log
        )
        again = graph if program.repeatable and not torch.is_autocast_enabled(flat[0].device.type) else None
        try:
            backward = self._record_backward(program, forward)
        except torch.OutOfMemoryError:
            forward.release()
            raise RefusedError(Refusal("there is too little device memory to capture the backward pass")) from None
        except BaseException:
            forward.release()
            raise
        tails = self._tail_step(program, forward, [flat[place] for place in program.gradient_places], known)
        return _Graphs(program, forward, backward, self._gradients, stable, again, self, tails)

    def _tail_step(
        self, program: SplitProgram, forward: Recording, trained: Sequence[torch.Tensor], known: Collection[int]
    ) -> TailStep | None:
        """For a call of which parameters alone get gradients, at once; those of others are autograd's to pass on."""
        is_whole = len(set(program.groups)) == 1 and program.autocast is None
        is_owned = all(id(tensor) in known and tensor.is_leaf for tensor in trained)
        if not (self._config.defer_loss and is_whole and is_owned):
            return None
        return TailStep(
            program, forward, trained, self._gradients, config=self._config, streams=self._streams, log=self._log
        )

    def _record_backward(self, program: SplitProgram, forward: Recording) -> Recording | None:
        """The backward graph over the forward graph's memory; None where that keeps none between calls."""
        executor = forward.executor
        if not isinstance(executor, CudaGraph):
            return None
        tangents = [torch.ones_like(layout.empty()) for layout in program.tangents]
        first = len(program.differentiable)
        saved = executor.static_outputs()[first:]
        warm = [*executor.warm_outputs()[first:], *tangents]
        return Recording(
            program.backward,
            [*saved, *tangents],
            stable=range(len(saved)),
            config=self._config,
            pool=GraphPool(self._streams),
            log=self._log,
            warm_up=warm,
        )


class _Graphs:
    """The captured forward and backward pass of a call.

    `again` runs the call once more, inside autograd; None where that would differ. `step`, which is not
    kept alive, is told of backward passes for which the captured one is no use.
    """

    def __init__(
        self,
        program: SplitProgram,
        forward: Recording,
        backward: Recording | None,
        gradients: dict[int, torch.Tensor],
        stable: Collection[int],
        again: fx.GraphModule | None,
        step: SplitStep,
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

    def __init__(self, graphs: _Graphs, node: Any) -> None:
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
    def forward(ctx: Any, graphs: _Graphs, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
        graphs: _Graphs = ctx.graphs
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


def _other_autocast() -> Refusal:
    return Refusal(
        "backward() runs inside of autocast and was captured outside, or the other way round",
        remedy="call backward() outside of autocast always",
    )


def _in_layout(tangent: torch.Tensor | None, layout: TensorLayout) -> torch.Tensor:
    if tangent is None:
        return layout.empty().zero_()
    if tangent.stride() == layout.stride:
        return tangent
    return layout.empty().copy_(tangent)


def _were_edited(versions: Sequence[tuple[weakref.ref[torch.Tensor], int]]) -> bool:
    return any((tensor := reference()) is not None and tensor._version != version for reference, version in versions)


def _leaves(output: Any) -> list[Any]:
    """The tensors of an output, in dataclasses too."""
    leaves = []
    for leaf in pytree.tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaves += [one for field in dataclasses.fields(leaf) for one in _leaves(getattr(leaf, field.name))]
        else:
            leaves.append(leaf)
    return leaves


def _is_batched(tangent: torch.Tensor) -> bool:
    functorch = torch._C._functorch  # vmap has no public test for its tensors
    return functorch.is_batchedtensor(tangent) or functorch.is_legacy_batchedtensor(tangent)
