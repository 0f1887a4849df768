"""Replays the calls of a module, forward and backward, inside the user's own autograd graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.background import is_quiet
from kitsune.budget import CaptureBudget
from kitsune.capture.ambient import autocast_dtype
from kitsune.capture.data_parallel import Reduction, bucket_bytes, reduced_facts
from kitsune.capture.partition import BackwardPart
from kitsune.capture.retention import no_traces
from kitsune.capture.split_program import SplitProgram, trace_split
from kitsune.capture.watch import refuse_sending_hooks, refuse_surroundings, sending_hook_facts
from kitsune.config import Config
from kitsune.device import refuse_fusion, refuse_streams
from kitsune.engine.fusing import Fusing
from kitsune.engine.recording import Recording, names_in
from kitsune.engine.rounding import rounding
from kitsune.errors import Refusal, RefusedError, first_line
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import Chooser, RefusalLog
from kitsune.loop.backward_graph import BackwardGraph
from kitsune.loop.backward_recorder import BackwardRecorder
from kitsune.loop.call_fusing import call_fusing, fused_call
from kitsune.loop.call_graphs import CallGraphs
from kitsune.loop.guarded_step import Admission, Call, GuardedStep, RunApart
from kitsune.loop.shortcut import CallShortcut, call_facts, may_try_shortcut, same_tensors
from kitsune.loop.tail_step import TailStep
from kitsune.native.facts import attribute
from kitsune.status import ScheduleTime

# A call that has to be captured again and again is not rewritten again and again.
_REPLAYS_BEFORE_MORE_TRIALS = 1000


class SplitStep(GuardedStep):
    """Replays calls of one signature: a forward graph at the call, a backward graph in `backward()`.

    Args:
        module: the module.
        call: runs the module eagerly; called with its positional and keyword arguments.
        gradients: static gradients by address, for the optimizer's update to read in place;
            entries are added here.
        chooser: decides whether calls of this signature are replayed.
        admission: asked before anything is captured.
        budget: told of the time that captures take.
        reduction: of a wrapped module, whose gradients may reach no node of autograd's.
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
        admission: Admission,
        budget: CaptureBudget,
        log: RefusalLog,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(module, call, config=config, chooser=chooser, admission=admission, budget=budget, log=log)
        self._gradients, self._streams, self._reduction = gradients, streams, reduction
        self._recorder = BackwardRecorder(config, streams, log)
        self._graphs: CallGraphs | None = None
        self.used_at = 0  # the iteration of the latest call
        self.verified = 0  # replays of the present graphs that were compared with plain PyTorch
        self.used_roots: set[int] = set()  # places of the outputs that the latest eager backward pass began from
        self._shortcut: CallShortcut | None = None
        self._num_shortcuts = 0  # so far
        self._fusing: Fusing | None = None  # of the present graphs, under way
        self._captured_at = 0  # replays
        self._unfused: SplitProgram | None = None  # until the fused one has proved faster
        self._flat: Sequence[torch.Tensor] = ()  # of the call that is being answered in the long way
        self._autocast: torch.dtype | None = None  # what autocast computes in during the latest backward pass
        self._seen_autocast: tuple[torch.dtype | None, ...] = ()  # the same of an eager one, once there was one
        self._has_moved = False  # into autocast or out of it, after a capture

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

    def is_pending(self) -> bool:
        """Whether there are graphs, whose memory the backward pass of the latest call may still need."""
        return self._graphs is not None and self._graphs.is_pending()

    @property
    def has_new_cases(self) -> bool:
        """Whether gradients of the latest backward pass will lie elsewhere from the next one on."""
        return self._graphs is not None and self._graphs.has_new_cases

    @property
    def schedules(self) -> tuple[ScheduleTime, ...]:
        """Those of the backward pass that were tried."""
        return () if self._graphs is None else self._recorder.schedules

    def watch_backward(self, output: Any) -> None:
        """Learns from the backward pass of an eager call, before a replay meets that.

        Where it is differentiated, or runs inside of autocast at one time and outside at another, the signature is
        refused. Comparisons go back from the same outputs.
        """
        if self._config.verify:
            self.used_roots = set()
            for place, root in enumerate(roots_of(output)):
                _note_use(root, place, self.used_roots)
        if self.chooser.settled:
            return
        for leaf in leaves_of(output):
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

    def refuse_late_change(self) -> None:
        """What the backward pass of a replayed call reads of Python's objects has changed since the call."""
        refusal = Refusal("what an autograd.Function or a checkpoint reads in its backward pass changes after the call")
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

    def describe(self) -> tuple[str, str]:
        mode, reason = super().describe()
        if mode == "replay" and self._fusing is not None:
            return "measuring", self._fusing.describe()
        if mode == "replay" and (self._is_to_improve() or self._takes_back()):
            return (
                "measuring",
                "with the next call its graphs are recorded anew: fused, planned on several streams, or as before",
            )
        return mode, reason

    def rounding(self) -> float:
        """The coarsest rounding of a value of the captured call and its backward pass."""
        if self._graphs is None:
            return 0.0
        program = self._graphs.program
        parts = (program.forward, *(part.backward for part in program.parts))
        return max(rounding(part.graph) for part in parts)

    def settle(self) -> None:
        """Has the latest call run, if that was put off and somebody still refers to its outputs."""
        if self._graphs is not None:
            self._graphs.settle()

    def end_iteration(self) -> int:
        """To be called after each; how many of its backward passes ran operator by operator."""
        if self._graphs is None:
            return 0
        if not self._graphs.has_gone_back:
            return 0
        wants_recordings = self._graphs.wants_recordings and self.chooser.refusal is None
        if wants_recordings and is_quiet() and refuse_surroundings() is None:
            self._graphs.record_cases(self._record_case)
        copied, kept, partial = self._graphs.take_counts()
        if kept:
            reason, remedy = "gradients of earlier backward passes are kept", "let go of them before the next one"
            self._log.add(RefusedError(Refusal(reason, remedy=remedy), passing=True))
        if partial:
            unused = Refusal("not all outputs had a gradient in a backward pass, which ran operator by operator")
            self._log.add(RefusedError(unused, passing=True))
        return copied + partial

    def replay(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        try:
            done, output = super().replay(args, kwargs)
        finally:
            flat, self._flat = self._flat, ()
        if done and flat:  # a call in another thread may have taken it
            self._shortcut = self._find_shortcut(args, kwargs, flat)
        return done, output

    def repeat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Answers a call that goes on as the latest did; None, with nothing done, where that has to be looked at."""
        shortcut, graphs = self._shortcut, self._graphs
        if shortcut is None or graphs is None or (self.chooser.may_improve and self._improves_next()):
            return None
        flat = shortcut.inputs(args, kwargs)
        if flat is None or graphs.is_pending():
            return None
        self.replays += 1
        self.declined = None
        return graphs.call(flat)[0]

    def _find_shortcut(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], flat: Sequence[torch.Tensor]
    ) -> CallShortcut | None:
        """A shorter way to repeat the call that was just replayed, of `flat`, if there is one."""
        if not self.chooser.settled or self.chooser.refusal is not None or self.verified < self._config.verify:
            return None
        if self._shortcut is not None and self._shortcut.inputs(args, kwargs) is not None:
            return self._shortcut
        if not may_try_shortcut(self._num_shortcuts, self.replays):
            return None
        self._num_shortcuts += 1
        with self._budget.spending():
            shortcut = self._make_shortcut(args, kwargs, flat)
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
        facts = [
            attribute(self.chooser, "settled"),
            attribute(self.chooser, "refusal"),
            *reduced_facts(),
            *call_facts(self.module, flat[0].device),
            *sending_hook_facts(self.module.parameters()),
            *graphs.forward.facts(len(flat)),
        ]
        try:
            return CallShortcut(repetition, facts, args, kwargs, graphs.stable, graphs.forward.written)
        except LookupError:
            return None

    def _refuse_call(self) -> Refusal | None:
        return refuse_sending_hooks(self.module.parameters()) or super()._refuse_call()

    def _drop(self) -> None:
        if self._graphs is not None:
            self._graphs.release()
        self._graphs = self._shortcut = None
        if self._fusing is not None:
            self._fusing.close()
            self._fusing = None

    def _run(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self._flat = flat
        return self._prepared(graph, flat).call(flat)

    def _run_apart(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> RunApart:
        apart = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in flat]
        return apart, self._prepared(graph, flat).call_now(apart).outputs()

    def _prepared(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> CallGraphs:
        """The graphs of a call, recorded where needed."""
        if self._graphs is None:
            self._graphs = self._record(graph, flat)
        elif not self._graphs.forward.fits(flat):
            changed = self._graphs.forward.misfit(flat, names_in(self.module))
            self.release()
            raise RefusedError(Refusal(f"{changed} changed since the capture"), passing=True)
        elif self._graphs.program.autocast != self._autocast:
            self.release()
            raise RefusedError(_other_autocast(), passing=True)
        elif self._graphs.is_pending():
            raise RefusedError(
                Refusal(
                    "the model is called again before the backward pass of its last call",
                    remedy="a larger max_graphs lets more of such calls have graphs of their own",
                ),
                passing=True,
            )
        else:
            self._graphs.forward.refuse_written(flat)
        self._consider_improving(graph, flat)
        return self._graphs

    def _record(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> CallGraphs:
        self._captured_at, self._unfused = self.replays, None
        # Where the reducer is not to send gradients while the pass goes on, one graph has all of it, as tails need.
        left_alone = None if self._reduction is None else self._reduction.refuse()
        if left_alone is not None:
            self._log.do_without(Refusal(f"losses are not deferred: {left_alone.reason}"))
        is_cut = self._reduction is None or left_alone is not None
        program = trace_split(graph, flat, self._autocast, bucket_bytes() if is_cut else None)
        self.chooser.may_improve = self._fuses(flat) or self._num_streams(flat) > 1
        return self._recorded(program, graph, flat, num_streams=1)

    @no_traces()
    def _record_case(self, part: BackwardPart, missing: frozenset[int], beside: Recording | None) -> Recording | None:
        graphs = self._graphs
        assert graphs is not None
        autocast = torch.autocast(graphs.program.tangents[0].device.type, enabled=False)
        with self._budget.spending(), torch.inference_mode(False), torch.no_grad(), autocast:
            # `optimizer.step()` may be in any of them
            return self._recorder.record_case(graphs.program, graphs.forward, part, missing, beside)

    def _fuses(self, flat: Sequence[torch.Tensor]) -> bool:
        return self._config.fuses() and refuse_fusion(flat[0].device) is None

    def _num_streams(self, flat: Sequence[torch.Tensor]) -> int:
        """For the backward pass, which is planned as a CUDA graph or not at all."""
        is_planned = self._config.cuda_graphs and refuse_streams(flat[0].device) is None
        return self._config.max_streams() if is_planned else 1

    def _consider_improving(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> None:
        """Has the graphs fused, and planned on several streams, if that has not been tried and is worth it.

        Fusing is taken back where it was no use.
        """
        if self._unfused is not None and self.chooser.settled:
            if self._takes_back():
                with self._budget.spending():
                    self._exchange(self._unfused, self._unfused, graph, flat)
                self._log.do_without(Refusal("the call was measured to be no faster when it is fused"))
            self._unfused = None
        if self._improves_next():
            with self._budget.spending():
                self._improve(graph, flat)

    def _improve(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> None:
        assert self._graphs is not None
        program = self._graphs.program
        fused = None
        try:
            if self._fuses(flat):
                self._fusing = self._fusing or call_fusing(program, flat, self._log.do_without)
            if self._fusing is not None:
                if not self._fusing.advance():
                    return
                fused = fused_call(program, self._fusing, flat, self._log.do_without)
        except Exception as error:  # noqa: BLE001 - operators that cannot be timed, compilers, too little memory
            kind = type(error).__name__
            self._log.do_without(Refusal(f"the call is not fused ({kind}: {first_line(error)})"))
        self._fusing = None
        if fused is not None and self._exchange(fused, program, graph, flat):
            self._unfused, self.chooser.may_improve = program, False
            self.chooser.reopen(self.chooser.replay_seconds)
            return
        if fused is None and self._num_streams(flat) > 1:
            self._exchange(program, program, graph, flat)
        self.chooser.will_not_improve()

    def _takes_back(self) -> bool:
        """Whether the next call that goes the long way has the graphs recorded anew, as they were before fusing."""
        return self._unfused is not None and self.chooser.settled and self.chooser.has_lost

    def _is_to_improve(self) -> bool:
        """Whether the graphs will be recorded anew, for better ones."""
        if not (self.chooser.may_improve and self.chooser.settled):
            return False
        return self.is_first or self.replays - self._captured_at >= _REPLAYS_BEFORE_MORE_TRIALS

    def _improves_next(self) -> bool:
        """Whether the next call that goes the long way has the graphs improved, as far as that can be at present."""
        if not self._is_to_improve():
            return False
        return is_quiet() if self._fusing is None else self._fusing.may_go_on()

    @no_traces()
    def _exchange(
        self, program: SplitProgram, other: SplitProgram, graph: fx.GraphModule, flat: Sequence[torch.Tensor]
    ) -> bool:
        """Records `program` in place of the present graphs; False where that cannot be, but of `other`."""
        assert self._graphs is not None
        self._graphs.release()
        self._graphs = self._shortcut = None
        try:
            self._graphs = self._recorded(program, graph, flat, num_streams=self._num_streams(flat))
            return True
        except torch.OutOfMemoryError:
            refusal = Refusal("there is too little device memory to record the call anew")
        except RefusedError as error:
            refusal = error.refusal
        except Exception as error:  # noqa: BLE001 - drivers and compilers fail in many ways, and the loop does without
            refusal = Refusal(f"the call cannot be recorded anew ({type(error).__name__}: {first_line(error)})")
        # Out of the handlers: an exception that is being handled would keep alive all that was allocated.
        self._log.do_without(refusal)
        self._graphs = self._recorded(other, graph, flat, num_streams=1)
        return False

    def _recorded(
        self, program: SplitProgram, graph: fx.GraphModule, flat: Sequence[torch.Tensor], *, num_streams: int
    ) -> CallGraphs:
        self.verified = 0
        known = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        stable = {position for position, tensor in enumerate(flat) if id(tensor) in known}
        forward = Recording(
            program.forward, flat, stable=stable, config=self._config, pool=GraphPool(self._streams), log=self._log
        )
        again = graph if program.repeatable and not torch.is_autocast_enabled(flat[0].device.type) else None
        try:
            recordings = self._recorder.record(program, forward, num_streams=num_streams)
        except torch.OutOfMemoryError:
            forward.release()
            refusal = Refusal("there is too little device memory to capture the backward pass")
            raise RefusedError(refusal, for_memory=True) from None
        except BaseException:
            forward.release()
            raise
        backwards = [
            BackwardGraph(part, [program.tangents[root] for root in part.roots], recording, self._gradients)
            for part, recording in zip(program.parts, recordings, strict=True)
        ]
        tails = self._tail_step(program, forward, flat, known)
        return CallGraphs(program, forward, backwards, stable, again, self, tails, self._reduction)

    def _tail_step(
        self, program: SplitProgram, forward: Recording, flat: Sequence[torch.Tensor], known: Collection[int]
    ) -> TailStep | None:
        """For a call of which parameters alone get gradients, at once; those of others are autograd's to pass on."""
        if not self._config.defer_loss or len(program.parts) > 1 or program.autocast is not None:
            return None
        trained = [flat[place] for place in program.parts[0].gradient_places]
        if not all(id(tensor) in known and tensor.is_leaf for tensor in trained):
            return None
        if program.parts[0].sparse:
            self._log.do_without(Refusal("losses are not deferred: a gradient is sparse"))
            return None
        return TailStep(
            program,
            forward,
            trained,
            self._gradients,
            config=self._config,
            recorder=self._recorder,
            budget=self._budget,
            log=self._log,
            reduction=self._reduction,
        )


def _other_autocast() -> Refusal:
    return Refusal(
        "backward() runs inside of autocast and was captured outside, or the other way round",
        remedy="call backward() outside of autocast always",
    )


def _note_use(root: torch.Tensor, place: int, used: set[int]) -> None:
    """Has `place` added to `used` once a gradient of `root` arrives in a backward pass."""
    node, number = root.grad_fn, root.output_nr
    assert node is not None

    def note(tangents: Sequence[torch.Tensor | None]) -> None:
        if tangents[number] is not None:
            used.add(place)

    node.register_prehook(note)


def roots_of(output: Any) -> list[torch.Tensor]:
    """The tensors of an output that gradients may come from."""
    return [leaf for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def leaves_of(output: Any) -> list[Any]:
    """The tensors of an output, in dataclasses too."""
    leaves = []
    for leaf in pytree.tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaves += [one for field in dataclasses.fields(leaf) for one in leaves_of(getattr(leaf, field.name))]
        else:
            leaves.append(leaf)
    return leaves
