"""What steps of one signature have in common: capture at the right moment, guards, refusals."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import fx

from kitsune.background import refuse_recording
from kitsune.budget import CaptureBudget
from kitsune.capture.frontend import GuardedFunction
from kitsune.capture.retention import no_traces
from kitsune.capture.sole import sole_capture
from kitsune.capture.watch import refuse_backward_hooks, refuse_surroundings, refuse_wrapper_hooks, wrappers_of
from kitsune.config import Config
from kitsune.errors import Refusal, RefusedError
from kitsune.fallback import Chooser, RefusalLog
from kitsune.loop.ceiling import spend_capture

Call = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]

RunApart = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""What stood for a graph's tensors, and its outputs."""

_T = TypeVar("_T")


class Admission(Protocol):
    """Says which steps may capture."""

    def check(self, step: GuardedStep) -> None:
        """Raises `RefusedError` where `step` may not capture now."""

    def enter(self, step: GuardedStep) -> None:
        """`step`, which was checked, captures now; others make room for it."""

    def give_memory(self, step: GuardedStep) -> bool:
        """Has others give back memory that `step` has lacked; False if there are none."""


class _EndedEarly(Exception):
    """A call has come as far as to its graph, which is not to be run."""


def _end(_graph: fx.GraphModule, _flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise _EndedEarly


class ReplayedApart(NamedTuple):
    """A replay of a call that nobody has got to see.

    Attributes:
        output: what the call has returned.
        flat: the graph's tensors.
        inputs: the same, or what stands for them, outside of the user's autograd graph.
    """

    output: Any
    flat: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]


class GuardedStep(ABC):
    """Replays the calls of a function that have one signature, in one state of what Python's code depends on.

    Args:
        module: the module that the function calls.
        call: the function; called with positional and keyword arguments.
        config: the options.
        chooser: decides whether calls of this signature are replayed.
        admission: asked before anything is captured; it is not kept alive.
        budget: told of the time that captures take.
        log: told of every refusal.

    Attributes:
        declined: why the latest call could not be replayed; None if it could.
        misfits: what was captured is kept, and did not fit a call.
        cause: why the latest capture that was of its signature does not serve; None where there was none.
        replays: calls that were replayed.
        is_first: nothing of its signature was captured before what it has captured latest.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        call: Call,
        *,
        config: Config,
        chooser: Chooser,
        admission: Admission,
        budget: CaptureBudget,
        log: RefusalLog,
    ) -> None:
        self.chooser = chooser
        self.declined: Refusal | None = None
        self.misfits = False
        self.cause: Refusal | None = None
        self.replays = 0
        self.is_first = True
        self.module, self._call = module, call
        self._config, self._admission, self._budget, self._log = config, weakref.ref(admission), budget, log
        self._earned = 0  # replays that were counted when it was captured anew
        self._guarded: GuardedFunction | None = None
        self._wrappers: Sequence[torch.nn.Module] = ()  # torch.compile's, in the captured module

    @property
    @abstractmethod
    def executor(self) -> str | None:
        """What runs the captured graph; None while there is none."""

    def is_pending(self) -> bool:
        """Whether what was captured cannot be replayed before something else has happened."""
        return False

    def fits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether there is something captured, in a state in which it answers this call."""
        return self.executor is not None and self._guarded is not None and self._guarded.fits(args, kwargs)

    def misfit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Refusal | None:
        """Why what was captured does not fit this call; None if it does. Nothing runs."""
        if self._guarded is None:
            return self.cause
        try:
            self._guarded.through(_end, args, kwargs)
        except _EndedEarly:
            return None
        except RefusedError as error:
            return error.refusal
        raise AssertionError("a call without its graph raises")

    def replay(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Answers a call: (True, its result), or (False, None), with nothing done, if it has to run eagerly."""
        return self._try(lambda guarded: guarded(args, kwargs))

    def replay_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplayedApart | None:
        """Replays a call, with all that it does to Python objects, for nobody to go back from. None as `replay`."""

        def replay(guarded: GuardedFunction) -> ReplayedApart:
            given: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = []

            def run(graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                inputs, outputs = self._run_apart(graph, flat)
                given[:] = [(flat, inputs)]
                return guarded.results(outputs, inputs)

            output = guarded.through(run, args, kwargs)
            return ReplayedApart(output, *given[0])

        return self._try(replay)[1]

    def run_on(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stand_in: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> Any:
        """The output of a call that can be replayed, as its graph gives it operator by operator for other tensors.

        Args:
            stand_in: makes these from those of the graph.
        """
        guarded = self._guarded
        assert guarded is not None

        def run(graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            inputs = stand_in(flat)
            return guarded.results(graph(*inputs), inputs)

        return guarded.through(run, args, kwargs)

    def describe(self) -> tuple[str, str]:
        """The mode of the latest call and its reason, as a `Status` gives them."""
        if self.declined is not None and self.chooser.next() == "replay":
            return "eager", str(self.declined)
        return self.chooser.describe()

    def release(self) -> None:
        """Gives the graph and its memory back."""
        self._drop()
        self._guarded = None

    @abstractmethod
    def _run(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Replays a call whose forward pass is `graph(*flat)`, capturing it first where needed; returns its outputs."""

    def _run_apart(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> RunApart:
        """As `_run`, of a call whose outputs nobody gets; and what stood for `flat`."""
        return flat, self._run(graph, flat)

    @abstractmethod
    def _drop(self) -> None:
        """Gives up what was captured."""

    def _begin_call(self) -> None:  # noqa: B027 - most have nothing to do
        """Does what comes before a call that may be replayed, whose code may look at the outcome."""

    def _refuse_call(self) -> Refusal | None:
        """None if nothing stands in the way of replaying the present call."""
        return refuse_wrapper_hooks(self._wrappers) or refuse_surroundings()

    def _refuse_capture(self) -> Refusal | None:
        """None if nothing stands in the way of capturing at the present call."""
        return refuse_backward_hooks(self.module) or refuse_recording()

    def _try(self, replay: Callable[[GuardedFunction], _T]) -> tuple[bool, _T | None]:
        try:
            result = self._replay(replay)
        except RefusedError as error:
            self._decline(error)
            return False, None
        self.replays += 1
        self.declined = None
        return True, result

    def _replay(self, replay: Callable[[GuardedFunction], _T]) -> _T:
        if self._guarded is None:
            self._admitting().check(self)
            self._wrappers = wrappers_of(self.module)
        self._begin_call()
        refusal = self._refuse_call()
        if refusal is None and self._guarded is None:
            refusal = self._refuse_capture()
        if refusal is not None:
            raise RefusedError(refusal, passing=True)
        try:
            if self._guarded is not None:
                return replay(self._guarded)
            with sole_capture(), no_traces(), self._budget.capturing():
                self._admitting().enter(self)
                spend_capture(self.module, self.replays - self._earned)
                self._earned = self.replays
                self._guarded = GuardedFunction(self._call, self._run)
                return replay(self._guarded)
        except RefusedError as error:
            self.cause = error.refusal
            raise

    def _admitting(self) -> Admission:
        admission = self._admission()
        assert admission is not None, "steps are called by those who keep them"
        return admission

    def _decline(self, error: RefusedError) -> None:
        # Dynamo refuses backward hooks for good, but they may go again.
        hooks = None if error.passing else refuse_backward_hooks(self.module)
        refused = error if hooks is None else RefusedError(hooks, passing=True)
        if self._guarded is not None:
            self.misfits |= self._guarded.misfits
            if self._guarded.stale or self.executor is None or hooks is not None:
                self.release()
        if refused.for_memory and self._admitting().give_memory(self):
            refused = RefusedError(refused.refusal, passing=True)
        self._log.add(refused)
        self.declined = refused.refusal
        if not refused.passing:
            self.chooser.refuse(refused.refusal)
