"""The whole training step as one program of ATen operators: forward, loss, backward, clipping, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from kitsune.capture.checkpoints import inline_checkpoints
from kitsune.capture.foreseen_layouts import lay_out_as_foreseen
from kitsune.capture.recomputing import recompute
from kitsune.capture.signature import refuse_arguments
from kitsune.capture.state import Binding
from kitsune.capture.trace import gradients, interpret, own_gradients, trace
from kitsune.errors import Refusal, RefusedError
from kitsune.graph import dataflow
from kitsune.graph.verify import source_line

Phase = Literal["whole", "accumulate", "last"]


@dataclass(frozen=True)
class StepSpec:
    """What a training step is, apart from its arguments.

    Attributes:
        module: the model.
        loss: called with the step's positional and keyword arguments, returns the scalar loss.
        optimizer: a plain `torch.optim` optimizer.
        clip_grad_norm: the largest 2-norm of all gradients together; None: no clipping.
        scaler: an enabled gradient scaler, or None.
        accumulate: calls whose mean gradient makes one update.
        keep_grads: whether `.grad` holds the gradients afterwards.
    """

    module: torch.nn.Module
    loss: Callable[[tuple[Any, ...], Mapping[str, Any]], torch.Tensor]
    optimizer: torch.optim.Optimizer
    clip_grad_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1
    keep_grads: bool = False

    def owned(self) -> list[torch.nn.Parameter]:
        """The optimizer's parameters, those included that are frozen."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def params(self) -> list[torch.nn.Parameter]:
        """The parameters that the step trains."""
        return [param for group in self.optimizer.param_groups for param in group["params"] if param.requires_grad]

    def others(self) -> list[torch.nn.Parameter]:
        """The model's parameters that get a gradient and are not the optimizer's."""
        owned = {id(param) for param in self.owned()}
        return [param for param in self.module.parameters() if param.requires_grad and id(param) not in owned]


@dataclass(frozen=True)
class StepProgram:
    """A traced step.

    Attributes:
        module: takes the flat tensors of the call, followed by `state`; returns the loss and, where
            the step keeps gradients, those of `params`.
        state: the tensors beside the call's own that the graph reads and writes in place.
        stable: positions of inputs that stay the same tensors from call to call.
        params: the parameters that have a gradient.
        binding: the optimizer's side; None where the phase has no update.
        found_inf: 1 after a call whose update was skipped for an overflow; None without a scaler.
        sums: the accumulators of `params` that are part of `state`; none in the phase `"whole"`.
        scale: the scaler's tensors that are part of `state`.
        scaling: the scaler's constants in the graph.
    """

    module: fx.GraphModule
    state: tuple[torch.Tensor, ...]
    stable: frozenset[int]
    params: tuple[torch.nn.Parameter, ...]
    binding: Binding | None
    found_inf: torch.Tensor | None
    sums: tuple[torch.Tensor, ...]
    scale: tuple[torch.Tensor, ...]
    scaling: tuple[float, ...]


class _OtherGradientsError(Exception):
    """Tracing found gradients for other parameters than was assumed."""

    def __init__(self, positions: list[int]) -> None:
        super().__init__()
        self.positions = positions


def trace_step(
    spec: StepSpec,
    phase: Phase,
    graph: fx.GraphModule,
    flat: Sequence[torch.Tensor],
    accumulators: Mapping[int, torch.Tensor],
    *,
    composed: bool,
) -> StepProgram:
    """Traces the step whose forward pass and loss are `graph(*flat)`.

    Args:
        phase: `"whole"`: gradients and update; `"accumulate"`: gradients are added to
            `accumulators` (by `id` of the parameter); `"last"`: the same, followed by the update.
        composed: use the composed form of the optimizer's update.

    Raises:
        RefusedError: the step cannot be captured.
    """
    inline_checkpoints(graph)
    results = dataflow.outputs(graph.graph)
    if not results:  # the loss is an input
        raise RefusedError(Refusal("the loss does not depend on any parameter that requires a gradient"))
    if len(results) > 1:
        place = None if results[1] is None else source_line(results[1])
        left = "the step leaves tensors behind beside the loss, in attributes or containers"
        raise RefusedError(Refusal(left, place))
    known = {id(tensor) for tensor in (*spec.module.parameters(), *spec.module.buffers(), *spec.params())}
    stable = {position for position, tensor in enumerate(flat) if id(tensor) in known}
    refusal = refuse_arguments(flat)
    if refusal is None and any(tensor.requires_grad for place, tensor in enumerate(flat) if place not in stable):
        refusal = Refusal("an argument of the step requires a gradient")
    if refusal is not None:
        raise RefusedError(refusal)
    trained = {id(param): param for param in spec.params()}
    places = [position for position, tensor in enumerate(flat) if id(tensor) in trained]
    chosen = [place for place in places if phase == "accumulate" or Binding.is_initialised(spec.optimizer, flat[place])]
    tracer = _StepTracer(spec, phase, graph, flat, places, accumulators, composed)
    try:
        program = tracer.trace(chosen)
    except _OtherGradientsError as other:
        if not set(other.positions) <= set(chosen):
            raise RefusedError(Refusal("the optimizer has no state yet for some parameters"), passing=True) from None
        program = tracer.trace(other.positions)
    state_places = range(len(flat), len(flat) + len(program.state))
    return dataclasses.replace(program, stable=frozenset((*stable, *state_places)))


class _StepTracer:
    """Traces a step for one choice of parameters that have gradients."""

    def __init__(
        self,
        spec: StepSpec,
        phase: Phase,
        graph: fx.GraphModule,
        flat: Sequence[torch.Tensor],
        places: Sequence[int],
        accumulators: Mapping[int, torch.Tensor],
        composed: bool,
    ) -> None:
        self._spec, self._phase, self._graph, self._flat = spec, phase, graph, flat
        self._places, self._accumulators, self._composed = places, accumulators, composed

    def trace(self, chosen: Sequence[int]) -> StepProgram:
        spec, flat = self._spec, self._flat
        params = [param for place in chosen if isinstance(param := flat[place], torch.nn.Parameter)]
        updates = self._phase != "accumulate"
        found_inf = torch.zeros((), device=flat[0].device) if updates and spec.scaler is not None else None
        binding = Binding(spec.optimizer, params, composed=self._composed, found_inf=found_inf) if updates else None
        sums = [] if self._phase == "whole" else [self._accumulators[id(param)] for param in params]
        scale = [] if spec.scaler is None else scaler_tensors(spec.scaler)
        # The loss's gradient is an input of the graph: making it there would cost a kernel at every step.
        seed = torch.full((), 1 / spec.accumulate, device=flat[0].device)
        bound = [] if binding is None else binding.inputs()
        state = (*bound, *sums, *scale, seed)

        def step(*inputs: torch.Tensor) -> list[torch.Tensor]:
            values, rest = inputs[: len(flat)], list(inputs[len(flat) :])
            bound_values, rest = rest[: len(bound)], rest[len(bound) :]
            sum_values, scale_values = rest[: len(sums)], rest[len(sums) :]
            loss, grads = self._gradients(values, chosen, scale_values)
            if sum_values:
                torch._foreach_add_(sum_values, grads)
                grads = sum_values
            if binding is None:
                return [loss]
            if found_inf is not None:
                inf = bound_values[0]
                _unscale(grads, inf, scale_values[0])
            if spec.clip_grad_norm is not None:
                grads = clip(grads, spec.clip_grad_norm)
            with torch.no_grad():
                binding.update([values[place].detach() for place in chosen], grads, bound_values)
            if found_inf is not None:
                _update_scale(spec.scaler, scale_values, bound_values[0])
            kept = list(grads) if spec.keep_grads else []
            if sum_values:
                kept = [grad.clone() for grad in kept]
                torch._foreach_zero_(sum_values)
            return [loss, *kept]

        module = trace(step, [*flat, *state])
        recompute(module, dataflow.placeholders(module.graph)[-1:], self._graph.graph)
        lay_out_as_foreseen(module, [*flat, *state])
        return StepProgram(
            module=module,
            state=state,
            stable=frozenset(),
            params=tuple(params),
            binding=binding,
            found_inf=found_inf,
            sums=tuple(sums),
            scale=tuple(scale),
            scaling=scaling(spec.scaler),
        )

    def _gradients(
        self, values: Sequence[torch.Tensor], chosen: Sequence[int], scale: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss and its gradients; `scale` holds the scaler's tensors, if any, and the loss's own gradient."""
        spec = self._spec
        loss = interpret(self._graph, values)[0]
        if loss.numel() != 1:
            raise RefusedError(Refusal("the loss is not a tensor with one element"))
        if not loss.requires_grad:
            raise RefusedError(Refusal("the loss does not depend on any parameter that requires a gradient"))
        seed = scale[-1] if spec.scaler is None else scale[-1] * scale[0]
        grads = gradients([loss], [values[place] for place in self._places], [seed.to(loss.dtype).expand_as(loss)])
        used = [place for place, grad in zip(self._places, grads, strict=True) if grad is not None]
        if used != list(chosen):
            raise _OtherGradientsError(used)
        present = [grad for grad in grads if grad is not None]
        return loss.detach(), own_gradients([values[place] for place in used], present, [*values, *scale])


def clip(grads: list[torch.Tensor], max_norm: float) -> list[torch.Tensor]:
    """Gradients scaled so that their common 2-norm is at most `max_norm`, as `clip_grad_norm_` computes it."""
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    return list(torch._foreach_mul(grads, factor))


def scaling(scaler: torch.amp.GradScaler | None) -> tuple[float, ...]:
    """Growth factor, backoff factor and growth interval; nothing without a scaler."""
    if scaler is None:
        return ()
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


def scaler_tensors(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """The scale and the growth tracker, which have no public reader as tensors."""
    if scaler._scale is None or scaler._growth_tracker is None:
        raise RefusedError(Refusal("the gradient scaler is not initialised yet"), passing=True)
    return [scaler._scale, scaler._growth_tracker]


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
    found_inf.zero_()
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale.double().reciprocal().float())


def _update_scale(scaler: torch.amp.GradScaler | None, scale: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
    assert scaler is not None
    growth, backoff, interval = scaling(scaler)
    torch._amp_update_scale_(scale[0], scale[1], found_inf, growth, backoff, int(interval))
