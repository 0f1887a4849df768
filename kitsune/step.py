"""`TrainStep`: the whole training step, optimizer included, as one call."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

from kitsune.capture.step_program import StepSpec
from kitsune.config import Config
from kitsune.device import refuse_bfloat16
from kitsune.errors import KitsuneError, RefusedError
from kitsune.fallback import RefusalLog
from kitsune.loop.step_loop import StepLoop
from kitsune.optimizer import KitsuneOptimizer
from kitsune.plan import Plan
from kitsune.status import Status
from kitsune.verification import Verification

LossFunction = Callable[[Any, Any], torch.Tensor]
Forward = Callable[..., torch.Tensor]


class TrainStep:
    """One training step: forward pass, loss, backward pass and optimizer update.

    Calling it does what this loop body does, and returns the loss:

        optimizer.zero_grad()
        loss = loss_fn(model(*args[:-1]), args[-1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    The first steps of each signature (shapes, dtypes, modes) run exactly so; then the step is
    captured as one graph of ATen operators and replayed, on CUDA as one CUDA graph, where that is
    measured faster. Whatever cannot be captured runs as above, as steps do whose loss computes
    gradients (`torch.autograd.grad`, `create_graph`); `status()` says why.

    Args:
        model: the module, with its parameters on one device.
        loss_fn: called with the model's output and the target, which is the last positional
            argument of the step. Left out where `forward` is given.
        optimizer: a `torch.optim` optimizer or a `KitsuneOptimizer` over the model's parameters.
        forward: `forward(model, *args, **kwargs)` returns the loss, for every other shape of step.
        clip_grad_norm: clips the 2-norm of all gradients together, as `clip_grad_norm_` does.
        grad_scaler: a `torch.amp.GradScaler`: the loss is scaled, gradients are unscaled, the
            update is skipped where they overflow, and the scale is updated. With `enable_amp` in
            float16 the step makes one if none is given.
        accumulate: that many consecutive calls make one update, with the mean of their gradients.
            Clipping, the scaler and the optimizer apply to that update.
        keep_grads: leave the gradients of the update in `.grad`. Otherwise `.grad` is None
            after each call.
        config: the options, and
        **options: single options (fields of `Config`), which take precedence. Without `config` they are those of
            the `KitsuneOptimizer`, if it is one.

    Attributes:
        grad_scaler: the scaler in use, whose `state_dict` belongs into a checkpoint; None without.

    The returned loss is detached, of the forward pass of this call (not divided by
    `accumulate`), and belongs to the caller. Gradients that were in `.grad` before a call are
    discarded. Parameters that the optimizer does not own get no gradient. Calls must not
    overlap in time.

    Raises:
        ConfigError: an unknown option, or a value that is not allowed.
        TypeError, ValueError: other arguments of the wrong type, or that contradict each other.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        forward: Forward | None = None,
        clip_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        keep_grads: bool = False,
        config: Config | None = None,
        **options: Any,
    ) -> None:
        if config is None and isinstance(optimizer, KitsuneOptimizer):
            config = optimizer.config
        self.config = Config.from_options(options, config)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {type(grad_scaler).__name__}")
        if clip_grad_norm is not None and not _is_positive(clip_grad_norm):
            raise ValueError(f"clip_grad_norm must be a positive number, got {clip_grad_norm!r}")
        if not _is_positive(accumulate) or accumulate != int(accumulate):
            raise ValueError(f"accumulate must be a whole number from 1 up, got {accumulate!r}")
        needs_scaler = self.config.scales_losses()
        if needs_scaler and grad_scaler is None:
            params = (param for group in optimizer.param_groups for param in group["params"])
            grad_scaler = torch.amp.GradScaler(next(params).device.type)
            if isinstance(optimizer, KitsuneOptimizer) and optimizer.loss_scale is not None:
                grad_scaler.load_state_dict(optimizer.loss_scale.state_dict())
        self.grad_scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        if needs_scaler and self.grad_scaler is None:
            raise ValueError("amp_dtype=torch.float16 underflows with a grad_scaler that is not enabled")
        loss = _without_amp(model, loss_fn, forward)
        if isinstance(optimizer, KitsuneOptimizer):
            optimizer = optimizer.hand_over()
        self._log = RefusalLog("the training step")
        self._spec = StepSpec(model, loss, optimizer, clip_grad_norm, self.grad_scaler, accumulate, keep_grads)
        device = self._device_now()
        if device is None:
            raise ValueError("the optimizer has no parameter that requires a gradient")
        self._device = device
        self._loop = self._make_loop()
        _alive[next(_numbers)] = self

    @classmethod
    def alive(cls) -> list[TrainStep]:
        """All that there are, in the order of their making."""
        return list(_alive.values())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What updates the parameters."""
        return self._spec.optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs one step.

        Returns:
            The loss: detached, with one element, the caller's to keep.

        Raises:
            KitsuneError: another call of this step runs, in another thread or around this one.
        """
        loss = self._loop.repeat(args, kwargs)
        if loss is not None:
            return loss
        device = self._device_now()
        if device is not None and device != self._device:
            self._loop.release()
            self._device = device
            self._loop = self._make_loop()
        return self._loop.run(args, kwargs)

    def status(self) -> Status:
        """What the latest step did and why, with figures over all steps so far."""
        return self._loop.status()

    def plan(self, *args: Any, **kwargs: Any) -> Plan | None:
        """How steps are replayed: tasks, streams, memory, predicted times. None where they run eagerly.

        Without arguments, the plan of steps like the latest one. Given the arguments of a step, that of such a
        step, with `measured_spans`: its tasks are timed in some replays on copies, which take memory for a while
        and change no tensor of the training. (Attributes that the model sets in `forward` are set.)

        Raises:
            KitsuneError: a step with these arguments cannot be replayed at present, or there is too little memory.
        """
        if not args and not kwargs:
            return self._loop.plan()
        try:
            return self._loop.measured_plan(args, kwargs)
        except RefusedError as error:
            raise KitsuneError(f"the tasks of the step cannot be timed: {error.refusal}") from error

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """Compares a replay of one step with these arguments with plain PyTorch, and trains nothing.

        Both start from the present state; what rounding explains is no difference. (Whatever else the model's Python
        code does, it does several times.)

        Raises:
            KitsuneError: a call of this step runs, in another thread or around this one.
        """
        return self._loop.verify(args, kwargs)

    def release(self) -> None:
        """Gives all captured graphs and their memory back. Later steps start anew."""
        self._loop.release()

    def _device_now(self) -> torch.device | None:
        """Of the parameters that are trained; None while all are frozen."""
        for group in self._spec.optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    device: torch.device = param.device
                    return device
        return None

    def _make_loop(self) -> StepLoop:
        spec = self._spec
        if self.config.enable_amp:
            loss = _with_amp(spec.loss, self._device, self.config.amp_dtype, self._log)
            spec = dataclasses.replace(spec, loss=loss)
        return StepLoop(spec, self.config, self._device, self._log)


_alive: weakref.WeakValueDictionary[int, TrainStep] = weakref.WeakValueDictionary()
_numbers = itertools.count()

Loss = Callable[[tuple[Any, ...], Mapping[str, Any]], torch.Tensor]


def _is_positive(number: object) -> bool:
    return isinstance(number, Real) and float(number) > 0


def _without_amp(model: torch.nn.Module, loss_fn: LossFunction | None, forward: Forward | None) -> Loss:
    if (loss_fn is None) == (forward is None):
        raise TypeError("give either loss_fn or forward, and not both")
    for name, function in (("loss_fn", loss_fn), ("forward", forward)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    if forward is not None:

        def loss(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
            return forward(model, *args, **kwargs)

        return loss
    assert loss_fn is not None

    def loss_of_output(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        return loss_fn(model(*args[:-1], **kwargs), args[-1])

    return loss_of_output


def _with_amp(loss: Loss, device: torch.device, dtype: torch.dtype, log: RefusalLog) -> Loss:
    refusal = refuse_bfloat16(device) if dtype is torch.bfloat16 else None
    if refusal is not None:
        log.do_without(refusal)
        return loss

    def autocast_loss(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return loss(args, kwargs)

    return autocast_loss
