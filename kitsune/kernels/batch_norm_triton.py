"""The launches of `kitsune.kernels.batch_norm` on CUDA. To be imported where Triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kitsune.kernels.batch_norm import Layout, layout_of, num_counters
from kitsune.kernels.batch_norm_backward_triton import apply_gradients, backward_in_one, partial_sums
from kitsune.kernels.batch_norm_forms import Form, forms, split
from kitsune.kernels.batch_norm_forward_triton import apply, forward_in_one, partial_statistics
from kitsune.kernels.tuning import choose

Outputs = tuple[Tensor, ...]

_INTERPRETED_PROCESSORS = 1


class Norm(NamedTuple):
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    save_mean: Tensor
    save_invstd: Tensor


class Training(NamedTuple):
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float

    def arguments(self) -> tuple[Tensor | float | None, ...]:
        return self.running_mean, self.running_var, self.momentum, 1 - self.momentum, self.eps

    def without_effect(self, norm: Norm) -> Training:
        """The same, for a trial: in place of the running statistics, the results of `norm` are written once more."""
        if self.running_mean is None:
            return self
        return self._replace(running_mean=norm.save_mean, running_var=norm.save_invstd)


class Gradients(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor


def batch_norm(
    outputs: Outputs,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    momentum: float,
    eps: float,
    relu: bool,
    counters: Tensor | None = None,
) -> None:
    """Like all below: launches on the current stream what `kitsune.kernels.batch_norm` says and checks."""
    y, save_mean, save_invstd = outputs
    a = Norm(x, weight, bias, save_mean, save_invstd)
    _forward(y, residual, a, Training(running_mean, running_var, momentum, eps), None, None, relu, counters)


def batch_norm_backward(
    outputs: Outputs,
    grad_y: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    *,
    relu: bool,
    added_grad_y: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    norm = Norm(x, weight, bias, save_mean, save_invstd)
    _backward(grad_y, added_grad_y, y, None, norm, Gradients(*outputs), None, None, relu, counters)


def batch_norm_residual_backward(
    outputs: Outputs,
    grad_y: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    *,
    added_grad_y: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    grad_x, grad_residual, grad_weight, grad_bias = outputs
    norm = Norm(x, weight, None, save_mean, save_invstd)
    grads = Gradients(grad_x, grad_weight, grad_bias)
    _backward(grad_y, added_grad_y, y, grad_residual, norm, grads, None, None, True, counters)


def batch_norm_join(
    outputs: Outputs,
    a: Tensor,
    weight_a: Tensor | None,
    bias_a: Tensor | None,
    running_mean_a: Tensor | None,
    running_var_a: Tensor | None,
    b: Tensor,
    weight_b: Tensor | None,
    bias_b: Tensor | None,
    running_mean_b: Tensor | None,
    running_var_b: Tensor | None,
    *,
    momentum_a: float,
    eps_a: float,
    momentum_b: float,
    eps_b: float,
    counters: Tensor | None = None,
) -> None:
    y, save_mean_a, save_invstd_a, save_mean_b, save_invstd_b = outputs
    _forward(
        y,
        None,
        Norm(a, weight_a, bias_a, save_mean_a, save_invstd_a),
        Training(running_mean_a, running_var_a, momentum_a, eps_a),
        Norm(b, weight_b, bias_b, save_mean_b, save_invstd_b),
        Training(running_mean_b, running_var_b, momentum_b, eps_b),
        True,
        counters,
    )


def batch_norm_join_backward(
    outputs: Outputs,
    grad_y: Tensor,
    y: Tensor | None,
    a: Tensor,
    weight_a: Tensor | None,
    bias_a: Tensor | None,
    save_mean_a: Tensor,
    save_invstd_a: Tensor,
    b: Tensor,
    weight_b: Tensor | None,
    bias_b: Tensor | None,
    save_mean_b: Tensor,
    save_invstd_b: Tensor,
    *,
    added_grad_y: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    norm_a = Norm(a, weight_a, bias_a, save_mean_a, save_invstd_a)
    norm_b = Norm(b, weight_b, bias_b, save_mean_b, save_invstd_b)
    grads_a, grads_b = Gradients(*outputs[:3]), Gradients(*outputs[3:])
    _backward(grad_y, added_grad_y, y, None, norm_a, grads_a, norm_b, grads_b, True, counters)


def normalize(y: Tensor, residual: Tensor | None, norm: Norm, relu: bool) -> None:
    """What `batch_norm` does once it has the statistics."""
    layout = layout_of(norm.x)

    def run(form: Form) -> None:
        _apply(form, layout, y, residual, norm, None, relu)

    run(_choose_tile("batch_norm apply", layout, run, norm.x))


def normalize_gradient(grad: Tensor, norm: Norm, grads: Gradients) -> None:
    """What `batch_norm_backward` without ReLU does once it has the sums, which `grads` hold.

    Args:
        grad: behind the ReLU, where there is one.
    """
    layout = layout_of(norm.x)

    def run(form: Form) -> None:
        _apply_gradients(form, layout, grad, None, norm, grads, None, None, False)

    run(_choose_tile("batch_norm_backward apply", layout, run, norm.x))


def _choose_tile(name: str, layout: Layout, run: Callable[[Form], None], x: Tensor) -> Form:
    """The form for what sums nothing, where only the tile matters."""
    tiles = [one._replace(num_partials=2) for one in forms(layout, _num_processors(x.device)) if one.num_partials > 1]
    return choose(f"{name} {x.dtype} {layout}", tuple(dict.fromkeys(tiles)), run, x.device)


def _or_none(values: Norm | Gradients | None) -> tuple[Tensor | None, ...]:
    """An argument of a kernel, which asks whether its first value is None.

    In Triton 3.6 it cannot ask whether a tuple is None if one of its values may be.
    """
    return (None,) if values is None else tuple(values)


def _apply(form: Form, layout: Layout, y: Tensor, residual: Tensor | None, a: Norm, b: Norm | None, relu: bool) -> None:
    parts = split(form, layout)
    apply[(parts.num_row_programs, triton.cdiv(layout.channels, form.block_channels))](
        y, residual, tuple(a), _or_none(b),
        layout.rows, layout.channels, layout.spatial, parts.rows_a_program, relu=relu, **_tile(form, layout),
    )  # fmt: skip


def _apply_gradients(
    form: Form,
    layout: Layout,
    grad: Tensor,
    y: Tensor | None,
    a: Norm,
    grads_a: Gradients,
    b: Norm | None,
    grads_b: Gradients | None,
    relu: bool,
) -> None:
    parts = split(form, layout)
    apply_gradients[(parts.num_row_programs, triton.cdiv(layout.channels, form.block_channels))](
        grad, y, tuple(a), tuple(grads_a), _or_none(b), _or_none(grads_b),
        layout.rows, layout.channels, layout.spatial, parts.rows_a_program, relu=relu, **_tile(form, layout),
    )  # fmt: skip


def _forward(
    y: Tensor,
    residual: Tensor | None,
    a: Norm,
    training_a: Training,
    b: Norm | None,
    training_b: Training | None,
    relu: bool,
    counters: Tensor | None,
) -> None:
    layout = layout_of(a.x)
    matrix = (layout.rows, layout.channels, layout.spatial)
    of_a, of_b = tuple(a), _or_none(b)
    branches = 1 if b is None else 2

    def run(form: Form, training_a: Training, training_b: Training | None, counters: Tensor | None) -> None:
        tile = _tile(form, layout)
        trained = of_a, training_a.arguments(), of_b, None if training_b is None else training_b.arguments()
        blocks = triton.cdiv(layout.channels, form.block_channels)
        if form.num_partials == 1:
            forward_in_one[(1, blocks)](y, residual, *trained, *matrix, relu=relu, **tile)
            return
        parts = split(form, layout)
        partials = a.save_mean.new_empty(branches, 2, parts.num_partials, layout.channels)
        partial_statistics[(parts.num_partials, blocks, branches)](
            partials,
            _zeros(a.x, branches) if counters is None else counters,
            *trained,
            *matrix,
            parts.rows_a_partial,
            block_partials=parts.block_partials,
            **tile,
        )
        _apply(form, layout, y, residual, a, b, relu)

    trial_a = training_a.without_effect(a)
    trial_b = None if b is None or training_b is None else training_b.without_effect(b)
    counters_of = _counters_for_trials(a.x, branches)
    key = f"batch_norm {a.x.dtype} {layout} joined={b is not None}"
    form = _choose(key, layout, lambda form: run(form, trial_a, trial_b, counters_of(form)), y.device)
    run(form, training_a, training_b, counters)


def _backward(
    grad_y: Tensor,
    added: Tensor | None,
    y: Tensor | None,
    grad_residual: Tensor | None,
    a: Norm,
    grads_a: Gradients,
    b: Norm | None,
    grads_b: Gradients | None,
    relu: bool,
    counters: Tensor | None,
) -> None:
    layout = layout_of(a.x)
    matrix = (layout.rows, layout.channels, layout.spatial)
    pairs = tuple(a), tuple(grads_a), _or_none(b), _or_none(grads_b)
    # The gradient of the residual is masked already: neither a second gradient nor `y` need be read again. Without
    # one, a sum of gradients waits where that of `a` will be.
    kept = grads_a.x if grad_residual is None and added is not None else grad_residual
    masked, mask_by, mask = (grad_y, y, relu) if kept is None else (kept, None, False)

    def run(form: Form, counters: Tensor | None) -> None:
        tile = _tile(form, layout)
        blocks = triton.cdiv(layout.channels, form.block_channels)
        if form.num_partials == 1:
            backward_in_one[(1, blocks)](grad_y, added, y, grad_residual, *pairs, *matrix, relu=relu, **tile)
            return
        parts = split(form, layout)
        partials = a.save_mean.new_empty(2 if b is None else 3, parts.num_partials, layout.channels)
        partial_sums[(parts.num_partials, blocks)](
            partials,
            _zeros(a.x, 1) if counters is None else counters,
            grad_y,
            added,
            y,
            kept,
            *pairs,
            *matrix,
            parts.rows_a_partial,
            relu=relu,
            block_partials=parts.block_partials,
            **tile,
        )
        _apply_gradients(form, layout, masked, mask_by, a, grads_a, b, grads_b, mask)

    counters_of = _counters_for_trials(a.x, 1)
    key = f"batch_norm_backward {a.x.dtype} {layout} joined={b is not None}"
    run(_choose(key, layout, lambda form: run(form, counters_of(form)), grad_y.device), counters)


def _zeros(x: Tensor, branches: int) -> Tensor:
    return x.new_zeros(num_counters(x.shape[1], branches), dtype=torch.int32)


def _counters_for_trials(x: Tensor, branches: int) -> Callable[[Form], Tensor]:
    """For each form counters of its own: forms are tried in several threads, and zeroing does not count as theirs."""
    return cache(lambda _form: _zeros(x, branches))


def _tile(form: Form, layout: Layout) -> dict[str, int]:
    return {
        "channels_last": layout.channels_last,
        "block_rows": form.block_rows,
        "block_channels": form.block_channels,
        "num_warps": form.num_warps,
        "loads_ahead": form.loads_ahead,
    }


def _choose(key: str, layout: Layout, run: Callable[[Form], None], device: torch.device) -> Form:
    """What is done beside the normalization, such as ReLU, takes no other form: trying that out would take long."""
    return choose(key, forms(layout, _num_processors(device)), run, device)


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
