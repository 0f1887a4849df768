"""`kitsune::linear_activation` and `kitsune::linear_input_gradient`: a linear layer with its activation, in one launch.

The forward is `act(x @ weight.T + bias)`, the backward `(grad_output @ weight) * act'(saved)`, where the
activation is that of the layer before. Both compute as autocast does: operands are rounded to the compute dtype,
products are summed in float32, results have the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OF_OUTPUT = ("relu", "tanh")
"""Activations whose derivative is computed from their output."""
OF_PREACTIVATION = ("gelu", "gelu_tanh", "silu")
"""Activations whose derivative is computed from their input."""

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
_BACKWARDS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda grad, output: torch.ops.aten.threshold_backward(grad, output, 0),
    "tanh": torch.ops.aten.tanh_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
}

torch.library.define(
    "kitsune::linear_activation",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, *, ScalarType dtype, bool keep_preactivation=False, "
    "bool allow_tf32=False) -> (Tensor, Tensor)",
)
torch.library.define(
    "kitsune::linear_input_gradient",
    "(Tensor grad_output, Tensor weight, Tensor? saved, str activation, *, ScalarType dtype, "
    "bool allow_tf32=False) -> Tensor",
)


def linear_activation(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    keep_preactivation: bool = False,
    allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`act(x @ weight.T + bias)`, and `x @ weight.T + bias` if that is to be kept.

    Args:
        x: (M, K), of `dtype` or float32, with any strides.
        weight: (N, K), likewise.
        bias: (N,), likewise, or None.
        activation: "none", "relu", "tanh", "gelu", "gelu_tanh" (its approximation) or "silu".
        dtype: what to compute in: float32, bfloat16 or float16.
        keep_preactivation: only for "gelu", "gelu_tanh" and "silu": the derivatives of the others need the output.
        allow_tf32: round float32 operands to TF32 for the tensor cores.

    Returns:
        The output and the pre-activation, (M, N), contiguous, of `dtype`; the latter of shape (0,) unless kept.

    Raises:
        ValueError: shapes, dtypes, devices or the activation do not fit.
    """
    return torch.ops.kitsune.linear_activation.default(  # type: ignore[no-any-return]
        x, weight, bias, activation, dtype=dtype, keep_preactivation=keep_preactivation, allow_tf32=allow_tf32
    )


def linear_input_gradient(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    allow_tf32: bool = False,
) -> torch.Tensor:
    """`(grad_output @ weight) * act'(saved)`: the gradient of what enters the activation before a linear layer.

    Args:
        grad_output: (M, N), of `dtype` or float32, with any strides.
        weight: (N, K), likewise.
        saved: (M, K), likewise: the output of "relu" or "tanh", the input of "gelu", "gelu_tanh" or "silu"; None
            for "none".
        activation: as for `linear_activation`.
        dtype: what to compute in: float32, bfloat16 or float16.
        allow_tf32: round float32 operands to TF32 for the tensor cores.

    Returns:
        (M, K), contiguous, of `dtype`.

    Raises:
        ValueError: shapes, dtypes, devices or the activation do not fit.
    """
    return torch.ops.kitsune.linear_input_gradient.default(  # type: ignore[no-any-return]
        grad_output, weight, saved, activation, dtype=dtype, allow_tf32=allow_tf32
    )


def check_operands(name: str, dtype: torch.dtype, shapes: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    """Raises ValueError unless each tensor has its shape, `dtype` or float32, and the device of the first."""
    if dtype not in DTYPES:
        raise ValueError(f"{name} computes in float32, bfloat16 or float16: got {dtype}")
    device = next(iter(shapes.values()))[0].device
    for operand, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} takes {operand} of shape {shape}: got {tuple(tensor.shape)}")
        if tensor.dtype not in (dtype, torch.float32):
            raise ValueError(f"{name} in {dtype} takes {operand} of that dtype or float32: got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} takes tensors of one device: {operand} is on {tensor.device}, not on {device}")


def check_saved(name: str, saved: torch.Tensor | None, activation: str) -> None:
    """Raises ValueError unless there is an activation of that name, with what its derivative is computed from."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name} knows the activations {', '.join(ACTIVATIONS)}: got {activation!r}")
    if (saved is None) != (activation == "none"):
        raise ValueError(
            f"{name} takes a saved tensor for each activation but none: got "
            f"{'none' if saved is None else 'one'} for {activation!r}"
        )


def backpropagate(grad: torch.Tensor, saved: torch.Tensor | None, activation: str) -> torch.Tensor:
    """`grad * act'(saved)`, by ATen's operators."""
    return grad if saved is None else _BACKWARDS[activation](grad, saved.to(grad.dtype))


def _matrix(name: str, operand: str, tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.ndim != 2:
        raise ValueError(f"{name} takes a matrix as {operand}: got {tensor.ndim} dimensions")
    rows, cols = tensor.shape
    return rows, cols


def check_linear(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[int, int]:
    """The shape (M, N) of `x @ weight.T + bias`; raises ValueError if there is none."""
    num_rows, depth = _matrix(name, "x", x)
    num_cols, _ = _matrix(name, "weight", weight)
    operands = {"x": (x, (num_rows, depth)), "weight": (weight, (num_cols, depth))}
    check_operands(name, dtype, operands if bias is None else {**operands, "bias": (bias, (num_cols,))})
    return num_rows, num_cols


def _empty_outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    keep_preactivation: bool = False,
    allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    name = "linear_activation"
    shape = check_linear(name, x, weight, bias, dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name} knows the activations {', '.join(ACTIVATIONS)}: got {activation!r}")
    if keep_preactivation and activation not in OF_PREACTIVATION:
        raise ValueError(f"{name} keeps the pre-activation for {', '.join(OF_PREACTIVATION)}: got {activation!r}")
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape if keep_preactivation else (0,), dtype=dtype)


def _linear_on_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    keep_preactivation: bool = False,
    allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, nothing = _empty_outputs(x, weight, bias, activation, dtype=dtype, keep_preactivation=keep_preactivation)
    before = functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return ACTIVATIONS[activation](before), before if keep_preactivation else nothing


def _linear_on_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    keep_preactivation: bool = False,
    allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    from kitsune.kernels import linear_triton  # Triton is optional

    outputs = _empty_outputs(x, weight, bias, activation, dtype=dtype, keep_preactivation=keep_preactivation)
    with torch.cuda.device(x.device):
        linear_triton.linear(x, weight, bias, *outputs, activation=activation, allow_tf32=allow_tf32)
    return outputs


def _empty_input_gradient(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    allow_tf32: bool = False,
) -> torch.Tensor:
    name = "linear_input_gradient"
    num_rows, num_deep = _matrix(name, "grad_output", grad_output)
    _, num_cols = _matrix(name, "weight", weight)
    operands = {"grad_output": (grad_output, (num_rows, num_deep)), "weight": (weight, (num_deep, num_cols))}
    check_operands(name, dtype, operands if saved is None else {**operands, "saved": (saved, (num_rows, num_cols))})
    check_saved(name, saved, activation)
    return grad_output.new_empty((num_rows, num_cols), dtype=dtype)


def _input_gradient_on_cpu(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    allow_tf32: bool = False,
) -> torch.Tensor:
    _empty_input_gradient(grad_output, weight, saved, activation, dtype=dtype)
    return backpropagate(grad_output.to(dtype) @ weight.to(dtype), saved, activation)


def _input_gradient_on_cuda(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor | None,
    activation: str,
    *,
    dtype: torch.dtype,
    allow_tf32: bool = False,
) -> torch.Tensor:
    from kitsune.kernels import linear_triton  # Triton is optional

    grad_x = _empty_input_gradient(grad_output, weight, saved, activation, dtype=dtype)
    with torch.cuda.device(grad_x.device):
        linear_triton.input_gradient(grad_output, weight, saved, grad_x, activation=activation, allow_tf32=allow_tf32)
    return grad_x


torch.library.impl("kitsune::linear_activation", "CPU", _linear_on_cpu)
torch.library.impl("kitsune::linear_activation", "CUDA", _linear_on_cuda)
torch.library.register_fake("kitsune::linear_activation", _empty_outputs)
torch.library.impl("kitsune::linear_input_gradient", "CPU", _input_gradient_on_cpu)
torch.library.impl("kitsune::linear_input_gradient", "CUDA", _input_gradient_on_cuda)
torch.library.register_fake("kitsune::linear_input_gradient", _empty_input_gradient)
