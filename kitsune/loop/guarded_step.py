"""What steps of one signature have in common: capture at the right moment, guards, refusals."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from kitsune.background import refuse_recording
from kitsune.capture.frontend import GuardedFunction
from kitsune.capture.sole import sole_capture
from kitsune.capture.watch import refuse_backward_hooks, refuse_surroundings, refuse_wrapper_hooks, wrappers_of
from kitsune.config import Config
from kitsune.errors import Refusal, RefusedError
from kitsune.fallback import CaptureBudget, Chooser, RefusalLog

Call = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]

_T = TypeVar("_T")

_GAVE_WAY = Refusal("its graphs had given way to those of other signatures, of which max_graphs are kept")


class ReplayedApart(NamedTuple):
    """A replay of a call that nobody has got to see.

    Attributes:
        graph: what Dynamo has recorded of the function, and the views that are taken of its outputs.
        flat: the graph's tensors.
        inputs: the same, or what stands for them, outside of the user's autograd graph.
        outputs: of the replay, computed from `inputs`.
    """

    graph: Callable[..., Sequence[torch.Tensor]]
    flat: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


class GuardedStep(ABC):
    """Replays the calls of a function that have one signature.

    Args:
        module: the module that the function calls.
        call: the function; called with positional and keyword arguments.
        config: the options.
        chooser: decides whether calls of this signature are replayed.
        log: told of every refusal.

    Attributes:
        declined: why the latest call could not be replayed; None if it could.
        gave_way: whether what was captured has been released for the graphs of other signatures.
        replays: calls that were replayed.
        setup_seconds: time spent on captures.
    """

    def __init__(
        self, module: torch.nn.Module, call: Call, *, config: Config, chooser: Chooser, log: RefusalLog
    ) -> None:
        self.chooser = chooser
        self.declined: Refusal | None = None
        self.gave_way = False
        self.replays = 0
        self.setup_seconds = 0.0
        self.module, self._call = module, call
        self._config, self._log = config, log
        self._budget = CaptureBudget()
        self._guarded: GuardedFunction | None = None
        self._wrappers: Sequence[torch.nn.Module] = ()  # torch.compile's, in the captured module

    @property
    @abstractmethod
    def executor(self) -> str | None:
        """What runs the captured graph; None while there is none."""

    def replay(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Answers a call: (True, its result), or (False, None), with nothing done, if it has to run eagerly."""
        return self._try(lambda guarded: guarded(args, kwargs))

    def replay_apart(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplayedApart | None:
        """Replays a call up to the tensors that it returns: what Python does beside is left out. None as `replay`."""

        def run(guarded: GuardedFunction) -> ReplayedApart:
            replayed = self._run_apart(*guarded.graph_of(args, kwargs))

            def graph(*flat: torch.Tensor) -> Sequence[torch.Tensor]:
                return guarded.results(replayed.graph(*flat), flat)

            return replayed._replace(graph=graph, outputs=guarded.results(replayed.outputs, replayed.inputs))

        return self._try(run)[1]

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

    def _run_apart(self, graph: fx.GraphModule, flat: Sequence[torch.Tensor]) -> ReplayedApart:
        """As `_run`, of a call whose outputs nobody gets."""
        return ReplayedApart(graph, flat, flat, self._run(graph, flat))

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
            self._wrappers = wrappers_of(self.module)
        self._begin_call()
        refusal = self._refuse_call()
        if refusal is None and self._guarded is None:
            refusal = self._refuse_capture()
        if refusal is not None:
            raise RefusedError(refusal, passing=True)
        if self._guarded is not None:
            return replay(self._guarded)
        with sole_capture():
            self._budget.spend(self.replays, _GAVE_WAY if self.gave_way else self.declined)
            self.gave_way = False
            started = time.perf_counter()
            try:
                self._guarded = GuardedFunction(self._call, self._run)
                return replay(self._guarded)
            finally:
                self.setup_seconds += time.perf_counter() - started

    def _decline(self, error: RefusedError) -> None:
        # Dynamo refuses backward hooks for good, but they may go again.
        hooks = None if error.passing else refuse_backward_hooks(self.module)
        refused = error if hooks is None else RefusedError(hooks, passing=True)
        self._log.add(refused)
        self.declined = refused.refusal
        if self._guarded is not None and (self._guarded.stale or self.executor is None or hooks is not None):
            self.release()
        if not refused.passing:
            self.chooser.refuse(refused.refusal)
