"""Replays the backward pass of a call from the loss on, which the loop has made of its outputs, or the call as well."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from kitsune.background import refuse_recording
from kitsune.budget import CaptureBudget
from kitsune.capture.ambient import autocast_dtype
from kitsune.capture.data_parallel import Buckets, Reduction
from kitsune.capture.foreseen_layouts import lay_out_as_foreseen
from kitsune.capture.retention import no_traces
from kitsune.capture.split_program import SplitProgram
from kitsune.capture.tail_program import TailProgram, trace_tail
from kitsune.capture.watch import (
    parameter_hook_facts,
    refuse_parameter_hooks,
    refuse_surroundings,
    surrounding_facts,
)
from kitsune.config import Config
from kitsune.engine.recording import Recording
from kitsune.errors import RefusedError
from kitsune.execution.cuda_graph import CudaGraph
from kitsune.execution.handout import handout, is_small
from kitsune.execution.ownership import MOST_ALIKE, HandedOut, free_place
from kitsune.fallback import RefusalLog
from kitsune.graph import dataflow
from kitsune.loop.backward_recorder import BackwardRecorder
from kitsune.loop.following import Tail
from kitsune.native.build import facts_type
from kitsune.native.facts import Facts, attribute, result

_Key = tuple[Tail, bool, Buckets | None]


@dataclass
class _Recorded:
    """A tail, ready to replay.

    Attributes:
        given: what it takes after the values of the call.
        results: the places of what it returns before the gradients.
        kept: of these, the ones that the next replay overwrites.
        trained: the parameters that get a gradient.
        buckets: the gradients are to be averaged in these; None where they are not.
        static: the gradients, where the recording keeps them.
        surroundings: hold as long as nothing wants to see the backward pass, all of these require a gradient, and there
            is no autocast, under which the backward pass was not captured.
    """

    recording: Recording
    given: list[Tensor]
    results: tuple[int, ...]
    kept: tuple[int, ...]
    trained: list[Tensor]
    buckets: Buckets | None
    static: list[Tensor]
    handed_out: HandedOut
    surroundings: Facts

    def gradients(self, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those that the recording has returned after the results."""
        return returned if self.buckets is None else self.static or _unpacked(self.buckets, self.trained, returned)


class TailStep:
    """Replays tails of the calls of one recorded forward pass.

    Args:
        program: of the calls; its backward pass has one part.
        forward: its recorded forward pass.
        trained: the parameters that get gradients, as in the program.
        gradients: static gradients by address; entries are added here.
        recorder: has recorded the calls.
        budget: told of the time that captures take.
        reduction: averages gradients over several processes, when that is owed.

    Attributes:
        is_repeatable: whether calls may be replayed with their tails: it makes no difference when the forward pass
            runs, and each output has a gradient.
        trained: as above, by `id`.
    """

    def __init__(
        self,
        program: SplitProgram,
        forward: Recording,
        trained: Sequence[Tensor],
        gradients: dict[int, Tensor],
        *,
        config: Config,
        recorder: BackwardRecorder,
        budget: CaptureBudget,
        log: RefusalLog,
        reduction: Reduction | None,
    ) -> None:
        self._budget = budget
        self._program, self._forward, self._gradients = program, forward, gradients
        self._trained = dict(zip(program.parts[0].gradient_places, trained, strict=True))
        self._kind = program.tangents[0].device.type
        self._late = facts_type()([*chain(*program.late_reads)])
        self._config, self._recorder, self._log, self._reduction = config, recorder, log, reduction
        self._recorded: dict[_Key, list[_Recorded]] = {}  # see `free_place`
        self._alone: set[_Key] = set()  # those of which no further recording is made
        self.trained = frozenset(map(id, trained))
        self.is_repeatable = program.repeatable and all(program.differentiable)

    def accepts(self, tail: Tail) -> bool:
        """See `kitsune.loop.following.FollowedCall`."""
        try:
            with self._budget.spending():
                trace_tail(self._program, tail.operations, tail.root, (), tail.given)
        except RefusedError as error:
            self._log.add(RefusedError(error.refusal, passing=True))
            return False
        return True

    def replay(
        self, tail: Tail, values: Sequence[Tensor], wanted: Sequence[int], *, whole: bool = False
    ) -> Mapping[int, Tensor] | None:
        """Replays `tail`; see `kitsune.loop.following.FollowedCall`.

        Args:
            values: what the recorded forward pass has returned; or the flat tensors of the call, always the same ones.
            whole: whether the forward pass is to be replayed, too; see `is_repeatable`.
        """
        if self._reduction is not None and self._reduction.may_be_armed:  # it waits for gradients at autograd's nodes
            return None
        owed = self._reduction if self._reduction is not None and self._reduction.is_owed else None
        there = [grad for param in self._trained.values() if (grad := param.grad) is not None]
        buckets = None if owed is None or there else owed.buckets
        key = tail, whole, buckets
        alike = self._recorded.get(key, ())
        place = free_place([one.handed_out for one in alike])
        if place is None and (len(alike) == MOST_ALIKE or key in self._alone):
            _make_way(alike)
            place = free_place([one.handed_out for one in alike])
            if place is None:
                return None
        recorded = None if place is None else alike[place]
        if recorded is None or not recorded.surroundings.hold():
            refusal = refuse_parameter_hooks(self._trained.values()) or refuse_surroundings()
            if refusal is None and recorded is None:
                refusal = refuse_recording()
            if refusal is not None:
                self._log.add(RefusedError(refusal, passing=True))
                return None
            is_frozen = False in [param.requires_grad for param in self._trained.values()]
            if is_frozen or autocast_dtype(self._kind) is not None or not self._late.hold():
                return None
        if recorded is None:
            try:
                beside = alike[0].recording if alike else None
                with self._budget.spending():
                    recorded = self._record(tail, values, wanted, whole, buckets, beside)
            except RefusedError as error:
                self._log.add(RefusedError(error.refusal, passing=True))
                if alike or buckets is not None:
                    self._alone.add(key)
                else:
                    self.is_repeatable &= not whole
                    tail.refused = not whole
                return None
            self._recorded[key] = [*alike, recorded]
        if not set(wanted).issubset(recorded.results) or (there and not _may_add(there)):
            return None
        if owed is not None and len(recorded.trained) < len(self._trained):  # others wait for the gradients of all
            return None
        found = recorded.recording([*values, *recorded.given])
        results = dict(zip(recorded.results, found, strict=False))
        kept = {place: results[place] for place in recorded.kept if place == tail.root or place in wanted}
        if kept:
            results |= _copies(kept)
        returned = found[len(recorded.results) :]
        if owed is not None and not there:
            owed.average(returned)
        _accumulate(recorded.trained, recorded.gradients(returned), is_first=not there)
        if owed is not None and there:
            owed.average_gradients(recorded.trained)
        return results

    def release(self) -> None:
        """Gives the graphs and their memory back."""
        for recorded in chain.from_iterable(self._recorded.values()):
            for tensor in recorded.static:
                self._gradients.pop(tensor.data_ptr(), None)
            recorded.recording.release()
        self._recorded.clear()
        self._alone.clear()

    @no_traces()
    def _record(
        self,
        tail: Tail,
        values: Sequence[Tensor],
        wanted: Sequence[int],
        whole: bool,
        buckets: Buckets | None,
        beside: Recording | None,
    ) -> _Recorded:
        given = [tensor for some in tail.given for tensor in some]
        inputs = [*(tensor.detach() for tensor in values), *given]
        flat = inputs[: len(values)] if whole else None
        if whole:  # whichever outputs are wanted another time
            outputs = (place for place in range(len(self._program.differentiable)) if place != tail.root)
            wanted = sorted({*outputs, *wanted})
        pack = None if buckets is None else partial(_packed, buckets, list(self._trained.values()))
        program = trace_tail(self._program, tail.operations, tail.root, wanted, tail.given, flat, pack)
        lay_out_as_foreseen(program.module, inputs)
        device = inputs[0].device
        num_given = _num_given(program, tail, len(self._program.differentiable) if whole else 0)
        num_given *= device.type == "cuda" and self._config.cuda_graphs
        given_away = handout(device, num_given) if num_given else None
        is_fused = self._program.is_rewritten
        recording = self._recorder.record_tail(program.module, inputs, given_away, is_fused=is_fused, beside=beside)
        trained = [self._trained[place] for place in program.gradient_places]
        static: list[Tensor] = []
        if isinstance(recording.executor, CudaGraph):
            returned = recording.executor.static_outputs()[len(program.results) :]
            static = returned if buckets is None else _unpacked(buckets, trained, returned)
            self._gradients.update((tensor.data_ptr(), tensor) for tensor in static)
        all_trained = self._trained.values()
        surroundings = facts_type()(
            [
                *surrounding_facts(),
                *parameter_hook_facts(all_trained),
                *(attribute(param, "requires_grad") for param in all_trained),
                result(torch.is_autocast_enabled, self._kind),
                *chain(*self._program.late_reads),
            ]
        )
        kept = program.results[num_given:] if recording.executor.keeps_outputs else ()
        handed_out = HandedOut(static)
        return _Recorded(recording, given, program.results, kept, trained, buckets, static, handed_out, surroundings)


def _packed(buckets: Buckets, params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    return buckets.packed({id(param): grad for param, grad in zip(params, grads, strict=True)})


def _unpacked(buckets: Buckets, params: Sequence[Tensor], returned: Sequence[Tensor]) -> list[Tensor]:
    grads = buckets.unpacked(returned)
    return [grads[id(param)] for param in params]


def _num_given(program: TailProgram, tail: Tail, num_outputs: int) -> int:
    """Of how many of the first results each replay gives others: the loss, and small outputs of the call after it.

    Not of those of which others are views, which are copied together.
    """
    if program.results[:1] != (tail.root,):
        return 0
    if any(tail.is_view):
        return 1
    pairs = zip(program.results, dataflow.outputs(program.module.graph), strict=False)
    are_given = [place < num_outputs and node is not None and is_small(node.meta["val"]) for place, node in pairs]
    return [*are_given[1:], False].index(False) + 1


def _copies(values: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """In memory of their own; those that share some share it afterwards, too."""
    is_apart = len(values) == 1 or len({one.untyped_storage().data_ptr() for one in values.values()}) == len(values)
    if is_apart and False not in [value.is_contiguous() for value in values.values()]:
        return {place: value.clone() for place, value in values.items()}
    return copy.deepcopy(values)


def _make_way(alike: Sequence[_Recorded]) -> None:
    """Gives static gradients that are in `.grad` memory of their own, of the latest recordings, as far as is needed.

    Not where anything else refers to them: a view of a gradient sees what is added to it.
    """
    for one in reversed(alike):
        places = {tensor.data_ptr() for tensor in one.static}
        here = [grad for param in one.trained if (grad := param.grad) is not None and grad.data_ptr() in places]
        if one.handed_out.in_use({grad.untyped_storage().data_ptr() for grad in here}):
            return
        for grad in here:
            grad.data = grad.clone()
        if free_place([other.handed_out for other in alike]) is not None:
            return


def _may_add(there: Sequence[Tensor]) -> bool:
    """Whether all that autograd would do is to add to the gradients that are `there`, in `.grad`."""
    return not any(grad.requires_grad or grad.layout is not torch.strided for grad in there)


def _accumulate(trained: Sequence[Tensor], grads: Sequence[Tensor], *, is_first: bool) -> None:
    """Leaves `grads` in `.grad`, as a backward pass does; `is_first` where nothing is there."""
    there, added = list[Tensor](), list[Tensor]()
    for param, grad in zip(trained, grads, strict=True):
        if is_first or param.grad is None:
            param.grad = grad.data  # with a version of its own
        else:
            there.append(param.grad)
            added.append(grad)
    if there:
        with torch.no_grad():
            torch._foreach_add_(there, added)
