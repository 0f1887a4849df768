"""The Triton kernels of `kitsune.kernels.small_conv`, and their launches. To be imported where Triton is installed.

Shapes but the batch's are known to the compiler: the divisions that find image, row, column and tap become
multiplications, and it sees which addresses are adjacent. Pixels of the whole batch are numbered through, so that
small images share a program. Taps are numbered with the channel as the fastest index where channels are adjacent in
memory, else as the slowest.

`zero` is `kitsune.kernels.images.ZERO`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kitsune.kernels.images import ZERO
from kitsune.kernels.launch_triton import await_previous, launched
from kitsune.kernels.tuning import choose

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_SMALLEST = 16  # dimension that `tl.dot` takes
_MOST_PARTIAL_SUMS = 2**22
_MOST_PARTS_AT_ONCE = 256
_SUMS_A_PROGRAM = 16


class Form(NamedTuple):
    """A program computes `rows` pixels in all channels, `taps` products an iteration."""

    rows: int
    taps: int
    num_warps: int


class GradForm(NamedTuple):
    """A program adds up `taps` columns of the weight's gradient over one of `parts` of the batch, `rows` at a time."""

    rows: int
    taps: int
    parts: int
    num_warps: int


_FORMS = (
    Form(64, 32, 4), Form(32, 32, 2), Form(32, 64, 4), Form(64, 32, 2), Form(64, 64, 4), Form(64, 128, 8),
    Form(128, 32, 4), Form(128, 64, 8), Form(256, 32, 8), Form(32, 16, 1), Form(128, 16, 4),
)  # fmt: skip
_GRAD_TILES = ((64, 32, 4), (64, 64, 4), (128, 32, 4), (32, 128, 4))
_GRAD_PARTS = (128, 512, 32)


@triton.jit
def _taps(
    start: tl.tensor,
    zero: tl.tensor,
    channels: tl.constexpr,
    kernel_h: tl.constexpr,
    kernel_w: tl.constexpr,
    channels_first: tl.constexpr,
    block: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The numbers, channels, and rows and columns in the kernel of a block of taps."""
    tap = start + tl.arange(0, block) + zero
    if channels_first:
        channel = tap // (kernel_h * kernel_w) + zero
        offset = tap % (kernel_h * kernel_w) + zero
    else:
        channel = tap % channels + zero
        offset = tap // channels + zero
    return tap, channel, offset // kernel_w + zero, offset % kernel_w + zero


@triton.jit
def _patches(
    images: tl.tensor,
    stride_n: tl.tensor,
    stride_c: tl.tensor,
    stride_h: tl.tensor,
    stride_w: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    channel: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    inside: tl.tensor,
    zero: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    num_rows_h: tl.constexpr,
    num_rows_w: tl.constexpr,
    step_h: tl.constexpr,
    step_w: tl.constexpr,
    padding_h: tl.constexpr,
    padding_w: tl.constexpr,
    transposed: tl.constexpr,
) -> tl.tensor:
    """What the taps (channel, i, j) of each row meet in `images`, zero in the padding: a block (rows, taps).

    Rows are the windows of a convolution, or, `transposed`, the pixels of its input, met by the windows over them.
    """
    pixel = row % (num_rows_h * num_rows_w) + zero
    window_y = pixel // num_rows_w + zero
    window_x = pixel % num_rows_w + zero
    image = images + (row // (num_rows_h * num_rows_w)).to(tl.int64) * stride_n
    valid = (row < num_rows)[:, None] & inside[None, :]
    if transposed:
        y = (window_y + padding_h)[:, None] - i[None, :]
        x = (window_x + padding_w)[:, None] - j[None, :]
        valid &= (y >= 0) & (x >= 0) & (y % step_h == 0) & (x % step_w == 0)
        y = y // step_h + zero
        x = x // step_w + zero
    else:
        y = (window_y * step_h - padding_h)[:, None] + i[None, :]
        x = (window_x * step_w - padding_w)[:, None] + j[None, :]
        valid &= (y >= 0) & (x >= 0)
    at = channel[None, :] * stride_c + y * stride_h + x * stride_w
    return tl.load(image[:, None] + at, valid & (y < height) & (x < width), other=0.0)


@launched()
def _convolve(
    source: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    activation: tl.tensor,
    result: tl.tensor,
    num_rows: tl.tensor,
    source_stride_n: tl.tensor,
    source_stride_c: tl.tensor,
    source_stride_h: tl.tensor,
    source_stride_w: tl.tensor,
    weight_stride_o: tl.tensor,
    weight_stride_c: tl.tensor,
    weight_stride_h: tl.tensor,
    weight_stride_w: tl.tensor,
    activation_stride_n: tl.tensor,
    activation_stride_c: tl.tensor,
    activation_stride_h: tl.tensor,
    activation_stride_w: tl.tensor,
    zero: tl.tensor,
    source_channels: tl.constexpr,
    source_height: tl.constexpr,
    source_width: tl.constexpr,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    kernel_h: tl.constexpr,
    kernel_w: tl.constexpr,
    step_h: tl.constexpr,
    step_w: tl.constexpr,
    padding_h: tl.constexpr,
    padding_w: tl.constexpr,
    transposed: tl.constexpr,
    relu: tl.constexpr,
    source_channels_first: tl.constexpr,
    channels_first: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_taps: tl.constexpr,
    block_channels: tl.constexpr,
) -> None:
    await_previous()
    dtype: tl.constexpr = result.dtype.element_ty
    num_taps: tl.constexpr = source_channels * kernel_h * kernel_w
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    out = tl.arange(0, block_channels)
    total = tl.zeros([block_rows, block_channels], tl.float32)
    for start in range(0, num_taps, block_taps):
        tap, channel, i, j = _taps(start, zero, source_channels, kernel_h, kernel_w, source_channels_first, block_taps)
        inside = tap < num_taps
        patches = _patches(
            source, source_stride_n, source_stride_c, source_stride_h, source_stride_w,
            row, num_rows, channel, i, j, inside, zero, source_height, source_width, height, width,
            step_h, step_w, padding_h, padding_w, transposed,
        )  # fmt: skip
        at = channel * weight_stride_c + i * weight_stride_h + j * weight_stride_w
        factors = tl.load(
            weight + at[:, None] + (out * weight_stride_o)[None, :],
            inside[:, None] & (out < channels)[None, :],
            other=0.0,
        )
        total = tl.dot(patches.to(dtype), factors.to(dtype), total, input_precision=precision)
    if bias is not None:
        total += tl.load(bias + out, out < channels, other=0.0).to(dtype).to(tl.float32)[None, :]
    if relu:
        total = tl.where(total <= 0, 0.0, total)  # NaN stays
    pixel = row % (height * width) + zero
    image = (row // (height * width)).to(tl.int64)
    valid = (row < num_rows)[:, None] & (out < channels)[None, :]
    if activation is not None:
        corner = activation + image * activation_stride_n
        at = (pixel // width + zero) * activation_stride_h + (pixel % width + zero) * activation_stride_w
        gate = tl.load(corner[:, None] + at[:, None] + (out * activation_stride_c)[None, :], valid, other=0.0)
        total = tl.where(gate.to(tl.float32) <= 0, 0.0, total)
    if channels_first:
        at = pixel[:, None] + (out * (height * width))[None, :]
    else:
        at = (pixel * channels)[:, None] + out[None, :]
    corner = result + image * (channels * height * width)
    tl.store(corner[:, None] + at, total.to(dtype), valid)


@launched()
def _sum_products(
    grad: tl.tensor,
    x: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    rows_a_part: tl.tensor,
    grad_stride_n: tl.tensor,
    grad_stride_c: tl.tensor,
    grad_stride_h: tl.tensor,
    grad_stride_w: tl.tensor,
    x_stride_n: tl.tensor,
    x_stride_c: tl.tensor,
    x_stride_h: tl.tensor,
    x_stride_w: tl.tensor,
    zero: tl.tensor,
    x_channels: tl.constexpr,
    x_height: tl.constexpr,
    x_width: tl.constexpr,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    kernel_h: tl.constexpr,
    kernel_w: tl.constexpr,
    step_h: tl.constexpr,
    step_w: tl.constexpr,
    padding_h: tl.constexpr,
    padding_w: tl.constexpr,
    channels_first: tl.constexpr,
    dtype: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_taps: tl.constexpr,
    block_channels: tl.constexpr,
) -> None:
    """The sums over one part of the windows: `sums` is (parts, channels, taps + 1), the last for the bias."""
    await_previous()
    num_taps: tl.constexpr = x_channels * kernel_h * kernel_w
    tap, channel, i, j = _taps(
        tl.program_id(1) * block_taps, zero, x_channels, kernel_h, kernel_w, channels_first, block_taps
    )
    inside = tap < num_taps
    out = tl.arange(0, block_channels)
    total = tl.zeros([block_channels, block_taps], tl.float32)
    bias_total = tl.zeros([block_channels, block_rows], tl.float32)
    begin = tl.program_id(0) * rows_a_part
    end = tl.minimum(begin + rows_a_part, num_rows)
    for start in range(begin, end, block_rows):
        row = start + tl.arange(0, block_rows)
        patches = _patches(
            x, x_stride_n, x_stride_c, x_stride_h, x_stride_w,
            row, end, channel, i, j, inside, zero, x_height, x_width, height, width,
            step_h, step_w, padding_h, padding_w, False,
        )  # fmt: skip
        pixel = row % (height * width) + zero
        corner = grad + (row // (height * width)).to(tl.int64) * grad_stride_n
        at = (pixel // width + zero) * grad_stride_h + (pixel % width + zero) * grad_stride_w
        factors = tl.load(
            corner[None, :] + at[None, :] + (out * grad_stride_c)[:, None],
            (out < channels)[:, None] & (row < end)[None, :],
            other=0.0,
        ).to(dtype)
        total = tl.dot(factors, patches.to(dtype), total, input_precision=precision)
        bias_total += factors.to(tl.float32)
    sums += tl.program_id(0) * (channels * (num_taps + 1))
    at = (out * (num_taps + 1))[:, None] + tap[None, :]
    tl.store(sums + at, total, (out < channels)[:, None] & inside[None, :])
    if tl.program_id(1) == 0:
        tl.store(sums + out * (num_taps + 1) + num_taps, tl.sum(bias_total, 1), out < channels)


@launched()
def _add_parts(
    sums: tl.tensor,
    weight_grad: tl.tensor,
    bias_grad: tl.tensor,
    num_parts: tl.tensor,
    channels: tl.constexpr,
    num_taps: tl.constexpr,
    block_parts: tl.constexpr,
    block: tl.constexpr,
) -> None:
    await_previous()
    num_sums: tl.constexpr = channels * (num_taps + 1)
    index = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for start in range(0, num_parts, block_parts):
        part = start + tl.arange(0, block_parts)
        valid = (part < num_parts)[:, None] & (index < num_sums)[None, :]
        total += tl.sum(tl.load(sums + (part * num_sums)[:, None] + index[None, :], valid, other=0.0), 0)
    out = index // (num_taps + 1)
    tap = index % (num_taps + 1)
    valid = index < num_sums
    tl.store(weight_grad + out * num_taps + tap, total.to(weight_grad.dtype.element_ty), valid & (tap < num_taps))
    tl.store(bias_grad + out, total.to(bias_grad.dtype.element_ty), valid & (tap == num_taps))


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    result: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    relu: bool,
    allow_tf32: bool,
) -> None:
    """Fills `result`, dense as contiguous or channels_last tensors are, on the current stream.

    The arguments are those of `kitsune.kernels.small_conv.small_conv`, which checks them.
    """
    _launch(x, weight, bias, None, result, stride, padding, transposed=False, relu=relu, allow_tf32=allow_tf32)


def launch_input_grad(
    grad: torch.Tensor,
    weight: torch.Tensor,
    activation: torch.Tensor | None,
    result: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    allow_tf32: bool,
) -> None:
    """Fills `result`, dense as contiguous or channels_last tensors are, on the current stream.

    The arguments are those of `kitsune.kernels.small_conv.small_conv_input_grad`, which checks them.
    """
    swapped = weight.transpose(0, 1)
    _launch(
        grad, swapped, None, activation, result, stride, padding, transposed=True, relu=False, allow_tf32=allow_tf32
    )


def launch_weight_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_grad: torch.Tensor,
    bias_grad: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    dtype: torch.dtype,
    allow_tf32: bool,
) -> None:
    """Fills `weight_grad`, dense as contiguous or channels_last tensors are, and `bias_grad`, on the current stream.

    The arguments are those of `kitsune.kernels.small_conv.small_conv_weight_grad`, which checks them.
    """
    channels, _, *kernel = weight_grad.shape
    num_taps = math.prod(weight_grad.shape[1:])
    num_rows = grad.numel() // channels
    if not num_rows:
        weight_grad.zero_()
        bias_grad.zero_()
        return
    num_sums = channels * (num_taps + 1)

    def run(form: GradForm) -> None:
        num_blocks = triton.cdiv(num_rows, form.rows)
        rows_a_part = triton.cdiv(num_blocks, form.parts) * form.rows
        num_parts = triton.cdiv(num_rows, rows_a_part)
        sums = grad.new_empty((num_parts, num_sums), dtype=torch.float32)
        _sum_products[(num_parts, triton.cdiv(num_taps, form.taps))](
            grad, x, sums, num_rows, rows_a_part, *grad.stride(), *x.stride(), ZERO,
            *x.shape[1:], *grad.shape[1:], *kernel, *stride, *padding,
            channels_first=_channels_first(weight_grad), dtype=_DTYPES[dtype], precision=_precision(allow_tf32),
            block_rows=form.rows, block_taps=form.taps, block_channels=_power_of_2(channels), num_warps=form.num_warps,
            num_stages=1,  # Triton 3.6's pipeline reads single float32 values of padded windows from wrong places
        )  # fmt: skip
        _add_parts[(triton.cdiv(num_sums, _SUMS_A_PROGRAM),)](
            sums, weight_grad, bias_grad, num_parts, channels, num_taps,
            block_parts=min(_power_of_2(num_parts), _MOST_PARTS_AT_ONCE), block=_SUMS_A_PROGRAM, num_warps=4,
        )  # fmt: skip

    key = _key("small_conv_weight_grad", grad, x, weight_grad, stride, padding, dtype, allow_tf32)
    run(choose(key, _grad_forms(num_rows, num_taps, num_sums), run, grad.device))


def _launch(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: torch.Tensor | None,
    result: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    *,
    transposed: bool,
    relu: bool,
    allow_tf32: bool,
) -> None:
    """`weight` is (channels of the result, channels of the source, height, width)."""
    num_rows = result.numel() // result.shape[1]
    if not num_rows:
        return
    num_taps = math.prod(weight.shape[1:])

    def run(form: Form) -> None:
        _convolve[(triton.cdiv(num_rows, form.rows),)](
            source, weight, bias, activation, result, num_rows, *source.stride(), *weight.stride(),
            *((0, 0, 0, 0) if activation is None else activation.stride()), ZERO,
            *source.shape[1:], *result.shape[1:], *weight.shape[2:], *stride, *padding,
            transposed=transposed, relu=relu, source_channels_first=_channels_first(source),
            channels_first=_channels_first(result), precision=_precision(allow_tf32),
            block_rows=form.rows, block_taps=form.taps, block_channels=_power_of_2(result.shape[1]),
            num_warps=form.num_warps,
        )  # fmt: skip

    key = _key("small_conv", source, weight, bias, activation, result, stride, padding, transposed, relu, allow_tf32)
    run(choose(key, _forms(num_taps), run, source.device))


def _forms(num_taps: int) -> tuple[Form, ...]:
    return tuple(form for form in _FORMS if form.taps <= max(32, _power_of_2(num_taps)))


def _grad_forms(num_rows: int, num_taps: int, num_sums: int) -> tuple[GradForm, ...]:
    """Those that do not leave most of a tile empty, with partial sums that stay in the cache."""
    tiles = [tile for tile in _GRAD_TILES if tile[1] <= max(32, _power_of_2(num_taps))]
    most = max(1, _MOST_PARTIAL_SUMS // num_sums)
    forms = [
        GradForm(rows, taps, min(parts, most, triton.cdiv(num_rows, rows)), num_warps)
        for parts in _GRAD_PARTS
        for rows, taps, num_warps in tiles
    ]
    return tuple(dict.fromkeys(forms))


def _channels_first(images: torch.Tensor) -> bool:
    return images.stride(1) > images.stride(3)


def _power_of_2(number: int) -> int:
    return max(_SMALLEST, int(triton.next_power_of_2(number)))


def _precision(allow_tf32: bool) -> str:
    return "tf32" if allow_tf32 else "ieee"


def _key(name: str, *parts: object) -> str:
    return " ".join([name, *(_layout(part) if isinstance(part, torch.Tensor) else str(part) for part in parts)])


def _layout(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
