"""The Triton kernel of `kitsune.kernels.head`, and its launch. To be imported where Triton is installed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kitsune.kernels.launch_triton import await_previous, launched
from kitsune.kernels.linear_triton import backpropagate, describe, multiply
from kitsune.kernels.tuning import choose

_SMALLEST_BLOCK = 16  # of `tl.dot`
_COUNTED_AT_A_TIME = tl.constexpr(1024)


class Form(NamedTuple):
    """A program computes the logits of `rows` rows, summing over `depth` products an iteration, and then `cols`
    columns at a time of their part of the gradient of `x`, which is split among `splits` programs."""

    rows: int
    cols: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int


@triton.jit
def _some_targets(
    targets: tl.tensor, stride: tl.tensor, start: tl.tensor, num_rows: tl.tensor, ignore_index: tl.tensor
) -> tl.tensor:
    rows = (tl.arange(0, _COUNTED_AT_A_TIME) + start).to(tl.int64)
    return tl.load(targets + rows * stride, rows < num_rows, other=ignore_index)


@triton.jit
def _num_counted(
    first: tl.tensor,
    targets: tl.tensor,
    stride: tl.tensor,
    num_rows: tl.tensor,
    num_classes: tl.tensor,
    ignore_index: tl.tensor,
) -> tl.tensor:
    """How many targets are not ignored; the `first` are read already. Integers, so that the order does not matter."""
    count = tl.zeros((_COUNTED_AT_A_TIME,), dtype=tl.int32)
    target = first
    for start in range(0, num_rows, _COUNTED_AT_A_TIME):
        legal = ((target >= 0) & (target < num_classes)) | (target == ignore_index)
        tl.device_assert(legal, "cross_entropy_head: a target is out of range")
        count += (target != ignore_index).to(tl.int32)
        target = _some_targets(targets, stride, start + _COUNTED_AT_A_TIME, num_rows, ignore_index)
    return tl.sum(count, 0)


@triton.jit
def _block(
    matrix: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    row_stride: tl.tensor,
    col_stride: tl.tensor,
) -> tl.tensor:
    mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
    return tl.load(matrix + rows[:, None] * row_stride + cols[None, :] * col_stride, mask, other=0.0)


# Debugging is on for the assertion alone, as in PyTorch; overflows of integers need no check.
@launched(do_not_specialize=["scale", "ignore_index"], debug=True)
def _head(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    targets: tl.tensor,
    saved: tl.tensor,
    scale: tl.tensor,
    losses: tl.tensor,
    grad_logits: tl.tensor,
    grad_x: tl.tensor,
    num_rows: tl.tensor,
    num_classes: tl.tensor,
    num_deep: tl.tensor,
    x_row_stride: tl.tensor,
    x_depth_stride: tl.tensor,
    weight_row_stride: tl.tensor,
    weight_depth_stride: tl.tensor,
    bias_stride: tl.tensor,
    target_stride: tl.tensor,
    saved_row_stride: tl.tensor,
    saved_col_stride: tl.tensor,
    ignore_index: tl.int64,
    activation: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_classes: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    await_previous()
    dtype: tl.constexpr = grad_logits.dtype.element_ty
    block = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    rows = block.to(tl.int64) * block_rows + tl.arange(0, block_rows)
    classes = tl.arange(0, block_classes).to(tl.int64)
    is_class = (classes < num_classes)[None, :]
    cols = (split * block_cols + tl.arange(0, block_cols)).to(tl.int64)
    # All that does not wait for the logits is read first.
    some_targets = _some_targets(targets, target_stride, 0, num_rows, ignore_index)
    target = tl.load(targets + rows * target_stride, rows < num_rows, other=ignore_index)
    weights = _block(weight, classes, cols, num_classes, num_deep, weight_row_stride, weight_depth_stride)
    if saved is not None:
        saved_values = _block(saved, rows, cols, num_rows, num_deep, saved_row_stride, saved_col_stride)
    if bias is not None:
        biases = tl.load(bias + classes * bias_stride, classes < num_classes, other=0.0).to(dtype).to(tl.float32)
    factor = 1.0
    if scale is not None:
        factor = tl.load(scale)
    logits = multiply(
        x, x_row_stride, x_depth_stride, weight, weight_row_stride, weight_depth_stride,
        rows, classes, num_rows, num_classes, num_deep, dtype, precision, block_rows, block_classes, depth, 1,
    )  # fmt: skip
    count = _num_counted(some_targets, targets, target_stride, num_rows, num_classes, ignore_index)
    if bias is not None:
        logits += biases[None, :]
    logits = tl.where(is_class, logits.to(dtype).to(tl.float32), -float("inf"))
    logits -= tl.max(logits, 1)[:, None]
    powers = tl.where(is_class, tl.exp(logits), 0.0)
    total = tl.sum(powers, 1)
    counted = target != ignore_index
    is_target = classes[None, :] == target[:, None]
    factors = tl.where(counted, factor / count.to(tl.float32), 0.0)[:, None]
    # An ignored row's gradient is NaN if its logits are: 0 times NaN, as in PyTorch.
    grad = tl.where(is_class, powers / total[:, None] * factors - tl.where(is_target, factors, 0.0), 0.0).to(dtype)
    for _ in range(split * block_cols, num_deep, splits * block_cols):
        value = tl.dot(grad, weights.to(dtype), input_precision=precision)
        if saved is not None:
            value = backpropagate(value, saved_values.to(dtype).to(tl.float32), activation)
        mask = (rows[:, None] < num_rows) & (cols[None, :] < num_deep)
        tl.store(grad_x + rows[:, None] * num_deep + cols[None, :], value.to(dtype), mask)
        cols += splits * block_cols
        weights = _block(weight, classes, cols, num_classes, num_deep, weight_row_stride, weight_depth_stride)
        if saved is not None:
            saved_values = _block(saved, rows, cols, num_rows, num_deep, saved_row_stride, saved_col_stride)
    if split == 0:
        logarithm = tl.sum(tl.where(is_target, logits, 0.0), 1) - tl.log(total)
        loss = tl.sum(tl.where(counted, -logarithm, 0.0), 0) / count.to(tl.float32)
        tl.store(losses + block, loss)
        mask = (rows < num_rows)[:, None] & is_class
        tl.store(grad_logits + rows[:, None] * num_classes + classes[None, :], grad, mask)


@launched()
def _sum(parts: tl.tensor, result: tl.tensor, num_parts: tl.tensor, block_size: tl.constexpr) -> None:
    await_previous()
    totals = tl.zeros((block_size,), dtype=tl.float32)
    for start in range(0, num_parts, block_size):
        indices = start + tl.arange(0, block_size)
        totals += tl.load(parts + indices, indices < num_parts, other=0.0)
    tl.store(result, tl.sum(totals, 0))


def forms(num_rows: int, num_deep: int) -> tuple[Form, ...]:
    """Those worth timing: blocks of few rows or many, and the gradient of `x` split among one, few or many programs."""
    most_rows, most_deep = (max(_SMALLEST_BLOCK, triton.next_power_of_2(size)) for size in (num_rows, num_deep))
    candidates = (
        Form(rows, min(cols, most_deep), min(depth, most_deep), splits, 4, 1 if depth > 128 else 3)
        for rows in (16, 32, 64)
        for cols, depth, splits in ((32, 256, 8), (64, 64, 1), (64, 128, 4), (32, 128, 16))
        if rows <= most_rows and splits * min(cols, most_deep) <= most_deep
    )
    return tuple(dict.fromkeys(candidates)) or (Form(16, 16, 16, 1, 4, 2),)


def cross_entropy_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    saved: torch.Tensor | None,
    loss: torch.Tensor,
    grad_logits: torch.Tensor,
    grad_x: torch.Tensor,
    *,
    activation: str,
    scale: torch.Tensor | None,
    ignore_index: int,
    allow_tf32: bool,
    form: Form | None = None,
) -> None:
    """Launches the kernels of `kitsune.kernels.head.cross_entropy_head` into its outputs.

    Without a `form`, the fastest is chosen.
    """
    (num_rows, num_deep), num_classes = x.shape, weight.shape[0]
    if num_rows == 0:
        loss.fill_(float("nan"))
        return

    def run(form: Form) -> None:
        num_blocks = triton.cdiv(num_rows, form.rows)
        losses = loss if num_blocks == 1 else loss.new_empty(num_blocks)
        _head[(num_blocks * form.splits,)](
            x,
            weight,
            bias,
            targets,
            saved,
            scale,
            losses,
            grad_logits,
            grad_x,
            num_rows,
            num_classes,
            num_deep,
            *x.stride(),
            *weight.stride(),
            0 if bias is None else bias.stride(0),
            targets.stride(0),
            *((0, 0) if saved is None else saved.stride()),
            ignore_index,
            activation=activation,
            precision="tf32" if allow_tf32 and grad_x.dtype == torch.float32 else "ieee",
            block_rows=form.rows,
            block_classes=max(_SMALLEST_BLOCK, triton.next_power_of_2(num_classes)),
            block_cols=form.cols,
            depth=form.depth,
            splits=form.splits,
            num_warps=form.num_warps,
            num_stages=form.num_stages,
            **({"sanitize_overflow": False} if x.is_cuda else {}),  # the interpreter does not know it
        )
        if num_blocks > 1:
            _sum[(1,)](losses, loss, num_blocks, block_size=1024)

    options = f"{activation} scale={scale is not None} tf32={allow_tf32}"
    key = f"cross_entropy_head {describe([x, weight, bias, targets, saved, grad_x])} {options}"
    run(form or choose(key, forms(num_rows, num_deep), run, x.device))
