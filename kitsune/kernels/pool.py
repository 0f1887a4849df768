"""`kitsune::max_pool` and `kitsune::max_pool_backward`: max-pooling with ReLU, and its gradient.

They take the place of `aten.relu` and `aten.max_pool2d_with_indices`, in either order, for

    relu(max_pool(x)) == max_pool(relu(x)),

and of `aten.max_pool2d_with_indices_backward` with `aten.threshold_backward`. What the backward needs is one byte for
each window: the position of the chosen element in it, or that ReLU lets no gradient through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kitsune.kernels.images import FLOATS, check_images, dense, windows

NO_GRADIENT = 255
"""The position of windows whose maximum ReLU sets to zero."""

_MOST_KERNEL = 3

torch.library.define(
    "kitsune::max_pool",
    "(Tensor x, int[2] kernel, int[2] stride, int[2] padding, *, bool relu, bool channels_last, "
    "bool? position_channels_last=None) -> (Tensor, Tensor)",
)
torch.library.define(
    "kitsune::max_pool_backward",
    "(Tensor grad, Tensor position, int[2] size, int[2] kernel, int[2] stride, int[2] padding, *, "
    "bool channels_last) -> Tensor",
)


def max_pool(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    relu: bool,
    channels_last: bool,
    position_channels_last: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Max-pooling over windows of at most 3x3, rounding sizes down, then ReLU if wanted.

    NaN, ties and windows of -inf are treated as in `aten.max_pool2d_with_indices`.

    Args:
        x: (N, C, H, W), float32, bfloat16 or float16, with any strides.
        kernel, stride, padding: along height and width; the padding is at most half of the kernel.
        channels_last: the layout of the maxima, whatever that of `x`; contiguous otherwise.
        position_channels_last: that of the positions; None for the same one.

    Returns:
        The maxima (N, C, H', W') in the dtype of `x`, and uint8 of the same shape: the position of each
        within its window, `row * kernel[1] + column`, or `NO_GRADIENT` where ReLU gives zero.

    Raises:
        ValueError: dtypes, shapes or windows are not as above, or one image spans more than 2**30 elements.
    """
    y, position = torch.ops.kitsune.max_pool.default(
        x,
        list(kernel),
        list(stride),
        list(padding),
        relu=relu,
        channels_last=channels_last,
        position_channels_last=position_channels_last,
    )
    return y, position


def max_pool_backward(
    grad: torch.Tensor,
    position: torch.Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    channels_last: bool,
) -> torch.Tensor:
    """The gradient of `max_pool`: each element adds up, in float32, the gradients of the windows that chose it.

    Args:
        grad: (N, C, H', W'), float32, bfloat16 or float16, with any strides.
        position: uint8 of the same shape, with any strides, from `max_pool` with the same windows.
        size: height and width of the input of `max_pool`.
        channels_last: the layout of the result; contiguous otherwise.

    Returns:
        (N, C, *size), in the dtype of `grad`.

    Raises:
        ValueError: as `max_pool`, or the shapes do not belong together.
    """
    result: torch.Tensor = torch.ops.kitsune.max_pool_backward.default(
        grad, position, list(size), list(kernel), list(stride), list(padding), channels_last=channels_last
    )
    return result


def _check_windows(size: Sequence[int], kernel: list[int], stride: list[int], padding: list[int]) -> list[int]:
    """The height and width of the result."""
    right = (
        all(1 <= extent <= _MOST_KERNEL for extent in kernel)
        and min(stride) >= 1
        and all(0 <= 2 * pad <= extent for pad, extent in zip(padding, kernel, strict=True))
    )
    if not right:
        raise ValueError(
            "max_pool takes kernels of 1 to 3, strides from 1 and paddings of at most half the kernel: "
            f"got kernel {kernel}, stride {stride}, padding {padding}"
        )
    sizes = windows(size, kernel, stride, padding)
    if min(*size, *sizes) < 1:
        raise ValueError(f"no window of {kernel} with padding {padding} fits into images of {list(size)}")
    return sizes


def _check(x: torch.Tensor, kernel: list[int], stride: list[int], padding: list[int]) -> list[int]:
    """The shape of the results, or ValueError."""
    check_images("x", x, x.device)
    if x.dtype not in FLOATS:
        raise ValueError(f"max_pool takes float32, bfloat16 or float16: got {x.dtype}")
    return [*x.shape[:2], *_check_windows(x.shape[2:], kernel, stride, padding)]


def _check_backward(
    grad: torch.Tensor,
    position: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
) -> list[int]:
    """The shape of the result, or ValueError."""
    check_images("grad", grad, grad.device)
    check_images("position", position, grad.device)
    if grad.dtype not in FLOATS or position.dtype != torch.uint8:
        raise ValueError(
            "max_pool_backward takes gradients in float32, bfloat16 or float16 and uint8 positions: "
            f"got {grad.dtype} and {position.dtype}"
        )
    sizes = _check_windows(size, kernel, stride, padding)
    if list(grad.shape[2:]) != sizes or position.shape != grad.shape:
        raise ValueError(
            f"max_pool_backward takes gradients and positions of {sizes} windows: "
            f"got {tuple(grad.shape)} and {tuple(position.shape)}"
        )
    return [*grad.shape[:2], *size]


def _fake(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    relu: bool,
    channels_last: bool,
    position_channels_last: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _check(x, kernel, stride, padding)
    of_positions = channels_last if position_channels_last is None else position_channels_last
    return dense(x, shape, x.dtype, channels_last), dense(x, shape, torch.uint8, of_positions)


def _fake_backward(
    grad: torch.Tensor,
    position: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    channels_last: bool,
) -> torch.Tensor:
    shape = _check_backward(grad, position, size, kernel, stride, padding)
    return dense(grad, shape, grad.dtype, channels_last)


def _on_cpu(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    relu: bool,
    channels_last: bool,
    position_channels_last: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    y, position = _fake(
        x,
        kernel,
        stride,
        padding,
        relu=relu,
        channels_last=channels_last,
        position_channels_last=position_channels_last,
    )
    if not x.numel():
        return y, position
    maxima, indices = torch.ops.aten.max_pool2d_with_indices.default(x, kernel, stride, padding)
    rows, columns = _corners(indices, stride, padding)
    width = x.shape[3]
    position.copy_((indices // width - rows) * kernel[1] + indices % width - columns)
    if relu:
        position[maxima <= 0] = NO_GRADIENT
        maxima = maxima.relu()
    return y.copy_(maxima), position


def _on_cpu_backward(
    grad: torch.Tensor,
    position: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    channels_last: bool,
) -> torch.Tensor:
    result = _fake_backward(grad, position, size, kernel, stride, padding, channels_last=channels_last)
    if not result.numel():
        return result
    rows, columns = _corners(grad, stride, padding)
    chosen = position < kernel[0] * kernel[1]
    places = position.long()
    indices = torch.where(chosen, (rows + places // kernel[1]) * size[1] + columns + places % kernel[1], 0)
    added = torch.ops.aten.max_pool2d_with_indices_backward.default(
        torch.where(chosen, grad.float(), 0), result.float(), kernel, stride, padding, [1, 1], False, indices
    )
    return result.copy_(added)


def _corners(pooled: torch.Tensor, stride: list[int], padding: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows (H', 1) and columns (W') at which the windows begin, negative in the padding."""
    rows = torch.arange(pooled.shape[2], device=pooled.device)[:, None] * stride[0] - padding[0]
    columns = torch.arange(pooled.shape[3], device=pooled.device) * stride[1] - padding[1]
    return rows, columns


def _on_cuda(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    relu: bool,
    channels_last: bool,
    position_channels_last: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from kitsune.kernels import pool_triton  # Triton is optional

    y, position = _fake(
        x,
        kernel,
        stride,
        padding,
        relu=relu,
        channels_last=channels_last,
        position_channels_last=position_channels_last,
    )
    with torch.cuda.device(x.device):
        pool_triton.launch(x, y, position, kernel, stride, padding, relu=relu)
    return y, position


def _on_cuda_backward(
    grad: torch.Tensor,
    position: torch.Tensor,
    size: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    *,
    channels_last: bool,
) -> torch.Tensor:
    from kitsune.kernels import pool_triton  # Triton is optional

    result = _fake_backward(grad, position, size, kernel, stride, padding, channels_last=channels_last)
    with torch.cuda.device(grad.device):
        pool_triton.launch_backward(grad, position, result, kernel, stride, padding, channels_last=channels_last)
    return result


torch.library.register_fake("kitsune::max_pool", _fake)
torch.library.register_fake("kitsune::max_pool_backward", _fake_backward)
torch.library.impl("kitsune::max_pool", "CPU", _on_cpu)
torch.library.impl("kitsune::max_pool_backward", "CPU", _on_cpu_backward)
torch.library.impl("kitsune::max_pool", "CUDA", _on_cuda)
torch.library.impl("kitsune::max_pool_backward", "CUDA", _on_cuda_backward)
