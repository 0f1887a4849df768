"""The references of `kitsune.kernels.batch_norm` in plain torch. Each writes the results of the operator of its name.

They compute in float32 what the kernels do, in the same order but for the sums, on any device. They count nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


class _Norm(NamedTuple):
    """A normalization with known statistics."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    invstd: Tensor

    def centered(self) -> Tensor:
        return self.x.float() - _over(self.mean, self.x)

    def scale(self) -> Tensor:
        return _over(self.invstd if self.weight is None else self.invstd * self.weight, self.x)

    def result(self) -> Tensor:
        scaled = self.centered() * self.scale()
        return scaled if self.bias is None else scaled + _over(self.bias, self.x)


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
    y, save_mean, save_invstd = outputs
    _statistics(x, running_mean, running_var, save_mean, save_invstd, momentum, eps)
    result = _Norm(x, weight, bias, save_mean, save_invstd).result()
    if residual is not None:
        result = result + residual.float()
    y.copy_(result.relu() if relu else result)


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
    grad_residual: Tensor | None = None,
) -> None:
    """Where there is a `grad_residual`, the gradient behind the ReLU is written there."""
    grad_y = _total(grad_y, added_grad_y)
    norm = _Norm(x, weight, bias, save_mean, save_invstd)
    if relu:
        grad_y = _masked(grad_y, norm.result().to(x.dtype) if y is None else y)
    if grad_residual is not None:
        grad_residual.copy_(grad_y)
    _gradients(outputs, grad_y, norm)


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
    grad_residual.copy_(_masked(_total(grad_y, added_grad_y), y))
    _gradients((grad_x, grad_weight, grad_bias), grad_residual, _Norm(x, weight, None, save_mean, save_invstd))


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
    _statistics(a, running_mean_a, running_var_a, save_mean_a, save_invstd_a, momentum_a, eps_a)
    _statistics(b, running_mean_b, running_var_b, save_mean_b, save_invstd_b, momentum_b, eps_b)
    norm_a = _Norm(a, weight_a, bias_a, save_mean_a, save_invstd_a)
    norm_b = _Norm(b, weight_b, bias_b, save_mean_b, save_invstd_b)
    y.copy_((norm_a.result() + norm_b.result()).relu())


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
    norm_a = _Norm(a, weight_a, bias_a, save_mean_a, save_invstd_a)
    norm_b = _Norm(b, weight_b, bias_b, save_mean_b, save_invstd_b)
    grad_y = _total(grad_y, added_grad_y)
    grad = _masked(grad_y, (norm_a.result() + norm_b.result()).to(a.dtype) if y is None else y)
    _gradients(outputs[:3], grad, norm_a)
    _gradients(outputs[3:], grad, norm_b)


def _statistics(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    momentum: float,
    eps: float,
) -> None:
    rows = x.numel() // x.shape[1]
    variance, mean = torch.var_mean(x.float(), _all_but_channels(x), correction=0)
    save_mean.copy_(mean)
    save_invstd.copy_((variance + eps).rsqrt())
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        running_var.mul_(1 - momentum).add_(variance * (rows / (rows - 1)), alpha=momentum)


def _gradients(outputs: Outputs, grad: Tensor, norm: _Norm) -> None:
    grad_x, grad_weight, grad_bias = outputs
    x = norm.x
    rows = x.numel() // x.shape[1]
    grad, normal = grad.float(), norm.centered() * _over(norm.invstd, x)
    grad_bias.copy_(grad.sum(_all_but_channels(x)))
    grad_weight.copy_((grad * normal).sum(_all_but_channels(x)))
    grad_x.copy_((grad - _over(grad_bias / rows, x) - normal * _over(grad_weight / rows, x)) * norm.scale())


def _total(grad: Tensor, added: Tensor | None) -> Tensor:
    return grad if added is None else grad + added


def _masked(grad: Tensor, y: Tensor) -> Tensor:
    return torch.where(y <= 0, torch.zeros_like(grad), grad)


def _over(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(-1, *[1] * (x.dim() - 2))


def _all_but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]
