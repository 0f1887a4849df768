"""Batch norm in training mode with what surrounds it, as operators of a graph.

`kitsune::batch_norm` is `relu?(batch_norm(x) + residual?)`, `kitsune::batch_norm_join` is
`relu(batch_norm(a) + batch_norm(b))`, as where the branches of a down-sampling block meet; each has its backward.
Here are the definitions and the checks. On the CPU the operators are their references in plain torch.

Tensors of images are (N, C, *spatial), float32, bfloat16 or float16, dense in memory, channels last or contiguous; all
of one call have one shape, dtype and memory layout. Whatever belongs to channels is float32 and of shape (C,).
Everything is computed in float32 and rounded once, where it is stored: a residual is added before rounding.

All operators take `counters`, an int32 tensor of at least `num_counters` zeros. Of the programs that sum over images,
those of one block of channels count in it which one is the last, and thereby finishes the sums. They leave zeros, as
they found them, which is why no operator is declared to write them. But until an operator has ended, the counters are
its own: no two that may run at the same time can share any, and who gives them relies on nothing that they hold in
between. With others than zeros, sums would stay unfinished. Without `counters` an operator zeroes some for itself,
which takes a launch.

All backwards take `added_grad_y`, another gradient of `y`, like `grad_y`. Both are added first, and their sum is
rounded to their type, as it would be before the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kitsune.kernels import batch_norm_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROWS = 2**30  # rows are counted in int32, with room for a program
MAX_CHANNELS = 2**16 - 1  # blocks of channels are the second axis of a grid

torch.library.define(
    "kitsune::batch_norm",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, *, "
    "float momentum, float eps, bool relu, Tensor? counters=None) -> (Tensor y, Tensor save_mean, Tensor save_invstd)",
)
torch.library.define(
    "kitsune::batch_norm_backward",
    "(Tensor grad_y, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, Tensor save_mean, Tensor save_invstd, *, "
    "bool relu, Tensor? added_grad_y=None, Tensor? counters=None) "
    "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
)
torch.library.define(
    "kitsune::batch_norm_residual_backward",
    "(Tensor grad_y, Tensor x, Tensor y, Tensor? weight, Tensor save_mean, Tensor save_invstd, *, "
    "Tensor? added_grad_y=None, Tensor? counters=None) "
    "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
)
torch.library.define(
    "kitsune::batch_norm_join",
    "(Tensor a, Tensor? weight_a, Tensor? bias_a, Tensor(a!)? running_mean_a, Tensor(b!)? running_var_a, "
    "Tensor b, Tensor? weight_b, Tensor? bias_b, Tensor(c!)? running_mean_b, Tensor(d!)? running_var_b, *, "
    "float momentum_a, float eps_a, float momentum_b, float eps_b, Tensor? counters=None) "
    "-> (Tensor y, Tensor save_mean_a, Tensor save_invstd_a, Tensor save_mean_b, Tensor save_invstd_b)",
)
torch.library.define(
    "kitsune::batch_norm_join_backward",
    "(Tensor grad_y, Tensor? y, "
    "Tensor a, Tensor? weight_a, Tensor? bias_a, Tensor save_mean_a, Tensor save_invstd_a, "
    "Tensor b, Tensor? weight_b, Tensor? bias_b, Tensor save_mean_b, Tensor save_invstd_b, *, "
    "Tensor? added_grad_y=None, Tensor? counters=None) "
    "-> (Tensor grad_a, Tensor grad_weight_a, Tensor grad_bias_a, Tensor grad_b, Tensor grad_weight_b, "
    "Tensor grad_bias_b)",
)


class Layout(NamedTuple):
    """How a tensor (N, C, *spatial) lies in memory. A row is one place of one image."""

    rows: int  # values of a channel
    channels: int
    spatial: int  # places of an image
    channels_last: bool


def layout_of(x: Tensor) -> Layout:
    """Raises ValueError unless `x` is what the operators take."""
    if x.dtype not in DTYPES or x.dim() < 2:
        raise ValueError(
            f"batch_norm takes (N, C, *spatial) in float32, bfloat16 or float16: got {tuple(x.shape)} of {x.dtype}"
        )
    channels_last = x.movedim(1, -1).is_contiguous()
    if not channels_last and not x.is_contiguous():
        raise ValueError(
            "batch_norm takes tensors that are dense in memory, channels last or contiguous: "
            f"got {tuple(x.shape)} with strides {x.stride()}"
        )
    spatial = math.prod(x.shape[2:])
    layout = Layout(x.shape[0] * spatial, x.shape[1], spatial, channels_last)
    if not 2 <= layout.rows <= MAX_ROWS or not 1 <= layout.channels <= MAX_CHANNELS:
        raise ValueError(
            f"batch_norm takes 2 to {MAX_ROWS} values in each of 1 to {MAX_CHANNELS} channels: got {tuple(x.shape)}"
        )
    return layout


def num_counters(num_channels: int, branches: int = 1) -> int:
    """How many counters an operator needs, in any form: one for each block of channels.

    Args:
        branches: how many normalizations take statistics at once; 2 in `kitsune::batch_norm_join`.
    """
    return branches * num_channels


def batch_norm(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`y = relu?((x - mean) * invstd * weight + bias + residual)`, with the mean and variance of this batch.

    On CUDA for devices that `kitsune.device.refuse_triton` does not refuse.

    Args:
        x: (N, C, *spatial).
        residual: like `x`; None: nothing is added.
        weight, bias: (C,); None for 1 and 0.
        running_mean, running_var: (C,), both or none; changed in place to `(1 - momentum) * running + momentum * new`,
            where the new variance is the unbiased one.
        counters: zeros, see above.

    Returns:
        y: like `x`.
        save_mean: (C,).
        save_invstd: (C,), `1 / sqrt(variance + eps)` with the biased variance.

    Raises:
        ValueError: a channel has fewer than two values, or tensors do not match in shape, dtype, device or layout.
    """
    return torch.ops.kitsune.batch_norm.default(  # type: ignore[no-any-return]
        x, residual, weight, bias, running_mean, running_var,
        momentum=momentum, eps=eps, relu=relu, counters=counters,
    )  # fmt: skip


def batch_norm_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `batch_norm` without a residual, or with one where there is no ReLU.

    With `g = grad_y`, 0 where `y <= 0` if there is a ReLU, and `normal = (x - mean) * invstd`, over the n values of a
    channel: `grad_bias = sum(g)`, `grad_weight = sum(g * normal)` and
    `grad_x = weight * invstd * (g - grad_bias / n - normal * grad_weight / n)`.

    Args:
        grad_y, x: (N, C, *spatial).
        y: the output, for ReLU's mask. None: the mask is computed from `x` and `bias`, exactly as `kitsune::batch_norm`
            without a residual did, which saves reading `y` twice.
        weight, bias, save_mean, save_invstd: (C,). `bias` matters only where `y` does not.
        added_grad_y, counters: see above.

    Returns:
        grad_x: like `x`.
        grad_weight, grad_bias: (C,), also where `weight` is None.

    Raises:
        ValueError: there is a `y` but no ReLU, or as for `batch_norm`.
    """
    return torch.ops.kitsune.batch_norm_backward.default(  # type: ignore[no-any-return]
        grad_y, x, y, weight, bias, save_mean, save_invstd,
        relu=relu, added_grad_y=added_grad_y, counters=counters,
    )  # fmt: skip


def batch_norm_residual_backward(
    grad_y: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    *,
    added_grad_y: Tensor | None = None,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `batch_norm` with a residual and a ReLU: `batch_norm_backward`, and that of the residual.

    Returns:
        grad_x, grad_residual: like `x`; the latter is `grad_y`, 0 where `y <= 0`.
        grad_weight, grad_bias: (C,).
    """
    return torch.ops.kitsune.batch_norm_residual_backward.default(  # type: ignore[no-any-return]
        grad_y, x, y, weight, save_mean, save_invstd, added_grad_y=added_grad_y, counters=counters
    )


def batch_norm_join(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`y = relu(batch_norm(a) + batch_norm(b))`; arguments, results and errors as for `batch_norm`, for each branch.

    Returns:
        y, save_mean_a, save_invstd_a, save_mean_b, save_invstd_b
    """
    return torch.ops.kitsune.batch_norm_join.default(  # type: ignore[no-any-return]
        a, weight_a, bias_a, running_mean_a, running_var_a, b, weight_b, bias_b, running_mean_b, running_var_b,
        momentum_a=momentum_a, eps_a=eps_a, momentum_b=momentum_b, eps_b=eps_b, counters=counters,
    )  # fmt: skip


def batch_norm_join_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `batch_norm_join`; arguments and formulas as for `batch_norm_backward`, for each branch.

    Without `y`, ReLU's mask is computed from `a` and `b`, exactly as `kitsune::batch_norm_join` did.

    Returns:
        grad_a, grad_weight_a, grad_bias_a, grad_b, grad_weight_b, grad_bias_b; the gradients of the biases are equal.
    """
    return torch.ops.kitsune.batch_norm_join_backward.default(  # type: ignore[no-any-return]
        grad_y, y, a, weight_a, bias_a, save_mean_a, save_invstd_a, b, weight_b, bias_b, save_mean_b, save_invstd_b,
        added_grad_y=added_grad_y, counters=counters,
    )  # fmt: skip


# What checks the arguments and allocates the results: for tracing, that is all.


def _check(
    x: Tensor,
    like: Mapping[str, Tensor | None],
    of_channels: Mapping[str, Tensor | None],
    counters: Tensor | None,
    branches: int = 1,
) -> None:
    """Raises ValueError unless the tensors match: the kernels read memory by address."""
    layout = layout_of(x)
    for name, tensor in like.items():
        if tensor is None:
            continue
        if (tensor.shape, tensor.dtype, tensor.device) != (x.shape, x.dtype, x.device):
            raise ValueError(
                f"batch_norm takes {name} like its input, {tuple(x.shape)} of {x.dtype} on {x.device}: "
                f"got {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
        strides = zip(x.shape, x.stride(), tensor.stride(), strict=True)
        if any(size > 1 and one != other for size, one, other in strides):
            raise ValueError(
                f"batch_norm takes {name} laid out like its input, with strides {x.stride()}: got {tensor.stride()}"
            )
    for name, tensor in of_channels.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.device != x.device or tensor.shape != (layout.channels,):
            raise ValueError(
                f"batch_norm takes {name} in float32 of shape ({layout.channels},) on {x.device}: "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"batch_norm takes {name} dense in memory: got stride {tensor.stride()[0]}")
    if counters is not None:
        check_counters(counters, num_counters(layout.channels, branches), x.device)


def check_counters(counters: Tensor, num: int, device: torch.device) -> None:
    if counters.dtype != torch.int32 or counters.device != device or counters.dim() != 1 or counters.numel() < num:
        raise ValueError(
            f"batch_norm takes counters in int32 of shape ({num},) or more on {device}: "
            f"got {counters.dtype} of shape {tuple(counters.shape)} on {counters.device}"
        )
    if not counters.is_contiguous():
        raise ValueError(f"batch_norm takes counters dense in memory: got stride {counters.stride()[0]}")


def _check_running(running_mean: Tensor | None, running_var: Tensor | None) -> None:
    if (running_mean is None) != (running_var is None):
        raise ValueError("batch_norm takes both running_mean and running_var or none of them")


def _of_channels(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], dtype=torch.float32)


def outputs_of_batch_norm(
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
) -> tuple[Tensor, Tensor, Tensor]:
    of_channels = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    _check(x, {"residual": residual}, of_channels, counters)
    _check_running(running_mean, running_var)
    return torch.empty_like(x), _of_channels(x), _of_channels(x)


def outputs_of_batch_norm_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    of_channels = {"weight": weight, "bias": bias, "save_mean": save_mean, "save_invstd": save_invstd}
    _check(x, {"grad_y": grad_y, "added_grad_y": added_grad_y, "y": y}, of_channels, counters)
    if y is not None and not relu:
        raise ValueError("batch_norm_backward takes y for ReLU's mask only: got y and relu=False")
    return torch.empty_like(x), _of_channels(x), _of_channels(x)


def outputs_of_batch_norm_residual_backward(
    grad_y: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    *,
    added_grad_y: Tensor | None = None,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_channels = {"weight": weight, "save_mean": save_mean, "save_invstd": save_invstd}
    _check(x, {"grad_y": grad_y, "added_grad_y": added_grad_y, "y": y}, of_channels, counters)
    return torch.empty_like(x), torch.empty_like(x), _of_channels(x), _of_channels(x)


def outputs_of_batch_norm_join(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_a = {"weight_a": weight_a, "bias_a": bias_a, "running_mean_a": running_mean_a, "running_var_a": running_var_a}
    of_b = {"weight_b": weight_b, "bias_b": bias_b, "running_mean_b": running_mean_b, "running_var_b": running_var_b}
    _check(a, {"b": b}, {**of_a, **of_b}, counters, branches=2)
    _check_running(running_mean_a, running_var_a)
    _check_running(running_mean_b, running_var_b)
    return torch.empty_like(a), _of_channels(a), _of_channels(a), _of_channels(a), _of_channels(a)


def outputs_of_batch_norm_join_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    of_a = {"weight_a": weight_a, "bias_a": bias_a, "save_mean_a": save_mean_a, "save_invstd_a": save_invstd_a}
    of_b = {"weight_b": weight_b, "bias_b": bias_b, "save_mean_b": save_mean_b, "save_invstd_b": save_invstd_b}
    _check(a, {"grad_y": grad_y, "added_grad_y": added_grad_y, "y": y, "b": b}, {**of_a, **of_b}, counters)
    of_channels = [_of_channels(a) for _ in range(4)]
    return torch.empty_like(a), of_channels[0], of_channels[1], torch.empty_like(b), of_channels[2], of_channels[3]


def _implement(name: str, outputs_of: Callable[..., tuple[Tensor, ...]]) -> None:
    reference = getattr(batch_norm_reference, name)

    def on_cpu(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        outputs = outputs_of(*arguments, **options)
        reference(outputs, *arguments, **options)
        return outputs

    def on_cuda(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        from kitsune.kernels import batch_norm_triton  # Triton is optional

        outputs = outputs_of(*arguments, **options)
        with torch.cuda.device(outputs[0].device):
            getattr(batch_norm_triton, name)(outputs, *arguments, **options)
        return outputs

    torch.library.register_fake(f"kitsune::{name}", outputs_of)
    torch.library.impl(f"kitsune::{name}", "CPU", on_cpu)
    torch.library.impl(f"kitsune::{name}", "CUDA", on_cuda)


_implement("batch_norm", outputs_of_batch_norm)
_implement("batch_norm_backward", outputs_of_batch_norm_backward)
_implement("batch_norm_residual_backward", outputs_of_batch_norm_residual_backward)
_implement("batch_norm_join", outputs_of_batch_norm_join)
_implement("batch_norm_join_backward", outputs_of_batch_norm_join_backward)
