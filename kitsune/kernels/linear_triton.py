"""The Triton kernels of `kitsune.kernels.linear`, and their launches. To be imported where Triton is installed.

`multiply`, `activate` and `backpropagate` serve the kernels of other layers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kitsune.kernels.launch_triton import await_previous, launched
from kitsune.kernels.tuning import choose

ALIGNMENT_BYTES = 16


class Form(NamedTuple):
    """A tile of the result, `rows` by `cols`, is summed over `slices` times `depth` products an iteration.

    With several slices each has an accumulator of its own (and warps of its own); they are added at the end. With
    `by_lanes` no tensor core is asked: every thread has a tile of sums of its own, of some of the products, which are
    added at the end too. That is meant for float32, and for operands that lie densely along what is summed over.
    """

    rows: int
    cols: int
    depth: int
    slices: int
    num_warps: int
    num_stages: int
    by_lanes: bool = False


# From small to large. For MLPs at small batches, those of 16 x 16 with 4 warps were the fastest on an H200.
_FORMS = (
    Form(16, 16, 64, 4, 4, 3),
    Form(16, 16, 128, 4, 4, 2),
    Form(16, 16, 64, 1, 4, 4),
    Form(16, 32, 64, 4, 4, 3),
    Form(32, 32, 64, 2, 4, 3),
    Form(32, 32, 64, 1, 4, 4),
    Form(64, 32, 64, 1, 4, 4),
    Form(64, 64, 64, 1, 4, 3),
    Form(128, 64, 64, 1, 4, 3),
    Form(128, 128, 32, 1, 8, 4),
    Form(128, 128, 64, 1, 8, 3),
)
# Their threads have 64 sums each. On an H200 the MLP's first layers (784 to 512 to 256, batch 64, float32) take 4.9 and
# 3.6 us with them, and took 17.7 and 11.2 with the forms above.
_FORMS_BY_LANES = (
    Form(16, 16, 32, 1, 4, 4, by_lanes=True),
    Form(16, 16, 64, 1, 8, 4, by_lanes=True),
    Form(8, 16, 32, 1, 2, 4, by_lanes=True),
    Form(8, 16, 64, 1, 4, 4, by_lanes=True),
    Form(8, 8, 32, 1, 1, 4, by_lanes=True),
)
# With more, tiles are larger where that is possible: a product of that size fills a device with large tiles as well,
# and each form that is tried takes time to compile. What is left out was not timed.
_MOST_TILES = 1024
_LARGEST = 3  # forms that are tried where all have more: not every device has the shared memory for each
SMALLEST_BLOCK = 16  # of `tl.dot`


def forms(num_rows: int, num_cols: int, num_deep: int, candidates: Sequence[Form] = _FORMS) -> tuple[Form, ...]:
    """Those of the candidates, from small to large, that are worth timing for a product of `num_deep` terms.

    Tiles are no larger than the result, and not too many; what is summed at a time is no more than there is.
    """
    most_rows, most_cols, most_deep = (
        max(SMALLEST_BLOCK, triton.next_power_of_2(size)) for size in (num_rows, num_cols, num_deep)
    )
    fitting = [
        form._replace(depth=min(form.depth, most_deep))
        for form in candidates
        if form.rows <= most_rows and form.cols <= most_cols and form.slices * min(form.depth, most_deep) <= most_deep
    ]
    few = [form for form in fitting if num_tiles(form, num_rows, num_cols) <= _MOST_TILES]
    return tuple(dict.fromkeys(few or fitting[-_LARGEST:]))


def num_tiles(form: Form, num_rows: int, num_cols: int) -> int:
    """How many tiles of `form` cover a matrix."""
    return int(triton.cdiv(num_rows, form.rows) * triton.cdiv(num_cols, form.cols))


@triton.jit
def multiply(
    left: tl.tensor,
    left_row_stride: tl.tensor,
    left_depth_stride: tl.tensor,
    right: tl.tensor,
    right_col_stride: tl.tensor,
    right_depth_stride: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    num_deep: tl.tensor,
    dtype: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
    loads_ahead: tl.constexpr = 0,
) -> tl.tensor:
    """The tile of `left @ right` at `rows` and `cols` (int64), summed in float32 over the dimension called depth.

    With `loads_ahead` it is summed by lanes, and so many iterations are loaded ahead.
    """
    if loads_ahead:
        left_at = left + rows[:, None] * left_row_stride
        right_at = right + cols[:, None] * right_col_stride
        totals = tl.zeros((block_rows, block_cols, depth), dtype=tl.float32)
        for start in tl.range(0, num_deep, depth, num_stages=loads_ahead):
            deep = (start + tl.arange(0, depth)).to(tl.int64)
            is_deep = deep[None, :] < num_deep
            a = tl.load(left_at + deep[None, :] * left_depth_stride, (rows[:, None] < num_rows) & is_deep, other=0.0)
            b = tl.load(right_at + deep[None, :] * right_depth_stride, (cols[:, None] < num_cols) & is_deep, other=0.0)
            totals += a.to(dtype).to(tl.float32)[:, None, :] * b.to(dtype).to(tl.float32)[None, :, :]
        total = tl.sum(totals, 2)
    elif slices == 1:
        left_at = left + rows[:, None] * left_row_stride
        right_at = right + cols[None, :] * right_col_stride
        total = tl.zeros((block_rows, block_cols), dtype=tl.float32)
        for start in range(0, num_deep, depth):
            deep = (start + tl.arange(0, depth)).to(tl.int64)
            a_at = left_at + deep[None, :] * left_depth_stride
            b_at = right_at + deep[:, None] * right_depth_stride
            a = tl.load(a_at, (rows[:, None] < num_rows) & (deep[None, :] < num_deep), other=0.0)
            b = tl.load(b_at, (deep[:, None] < num_deep) & (cols[None, :] < num_cols), other=0.0)
            total = tl.dot(a.to(dtype), b.to(dtype), total, input_precision=precision)
    else:
        left_at = left + rows[None, :, None] * left_row_stride
        right_at = right + cols[None, None, :] * right_col_stride
        first = tl.arange(0, slices)[:, None] * depth + tl.arange(0, depth)[None, :]
        totals = tl.zeros((slices, block_rows, block_cols), dtype=tl.float32)
        for start in range(0, num_deep, slices * depth):
            deep = (start + first).to(tl.int64)
            a_at = left_at + deep[:, None, :] * left_depth_stride
            b_at = right_at + deep[:, :, None] * right_depth_stride
            a = tl.load(a_at, (rows[None, :, None] < num_rows) & (deep[:, None, :] < num_deep), other=0.0)
            b = tl.load(b_at, (deep[:, :, None] < num_deep) & (cols[None, None, :] < num_cols), other=0.0)
            totals = tl.dot(a.to(dtype), b.to(dtype), totals, input_precision=precision)
        total = tl.sum(totals, 0)
    return total


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    # Near zero the formula cancels. The polynomial (minimax, in x squared) is good to a unit in the last place.
    square = x * x
    series = ((1.57394409e-2 * square - 5.23025580e-2) * square + 1.33152470e-1) * square - 3.33327681e-1
    return tl.where(tl.abs(x) < 0.55, x + x * square * series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def _tanh_of_gelu(x: tl.tensor) -> tl.tensor:
    return _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))


@triton.jit
def activate(x: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    """`activation` of a float32 block."""
    if activation == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif activation == "tanh":
        x = _tanh(x)
    elif activation == "gelu":
        x = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":
        x = 0.5 * x * (1 + _tanh_of_gelu(x))
    elif activation == "silu":
        x = x / (1 + tl.exp(-x))
    else:
        tl.static_assert(activation == "none")
    return x


@triton.jit
def backpropagate(grad: tl.tensor, saved: tl.tensor, activation: tl.constexpr) -> tl.tensor:
    """`grad` times the derivative of `activation`, of float32 blocks; `saved` is its output, or its input."""
    if activation == "relu":
        grad = tl.where(saved <= 0, 0.0, grad)
    elif activation == "tanh":
        grad = grad * (1 - saved * saved)
    elif activation == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * saved * saved)
        grad = grad * (0.5 * (1 + tl.erf(saved * 0.7071067811865476)) + saved * density)
    elif activation == "gelu_tanh":
        tanh = _tanh_of_gelu(saved)
        inner = 0.7978845608028654 * (1 + 3 * 0.044715 * saved * saved)
        grad = grad * (0.5 * (1 + tanh) + 0.5 * saved * (1 - tanh * tanh) * inner)
    else:
        tl.static_assert(activation == "silu")
        sigmoid = 1 / (1 + tl.exp(-saved))
        grad = grad * (sigmoid * (1 + saved * (1 - sigmoid)))
    return grad


@triton.jit
def tile_of(
    tile: tl.tensor, num_cols: tl.tensor, block_rows: tl.constexpr, block_cols: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The rows and columns (int64) of a tile, which are counted along the rows of the matrix."""
    across = tl.cdiv(num_cols, block_cols)
    rows = (tile // across).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    cols = (tile % across).to(tl.int64) * block_cols + tl.arange(0, block_cols)
    return rows, cols


@launched()
def _linear(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    preactivation: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    num_deep: tl.tensor,
    x_row_stride: tl.tensor,
    x_depth_stride: tl.tensor,
    weight_row_stride: tl.tensor,
    weight_depth_stride: tl.tensor,
    bias_stride: tl.tensor,
    activation: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    await_previous()
    dtype: tl.constexpr = y.dtype.element_ty
    rows, cols = tile_of(tl.program_id(0), num_cols, block_rows, block_cols)
    if bias is not None:  # read first: it does not wait for the product
        biases = tl.load(bias + cols * bias_stride, cols < num_cols, other=0.0).to(dtype).to(tl.float32)
    value = multiply(
        x, x_row_stride, x_depth_stride, weight, weight_row_stride, weight_depth_stride,
        rows, cols, num_rows, num_cols, num_deep, dtype, precision, block_rows, block_cols, depth, slices, loads_ahead,
    )  # fmt: skip
    if bias is not None:
        value += biases[None, :]
    offsets = rows[:, None] * num_cols + cols[None, :]
    mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
    if preactivation is not None:
        tl.store(preactivation + offsets, value.to(dtype), mask)
    tl.store(y + offsets, activate(value, activation).to(dtype), mask)


@launched()
def _input_gradient(
    grad_output: tl.tensor,
    weight: tl.tensor,
    saved: tl.tensor,
    grad_x: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    num_deep: tl.tensor,
    grad_row_stride: tl.tensor,
    grad_depth_stride: tl.tensor,
    weight_depth_stride: tl.tensor,
    weight_col_stride: tl.tensor,
    saved_row_stride: tl.tensor,
    saved_col_stride: tl.tensor,
    activation: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> None:
    await_previous()
    dtype: tl.constexpr = grad_x.dtype.element_ty
    rows, cols = tile_of(tl.program_id(0), num_cols, block_rows, block_cols)
    mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
    if saved is not None:  # read first: it does not wait for the product
        saved_at = saved + rows[:, None] * saved_row_stride + cols[None, :] * saved_col_stride
        saved_values = tl.load(saved_at, mask, other=0.0).to(dtype).to(tl.float32)
    value = multiply(
        grad_output, grad_row_stride, grad_depth_stride, weight, weight_col_stride, weight_depth_stride,
        rows, cols, num_rows, num_cols, num_deep, dtype, precision, block_rows, block_cols, depth, slices,
    )  # fmt: skip
    if saved is not None:
        value = backpropagate(value, saved_values, activation)
    tl.store(grad_x + rows[:, None] * num_cols + cols[None, :], value.to(dtype), mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    preactivation: torch.Tensor,
    *,
    activation: str,
    allow_tf32: bool,
    form: Form | None = None,
) -> None:
    """Launches the kernel of `kitsune.kernels.linear.linear_activation` into its outputs.

    Without a `form`, the fastest is chosen.
    """
    (num_rows, num_deep), num_cols = x.shape, weight.shape[0]
    if y.numel() == 0:
        return

    def run(form: Form) -> None:
        _linear[(num_tiles(form, num_rows, num_cols),)](
            x,
            weight,
            bias,
            y,
            preactivation if preactivation.numel() else None,
            num_rows,
            num_cols,
            num_deep,
            *x.stride(),
            *weight.stride(),
            0 if bias is None else bias.stride(0),
            activation=activation,
            loads_ahead=form.num_stages if form.by_lanes else 0,
            **compile_options(form, y.dtype, allow_tf32),
        )

    options = f"{activation} keep={preactivation.numel() > 0} tf32={allow_tf32}"
    key = f"linear {describe([x, weight, bias, y])} {options}"
    is_dense = x.stride(1) == weight.stride(1) == 1
    more = _FORMS_BY_LANES if y.dtype == torch.float32 and not allow_tf32 and is_dense else ()
    run(form or choose(key, forms(num_rows, num_cols, num_deep, (*more, *_FORMS)), run, x.device))


def input_gradient(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    saved: torch.Tensor | None,
    grad_x: torch.Tensor,
    *,
    activation: str,
    allow_tf32: bool,
    form: Form | None = None,
) -> None:
    """Launches the kernel of `kitsune.kernels.linear.linear_input_gradient` into `grad_x`.

    Without a `form`, the fastest is chosen.
    """
    (num_rows, num_cols), num_deep = grad_x.shape, weight.shape[0]
    if grad_x.numel() == 0:
        return

    def run(form: Form) -> None:
        _input_gradient[(num_tiles(form, num_rows, num_cols),)](
            grad_output,
            weight,
            saved,
            grad_x,
            num_rows,
            num_cols,
            num_deep,
            *grad_output.stride(),
            *weight.stride(),
            *((0, 0) if saved is None else saved.stride()),
            activation=activation,
            **compile_options(form, grad_x.dtype, allow_tf32),
        )

    key = f"linear_input_gradient {describe([grad_output, weight, saved, grad_x])} {activation} tf32={allow_tf32}"
    run(form or choose(key, forms(num_rows, num_cols, num_deep), run, grad_x.device))


def compile_options(form: Form, dtype: torch.dtype, allow_tf32: bool) -> dict[str, int | str]:
    """The constants of a kernel that calls `multiply`, and how to compile it."""
    return {
        "precision": precision_of(dtype, allow_tf32),
        "block_rows": form.rows,
        "block_cols": form.cols,
        "depth": form.depth,
        "slices": form.slices,
        "num_warps": form.num_warps,
        "num_stages": form.num_stages,
    }


def precision_of(dtype: torch.dtype, allow_tf32: bool) -> str:
    """How `tl.dot` is to take operands."""
    return "tf32" if allow_tf32 and dtype == torch.float32 else "ieee"


def describe(tensors: Sequence[torch.Tensor | None]) -> str:
    """What the time of a kernel depends on: shapes, strides, dtypes, and which tensors are aligned."""
    return " ".join(
        "-"
        if tensor is None
        else f"{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}{'' if is_aligned(tensor) else ' misaligned'}"
        for tensor in tensors
    )


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether loads of 16 bytes may begin at the tensor's first element."""
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0
