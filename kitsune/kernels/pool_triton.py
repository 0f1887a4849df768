"""The Triton kernels of `kitsune.kernels.pool`, and their launches. To be imported where Triton is installed.

A program computes a block of one image's results in the order in which they lie in memory. Shapes but the batch's are
known to the compiler: the divisions that find channel, row and column become multiplications, and it sees which
addresses are adjacent.

`zero` is `kitsune.kernels.images.ZERO`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kitsune.kernels.images import ZERO
from kitsune.kernels.launch_triton import await_previous, launched
from kitsune.kernels.pool import NO_GRADIENT
from kitsune.kernels.tuning import choose


class Form(NamedTuple):
    """How many results a program computes, and with how many warps."""

    block: int
    num_warps: int


_FORMS = (Form(256, 4), Form(128, 1), Form(128, 4), Form(256, 2), Form(512, 4), Form(1024, 4), Form(1024, 8))


@triton.jit
def _place(
    index: tl.tensor,
    zero: tl.tensor,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    channels_last: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The channels, rows and columns of elements of one image, counted in the order of memory."""
    if channels_last:
        channel = index % channels
        pixel = index // channels + zero
    else:
        channel = index // (height * width)
        pixel = index % (height * width) + zero
    return channel, pixel // width + zero, pixel % width + zero


@launched()
def _max_pool(
    x: tl.tensor,
    y: tl.tensor,
    position: tl.tensor,
    x_stride_n: tl.tensor,
    x_stride_c: tl.tensor,
    x_stride_h: tl.tensor,
    x_stride_w: tl.tensor,
    y_stride_n: tl.tensor,
    y_stride_c: tl.tensor,
    y_stride_h: tl.tensor,
    y_stride_w: tl.tensor,
    zero: tl.tensor,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    pooled_height: tl.constexpr,
    pooled_width: tl.constexpr,
    kernel_h: tl.constexpr,
    kernel_w: tl.constexpr,
    stride_h: tl.constexpr,
    stride_w: tl.constexpr,
    padding_h: tl.constexpr,
    padding_w: tl.constexpr,
    relu: tl.constexpr,
    no_gradient: tl.constexpr,
    channels_last: tl.constexpr,
    same_layout: tl.constexpr,
    block: tl.constexpr,
) -> None:
    await_previous()
    size: tl.constexpr = channels * pooled_height * pooled_width
    num_blocks: tl.constexpr = (size + block - 1) // block
    image = (tl.program_id(0) // num_blocks).to(tl.int64)
    index = tl.program_id(0) % num_blocks * block + tl.arange(0, block) + zero
    inside = index < size
    channel, row, column = _place(index, zero, channels, pooled_height, pooled_width, channels_last)
    top = row * stride_h - padding_h
    left = column * stride_w - padding_w
    x += image * x_stride_n
    best = tl.full([block], float("-inf"), tl.float32)
    chosen = tl.maximum(-top, 0) * kernel_w + tl.maximum(-left, 0)  # if nothing exceeds -inf: the first element
    for i in tl.static_range(kernel_h):
        for j in tl.static_range(kernel_w):
            valid = inside & (top + i >= 0) & (top + i < height) & (left + j >= 0) & (left + j < width)
            at = channel * x_stride_c + (top + i) * x_stride_h + (left + j) * x_stride_w
            value = tl.load(x + at, valid, other=float("-inf")).to(tl.float32)
            better = (value > best) | (value != value)  # PyTorch takes the last NaN
            best = tl.where(better, value, best)
            chosen = tl.where(better, i * kernel_w + j, chosen)
    if relu:
        chosen = tl.where(best <= 0, no_gradient, chosen)
        best = tl.where(best <= 0, 0.0, best)
    at = index if same_layout else channel * y_stride_c + row * y_stride_h + column * y_stride_w
    tl.store(y + image * y_stride_n + at, best.to(y.dtype.element_ty), inside)
    tl.store(position + image * size + index, chosen.to(tl.uint8), inside)


@launched()
def _max_pool_backward(
    grad: tl.tensor,
    position: tl.tensor,
    result: tl.tensor,
    grad_stride_n: tl.tensor,
    grad_stride_c: tl.tensor,
    grad_stride_h: tl.tensor,
    grad_stride_w: tl.tensor,
    position_stride_n: tl.tensor,
    position_stride_c: tl.tensor,
    position_stride_h: tl.tensor,
    position_stride_w: tl.tensor,
    zero: tl.tensor,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    pooled_height: tl.constexpr,
    pooled_width: tl.constexpr,
    kernel_h: tl.constexpr,
    kernel_w: tl.constexpr,
    stride_h: tl.constexpr,
    stride_w: tl.constexpr,
    padding_h: tl.constexpr,
    padding_w: tl.constexpr,
    channels_last: tl.constexpr,
    block: tl.constexpr,
) -> None:
    await_previous()
    size: tl.constexpr = channels * height * width
    num_blocks: tl.constexpr = (size + block - 1) // block
    rows: tl.constexpr = (kernel_h + stride_h - 1) // stride_h  # of windows over one element
    columns: tl.constexpr = (kernel_w + stride_w - 1) // stride_w
    image = (tl.program_id(0) // num_blocks).to(tl.int64)
    index = tl.program_id(0) % num_blocks * block + tl.arange(0, block) + zero
    inside = index < size
    channel, row, column = _place(index, zero, channels, height, width, channels_last)
    row += padding_h
    column += padding_w
    grad += image * grad_stride_n
    position += image * position_stride_n
    last_row = row // stride_h  # of the windows over the element
    last_column = column // stride_w
    inner_row = row - last_row * stride_h + zero  # of the element in that window
    inner_column = column - last_column * stride_w + zero
    total = tl.zeros([block], tl.float32)
    for a in tl.static_range(rows):
        for b in tl.static_range(columns):
            window_row = last_row - (rows - 1 - a)
            window_column = last_column - (columns - 1 - b)
            i = inner_row + (rows - 1 - a) * stride_h
            j = inner_column + (columns - 1 - b) * stride_w
            valid = inside & (window_row >= 0) & (window_row < pooled_height) & (i < kernel_h)
            valid &= (window_column >= 0) & (window_column < pooled_width) & (j < kernel_w)
            at = channel * position_stride_c + window_row * position_stride_h + window_column * position_stride_w
            chosen = tl.load(position + at, valid, other=255).to(tl.int32)
            at = channel * grad_stride_c + window_row * grad_stride_h + window_column * grad_stride_w
            value = tl.load(grad + at, valid, other=0.0).to(tl.float32)
            total += tl.where(valid & (chosen == i * kernel_w + j), value, 0.0)
    tl.store(result + image * size + index, total.to(result.dtype.element_ty), inside)


def launch(
    x: torch.Tensor,
    y: torch.Tensor,
    position: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    relu: bool,
) -> None:
    """Fills `y` and `position`, dense in the order of contiguous or channels_last tensors, on the current stream.

    The arguments are those of `kitsune.kernels.pool.max_pool`, which checks them.
    """
    if not y.numel():
        return

    def run(form: Form) -> None:
        _max_pool[(_num_programs(y, form),)](
            x, y, position, *x.stride(), *y.stride(), ZERO, *x.shape[1:], *y.shape[2:], *kernel, *stride, *padding,
            relu=relu, no_gradient=NO_GRADIENT, channels_last=not position.is_contiguous(),
            same_layout=y.stride() == position.stride(), block=form.block, num_warps=form.num_warps,
        )  # fmt: skip

    key = f"max_pool {_layout(x)} {kernel} {stride} {padding} {relu} {y.stride()} {position.stride()}"
    run(choose(key, _FORMS, run, x.device))


def launch_backward(
    grad: torch.Tensor,
    position: torch.Tensor,
    result: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    channels_last: bool,
) -> None:
    """Fills `result`, dense in the layout that `channels_last` says, on the current stream.

    The arguments are those of `kitsune.kernels.pool.max_pool_backward`, which checks them.
    """
    if not result.numel():
        return

    def run(form: Form) -> None:
        _max_pool_backward[(_num_programs(result, form),)](
            grad, position, result, *grad.stride(), *position.stride(), ZERO, *result.shape[1:], *grad.shape[2:],
            *kernel, *stride, *padding, channels_last=channels_last, block=form.block, num_warps=form.num_warps,
        )  # fmt: skip

    key = f"max_pool_backward {_layout(grad)} {_layout(position)} {result.shape} {kernel} {stride} {padding}"
    run(choose(f"{key} {channels_last}", _FORMS, run, grad.device))


def _num_programs(result: torch.Tensor, form: Form) -> int:
    return result.shape[0] * int(triton.cdiv(result[0].numel(), form.block))


def _layout(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
