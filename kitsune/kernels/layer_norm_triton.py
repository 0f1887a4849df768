"""The Triton kernels of `kitsune.kernels.layer_norm`, and their launches. To be imported where Triton is installed.

RMS norm is layer norm whose mean is 0: the same kernels, without a tensor of means. A program has whole rows in
registers where they fit, so that the variance is that of differences from the mean at no further reading; longer rows
are read once for each of the sums, block by block. The gradients of weight and bias are sums over all rows, which each
program makes of its own and one more kernel of theirs, in an order that is fixed by the form.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitsune.kernels.launch_triton import await_previous, launched
from kitsune.kernels.linear_triton import describe
from kitsune.kernels.rows import num_rows, row_stride
from kitsune.kernels.tuning import choose

Outputs = tuple[Tensor, ...]

MOST_WHOLE = 2**14  # columns of a row that a program of the forward keeps
MOST_WHOLE_BACKWARD = 2**13  # where there are sums to be kept, too
_FINISHED_AT_ONCE = (64, 32)  # partial sums and columns of a tile


class Form(NamedTuple):
    """A tile is `block_rows` times `block_cols` values; with fewer columns than a row has, rows are read in blocks.

    Where sums are made over rows, those are shared among up to `num_partials` programs.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    num_partials: int = 1


@triton.jit
def _load(
    tensor: tl.tensor, stride: tl.tensor, rows: tl.tensor, cols: tl.tensor, end: tl.tensor, num_cols: tl.constexpr
) -> tl.tensor:
    """A tile, in float32, and 0 outside of rows before `end`."""
    mask = (rows < end)[:, None] & (cols < num_cols)[None, :]
    return tl.load(tensor + rows[:, None] * stride + cols[None, :], mask, other=0.0).to(tl.float32)


@triton.jit
def _store(
    tensor: tl.tensor, values: tl.tensor, rows: tl.tensor, cols: tl.tensor, end: tl.tensor, num_cols: tl.constexpr
) -> None:
    mask = (rows < end)[:, None] & (cols < num_cols)[None, :]
    at = tensor + rows[:, None] * num_cols + cols[None, :]
    tl.store(at, values.to(tensor.dtype.element_ty), mask)


@triton.jit
def _load_of_columns(tensor: tl.tensor, cols: tl.tensor, num_cols: tl.constexpr) -> tl.tensor:
    return tl.load(tensor + cols, cols < num_cols, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _average(values: tl.tensor, num_cols: tl.constexpr) -> tl.tensor:
    """Of the columns. Triton's own division is off by up to two units in the last place."""
    return tl.div_rn(tl.sum(values, 1), num_cols * 1.0)


# Forward


@triton.jit
def _summed(
    x: tl.tensor,
    x_stride: tl.tensor,
    residual: tl.tensor,
    residual_stride: tl.tensor,
    total: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    end: tl.tensor,
    num_cols: tl.constexpr,
) -> tl.tensor:
    values = _load(x, x_stride, rows, cols, end, num_cols)
    if residual is not None:
        values += _load(residual, residual_stride, rows, cols, end, num_cols)
        values = values.to(total.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def _centered(values: tl.tensor, average: tl.tensor, cols: tl.tensor, num_cols: tl.constexpr) -> tl.tensor:
    return tl.where((cols < num_cols)[None, :], values - average[:, None], 0.0)


@triton.jit
def _scale(squares: tl.tensor, eps: tl.tensor, num_cols: tl.constexpr) -> tl.tensor:
    return tl.div_rn(1.0, tl.sqrt_rn(_average(squares, num_cols) + eps))


@triton.jit
def _store_normalized(
    y: tl.tensor,
    copy: tl.tensor,
    centered: tl.tensor,
    scale: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    end: tl.tensor,
    num_cols: tl.constexpr,
) -> None:
    result = centered * scale[:, None]
    if weight is not None:
        result *= _load_of_columns(weight, cols, num_cols)
    if bias is not None:
        result += _load_of_columns(bias, cols, num_cols)
    _store(y, result, rows, cols, end, num_cols)
    if copy is not None:
        _store(copy, result, rows, cols, end, num_cols)


@launched()
def _norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    copy: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    num_cols: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    await_previous()
    rows = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    average = tl.zeros((block_rows,), dtype=tl.float32)
    if block_cols >= num_cols:
        cols = tl.arange(0, block_cols)
        values = _summed(x, x_stride, residual, residual_stride, total, rows, cols, num_rows, num_cols)
        if residual is not None:
            _store(total, values, rows, cols, num_rows, num_cols)
        if mean is not None:
            average = _average(values, num_cols)
        centered = _centered(values, average, cols, num_cols)
        if mean is not None:  # an average far from zero is rounded by much, which the differences have in common
            centered = _centered(centered, _average(centered, num_cols), cols, num_cols)
        scale = _scale(centered * centered, eps, num_cols)
        _store_normalized(y, copy, centered, scale, weight, bias, rows, cols, num_rows, num_cols)
    else:
        if mean is not None:
            sums = tl.zeros((block_rows, block_cols), dtype=tl.float32)
            for start in range(0, num_cols, block_cols):
                cols = start + tl.arange(0, block_cols)
                sums += _summed(x, x_stride, residual, residual_stride, total, rows, cols, num_rows, num_cols)
            average = _average(sums, num_cols)
        squares = tl.zeros((block_rows, block_cols), dtype=tl.float32)
        for start in range(0, num_cols, block_cols):
            cols = start + tl.arange(0, block_cols)
            values = _summed(x, x_stride, residual, residual_stride, total, rows, cols, num_rows, num_cols)
            centered = _centered(values, average, cols, num_cols)
            squares += centered * centered
        scale = _scale(squares, eps, num_cols)
        for start in range(0, num_cols, block_cols):
            cols = start + tl.arange(0, block_cols)
            values = _summed(x, x_stride, residual, residual_stride, total, rows, cols, num_rows, num_cols)
            if residual is not None:
                _store(total, values, rows, cols, num_rows, num_cols)
            centered = _centered(values, average, cols, num_cols)
            _store_normalized(y, copy, centered, scale, weight, bias, rows, cols, num_rows, num_cols)
    if mean is not None:
        tl.store(mean + rows, average, rows < num_rows)
    tl.store(rstd + rows, scale, rows < num_rows)


# Backward


@triton.jit
def _normalized(
    total: tl.tensor,
    stride: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    end: tl.tensor,
    num_cols: tl.constexpr,
) -> tl.tensor:
    values = _load(total, stride, rows, cols, end, num_cols)
    if mean is not None:
        average = tl.load(mean + rows, rows < end, other=0.0)
        values = _centered(values, average, cols, num_cols)
    return values * tl.load(rstd + rows, rows < end, other=0.0)[:, None]


@triton.jit
def _scaled(grad: tl.tensor, weight: tl.tensor, cols: tl.tensor, num_cols: tl.constexpr) -> tl.tensor:
    if weight is not None:
        grad *= _load_of_columns(weight, cols, num_cols)
    return grad


@triton.jit
def _store_gradient(
    grad_x: tl.tensor,
    copy: tl.tensor,
    scaled: tl.tensor,
    normal: tl.tensor,
    shift: tl.tensor,
    slope: tl.tensor,
    rstd: tl.tensor,
    grad_total: tl.tensor,
    grad_total_stride: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    end: tl.tensor,
    num_cols: tl.constexpr,
) -> None:
    scale = tl.load(rstd + rows, rows < end, other=0.0)
    result = (scaled - shift[:, None] - normal * slope[:, None]) * scale[:, None]
    if grad_total is not None:
        result += _load(grad_total, grad_total_stride, rows, cols, end, num_cols)
    _store(grad_x, result, rows, cols, end, num_cols)
    if copy is not None:
        _store(copy, result, rows, cols, end, num_cols)


@triton.jit
def _store_partial(
    partial: tl.tensor, program: tl.tensor, sums: tl.tensor, cols: tl.tensor, num_cols: tl.constexpr
) -> None:
    tl.store(partial + program.to(tl.int64) * num_cols + cols, tl.sum(sums, 0), cols < num_cols)


@launched()
def _norm_backward(
    grad_y: tl.tensor,
    grad_total: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    weight: tl.tensor,
    grad_x: tl.tensor,
    copy: tl.tensor,
    partial_weight: tl.tensor,
    partial_bias: tl.tensor,
    num_rows: tl.tensor,
    rows_a_program: tl.tensor,
    grad_y_stride: tl.tensor,
    grad_total_stride: tl.tensor,
    total_stride: tl.tensor,
    num_cols: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    """Of whole rows: `grad_x`, and where they are wanted the sums over a program's rows."""
    await_previous()
    begin = tl.program_id(0) * rows_a_program
    end = tl.minimum(begin + rows_a_program, num_rows)
    cols = tl.arange(0, block_cols)
    shift = tl.zeros((block_rows,), dtype=tl.float32)
    sums_weight = tl.zeros((block_rows, block_cols), dtype=tl.float32)
    sums_bias = tl.zeros((block_rows, block_cols), dtype=tl.float32)
    for start in range(begin, end, block_rows):
        rows = (start + tl.arange(0, block_rows)).to(tl.int64)
        grad = _load(grad_y, grad_y_stride, rows, cols, end, num_cols)
        normal = _normalized(total, total_stride, mean, rstd, rows, cols, end, num_cols)
        if partial_weight is not None:
            sums_weight += grad * normal
        if partial_bias is not None:
            sums_bias += grad
        scaled = _scaled(grad, weight, cols, num_cols)
        if mean is not None:
            shift = _average(scaled, num_cols)
        slope = _average(scaled * normal, num_cols)
        _store_gradient(
            grad_x, copy, scaled, normal, shift, slope, rstd, grad_total, grad_total_stride, rows, cols, end, num_cols
        )
    if partial_weight is not None:
        _store_partial(partial_weight, tl.program_id(0), sums_weight, cols, num_cols)
    if partial_bias is not None:
        _store_partial(partial_bias, tl.program_id(0), sums_bias, cols, num_cols)


@launched()
def _long_norm_backward(
    grad_y: tl.tensor,
    grad_total: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    weight: tl.tensor,
    grad_x: tl.tensor,
    copy: tl.tensor,
    grad_y_stride: tl.tensor,
    grad_total_stride: tl.tensor,
    total_stride: tl.tensor,
    num_cols: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    """`grad_x` of one row that is too long for a tile."""
    await_previous()
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    end = tl.num_programs(0)
    shift = tl.zeros((1,), dtype=tl.float32)
    sums = tl.zeros((1, block_cols), dtype=tl.float32)
    projections = tl.zeros((1, block_cols), dtype=tl.float32)
    for start in range(0, num_cols, block_cols):
        cols = start + tl.arange(0, block_cols)
        scaled = _scaled(_load(grad_y, grad_y_stride, rows, cols, end, num_cols), weight, cols, num_cols)
        sums += scaled
        projections += scaled * _normalized(total, total_stride, mean, rstd, rows, cols, end, num_cols)
    if mean is not None:
        shift = _average(sums, num_cols)
    slope = _average(projections, num_cols)
    for start in range(0, num_cols, block_cols):
        cols = start + tl.arange(0, block_cols)
        scaled = _scaled(_load(grad_y, grad_y_stride, rows, cols, end, num_cols), weight, cols, num_cols)
        normal = _normalized(total, total_stride, mean, rstd, rows, cols, end, num_cols)
        _store_gradient(
            grad_x, copy, scaled, normal, shift, slope, rstd, grad_total, grad_total_stride, rows, cols, end, num_cols
        )


@launched()
def _long_partial_sums(
    grad_y: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    partial_weight: tl.tensor,
    partial_bias: tl.tensor,
    num_rows: tl.tensor,
    rows_a_program: tl.tensor,
    grad_y_stride: tl.tensor,
    total_stride: tl.tensor,
    num_cols: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    """The sums over a program's rows, for a block of the columns."""
    await_previous()
    begin = tl.program_id(0) * rows_a_program
    end = tl.minimum(begin + rows_a_program, num_rows)
    cols = tl.program_id(1) * block_cols + tl.arange(0, block_cols)
    sums_weight = tl.zeros((1, block_cols), dtype=tl.float32)
    sums_bias = tl.zeros((1, block_cols), dtype=tl.float32)
    for start in range(begin, end):
        rows = (start + tl.arange(0, 1)).to(tl.int64)
        grad = _load(grad_y, grad_y_stride, rows, cols, end, num_cols)
        if partial_weight is not None:
            sums_weight += grad * _normalized(total, total_stride, mean, rstd, rows, cols, end, num_cols)
        if partial_bias is not None:
            sums_bias += grad
    if partial_weight is not None:
        _store_partial(partial_weight, tl.program_id(0), sums_weight, cols, num_cols)
    if partial_bias is not None:
        _store_partial(partial_bias, tl.program_id(0), sums_bias, cols, num_cols)


@triton.jit
def _finish(
    partial: tl.tensor,
    result: tl.tensor,
    num_partials: tl.tensor,
    num_cols: tl.constexpr,
    block_partials: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    cols = tl.program_id(0) * block_cols + tl.arange(0, block_cols)
    sums = tl.zeros((block_partials, block_cols), dtype=tl.float32)
    for start in range(0, num_partials, block_partials):
        rows = (start + tl.arange(0, block_partials)).to(tl.int64)
        sums += _load(partial, num_cols, rows, cols, num_partials, num_cols)
    tl.store(result + cols, tl.sum(sums, 0).to(result.dtype.element_ty), cols < num_cols)


@launched()
def _finish_sums(
    partial_weight: tl.tensor,
    grad_weight: tl.tensor,
    partial_bias: tl.tensor,
    grad_bias: tl.tensor,
    num_partials: tl.tensor,
    num_cols: tl.constexpr,
    block_partials: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    await_previous()
    if grad_weight is not None:
        _finish(partial_weight, grad_weight, num_partials, num_cols, block_partials, block_cols)
    if grad_bias is not None:
        _finish(partial_bias, grad_bias, num_partials, num_cols, block_partials, block_cols)


# The forms


@cache
def forms(num_rows: int, num_cols: int) -> tuple[Form, ...]:
    """At most twelve for the forward; the first is a fair choice for most shapes."""
    if num_cols > MOST_WHOLE:
        return tuple(Form(1, cols, num_warps) for cols in (4096, 8192) for num_warps in (8, 16))
    return tuple(dict.fromkeys(_tiles(num_rows, num_cols, (2048, 1024, 4096, 8192), (16, 8, 32))))


@cache
def backward_forms(num_rows: int, num_cols: int) -> tuple[Form, ...]:
    """At most twelve for the backward; the first is a fair choice for most shapes."""
    tiles = [Form(1, cols, num_warps) for cols in (2048, 4096) for num_warps in (4, 8)]
    if num_cols <= MOST_WHOLE_BACKWARD:
        tiles = list(dict.fromkeys(_tiles(num_rows, num_cols, (2048, 4096), (16, 8))))
    found = (
        form._replace(num_partials=min(num_partials, triton.cdiv(num_rows, form.block_rows)))
        for num_partials in (256, 528, 1056)
        for form in tiles
    )
    return tuple(dict.fromkeys(found))


def _tiles(num_rows: int, num_cols: int, sizes: tuple[int, ...], values_a_thread: tuple[int, ...]) -> Iterator[Form]:
    """Whole rows in tiles of about these sizes, among warps that hold so many values a thread."""
    block_cols = triton.next_power_of_2(num_cols)
    for size in sizes:
        block_rows = min(max(1, size // block_cols), triton.next_power_of_2(num_rows))
        for values in values_a_thread:
            yield Form(block_rows, block_cols, max(1, min(16, block_rows * block_cols // (32 * values))))


# The launches


def layer_norm(
    outputs: Outputs,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
    form: Form | None = None,
) -> None:
    """Like all below: launches on the current stream what `kitsune.kernels.layer_norm` says and checks.

    Without a `form`, the fastest is chosen.
    """
    y, total, mean, rstd, copy = outputs
    _launch(x, residual, weight, bias, y, total, mean, rstd, copy if copy_dtype else None, eps, form)


def layer_norm_backward(
    outputs: Outputs,
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    copy_dtype: torch.dtype | None = None,
    form: Form | None = None,
) -> None:
    grad_x, grad_weight, grad_bias, copy = outputs
    of_weight = None if weight_dtype is None else grad_weight
    of_bias = None if bias_dtype is None else grad_bias
    of_x = grad_x, copy if copy_dtype else None
    _launch_backward(grad_y, grad_total, total, mean, rstd, weight, *of_x, of_weight, of_bias, form)


def rms_norm(
    outputs: Outputs,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    dtype: torch.dtype,
    copy_dtype: torch.dtype | None = None,
    form: Form | None = None,
) -> None:
    y, total, rstd, copy = outputs
    _launch(x, residual, weight, None, y, total, None, rstd, copy if copy_dtype else None, eps, form)


def rms_norm_backward(
    outputs: Outputs,
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    weight_dtype: torch.dtype | None,
    copy_dtype: torch.dtype | None = None,
    form: Form | None = None,
) -> None:
    grad_x, grad_weight, copy = outputs
    of_weight = None if weight_dtype is None else grad_weight
    of_x = grad_x, copy if copy_dtype else None
    _launch_backward(grad_y, grad_total, total, None, rstd, weight, *of_x, of_weight, None, form)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    total: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    copy: Tensor | None,
    eps: float,
    form: Form | None,
) -> None:
    rows, cols = num_rows(x), x.shape[-1]
    if rows == 0:
        return

    def run(form: Form) -> None:
        _norm[(triton.cdiv(rows, form.block_rows),)](
            x,
            residual,
            weight,
            bias,
            y,
            total,
            mean,
            rstd,
            copy,
            rows,
            _stride(x),
            _stride(residual),
            eps,
            num_cols=cols,
            block_rows=form.block_rows,
            block_cols=form.block_cols,
            num_warps=form.num_warps,
        )

    key = f"norm {describe([x, residual, weight, bias, y, mean, copy])}"
    run(form or choose(key, forms(rows, cols), run, x.device))


def _launch_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    grad_x: Tensor,
    copy: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    form: Form | None,
) -> None:
    rows, cols = num_rows(total), total.shape[-1]
    sums = [one for one in (grad_weight, grad_bias) if one is not None]
    if rows == 0:
        for one in sums:
            one.zero_()
        return

    def run(form: Form) -> None:
        tiles_a_program = triton.cdiv(triton.cdiv(rows, form.num_partials), form.block_rows)
        rows_a_program = tiles_a_program * form.block_rows
        num_partials = triton.cdiv(rows, rows_a_program)
        partial_weight, partial_bias = (
            None if one is None else rstd.new_empty(num_partials, cols) for one in (grad_weight, grad_bias)
        )
        strides = _stride(grad_y), _stride(grad_total), _stride(total)
        if form.block_cols >= cols:
            _norm_backward[(num_partials,)](
                grad_y, grad_total, total, mean, rstd, weight, grad_x, copy, partial_weight, partial_bias,
                rows, rows_a_program, *strides,
                num_cols=cols, block_rows=form.block_rows, block_cols=form.block_cols, num_warps=form.num_warps,
            )  # fmt: skip
        else:
            _long_norm_backward[(rows,)](
                grad_y, grad_total, total, mean, rstd, weight, grad_x, copy, *strides,
                num_cols=cols, block_cols=form.block_cols, num_warps=form.num_warps,
            )  # fmt: skip
            if sums:
                _long_partial_sums[(num_partials, triton.cdiv(cols, form.block_cols))](
                    grad_y, total, mean, rstd, partial_weight, partial_bias,
                    rows, rows_a_program, strides[0], strides[2],
                    num_cols=cols, block_cols=form.block_cols, num_warps=form.num_warps,
                )  # fmt: skip
        if sums:
            block_partials, block_cols = _FINISHED_AT_ONCE
            _finish_sums[(triton.cdiv(cols, block_cols),)](
                partial_weight, grad_weight, partial_bias, grad_bias, num_partials,
                num_cols=cols, block_partials=block_partials, block_cols=block_cols,
            )  # fmt: skip

    described = describe([grad_y, grad_total, total, mean, weight, grad_x, copy, grad_weight, grad_bias])
    key = f"norm_backward {described}"
    run(form or choose(key, backward_forms(rows, cols), run, total.device))


def _stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else row_stride("layer_norm", "a tensor", tensor)
