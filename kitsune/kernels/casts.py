"""`kitsune::cast_many`: many tensors cast to another floating-point type in few launches.

It takes the place of one `aten._to_copy` a parameter, as autocast casts them, where most take longer to launch than to
compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kitsune.kernels.images import FLOATS

torch.library.define("kitsune::cast_many", "(Tensor[] inputs, ScalarType dtype) -> Tensor[]")


def cast_many(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Copies of tensors in another dtype, rounded as `Tensor.to` does.

    Args:
        inputs: at least one, of any shapes, all float32, bfloat16 or float16 and on one device; each dense in memory,
            in any order of dimensions.
        dtype: float32, bfloat16 or float16.

    Returns:
        One tensor an input, of its shape and strides.

    Raises:
        ValueError: dtypes, devices or layouts are not as above.
    """
    results: list[torch.Tensor] = torch.ops.kitsune.cast_many.default(list(inputs), dtype)
    return results


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` fills a part of memory, each element in a place of its own."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _fake(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    source, device = inputs[0].dtype, inputs[0].device
    if source not in FLOATS or dtype not in FLOATS:
        raise ValueError(f"cast_many takes float32, bfloat16 or float16: got {source} to be cast to {dtype}")
    for tensor in inputs:
        if tensor.dtype != source or tensor.device != device:
            raise ValueError(
                f"cast_many takes tensors of one dtype on one device: got {tensor.dtype} on {tensor.device} "
                f"beside {source} on {device}"
            )
        if not is_dense(tensor):
            raise ValueError(
                f"cast_many takes tensors that are dense in memory: got {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
    return [torch.empty_like(tensor, dtype=dtype) for tensor in inputs]


def _on_cpu(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    results = _fake(inputs, dtype)
    return [result.copy_(tensor) for result, tensor in zip(results, inputs, strict=True)]


def _on_cuda(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    from kitsune.kernels import casts_triton  # Triton is optional

    results = _fake(inputs, dtype)
    with torch.cuda.device(inputs[0].device):
        casts_triton.launch(inputs, results)
    return results


torch.library.register_fake("kitsune::cast_many", _fake)
torch.library.impl("kitsune::cast_many", "CPU", _on_cpu)
torch.library.impl("kitsune::cast_many", "CUDA", _on_cuda)
