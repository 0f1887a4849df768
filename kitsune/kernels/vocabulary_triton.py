"""The Triton kernels of `kitsune.kernels.vocabulary`, and their launches. To be imported where Triton is installed.

Where a row is shared among programs, the number of its blocks is not known to the compiler, although it could be: see
`kitsune.kernels.pool_triton` for what it would make of that.

Blocks of a row of logits that lie within it are loaded and stored without a mask: one that ends at an odd number of
columns would keep the compiler from moving more than one value at a time.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitsune.kernels.launch_triton import await_previous, launched
from kitsune.kernels.linear_triton import describe
from kitsune.kernels.rows import row_stride
from kitsune.kernels.tuning import choose

_LOSSES_AT_A_TIME = 4096
_MOST_TRIED = 2**27  # logits of a trial
RUN = 64  # rows of one index that are summed ahead


class Form(NamedTuple):
    """A tile is `block_rows` times `block_cols` values."""

    block_rows: int
    block_cols: int
    num_warps: int


# Cross-entropy


@triton.jit
def _add_powers(greatest: tl.tensor, powers: tl.tensor, values: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The greatest value of a row so far and the sum of powers relative to it, and those of `values` as well."""
    new = tl.maximum(greatest, tl.max(values, 1))
    shift = tl.where(new == -float("inf"), 0.0, new)  # so far, each power is 0
    powers = powers * tl.exp(greatest - shift) + tl.sum(tl.exp(values - shift[:, None]), 1)
    return new, powers


# Debugging is on for the assertion alone, as in PyTorch; overflows of integers need no check.
@launched(do_not_specialize=["ignore_index"], debug=True)
def _row_losses(
    logits: tl.tensor,
    targets: tl.tensor,
    losses: tl.tensor,
    row_max: tl.tensor,
    log_sum: tl.tensor,
    logits_stride: tl.tensor,
    target_stride: tl.tensor,
    ignore_index: tl.int64,
    label_smoothing: tl.tensor,
    smooth: tl.constexpr,
    num_cols: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    greatest = tl.full((1,), -float("inf"), dtype=tl.float32)
    powers = tl.zeros((1,), dtype=tl.float32)
    plain_sum = tl.zeros((1,), dtype=tl.float32)
    whole: tl.constexpr = num_cols // block_cols * block_cols
    for start in range(0, whole, block_cols):
        values = tl.load(logits + (start + tl.arange(0, block_cols))[None, :]).to(tl.float32)
        greatest, powers = _add_powers(greatest, powers, values)
        if smooth:
            plain_sum += tl.sum(values, 1)
    if whole < num_cols:
        cols = (whole + tl.arange(0, block_cols))[None, :]
        values = tl.load(logits + cols, cols < num_cols, other=-float("inf")).to(tl.float32)
        greatest, powers = _add_powers(greatest, powers, values)
        if smooth:
            plain_sum += tl.sum(tl.where(cols < num_cols, values, 0.0), 1)
    target = tl.load(targets + row * target_stride)
    legal = (target >= 0) & (target < num_cols)
    counted = target != ignore_index
    tl.device_assert(legal | (target == ignore_index), "cross_entropy: a target is out of range")
    logarithm = tl.log(powers)
    loss = logarithm + (greatest - tl.load(logits + target, legal, other=0.0).to(tl.float32))
    if smooth:
        loss = (1 - label_smoothing) * loss + label_smoothing * (logarithm + (greatest - plain_sum / num_cols))
    places = row + tl.arange(0, 1)
    tl.store(losses + places, tl.where(counted, loss, 0.0))
    tl.store(row_max + places, greatest)
    tl.store(log_sum + places, logarithm)


@launched(do_not_specialize=["ignore_index"])
def _reduce_losses(
    losses: tl.tensor,
    targets: tl.tensor,
    loss: tl.tensor,
    num_counted: tl.tensor,
    num_rows: tl.tensor,
    target_stride: tl.tensor,
    ignore_index: tl.int64,
    mean: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    await_previous()
    sums = tl.zeros((block_rows,), dtype=tl.float32)
    counts = tl.zeros((block_rows,), dtype=tl.int32)
    for start in range(0, num_rows, block_rows):
        rows = (start + tl.arange(0, block_rows)).to(tl.int64)
        sums += tl.load(losses + rows, rows < num_rows, other=0.0)
        target = tl.load(targets + rows * target_stride, rows < num_rows, other=ignore_index)
        counts += (target != ignore_index).to(tl.int32)
    total = tl.sum(sums, 0)
    count = tl.sum(counts, 0).to(tl.float32)
    if mean:
        total = tl.div_rn(total, count)
    tl.store(loss, total)
    tl.store(num_counted, count)


@launched(do_not_specialize=["ignore_index", "num_blocks"])
def _grad_logits(
    grad_loss: tl.tensor,
    logits: tl.tensor,
    targets: tl.tensor,
    row_max: tl.tensor,
    log_sum: tl.tensor,
    num_counted: tl.tensor,
    result: tl.tensor,
    logits_stride: tl.tensor,
    result_stride: tl.tensor,
    target_stride: tl.tensor,
    ignore_index: tl.int64,
    of_target: tl.tensor,
    of_each: tl.tensor,
    num_blocks: tl.tensor,
    mean: tl.constexpr,
    num_cols: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    await_previous()
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    first = tl.program_id(0) % num_blocks * block_cols
    cols = first + tl.arange(0, block_cols)
    is_within = first + block_cols <= num_cols
    factor = tl.load(grad_loss)
    if mean:
        factor = tl.div_rn(factor, tl.load(num_counted))
    target = tl.load(targets + row * target_stride)
    factor = tl.where(target == ignore_index, 0.0, factor)
    logits += row * logits_stride
    result += row * result_stride
    if is_within:
        values = tl.load(logits + cols).to(tl.float32)
    else:
        values = tl.load(logits + cols, cols < num_cols, other=0.0).to(tl.float32)
    probabilities = tl.exp(values - tl.load(row_max + row) - tl.load(log_sum + row))
    expected = tl.where(cols == target, of_target, 0.0) + of_each
    grad = ((probabilities - expected) * factor).to(result.dtype.element_ty)
    if is_within:
        tl.store(result + cols, grad)
    else:
        tl.store(result + cols, grad, cols < num_cols)


# Embeddings


@triton.jit
def _gather(
    weight: tl.tensor,
    indices: tl.tensor,
    stride: tl.tensor,
    table_rows: tl.tensor,
    places: tl.tensor,
    is_place: tl.tensor,
    cols: tl.tensor,
    num_cols: tl.constexpr,
) -> tl.tensor:
    index = tl.load(indices + places, is_place, other=0).to(tl.int64)
    legal = (index >= 0) & (index < table_rows)
    tl.device_assert(legal, "embedding: an index is out of range")
    mask = (legal & is_place)[:, None] & (cols < num_cols)[None, :]
    return tl.load(weight + index[:, None] * stride + cols[None, :], mask, other=0.0).to(tl.float32)


@launched(do_not_specialize=["num_blocks"], debug=True)
def _embed(
    weight: tl.tensor,
    indices: tl.tensor,
    added_weight: tl.tensor,
    added_indices: tl.tensor,
    result: tl.tensor,
    stride: tl.tensor,
    added_stride: tl.tensor,
    table_rows: tl.tensor,
    added_table_rows: tl.tensor,
    num_indices: tl.tensor,
    num_added: tl.tensor,
    num_blocks: tl.tensor,
    num_cols: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    await_previous()
    places = (tl.program_id(0) // num_blocks).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    cols = tl.program_id(0) % num_blocks * block_cols + tl.arange(0, block_cols)
    is_place = places < num_indices
    rows = _gather(weight, indices, stride, table_rows, places, is_place, cols, num_cols)
    if added_weight is not None:
        repeated = places % num_added
        rows += _gather(added_weight, added_indices, added_stride, added_table_rows, repeated, is_place, cols, num_cols)
    mask = is_place[:, None] & (cols < num_cols)[None, :]
    tl.store(result + places[:, None] * num_cols + cols[None, :], rows.to(result.dtype.element_ty), mask)


@triton.jit
def _sum_rows(
    sums: tl.tensor,
    grad: tl.tensor,
    order: tl.tensor,
    stride: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    cols: tl.tensor,
    num_cols: tl.constexpr,
    block_rows: tl.constexpr,
) -> tl.tensor:
    """Adds the rows of `grad` at the places that stand in `order` from `begin` to `end`; without it, at these."""
    for start in range(begin, end, block_rows):
        places = (start + tl.arange(0, block_rows)).to(tl.int64)
        is_place = places < end
        if order is not None:
            places = tl.load(order + places, is_place, other=0)
        mask = is_place[:, None] & (cols < num_cols)[None, :]
        sums += tl.load(grad + places[:, None] * stride + cols[None, :], mask, other=0.0).to(tl.float32)
    return sums


@launched(do_not_specialize=["num_blocks"])
def _sum_runs(
    grad: tl.tensor,
    order: tl.tensor,
    sorted_indices: tl.tensor,
    runs: tl.tensor,
    stride: tl.tensor,
    num_blocks: tl.tensor,
    num_cols: tl.constexpr,
    run_length: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    """The sum of each `run_length` places in order, from a multiple of that on, that are all of one index."""
    await_previous()
    run = tl.program_id(0) // num_blocks
    cols = tl.program_id(0) % num_blocks * block_cols + tl.arange(0, block_cols)
    begin = run * run_length
    if tl.load(sorted_indices + begin) == tl.load(sorted_indices + begin + run_length - 1):
        sums = tl.zeros((block_rows, block_cols), dtype=tl.float32)
        sums = _sum_rows(sums, grad, order, stride, begin, begin + run_length, cols, num_cols, block_rows)
        tl.store(runs + run.to(tl.int64) * num_cols + cols, tl.sum(sums, 0), cols < num_cols)


@launched(do_not_specialize=["padding_idx", "num_blocks"])
def _sum_indices(
    grad: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    runs: tl.tensor,
    added: tl.tensor,
    result: tl.tensor,
    stride: tl.tensor,
    added_stride: tl.tensor,
    padding_idx: tl.int64,
    num_blocks: tl.tensor,
    num_cols: tl.constexpr,
    run_length: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
) -> None:
    """One row of the result: the places of an index before, in, and after its runs, and what it is added to."""
    await_previous()
    index = tl.program_id(0) // num_blocks
    cols = tl.program_id(0) % num_blocks * block_cols + tl.arange(0, block_cols)
    if added is not None:  # first: nothing that is looked up matters to it
        total = tl.load(added + index.to(tl.int64) * added_stride + cols, cols < num_cols, other=0.0).to(tl.float32)
    begin = tl.load(starts + index)
    end = tl.where(index == padding_idx, begin, tl.load(starts + index + 1))
    first_run = (begin + run_length - 1) // run_length
    last_run = tl.maximum(first_run, end // run_length)
    before = tl.minimum(first_run * run_length, end)
    after = tl.maximum(last_run * run_length, before)
    sums = tl.zeros((block_rows, block_cols), dtype=tl.float32)
    sums = _sum_rows(sums, grad, order, stride, begin, before, cols, num_cols, block_rows)
    sums = _sum_rows(sums, runs, None, num_cols, first_run, last_run, cols, num_cols, block_rows)
    sums = _sum_rows(sums, grad, order, stride, after, end, cols, num_cols, block_rows)
    if added is not None:
        total += tl.sum(sums, 0)
    else:
        total = tl.sum(sums, 0)
    at = result + index.to(tl.int64) * num_cols + cols
    tl.store(at, total.to(result.dtype.element_ty), cols < num_cols)


# The forms


@cache
def loss_forms(num_cols: int) -> tuple[Form, ...]:
    """At most twelve for a cross-entropy over so many classes; the first is a fair choice for most shapes."""
    most = triton.next_power_of_2(num_cols)
    blocks = dict.fromkeys(min(most, cols) for cols in (4096, 2048, 8192, 1024))
    found = (Form(1, cols, _num_warps(cols, values)) for cols in blocks for values in (16, 8, 32))
    return tuple(dict.fromkeys(found))


@cache
def embedding_forms(num_rows: int, num_cols: int) -> tuple[Form, ...]:
    """At most twelve for tables of so many columns, of which as a rule `num_rows` rows belong together."""
    most_rows, most_cols = triton.next_power_of_2(num_rows), triton.next_power_of_2(num_cols)
    tiles = dict.fromkeys(
        (min(most_rows, rows), min(most_cols, cols)) for rows, cols in ((1, 1024), (4, 256), (2, 1024), (8, 128))
    )
    found = (Form(rows, cols, _num_warps(rows * cols, values)) for rows, cols in tiles for values in (8, 4, 16))
    return tuple(dict.fromkeys(found))


def _num_warps(num_values: int, values_a_thread: int) -> int:
    return max(1, min(16, num_values // (32 * values_a_thread)))


# The launches


def cross_entropy(
    outputs: tuple[Tensor, ...],
    logits: Tensor,
    targets: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    form: Form | None = None,
) -> None:
    """Like all below: launches on the current stream what `kitsune.kernels.vocabulary` says and checks.

    Without a `form`, the fastest is chosen.
    """
    loss, row_max, log_sum, num_counted = outputs
    losses = torch.empty_like(row_max)

    def run(form: Form) -> None:
        _row_losses[(logits.shape[0],)](
            logits, targets, losses, row_max, log_sum, _stride(logits), targets.stride(0), ignore_index,
            label_smoothing, smooth=label_smoothing != 0, num_cols=logits.shape[1],
            block_cols=form.block_cols, num_warps=form.num_warps, **_without_overflow_checks(logits),
        )  # fmt: skip

    if losses.numel():
        key = f"cross_entropy {describe([logits, targets])} smooth={label_smoothing != 0}"
        run(form or choose(key, loss_forms(logits.shape[1]), run, logits.device))
    _reduce_losses[(1,)](
        losses, targets, loss, num_counted, logits.shape[0], targets.stride(0), ignore_index,
        mean=reduction == "mean", block_rows=_LOSSES_AT_A_TIME, num_warps=8,
    )  # fmt: skip


def cross_entropy_backward(
    result: Tensor,
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    num_counted: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    form: Form | None = None,
) -> None:
    num_rows, num_cols = logits.shape
    if num_rows == 0:
        return

    def run(form: Form, result: Tensor) -> None:
        num_blocks = triton.cdiv(num_cols, form.block_cols)
        _grad_logits[(result.shape[0] * num_blocks,)](
            grad_loss, logits, targets, row_max, log_sum, num_counted, result,
            _stride(logits), _stride(result), targets.stride(0), ignore_index,
            1 - label_smoothing, label_smoothing / num_cols, num_blocks,
            mean=reduction == "mean", num_cols=num_cols, block_cols=form.block_cols, num_warps=form.num_warps,
        )  # fmt: skip

    def trial(form: Form) -> None:
        """Of a part of the rows, as the logits may be what is to be overwritten, and too many for a copy."""
        shape = min(num_rows, max(1, _MOST_TRIED // num_cols)), num_cols
        run(form, logits.new_empty_strided(shape, result.stride()))

    key = f"cross_entropy_backward {describe([logits, targets, result])}"
    run(form or choose(key, loss_forms(num_cols), trial, logits.device), result)


def cross_entropy_backward_(
    _: None,
    grad_loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    num_counted: Tensor,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    form: Form | None = None,
) -> None:
    cross_entropy_backward(
        logits, grad_loss, logits, targets, row_max, log_sum, num_counted,
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, form=form,
    )  # fmt: skip


def embedding(
    result: Tensor,
    weight: Tensor,
    indices: Tensor,
    added_weight: Tensor | None,
    added_indices: Tensor | None,
    *,
    form: Form | None = None,
) -> None:
    if not indices.numel():
        return
    num_cols = weight.shape[1]
    flat, added_flat = indices.reshape(-1), None if added_indices is None else added_indices.reshape(-1)

    def run(form: Form) -> None:
        num_blocks = triton.cdiv(num_cols, form.block_cols)
        _embed[(triton.cdiv(flat.shape[0], form.block_rows) * num_blocks,)](
            weight, flat, added_weight, added_flat, result,
            _stride(weight), 0 if added_weight is None else _stride(added_weight),
            weight.shape[0], 0 if added_weight is None else added_weight.shape[0],
            flat.shape[0], 0 if added_flat is None else added_flat.shape[0], num_blocks,
            num_cols=num_cols, block_rows=form.block_rows, block_cols=form.block_cols,
            num_warps=form.num_warps, **_without_overflow_checks(weight),
        )  # fmt: skip

    key = f"embedding {describe([weight, flat, added_weight, added_flat])}"
    run(form or choose(key, embedding_forms(flat.shape[0], num_cols), run, weight.device))


def embedding_backward(
    result: Tensor,
    grad: Tensor,
    indices: Tensor,
    added: Tensor | None = None,
    *,
    num_embeddings: int,
    padding_idx: int,
    dtype: torch.dtype,
    form: Form | None = None,
) -> None:
    num_cols = grad.shape[-1]
    sorted_indices, order = indices.reshape(-1).sort(stable=True)
    borders = torch.arange(num_embeddings + 1, dtype=indices.dtype, device=indices.device)
    starts = torch.searchsorted(sorted_indices, borders, out_int32=True)
    num_runs = order.shape[0] // RUN
    runs = grad.new_empty(num_runs, num_cols, dtype=torch.float32)

    def run(form: Form) -> None:
        num_blocks = triton.cdiv(num_cols, form.block_cols)
        tile = {"block_rows": form.block_rows, "block_cols": form.block_cols, "num_warps": form.num_warps}
        if num_runs:
            _sum_runs[(num_runs * num_blocks,)](
                grad, order, sorted_indices, runs, _stride(grad), num_blocks, num_cols=num_cols, run_length=RUN, **tile
            )
        _sum_indices[(num_embeddings * num_blocks,)](
            grad, order, starts, runs, added, result,
            _stride(grad), 0 if added is None else _stride(added), padding_idx, num_blocks,
            num_cols=num_cols, run_length=RUN, **tile,
        )  # fmt: skip

    key = f"embedding_backward {describe([grad, added, result])}"
    run(form or choose(key, embedding_forms(RUN, num_cols), run, grad.device))


def _stride(tensor: Tensor) -> int:
    return row_stride("a kernel", "a tensor", tensor)


def _without_overflow_checks(tensor: Tensor) -> dict[str, bool]:
    """To go with `debug`; the interpreter does not know it."""
    return {"sanitize_overflow": False} if tensor.is_cuda else {}
