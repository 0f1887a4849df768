"""Layer norm and RMS norm over the last dimension, with the residual that is added before, as operators of a graph.

`kitsune::layer_norm` is `layer_norm(x + residual?)`, `kitsune::rms_norm` is `rms_norm(x + residual?)`; each has its
backward, to which the gradient that reaches the sum on its other way, the residual branch, may be given. The first
result may be wanted in another precision as well, as under autocast. Here are the definitions and the checks. On the
CPU the operators are the references below, in plain torch.

Tensors (*, N) are float32, bfloat16 or float16, each of its own; their rows are contiguous and evenly spaced (a slice
of a matrix's columns, every other row), and results are contiguous. Everything is computed in float32 and rounded
once, where it is stored, but for the sum, which is rounded before it is normalized, as it is where the two are apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kitsune.kernels.rows import FLOATS, check_rows, check_vector

torch.library.define(
    "kitsune::layer_norm",
    "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, *, float eps, ScalarType dtype, "
    "ScalarType? copy_dtype=None) -> (Tensor y, Tensor total, Tensor mean, Tensor rstd, Tensor copy)",
)
torch.library.define(
    "kitsune::layer_norm_backward",
    "(Tensor grad_y, Tensor? grad_total, Tensor total, Tensor mean, Tensor rstd, Tensor? weight, *, "
    "ScalarType? weight_dtype, ScalarType? bias_dtype, ScalarType? copy_dtype=None) "
    "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor copy)",
)
torch.library.define(
    "kitsune::rms_norm",
    "(Tensor x, Tensor? residual, Tensor? weight, *, float eps, ScalarType dtype, ScalarType? copy_dtype=None) "
    "-> (Tensor y, Tensor total, Tensor rstd, Tensor copy)",
)
torch.library.define(
    "kitsune::rms_norm_backward",
    "(Tensor grad_y, Tensor? grad_total, Tensor total, Tensor rstd, Tensor? weight, *, ScalarType? weight_dtype, "
    "ScalarType? copy_dtype=None) -> (Tensor grad_x, Tensor grad_weight, Tensor copy)",
)


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`y = (total - mean) * rstd * weight + bias` with `total = x + residual`, and with the statistics of each row.

    On CUDA for devices that `kitsune.device.refuse_triton` does not refuse.

    Args:
        x: (*, N).
        residual: (*, N); None: nothing is added.
        weight, bias: (N,), float32, bfloat16 or float16; None for 1 and 0.
        eps: is added to the variance.
        dtype: of `y`; with float32 sums and a lower one, what autocast computes.
        copy_dtype: of `copy`; None: it is not wanted.

    Returns:
        y: (*, N), of `dtype`.
        total: (*, N), of the dtype to which those of `x` and `residual` promote; of shape (0,) without a residual.
        mean: (*, 1), float32.
        rstd: (*, 1), float32, `1 / sqrt(variance + eps)` with the biased variance.
        copy: (*, N), what is rounded to `y`, rounded to `copy_dtype`; of shape (0,), float32, if it is not wanted.

    Raises:
        ValueError: tensors do not match in shape, dtype, device or layout, or N is 0.
    """
    return torch.ops.kitsune.layer_norm.default(  # type: ignore[no-any-return]
        x, residual, weight, bias, eps=eps, dtype=dtype, copy_dtype=copy_dtype
    )


def layer_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `layer_norm`.

    With `normal = (total - mean) * rstd`, `g = grad_y * weight`, and means over a row:
    `grad_x = (g - mean(g) - normal * mean(g * normal)) * rstd + grad_total`, and over all rows
    `grad_weight = sum(grad_y * normal)` and `grad_bias = sum(grad_y)`.

    Args:
        grad_y: (*, N).
        grad_total: (*, N), the gradient of `total` from where else it is used; None: it is not.
        total: (*, N), what was normalized: `x` where there was no residual.
        mean, rstd: (*, 1), float32, contiguous.
        weight: (N,), as in the forward.
        weight_dtype, bias_dtype: of `grad_weight` and `grad_bias`; None: that gradient is not wanted.
        copy_dtype: of `copy`; None: it is not wanted.

    Returns:
        grad_x: (*, N), of the dtype of `total`; it is the gradient of `x` and of the residual.
        grad_weight, grad_bias: (N,); of shape (0,), float32, where they are not wanted.
        copy: (*, N), what is rounded to `grad_x`, rounded to `copy_dtype`; of shape (0,), float32, if not wanted.

    Raises:
        ValueError: as for `layer_norm`.
    """
    return torch.ops.kitsune.layer_norm_backward.default(  # type: ignore[no-any-return]
        grad_y, grad_total, total, mean, rstd, weight,
        weight_dtype=weight_dtype, bias_dtype=bias_dtype, copy_dtype=copy_dtype,
    )  # fmt: skip


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`y = total * rstd * weight` with `total = x + residual` and `rstd = 1 / sqrt(mean(total ** 2) + eps)` of a row.

    Zhang and Sennrich, "Root mean square layer normalization" (2019). Arguments, results and errors are those of
    `layer_norm`, without a bias and a mean.

    Returns:
        y, total, rstd, copy
    """
    return torch.ops.kitsune.rms_norm.default(  # type: ignore[no-any-return]
        x, residual, weight, eps=eps, dtype=dtype, copy_dtype=copy_dtype
    )


def rms_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    weight_dtype: torch.dtype | None,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `rms_norm`: as for `layer_norm_backward`, with a mean of 0 and without `mean(g)`.

    Returns:
        grad_x, grad_weight, copy
    """
    return torch.ops.kitsune.rms_norm_backward.default(  # type: ignore[no-any-return]
        grad_y, grad_total, total, rstd, weight, weight_dtype=weight_dtype, copy_dtype=copy_dtype
    )


# What checks the arguments and allocates the results: for tracing, that is all.


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"{name} gives results in float32, bfloat16 or float16: got {dtype}")


def _forward_outputs(
    name: str, x: Tensor, residual: Tensor | None, of_columns: dict[str, Tensor | None], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`y`, `total`, and one statistic."""
    _check_dtype(name, dtype)
    check_rows(name, "x", x, x.shape, x.device)
    for column, tensor in of_columns.items():
        if tensor is not None:
            check_vector(name, column, tensor, x.shape[-1:], FLOATS, x.device)
    total = x.new_empty(0)
    if residual is not None:
        check_rows(name, "residual", residual, x.shape, x.device)
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return x.new_empty(x.shape, dtype=dtype), total, _of_rows(x)


def _backward_outputs(
    name: str,
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    statistics: dict[str, Tensor],
    weight: Tensor | None,
    dtypes: tuple[torch.dtype | None, ...],
) -> tuple[Tensor, ...]:
    check_rows(name, "total", total, total.shape, total.device)
    check_rows(name, "grad_y", grad_y, total.shape, total.device)
    if grad_total is not None:
        check_rows(name, "grad_total", grad_total, total.shape, total.device)
    for statistic, tensor in statistics.items():
        check_vector(name, statistic, tensor, (*total.shape[:-1], 1), (torch.float32,), total.device)
    if weight is not None:
        check_vector(name, "weight", weight, total.shape[-1:], FLOATS, total.device)
    of_columns = []
    for dtype in dtypes:
        _check_dtype(name, dtype or torch.float32)
        of_columns.append(total.new_empty(total.shape[-1] if dtype else 0, dtype=dtype or torch.float32))
    return total.new_empty(total.shape), *of_columns


def _of_rows(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _copy_of(name: str, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    _check_dtype(name, dtype or torch.float32)
    return x.new_empty(x.shape if dtype else (0,), dtype=dtype or torch.float32)


def _outputs_of_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    name, of_columns = "layer_norm", {"weight": weight, "bias": bias}
    return *_forward_outputs(name, x, residual, of_columns, dtype), _of_rows(x), _copy_of(name, x, copy_dtype)


def _outputs_of_layer_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    name, statistics, dtypes = "layer_norm_backward", {"mean": mean, "rstd": rstd}, (weight_dtype, bias_dtype)
    outputs = _backward_outputs(name, grad_y, grad_total, total, statistics, weight, dtypes)
    return *outputs, _copy_of(name, total, copy_dtype)


def _outputs_of_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    name = "rms_norm"
    return *_forward_outputs(name, x, residual, {"weight": weight}, dtype), _copy_of(name, x, copy_dtype)


def _outputs_of_rms_norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    weight_dtype: torch.dtype | None,
    copy_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    name = "rms_norm_backward"
    outputs = _backward_outputs(name, grad_y, grad_total, total, {"rstd": rstd}, weight, (weight_dtype,))
    return *outputs, _copy_of(name, total, copy_dtype)


# The references: each writes the results of the operator of its name, on any device.


def _layer_norm(
    outputs: tuple[Tensor, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
) -> None:
    y, total, mean, rstd, copy = outputs
    values = _summed(x, residual, total)
    mean.copy_(values.mean(-1, keepdim=True))
    _normalize(y, copy, rstd, values - mean, weight, bias, eps)


def _layer_norm_backward(
    outputs: tuple[Tensor, ...],
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    copy_dtype: torch.dtype | None = None,
) -> None:
    grad_x, grad_weight, grad_bias, copy = outputs
    grad, normal = grad_y.float(), (total.float() - mean) * rstd
    _sum_rows(grad_weight, grad * normal)
    _sum_rows(grad_bias, grad)
    scaled = grad if weight is None else grad * weight.float()
    correction = scaled.mean(-1, keepdim=True) + normal * (scaled * normal).mean(-1, keepdim=True)
    _add((grad_x, copy), (scaled - correction) * rstd, grad_total)


def _rms_norm(
    outputs: tuple[Tensor, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
) -> None:
    y, total, rstd, copy = outputs
    _normalize(y, copy, rstd, _summed(x, residual, total), weight, None, eps)


def _rms_norm_backward(
    outputs: tuple[Tensor, ...],
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    weight_dtype: torch.dtype | None,
    copy_dtype: torch.dtype | None = None,
) -> None:
    grad_x, grad_weight, copy = outputs
    grad, normal = grad_y.float(), total.float() * rstd
    _sum_rows(grad_weight, grad * normal)
    scaled = grad if weight is None else grad * weight.float()
    _add((grad_x, copy), (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd, grad_total)


def _summed(x: Tensor, residual: Tensor | None, total: Tensor) -> Tensor:
    return x.float() if residual is None else total.copy_(x.float() + residual.float()).float()


def _normalize(
    y: Tensor, copy: Tensor, rstd: Tensor, centered: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    rstd.copy_((centered.square().mean(-1, keepdim=True) + eps).rsqrt())
    normal = centered * rstd
    _add((y, copy), normal if weight is None else normal * weight.float(), bias)


def _add(results: tuple[Tensor, Tensor], values: Tensor, added: Tensor | None) -> None:
    for result in results:
        if result.shape == values.shape:  # but a copy that is not wanted
            result.copy_(values if added is None else values + added.float())


def _sum_rows(result: Tensor, values: Tensor) -> None:
    if result.numel():
        result.copy_(values.reshape(-1, values.shape[-1]).sum(0))


def _implement(name: str, outputs_of: Callable[..., tuple[Tensor, ...]], reference: Callable[..., None]) -> None:
    def on_cpu(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        outputs = outputs_of(*arguments, **options)
        reference(outputs, *arguments, **options)
        return outputs

    def on_cuda(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        from kitsune.kernels import layer_norm_triton  # Triton is optional

        outputs = outputs_of(*arguments, **options)
        with torch.cuda.device(outputs[0].device):
            getattr(layer_norm_triton, name)(outputs, *arguments, **options)
        return outputs

    torch.library.register_fake(f"kitsune::{name}", outputs_of)
    torch.library.impl(f"kitsune::{name}", "CPU", on_cpu)
    torch.library.impl(f"kitsune::{name}", "CUDA", on_cuda)


_implement("layer_norm", _outputs_of_layer_norm, _layer_norm)
_implement("layer_norm_backward", _outputs_of_layer_norm_backward, _layer_norm_backward)
_implement("rms_norm", _outputs_of_rms_norm, _rms_norm)
_implement("rms_norm_backward", _outputs_of_rms_norm_backward, _rms_norm_backward)
