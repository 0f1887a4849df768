"""Runs training steps, each replayed or eagerly, and keeps the graphs of their signatures."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from kitsune.budget import CaptureBudget
from kitsune.capture.autograd_graph import nodes_behind
from kitsune.capture.signature import call_signature
from kitsune.capture.state import note_step
from kitsune.capture.step_program import Phase, StepSpec
from kitsune.capture.watch import has_compiled_parts, refuse_module
from kitsune.config import Config
from kitsune.device import refuse_fusion, refuse_streams, synchronize
from kitsune.engine.worker.client import expect
from kitsune.errors import KitsuneError, Refusal, RefusedError
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import Chooser, RefusalLog
from kitsune.loop.accumulation import Accumulators
from kitsune.loop.cache import StepCache
from kitsune.loop.comparison import StepComparison
from kitsune.loop.whole_step import UpdateForm, WholeStep
from kitsune.memory.pool import MemoryPool
from kitsune.plan import Plan
from kitsune.status import Status
from kitsune.verification import Verification

_OVERLAP = "the training step is called while another call of it runs; calls must not overlap"


class StepLoop:
    """The steps of one `TrainStep`.

    At most `config.max_graphs` of them hold graphs, which keep them for as long as they are used now and then.
    """

    def __init__(self, spec: StepSpec, config: Config, device: torch.device, log: RefusalLog) -> None:
        self._spec, self._config, self._device, self._log = spec, config, device, log
        self._pool, self._memory = GraphPool(StreamPool()), MemoryPool()
        self._accumulators = Accumulators(spec)
        self._form = UpdateForm(config.compile)  # Inductor fuses composed updates; fused ones are opaque to it
        phases = 1 if spec.accumulate == 1 else 2
        self._budget = CaptureBudget(config)
        self._steps: StepCache[WholeStep] = StepCache(config.max_graphs * phases, self._budget, log)
        self._latest: WholeStep | None = None
        self._num_parts = sum(1 for _ in spec.module.modules())
        self._waits_until: float | None = None  # captures of steps as the latest one
        self._is_idle = threading.Lock()
        self._fallbacks = 0
        self._is_reentrant: bool | None = None  # not known
        self._verify = config.verify
        refusal = refuse_streams(device)
        self._uses_streams = refusal is None
        if refusal is not None and config.num_streams is not None and config.max_streams() > 1:
            log.do_without(refusal)
        refusal = refuse_fusion(device)
        self._can_fuse = refusal is None
        if refusal is not None and config.enable_fusion and config.fuses():
            log.do_without(refusal)
        if self._can_fuse and config.fuses():
            expect(device)
        self._refusal = refuse_module(spec.module)
        if self._refusal is not None:
            log.add(self._refusal)

    def repeat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """One step, replayed as the latest one was, on the same device; None, with nothing done, if it has to be run.

        Raises:
            KitsuneError: another thread is in the midst of one; replays of both would write the same memory.
        """
        if not self._is_idle.acquire(False):  # as `_alone` does, at less cost
            raise KitsuneError(_OVERLAP)
        try:
            latest = self._latest
            if latest is None or (self._verify and latest.is_unverified(self._verify)):
                return None
            return latest.repeat(args, kwargs)
        finally:
            self._is_idle.release()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """One step; returns its detached loss.

        Raises:
            KitsuneError: as `repeat`.
        """
        with self._alone():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        phase = self._accumulators.phase()
        key = self._key(phase, args, kwargs)
        is_decided = key in self._steps or self._refusal is not None
        self._waits_until = None if is_decided else self._budget.put_off_until(self._num_parts)
        if self._waits_until is not None:
            waiting_loss = self._eager(args, kwargs, phase)
            self._accumulators.advance()
            return waiting_loss
        step = self._steps.get(key, args, kwargs, partial(self._make, phase))
        self._latest = step
        choice = step.chooser.next()
        step.chooser.start()
        if choice == "replay" and self._verify and step.is_unverified(self._verify):
            verified = self._verified(step, args, kwargs, phase)
            if verified is not None:
                return verified
        done, loss = step.replay(args, kwargs) if choice == "replay" else (False, None)
        if not done:
            if choice == "replay":
                self._fallbacks += 1
                self._is_reentrant = None  # the model may have changed
            loss = self._eager(args, kwargs, phase)
            choice = "eager"
        step.chooser.finish(choice)
        self._steps.settle(step)
        self._accumulators.advance()
        assert isinstance(loss, torch.Tensor)
        return loss

    def verify(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Verification:
        """Compares a replay of the present step with plain PyTorch, and leaves everything as it was.

        Raises:
            KitsuneError: as `run`.
        """
        with self._alone(), self._same_gradients():
            phase = self._accumulators.phase()
            step = self._step_for(phase, args, kwargs)
            if step.chooser.refusal is not None:
                return Verification(False, reason=str(step.chooser.refusal))
            try:
                comparison = StepComparison(self._spec, self._accumulators, self._device)
                with comparison.undone():
                    found = comparison.differences(step, args, kwargs, partial(self._eager, args, kwargs, phase))
            except RefusedError as error:
                return Verification(False, reason=str(error.refusal))
            self._steps.settle(step)
            return Verification(False, reason=str(step.declined)) if found is None else Verification(True, tuple(found))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._is_idle.acquire(False):
            raise KitsuneError(_OVERLAP)
        try:
            yield
        finally:
            self._is_idle.release()

    @contextmanager
    def _same_gradients(self) -> Iterator[None]:
        """Afterwards, what was in `.grad` is there again."""
        grads = [(param, param.grad) for param in self._spec.params()]
        try:
            yield
        finally:
            for param, grad in grads:
                param.grad = grad

    def release(self) -> None:
        """Gives all graphs and their memory back."""
        self._steps.clear()
        gc.collect()  # of the graphs, which are cycles, and hold what their plans place
        self._memory.release()
        self._latest = None

    def plan(self) -> Plan | None:
        """The plan by which steps like the latest one are replayed; None where it ran eagerly."""
        return None if self._latest is None else self._latest.plan

    def measured_plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan | None:
        """The plan by which the present step would be replayed, with times of its tasks; None where it runs eagerly."""
        phase = self._accumulators.phase()
        with self._same_gradients():
            self._accumulators.begin(phase)
            step = self._steps.find(self._key(phase, args, kwargs), args, kwargs)
            return None if step is None else step.measured_plan(args, kwargs)

    def status(self) -> Status:
        latest = self._latest
        mode, reason = ("idle", "no step has run yet") if latest is None else latest.describe()
        if self._waits_until is not None:
            mode, reason = "measuring", str(self._budget.put_off(self._waits_until))
        plan = self.plan()
        return Status(
            mode=mode,
            reason=reason,
            covered=("forward", "loss", "backward", "update") if mode == "replay" else (),
            executor=None if latest is None else latest.executor,
            fused=plan is not None and plan.is_fused,
            setup_seconds=self._budget.seconds,
            eager_seconds=None if latest is None else latest.chooser.eager_seconds,
            replay_seconds=None if latest is None else latest.chooser.replay_seconds,
            graphs=self._steps.graphs,
            replays=self._steps.replays,
            fallbacks=self._fallbacks,
            refusals=self._log.reasons(),
            not_in_effect=self._config.not_in_effect(uses_streams=self._uses_streams, can_fuse=self._can_fuse),
            schedules=() if latest is None else latest.schedules(),
            plan=plan,
            memory=None if plan is None else self._memory.statistics(),
        )

    def _verified(
        self, step: WholeStep, args: tuple[Any, ...], kwargs: Mapping[str, Any], phase: Phase
    ) -> torch.Tensor | None:
        """The present step as plain PyTorch does it, compared with a replay; None, with nothing done, without one."""
        comparison = StepComparison(self._spec, self._accumulators, self._device)
        differences = comparison.differences(step, args, kwargs, partial(self._eager, args, kwargs, phase))
        if differences is None:
            return None
        if differences:
            first = differences[0]
            refusal = Refusal(f"a replay differed from plain PyTorch: {first}", first.operator)
            self._log.add(refusal)
            step.chooser.refuse(refusal)
        else:
            step.note_verified()
        self._steps.settle(step)
        self._accumulators.advance()
        return comparison.loss

    def _step_for(self, phase: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WholeStep:
        self._accumulators.begin(phase)
        return self._steps.get(self._key(phase, args, kwargs), args, kwargs, partial(self._make, phase))

    def _key(self, phase: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        return phase, call_signature(args, kwargs, self._spec.module, self._device)

    def _make(self, phase: Phase, was_met: bool) -> WholeStep:
        is_compiled = partial(has_compiled_parts, self._spec.module)
        chooser = Chooser(
            self._config.mode, partial(synchronize, self._device), is_compiled=is_compiled, was_met=was_met
        )
        if self._refusal is not None:
            chooser.refuse(self._refusal)
        return WholeStep(
            self._spec,
            phase,
            self._accumulators,
            self._form,
            config=self._config,
            pool=self._pool,
            memory=self._memory,
            chooser=chooser,
            admission=self._steps,
            budget=self._budget,
            log=self._log,
        )

    def _eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], phase: Phase) -> torch.Tensor:
        spec = self._spec
        spec.optimizer.zero_grad(set_to_none=True)
        if phase != "whole":
            self._accumulators.attach_and_watch()
        num_checkpoints, addresses = _num_checkpoints(), _addresses(spec.params())
        loss = spec.loss(args, kwargs)
        if not self._is_reentrant and _num_checkpoints() > num_checkpoints:
            self._is_reentrant = None
        objective = loss / spec.accumulate if spec.accumulate > 1 else loss
        if spec.scaler is not None:
            objective = spec.scaler.scale(objective)
        self._go_back(objective, _with_gradients(args, kwargs), is_exchanged=_addresses(spec.params()) != addresses)
        if phase == "accumulate":
            self._accumulators.detach()
            return loss.detach()
        self._eager_update()
        if phase == "last":
            self._keep_copies()
        if not spec.keep_grads:
            spec.optimizer.zero_grad(set_to_none=True)
        if phase == "last":
            self._accumulators.clear()
        return loss.detach()

    def _go_back(self, objective: torch.Tensor, inputs: Sequence[torch.Tensor], *, is_exchanged: bool) -> None:
        """Gives gradients to the optimizer's parameters only, which is more than reentrant checkpoints can do.

        Where the call has given a parameter other memory (`is_exchanged`), autograd does not find it by itself either.
        Gradients of `inputs` are computed and dropped: hooks of the layers that take them are given these.

        All of it runs in this thread: cuDNN keeps the algorithms that it has searched for by thread, and a capture, in
        this one, needs the same.
        """
        params = self._spec.params()
        if self._is_reentrant is None:
            self._is_reentrant = _is_reentrant(objective)
        with torch.autograd.set_multithreading_enabled(False):
            if self._is_reentrant or is_exchanged:
                with _unchanged_gradients([*self._spec.others(), *inputs]):
                    objective.backward()
            elif params or not objective.requires_grad:  # without any autograd raises, as it does without Kitsune
                with _unchanged_gradients(inputs):
                    torch.autograd.backward(objective, inputs=[*params, *inputs] or None)

    def _eager_update(self) -> None:
        spec = self._spec
        if spec.scaler is not None:
            spec.scaler.unscale_(spec.optimizer)
        if spec.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(spec.owned(), spec.clip_grad_norm)
        if spec.scaler is None:
            spec.optimizer.step()
        else:
            spec.scaler.step(spec.optimizer)
            spec.scaler.update()
        note_step(spec.optimizer)

    def _keep_copies(self) -> None:
        for param in self._spec.owned():
            if self._spec.keep_grads and param.grad is not None:
                param.grad = param.grad.clone()


def _addresses(params: Sequence[torch.nn.Parameter]) -> list[int]:
    return [param.data_ptr() for param in params]


def _with_gradients(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that require a gradient, each once."""
    leaves = pytree.tree_leaves((args, kwargs))
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return list(found.values())


@contextmanager
def _unchanged_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What a backward pass adds to `.grad` of `tensors` is dropped."""
    with warnings.catch_warnings() if tensors else nullcontext():
        if tensors:  # to look at that of a tensor which is no leaf warns
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        kept = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in zip(tensors, kept, strict=True):
            tensor.grad = grad


def _num_checkpoints() -> int:
    """Grows with every reentrant checkpoint that there is. Each is a node of autograd's graph, and refers to its class.

    To look for them in the graph takes long, where it has thousands of nodes.
    """
    return sys.getrefcount(CheckpointFunction._backward_cls)


def _is_reentrant(loss: torch.Tensor) -> bool:
    """Whether a checkpoint lies on the way back from `loss` that runs a backward pass of its own."""
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes_behind([loss]))
