"""`kitsune::cross_entropy_head`: the last linear layer of a classifier with its loss, forward and backward at once.

It computes as autocast does: the logits have the compute dtype, the loss is taken of them in float32, and the
gradient of the logits is rounded to the compute dtype before it is multiplied by the weight.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kitsune.kernels.linear import backpropagate, check_linear, check_operands, check_saved

MOST_CLASSES = 128

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

torch.library.define(
    "kitsune::cross_entropy_head",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor targets, Tensor? saved, str activation, *, ScalarType dtype, "
    "Tensor? scale=None, int ignore_index=-100, bool allow_tf32=False) -> (Tensor, Tensor, Tensor)",
)


def cross_entropy_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    ignore_index: int = -100,
    allow_tf32: bool = False,
) -> Outputs:
    """The mean cross-entropy of `logits = x @ weight.T + bias`, and its gradients.

    With n the number of targets that are not ignored, p = softmax(logits), y the one-hot targets::

        loss        = -sum(log(p) * y) / n
        grad_logits = (p - y) * scale / n, and 0 where the target is ignored
        grad_x      = (grad_logits @ weight) * act'(saved)

    Args:
        x: (M, K), of `dtype` or float32, with any strides.
        weight: (N, K), likewise, for N classes, 1 to 128.
        bias: (N,), likewise, or None.
        targets: (M,), int64, 0 to N - 1 or `ignore_index`. Others stop the program by a device assertion, as in
            PyTorch (on the CPU: IndexError).
        saved: (M, K), of `dtype` or float32: the output of "relu" or "tanh" (which is `x`), the input of "gelu",
            "gelu_tanh" or "silu"; None for "none".
        activation: what made `x`: see `kitsune.kernels.linear.linear_activation`.
        dtype: what to compute in: float32, bfloat16 or float16.
        scale: a float32 scalar: the gradient of the loss, such as a `GradScaler`'s scale; 1 if None.
        allow_tf32: round float32 operands to TF32 for the tensor cores.

    Returns:
        The loss, a float32 scalar (NaN if every target is ignored, and not scaled); the gradient of the logits,
        (M, N), contiguous, of `dtype`; the gradient of what entered the activation, (M, K), contiguous, of `dtype`.

    Raises:
        ValueError: shapes, dtypes, devices, the activation or the number of classes do not fit.
    """
    return torch.ops.kitsune.cross_entropy_head.default(  # type: ignore[no-any-return]
        x,
        weight,
        bias,
        targets,
        saved,
        activation,
        dtype=dtype,
        scale=scale,
        ignore_index=ignore_index,
        allow_tf32=allow_tf32,
    )


def _empty_outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    ignore_index: int = -100,
    allow_tf32: bool = False,
) -> Outputs:
    name = "cross_entropy_head"
    num_rows, num_classes = check_linear(name, x, weight, bias, dtype)
    if not 1 <= num_classes <= MOST_CLASSES:
        raise ValueError(f"{name} takes 1 to {MOST_CLASSES} classes: got {num_classes}")
    check_saved(name, saved, activation)
    if saved is not None:
        check_operands(name, dtype, {"x": (x, (num_rows, x.shape[1])), "saved": (saved, (num_rows, x.shape[1]))})
    if targets.shape != (num_rows,) or targets.dtype != torch.int64 or targets.device != x.device:
        raise ValueError(
            f"{name} takes {num_rows} targets of torch.int64 on {x.device}: got {tuple(targets.shape)} of "
            f"{targets.dtype} on {targets.device}"
        )
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device):
        raise ValueError(
            f"{name} takes a float32 scalar on {x.device} as scale: got {tuple(scale.shape)} of {scale.dtype} "
            f"on {scale.device}"
        )
    loss = x.new_empty((), dtype=torch.float32)
    return loss, x.new_empty((num_rows, num_classes), dtype=dtype), x.new_empty(x.shape, dtype=dtype)


def _on_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    ignore_index: int = -100,
    allow_tf32: bool = False,
) -> Outputs:
    _empty_outputs(x, weight, bias, targets, saved, activation, dtype=dtype, scale=scale)
    logits = functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    log_probabilities = functional.log_softmax(logits.float(), 1)
    loss = functional.nll_loss(log_probabilities, targets, ignore_index=ignore_index)
    counted = targets != ignore_index
    factor = torch.where(counted, (1.0 if scale is None else scale) / counted.sum(), 0.0)[:, None]
    one_hot = targets[:, None] == torch.arange(weight.shape[0], device=targets.device)
    grad_logits = (log_probabilities.exp() * factor - one_hot * factor).to(dtype)
    return loss, grad_logits, backpropagate(grad_logits @ weight.to(dtype), saved, activation)


def _on_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    ignore_index: int = -100,
    allow_tf32: bool = False,
) -> Outputs:
    from kitsune.kernels import head_triton  # Triton is optional

    outputs = _empty_outputs(x, weight, bias, targets, saved, activation, dtype=dtype, scale=scale)
    with torch.cuda.device(x.device):
        head_triton.cross_entropy_head(
            x,
            weight,
            bias,
            targets,
            saved,
            *outputs,
            activation=activation,
            scale=scale,
            ignore_index=ignore_index,
            allow_tf32=allow_tf32,
        )
    return outputs


torch.library.impl("kitsune::cross_entropy_head", "CPU", _on_cpu)
torch.library.impl("kitsune::cross_entropy_head", "CUDA", _on_cuda)
torch.library.register_fake("kitsune::cross_entropy_head", _empty_outputs)
