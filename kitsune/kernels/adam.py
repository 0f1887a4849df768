"""`kitsune::adam_`: Adam and AdamW over many float32 parameters in few launches, as an operator of a graph.

It takes the place of `torch._fused_adam_`, which computes `1 - beta2` in float32 on CUDA: at the
default of 0.999 the second moments are wrong by 5e-5 of their value. Here the complements of the
betas are rounded once, from float64, and the order of operations is that of `torch.optim.Adam`'s
default implementation on CUDA (`foreach=True`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]

_HALVES = (torch.bfloat16, torch.float16)

torch.library.define(
    "kitsune::adam_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor[] steps, *, Tensor lr, float beta1, float beta2, float weight_decay, "
    "float eps, bool decoupled, bool maximize, Tensor? found_inf=None) -> ()",
)


def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled: bool,
    maximize: bool,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One step of Adam, in place, on the CPU or a CUDA device that `kitsune.device.refuse_triton` does not refuse.

    Args:
        params: float32 tensors on one device, dense in memory in any order of dimensions. On the CPU they may be
            float64, and with them all that is float32 here.
        grads: of the shape and strides of `params`, one each, all float32, all bfloat16 or all float16; they are
            cast to float32 before anything else.
        exp_avgs, exp_avg_sqs: of the shape, strides and dtype of `params`, one each.
        max_exp_avg_sqs: the same for AMSGrad; empty for none.
        steps: float32 scalars, one a parameter (they may be one tensor), that count this step already.
        lr: a float32 scalar.
        decoupled: weight decay as in AdamW.
        found_inf: a float32 scalar; nothing is changed where it is 1.

    Raises:
        ValueError: tensors do not match in number, dtype, device or layout.
    """
    torch.ops.kitsune.adam_.default(
        list(params),
        list(grads),
        list(exp_avgs),
        list(exp_avg_sqs),
        list(max_exp_avg_sqs),
        list(steps),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        decoupled=decoupled,
        maximize=maximize,
        found_inf=found_inf,
    )


def _check(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    lr: torch.Tensor,
    found_inf: torch.Tensor | None = None,
    **numbers: float,
) -> None:
    """Raises ValueError unless the tensors are what `adam_` asks for: the kernel reads memory by address."""
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if max_exp_avg_sqs:
        lists["max_exp_avg_sqs"] = max_exp_avg_sqs
    for name, tensors in {**lists, "steps": steps}.items():
        if len(tensors) != len(params):
            raise ValueError(f"adam_ takes one tensor of {name} a parameter: got {len(tensors)} for {len(params)}")
    is_wide = bool(params) and params[0].dtype == torch.float64 and lr.device.type == "cpu"
    dtype = torch.float64 if is_wide else torch.float32
    _check_types(grads, grads[0].dtype if grads and grads[0].dtype in _HALVES else dtype, lr.device)
    scalars = [*steps, lr, *([] if found_inf is None else [found_inf])]
    state = [tensor for name, tensors in lists.items() if name != "grads" for tensor in tensors]
    _check_types([*params, *state, *scalars], dtype, lr.device)
    for name, tensors in lists.items():
        for param, tensor in zip(params, tensors, strict=True):
            if tensor.shape != param.shape or not _same_memory_order(tensor, param):
                raise ValueError(
                    f"adam_ takes {name} laid out like the parameters: got {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()} for {tuple(param.shape)} with strides {param.stride()}"
                )


def _check_types(tensors: Tensors, dtype: torch.dtype, device: torch.device) -> None:
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                "adam_ takes float32 tensors of one device (float64 on the CPU; gradients may be all bfloat16 or all "
                f"float16): got {tensor.dtype} on {tensor.device} beside a learning rate on {device}"
            )


def _adam_on_cpu(*lists: Tensors, decoupled: bool, **options: Any) -> None:
    _check(*lists, **options)
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = map(list, lists)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    cast = [grad.to(param.dtype) for param, grad in zip(params, grads, strict=True)]
    update(params, cast, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, amsgrad=bool(max_exp_avg_sqs), **options)


def _adam_on_cuda(*lists: Tensors, lr: torch.Tensor, **options: Any) -> None:
    from kitsune.kernels import adam_triton  # Triton is optional

    _check(*lists, lr=lr, **options)
    with torch.cuda.device(lr.device):
        adam_triton.launch(*lists, lr=lr, **options)


def _same_memory_order(first: torch.Tensor, second: torch.Tensor) -> bool:
    strides = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


torch.library.register_fake("kitsune::adam_", _check)
torch.library.impl("kitsune::adam_", "CPU", _adam_on_cpu)
torch.library.impl("kitsune::adam_", "CUDA", _adam_on_cuda)
