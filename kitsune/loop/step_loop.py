"""Runs training steps, each replayed or eagerly, and keeps the graphs of their signatures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

import torch

from kitsune.capture.signature import call_signature
from kitsune.capture.step_program import Phase, StepSpec
from kitsune.capture.watch import refuse_module
from kitsune.config import Config
from kitsune.device import synchronize
from kitsune.execution.graph_pool import GraphPool
from kitsune.fallback import Chooser, RefusalLog
from kitsune.loop.accumulation import Accumulators
from kitsune.loop.whole_step import WholeStep
from kitsune.status import Status


class StepLoop:
    """The steps of one `TrainStep`.

    At most `config.max_graphs` signatures are kept; the least recently used one is forgotten first.
    """

    def __init__(self, spec: StepSpec, config: Config, device: torch.device, log: RefusalLog) -> None:
        self._spec, self._config, self._device, self._log = spec, config, device, log
        self._pool = GraphPool()
        self._accumulators = Accumulators(spec)
        self._steps: OrderedDict[Hashable, WholeStep] = OrderedDict()
        self._latest: WholeStep | None = None
        self._fallbacks = 0
        self._past_replays = 0
        self._past_setup_seconds = 0.0
        self._refusal = refuse_module(spec.module)
        if self._refusal is not None:
            log.add(self._refusal)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """One step; returns its detached loss."""
        phase = self._accumulators.phase()
        step = self._latest = self._step(args, kwargs, phase)
        choice = step.chooser.next()
        step.chooser.start()
        loss = step.replay(args, kwargs) if choice == "replay" else None
        if loss is None:
            self._fallbacks += choice == "replay"
            loss = self._eager(args, kwargs, phase)
            choice = "eager"
        step.chooser.finish(choice)
        if step.chooser.refusal is not None and step.executor is not None:
            self._log.add(step.chooser.refusal)
            step.release()
        self._accumulators.advance()
        return loss

    def release(self) -> None:
        """Gives all graphs and their memory back."""
        while self._steps:
            self._forget_oldest()
        self._latest = None

    def status(self) -> Status:
        steps, latest = list(self._steps.values()), self._latest
        mode, reason = ("idle", "no step has run yet") if latest is None else latest.chooser.describe()
        return Status(
            mode=mode,
            reason=reason,
            covered=("forward", "loss", "backward", "update") if mode == "replay" else (),
            executor=None if latest is None else latest.executor,
            setup_seconds=self._past_setup_seconds + sum(step.setup_seconds for step in steps),
            eager_seconds=None if latest is None else latest.chooser.eager_seconds,
            replay_seconds=None if latest is None else latest.chooser.replay_seconds,
            graphs=sum(step.executor is not None for step in steps),
            replays=self._past_replays + sum(step.replays for step in steps),
            fallbacks=self._fallbacks,
            refusals=self._log.reasons(),
            not_in_effect=self._config.not_in_effect(),
        )

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], phase: Phase) -> WholeStep:
        key = (phase, call_signature(args, kwargs, self._spec.module, self._device))
        step = self._steps.get(key)
        if step is not None:
            self._steps.move_to_end(key)
            return step
        if len(self._steps) >= self._config.max_graphs * 2:
            self._forget_oldest()
        chooser = Chooser(self._config.mode, partial(synchronize, self._device))
        if self._refusal is not None:
            chooser.refuse(self._refusal)
        step = self._steps[key] = WholeStep(
            self._spec,
            phase,
            self._accumulators,
            config=self._config,
            pool=self._pool,
            chooser=chooser,
            log=self._log,
        )
        return step

    def _forget_oldest(self) -> None:
        _, step = self._steps.popitem(last=False)
        self._past_replays += step.replays
        self._past_setup_seconds += step.setup_seconds
        step.release()

    def _eager(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], phase: Phase) -> torch.Tensor:
        spec = self._spec
        spec.optimizer.zero_grad(set_to_none=True)
        if phase != "whole":
            self._accumulators.attach()
        loss = spec.loss(args, kwargs)
        objective = loss / spec.accumulate if spec.accumulate > 1 else loss
        if spec.scaler is not None:
            objective = spec.scaler.scale(objective)
        torch.autograd.backward(objective, inputs=spec.params())
        if phase == "accumulate":
            self._accumulators.detach()
            return loss.detach()
        self._eager_update()
        if phase == "last":
            self._keep_copies()
            self._accumulators.clear()
        if not spec.keep_grads:
            spec.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _eager_update(self) -> None:
        spec = self._spec
        if spec.scaler is not None:
            spec.scaler.unscale_(spec.optimizer)
        if spec.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(spec.params(), spec.clip_grad_norm)
        if spec.scaler is None:
            spec.optimizer.step()
            return
        spec.scaler.step(spec.optimizer)
        spec.scaler.update()

    def _keep_copies(self) -> None:
        for param in self._spec.params():
            if self._spec.keep_grads and param.grad is not None:
                param.grad = param.grad.clone()
