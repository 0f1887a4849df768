"""`kitsune::linear_adam_` and `kitsune::linear_sgd_`: the gradients of many linear layers, and the optimizer's step.

The gradients of weights and biases, `grad_output.T @ input` and `grad_output.sum(0)`, go from the accumulators into
the update, in one launch for layers whose data types agree. Nothing may read the old parameters afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kitsune.kernels.linear import DTYPES

Tensors = Sequence[torch.Tensor]

torch.library.define(
    "kitsune::linear_adam_",
    "(Tensor[] grad_outputs, Tensor[] inputs, int[] layers, Tensor(a!)[] parameters, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor[] steps, Tensor(e!)[] grads, "
    "Tensor(f!)[] shadows, *, Tensor lr, float beta1, float beta2, float weight_decay, float eps, bool decoupled, "
    "bool maximize, Tensor? found_inf=None, bool allow_tf32=False) -> ()",
)
torch.library.define(
    "kitsune::linear_sgd_",
    "(Tensor[] grad_outputs, Tensor[] inputs, int[] layers, Tensor(a!)[] parameters, Tensor(b!)[] momentum_buffers, "
    "Tensor(c!)[] grads, Tensor(d!)[] shadows, *, Tensor lr, float momentum, float dampening, float weight_decay, "
    "bool nesterov, bool maximize, Tensor? found_inf=None, bool allow_tf32=False) -> ()",
)


def linear_adam_(
    grad_outputs: Tensors,
    inputs: Tensors,
    layers: Sequence[int],
    parameters: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    grads: Tensors = (),
    shadows: Tensors = (),
    *,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled: bool,
    maximize: bool,
    found_inf: torch.Tensor | None = None,
    allow_tf32: bool = False,
) -> None:
    """The gradients of linear layers and one step of Adam or AdamW with them, in place.

    Gradients are summed in float32 and rounded to the data type of `grad_outputs`, as autocast does, before the
    arithmetic of `kitsune::adam_`.

    Args:
        grad_outputs: for each layer (M, N), float32, bfloat16 or float16, rows dense in memory.
        inputs: for each layer (M, K), of the type of its `grad_outputs` or float32, rows dense in memory.
        layers: for each parameter the index of its layer.
        parameters: weights (N, K) and biases (N,) in any order, float32, contiguous.
        exp_avgs, exp_avg_sqs: like `parameters`.
        max_exp_avg_sqs: the same for AMSGrad; empty for none.
        steps: float32 scalars, one a parameter (they may be one tensor), that count this step already.
        grads: like `parameters`: written if given.
        shadows: of the shapes of `parameters`, contiguous, of one data type: copies of the new parameters, if given.
        lr: a float32 scalar.
        decoupled: weight decay as in AdamW.
        found_inf: a float32 scalar; nothing is changed where it is 1.
        allow_tf32: round float32 operands to TF32 for the tensor cores.

    Raises:
        ValueError: tensors do not match in number, shape, dtype, device or layout.
    """
    torch.ops.kitsune.linear_adam_.default(
        list(grad_outputs),
        list(inputs),
        list(layers),
        list(parameters),
        list(exp_avgs),
        list(exp_avg_sqs),
        list(max_exp_avg_sqs),
        list(steps),
        list(grads),
        list(shadows),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        decoupled=decoupled,
        maximize=maximize,
        found_inf=found_inf,
        allow_tf32=allow_tf32,
    )


def linear_sgd_(
    grad_outputs: Tensors,
    inputs: Tensors,
    layers: Sequence[int],
    parameters: Tensors,
    momentum_buffers: Tensors,
    grads: Tensors = (),
    shadows: Tensors = (),
    *,
    lr: torch.Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    found_inf: torch.Tensor | None = None,
    allow_tf32: bool = False,
) -> None:
    """The gradients of linear layers and one step of SGD with them, in place.

    The step is that of `torch._fused_sgd_` with `is_first_step=False`.

    Args:
        momentum_buffers: like `parameters`; empty if `momentum` is 0.
        grad_outputs, inputs, layers, parameters, grads, shadows, lr, found_inf, allow_tf32: as for `linear_adam_`.

    Raises:
        ValueError: tensors do not match in number, shape, dtype, device or layout.
    """
    torch.ops.kitsune.linear_sgd_.default(
        list(grad_outputs),
        list(inputs),
        list(layers),
        list(parameters),
        list(momentum_buffers),
        list(grads),
        list(shadows),
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        found_inf=found_inf,
        allow_tf32=allow_tf32,
    )


def _check_adam(
    grad_outputs: Tensors,
    inputs: Tensors,
    layers: Sequence[int],
    parameters: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    grads: Tensors,
    shadows: Tensors,
    *,
    lr: torch.Tensor,
    found_inf: torch.Tensor | None = None,
    **numbers: Any,
) -> None:
    if len(steps) != len(parameters):
        raise ValueError(f"there must be one step a parameter: got {len(steps)} for {len(parameters)}")
    _check_layers(grad_outputs, inputs, layers, parameters)
    _check_scalars([*steps, lr] if found_inf is None else [*steps, lr, found_inf])
    lists = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    optional = {"max_exp_avg_sqs": max_exp_avg_sqs, "grads": grads}
    _check_parameters(parameters, {**lists, **{name: some for name, some in optional.items() if some}}, shadows)
    _check_devices([*grad_outputs, *inputs, *parameters, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs, *steps], lr)
    _check_devices([*grads, *shadows] if found_inf is None else [*grads, *shadows, found_inf], lr)


def _check_sgd(
    grad_outputs: Tensors,
    inputs: Tensors,
    layers: Sequence[int],
    parameters: Tensors,
    momentum_buffers: Tensors,
    grads: Tensors,
    shadows: Tensors,
    *,
    lr: torch.Tensor,
    momentum: float,
    found_inf: torch.Tensor | None = None,
    **numbers: Any,
) -> None:
    _check_layers(grad_outputs, inputs, layers, parameters)
    _check_scalars([lr] if found_inf is None else [lr, found_inf])
    if (momentum != 0) != bool(momentum_buffers) and parameters:
        raise ValueError(f"momentum needs buffers, and no momentum none: {momentum=}, {len(momentum_buffers)} buffers")
    optional = {"momentum_buffers": momentum_buffers, "grads": grads}
    _check_parameters(parameters, {name: some for name, some in optional.items() if some}, shadows)
    _check_devices([*grad_outputs, *inputs, *parameters, *momentum_buffers, *grads, *shadows], lr)
    _check_devices([] if found_inf is None else [found_inf], lr)


def _check_layers(grad_outputs: Tensors, inputs: Tensors, layers: Sequence[int], parameters: Tensors) -> None:
    if len(grad_outputs) != len(inputs):
        raise ValueError(f"there must be one input a grad_output: got {len(inputs)} for {len(grad_outputs)}")
    if len(layers) != len(parameters):
        raise ValueError(f"there must be one layer a parameter: got {len(layers)} for {len(parameters)}")
    for grad_output, x in zip(grad_outputs, inputs, strict=True):
        if grad_output.ndim != 2 or x.ndim != 2 or grad_output.shape[0] != x.shape[0]:
            raise ValueError(
                f"grad_outputs and inputs must be matrices of as many rows: got {tuple(grad_output.shape)} "
                f"and {tuple(x.shape)}"
            )
        if grad_output.dtype not in DTYPES or x.dtype not in (grad_output.dtype, torch.float32):
            raise ValueError(
                "grad_outputs must be float32, bfloat16 or float16, and inputs the same or float32: "
                f"got {grad_output.dtype} and {x.dtype}"
            )
        for tensor in (grad_output, x):
            if tensor.shape[1] > 1 and tensor.stride(1) != 1:
                raise ValueError(f"rows of grad_outputs and inputs must be dense: got strides {tensor.stride()}")
    for layer, parameter in zip(layers, parameters, strict=True):
        if not 0 <= layer < len(inputs):
            raise ValueError(f"there are {len(inputs)} layers: got {layer}")
        weight = (grad_outputs[layer].shape[1], inputs[layer].shape[1])
        if parameter.shape not in (weight, weight[:1]):
            raise ValueError(
                f"layer {layer} has a weight of shape {weight} and a bias of {weight[:1]}: got {tuple(parameter.shape)}"
            )


def _check_parameters(parameters: Tensors, lists: Mapping[str, Tensors], shadows: Tensors) -> None:
    shadow_type = shadows[0].dtype if shadows else torch.float32
    named = {"parameters": parameters, **lists, **({"shadows": shadows} if shadows else {})}
    for name, tensors in named.items():
        if len(tensors) != len(parameters):
            raise ValueError(f"there must be one of {name} a parameter: got {len(tensors)} for {len(parameters)}")
        dtype = shadow_type if name == "shadows" else torch.float32
        for tensor, parameter in zip(tensors, parameters, strict=True):
            if tensor.dtype != dtype or tensor.shape != parameter.shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be {dtype}, contiguous and shaped like the parameters: got {tensor.dtype}, "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()} for {tuple(parameter.shape)}"
                )


def _check_scalars(scalars: Tensors) -> None:
    for scalar in scalars:
        if scalar.dtype != torch.float32 or scalar.numel() != 1:
            raise ValueError(f"lr, steps and found_inf must be float32 scalars: got {scalar.dtype} of {scalar.shape}")


def _check_devices(tensors: Tensors, lr: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.device != lr.device:
            raise ValueError(f"there must be one device: got {tensor.device} beside a learning rate on {lr.device}")


def _gradients(
    grad_outputs: Tensors, inputs: Tensors, layers: Sequence[int], parameters: Tensors
) -> list[torch.Tensor]:
    """As float32, of the precision of `grad_outputs`."""
    found = []
    for layer, parameter in zip(layers, parameters, strict=True):
        grad, x = grad_outputs[layer], inputs[layer]
        found.append((grad.sum(0) if parameter.ndim == 1 else grad.t() @ x.to(grad.dtype)).float())
    return found


def _copy(targets: Tensors, values: Tensors) -> None:
    """Into targets that are given: all or none."""
    for target, value in zip(targets, values, strict=bool(targets)):
        target.copy_(value)


def _adam_on_cpu(
    *lists: Any, decoupled: bool, found_inf: torch.Tensor | None = None, allow_tf32: bool = False, **options: Any
) -> None:
    _check_adam(*lists, found_inf=found_inf, **options)
    grad_outputs, inputs, layers, parameters, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, grads, shadows = lists
    if not parameters or (found_inf is not None and found_inf.item() == 1):
        return
    found = _gradients(grad_outputs, inputs, layers, parameters)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    amsgrad = bool(max_exp_avg_sqs)
    update(parameters, found, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, amsgrad=amsgrad, **options)
    _copy(grads, found)
    _copy(shadows, parameters)


def _sgd_on_cpu(*lists: Any, found_inf: torch.Tensor | None = None, allow_tf32: bool = False, **options: Any) -> None:
    _check_sgd(*lists, found_inf=found_inf, **options)
    grad_outputs, inputs, layers, parameters, momentum_buffers, grads, shadows = lists
    if not parameters or (found_inf is not None and found_inf.item() == 1):
        return
    found = _gradients(grad_outputs, inputs, layers, parameters)
    torch._fused_sgd_(parameters, found, momentum_buffers, is_first_step=False, **options)
    _copy(grads, found)
    _copy(shadows, parameters)


def _adam_on_cuda(*lists: Any, lr: torch.Tensor, **options: Any) -> None:
    from kitsune.kernels import grouped_update_triton  # Triton is optional

    _check_adam(*lists, lr=lr, **options)
    with torch.cuda.device(lr.device):
        grouped_update_triton.linear_adam(*lists, lr=lr, **options)


def _sgd_on_cuda(*lists: Any, lr: torch.Tensor, **options: Any) -> None:
    from kitsune.kernels import grouped_update_triton  # Triton is optional

    _check_sgd(*lists, lr=lr, **options)
    with torch.cuda.device(lr.device):
        grouped_update_triton.linear_sgd(*lists, lr=lr, **options)


torch.library.impl("kitsune::linear_adam_", "CPU", _adam_on_cpu)
torch.library.impl("kitsune::linear_adam_", "CUDA", _adam_on_cuda)
torch.library.register_fake("kitsune::linear_adam_", _check_adam)
torch.library.impl("kitsune::linear_sgd_", "CPU", _sgd_on_cpu)
torch.library.impl("kitsune::linear_sgd_", "CUDA", _sgd_on_cuda)
torch.library.register_fake("kitsune::linear_sgd_", _check_sgd)
