"""`kitsune::add_to_scalars_`: a number added to many tensors of one element, in few launches.

It takes the place of `aten._foreach_add_` on the step counts of optimizers and of batch norm, whose kernel waits until
the one before it has ended, and lets the next one wait as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

torch.library.define("kitsune::add_to_scalars_", "(Tensor(a!)[] scalars, int number) -> ()")


def add_to_scalars_(scalars: Sequence[torch.Tensor], number: int) -> None:
    """Adds `number` to tensors of one element in place, as `Tensor.add_` does.

    Args:
        scalars: at least one, all of one dtype on one device: float32, float64, int32 or int64; in no two the same
            memory.
        number: of 32 bits.

    Raises:
        ValueError: numbers of elements, dtypes or devices are not as above.
    """
    torch.ops.kitsune.add_to_scalars_.default(list(scalars), number)


DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


def _check(scalars: Sequence[torch.Tensor], number: int) -> None:
    dtype, device = scalars[0].dtype, scalars[0].device
    if dtype not in DTYPES:
        raise ValueError(f"add_to_scalars_ takes float32, float64, int32 or int64: got {dtype}")
    for scalar in scalars:
        if scalar.numel() != 1 or scalar.dtype != dtype or scalar.device != device:
            raise ValueError(
                f"add_to_scalars_ takes tensors of one element, of one dtype on one device: got "
                f"{tuple(scalar.shape)} of {scalar.dtype} on {scalar.device} beside {dtype} on {device}"
            )


def _on_cpu(scalars: Sequence[torch.Tensor], number: int) -> None:
    _check(scalars, number)
    torch._foreach_add_(list(scalars), number)


def _on_cuda(scalars: Sequence[torch.Tensor], number: int) -> None:
    from kitsune.kernels import scalars_triton  # Triton is optional

    _check(scalars, number)
    with torch.cuda.device(scalars[0].device):
        scalars_triton.launch(scalars, number)


torch.library.register_fake("kitsune::add_to_scalars_", _check)
torch.library.impl("kitsune::add_to_scalars_", "CPU", _on_cpu)
torch.library.impl("kitsune::add_to_scalars_", "CUDA", _on_cuda)
