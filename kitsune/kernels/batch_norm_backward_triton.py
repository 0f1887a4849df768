"""The Triton kernels of batch norm's backward.

The gradients of a normalization are a tuple, those of x, weight and bias; other tuples are as in the forward's kernels.
The gradient of what comes out may be a sum, of `grad_y` and `added`, which is rounded as where it is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kitsune.kernels.batch_norm_forward_triton import addresses, is_last, known_values, normalized, valid_in
from kitsune.kernels.launch_triton import await_previous, launched


@triton.jit
def _gradient_tile(
    grad_y: tl.tensor,
    added: tl.tensor,
    y: tl.tensor,
    a: tl.tuple,
    values_a: tl.tuple,
    b: tl.tuple,
    values_b: tl.tuple,
    start: tl.tensor,
    end: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    relu: tl.constexpr,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
) -> tl.tuple:
    """The gradient before ReLU, and what was normalized, less its mean."""
    valid = valid_in(start, end, channels, num_channels, block_rows)
    at = addresses(grad_y, start, channels, num_channels, spatial, channels_last, block_rows)
    grad = tl.load(at, valid, other=0.0).to(tl.float32)
    if added is not None:
        at = addresses(added, start, channels, num_channels, spatial, channels_last, block_rows)
        grad += tl.load(at, valid, other=0.0).to(tl.float32)
        grad = grad.to(grad_y.dtype.element_ty).to(tl.float32)
    at = addresses(a[0], start, channels, num_channels, spatial, channels_last, block_rows)
    centered_a = tl.load(at, valid, other=0.0).to(tl.float32) - values_a[0][None, :]
    centered_b = centered_a
    if b[0] is not None:
        at = addresses(b[0], start, channels, num_channels, spatial, channels_last, block_rows)
        centered_b = tl.load(at, valid, other=0.0).to(tl.float32) - values_b[0][None, :]
    if relu:
        if y is not None:
            at = addresses(y, start, channels, num_channels, spatial, channels_last, block_rows)
            result = tl.load(at, valid, other=0.0).to(tl.float32)
        else:
            result = normalized(centered_a, values_a)
            if b[0] is not None:
                result += normalized(centered_b, values_b)
            result = result.to(a[0].dtype.element_ty).to(tl.float32)  # as it was stored
        grad = tl.where(result <= 0, 0.0, grad)
    return grad, centered_a, centered_b


@triton.jit
def _sums(
    grad_y: tl.tensor,
    added: tl.tensor,
    y: tl.tensor,
    kept: tl.tensor,
    a: tl.tuple,
    values_a: tl.tuple,
    b: tl.tuple,
    values_b: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    relu: tl.constexpr,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> tl.tuple:
    """Over the rows from `begin` to `end`: of the gradients, and of these times each centered input.

    Where there is a `kept`, the gradients before ReLU are stored there.
    """
    sums = tl.zeros((block_rows, block_channels), tl.float32)
    sums_a = tl.zeros((block_rows, block_channels), tl.float32)
    sums_b = tl.zeros((block_rows, block_channels), tl.float32)
    for tile in tl.range(tl.cdiv(end - begin, block_rows), num_stages=loads_ahead):
        start = begin + tile * block_rows
        grad, centered_a, centered_b = _gradient_tile(
            grad_y, added, y, a, values_a, b, values_b,
            start, end, channels, num_channels, spatial, relu, channels_last, block_rows,
        )  # fmt: skip
        sums += grad
        sums_a += grad * centered_a
        if b[0] is not None:
            sums_b += grad * centered_b
        if kept is not None:
            at = addresses(kept, start, channels, num_channels, spatial, channels_last, block_rows)
            valid = valid_in(start, end, channels, num_channels, block_rows)
            tl.store(at, grad.to(kept.dtype.element_ty), valid)
    return tl.sum(sums, 0), tl.sum(sums_a, 0), tl.sum(sums_b, 0)


@triton.jit
def store_of_channels(
    grads: tl.tuple, weight: tl.tensor, bias: tl.tensor, channels: tl.tensor, num_channels: tl.tensor
) -> None:
    tl.store(grads[1] + channels, weight, channels < num_channels)
    tl.store(grads[2] + channels, bias, channels < num_channels)


@triton.jit
def _store_gradients(
    grad_y: tl.tensor,
    added: tl.tensor,
    y: tl.tensor,
    grad_residual: tl.tensor,
    a: tl.tuple,
    grads_a: tl.tuple,
    values_a: tl.tuple,
    grad_weight_a: tl.tensor,
    b: tl.tuple,
    grads_b: tl.tuple,
    values_b: tl.tuple,
    grad_weight_b: tl.tensor,
    grad_bias: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    relu: tl.constexpr,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    _, invstd_a, scale_a, _ = values_a
    _, invstd_b, scale_b, _ = values_b
    mean_grad = grad_bias / rows.to(tl.float32)
    slope_a = grad_weight_a * invstd_a / rows.to(tl.float32)
    slope_b = grad_weight_b * invstd_b / rows.to(tl.float32)
    for tile in tl.range(tl.cdiv(end - begin, block_rows), num_stages=loads_ahead):
        start = begin + tile * block_rows
        grad, centered_a, centered_b = _gradient_tile(
            grad_y, added, y, a, values_a, b, values_b,
            start, end, channels, num_channels, spatial, relu, channels_last, block_rows,
        )  # fmt: skip
        valid = valid_in(start, end, channels, num_channels, block_rows)
        if grad_residual is not None:
            at = addresses(grad_residual, start, channels, num_channels, spatial, channels_last, block_rows)
            tl.store(at, grad.to(grad_residual.dtype.element_ty), valid)
        result = (grad - mean_grad[None, :] - centered_a * slope_a[None, :]) * scale_a[None, :]
        at = addresses(grads_a[0], start, channels, num_channels, spatial, channels_last, block_rows)
        tl.store(at, result.to(grads_a[0].dtype.element_ty), valid)
        if b[0] is not None:
            result = (grad - mean_grad[None, :] - centered_b * slope_b[None, :]) * scale_b[None, :]
            at = addresses(grads_b[0], start, channels, num_channels, spatial, channels_last, block_rows)
            tl.store(at, result.to(grads_b[0].dtype.element_ty), valid)


@triton.jit
def all_sums(
    partials: tl.tensor,
    num_partials: tl.tensor,
    is_joined: tl.constexpr,
    channels: tl.tensor,
    num_channels: tl.tensor,
    block_partials: tl.constexpr,
    block_channels: tl.constexpr,
) -> tl.tuple:
    sums = tl.zeros((block_partials, block_channels), tl.float32)
    sums_a = tl.zeros((block_partials, block_channels), tl.float32)
    sums_b = tl.zeros((block_partials, block_channels), tl.float32)
    stride = num_partials * num_channels
    for first in tl.range(0, num_partials, block_partials, loop_unroll_factor=2):
        parts = first + tl.arange(0, block_partials)
        mask = (parts < num_partials)[:, None] & (channels < num_channels)[None, :]
        at = partials + parts[:, None] * num_channels + channels[None, :]
        sums += tl.load(at, mask, other=0.0, cache_modifier=".cg")
        sums_a += tl.load(at + stride, mask, other=0.0, cache_modifier=".cg")
        if is_joined:
            sums_b += tl.load(at + 2 * stride, mask, other=0.0, cache_modifier=".cg")
    return tl.sum(sums, 0), tl.sum(sums_a, 0), tl.sum(sums_b, 0)


@launched()
def partial_sums(
    partials: tl.tensor,
    counters: tl.tensor,
    grad_y: tl.tensor,
    added: tl.tensor,
    y: tl.tensor,
    kept: tl.tensor,
    a: tl.tuple,
    grads_a: tl.tuple,
    b: tl.tuple,
    grads_b: tl.tuple,
    rows: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    rows_a_partial: tl.tensor,
    relu: tl.constexpr,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    block_partials: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    """There is a counter for each block of channels."""
    await_previous()
    part, num_partials = tl.program_id(0), tl.num_programs(0)
    begin = part * rows_a_partial
    end = tl.minimum(begin + rows_a_partial, rows)
    channels = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    values_a = known_values(a, channels, num_channels, block_channels)
    values_b = values_a
    if b[0] is not None:
        values_b = known_values(b, channels, num_channels, block_channels)
    sums, sums_a, sums_b = _sums(
        grad_y, added, y, kept, a, values_a, b, values_b,
        begin, end, channels, num_channels, spatial, relu, channels_last, block_rows, block_channels, loads_ahead,
    )  # fmt: skip
    mask = channels < num_channels
    at = partials + part * num_channels + channels
    stride = num_partials * num_channels
    tl.store(at, sums, mask)
    tl.store(at + stride, sums_a, mask)
    if b[0] is not None:
        tl.store(at + 2 * stride, sums_b, mask)
    if is_last(counters + tl.program_id(1), num_partials):
        grad_bias, of_a, of_b = all_sums(
            partials, num_partials, b[0] is not None, channels, num_channels, block_partials, block_channels
        )
        store_of_channels(grads_a, of_a * values_a[1], grad_bias, channels, num_channels)
        if b[0] is not None:
            store_of_channels(grads_b, of_b * values_b[1], grad_bias, channels, num_channels)


@launched()
def apply_gradients(
    grad_y: tl.tensor,
    y: tl.tensor,
    a: tl.tuple,
    grads_a: tl.tuple,
    b: tl.tuple,
    grads_b: tl.tuple,
    rows: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    rows_a_program: tl.tensor,
    relu: tl.constexpr,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    await_previous()
    begin = tl.program_id(0) * rows_a_program
    end = tl.minimum(begin + rows_a_program, rows)
    channels = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    mask = channels < num_channels
    values_a = known_values(a, channels, num_channels, block_channels)
    grad_weight_a = tl.load(grads_a[1] + channels, mask, other=0.0)
    grad_bias = tl.load(grads_a[2] + channels, mask, other=0.0)
    values_b = values_a
    grad_weight_b = grad_weight_a
    if b[0] is not None:
        values_b = known_values(b, channels, num_channels, block_channels)
        grad_weight_b = tl.load(grads_b[1] + channels, mask, other=0.0)
    _store_gradients(
        grad_y, None, y, None, a, grads_a, values_a, grad_weight_a, b, grads_b, values_b, grad_weight_b, grad_bias,
        rows, begin, end, channels, num_channels, spatial, relu, channels_last, block_rows, loads_ahead,
    )  # fmt: skip


@launched()
def backward_in_one(
    grad_y: tl.tensor,
    added: tl.tensor,
    y: tl.tensor,
    grad_residual: tl.tensor,
    a: tl.tuple,
    grads_a: tl.tuple,
    b: tl.tuple,
    grads_b: tl.tuple,
    rows: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    relu: tl.constexpr,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    await_previous()
    begin = tl.program_id(0) * block_rows  # 0, and to the compiler a multiple: else it would not read vectors
    channels = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    values_a = known_values(a, channels, num_channels, block_channels)
    values_b = values_a
    if b[0] is not None:
        values_b = known_values(b, channels, num_channels, block_channels)
    grad_bias, sums_a, sums_b = _sums(
        grad_y, added, y, None, a, values_a, b, values_b,
        begin, rows, channels, num_channels, spatial, relu, channels_last, block_rows, block_channels, loads_ahead,
    )  # fmt: skip
    grad_weight_a = sums_a * values_a[1]
    grad_weight_b = sums_b * values_b[1]
    store_of_channels(grads_a, grad_weight_a, grad_bias, channels, num_channels)
    if b[0] is not None:
        store_of_channels(grads_b, grad_weight_b, grad_bias, channels, num_channels)
    _store_gradients(
        grad_y, added, y, grad_residual,
        a, grads_a, values_a, grad_weight_a, b, grads_b, values_b, grad_weight_b, grad_bias,
        rows, begin, rows, channels, num_channels, spatial, relu, channels_last, block_rows, loads_ahead,
    )  # fmt: skip
