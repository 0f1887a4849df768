"""The Triton kernels of `kitsune.kernels.grouped_update`, and their launches. To be imported where Triton is installed.

A program computes one tile of one parameter's gradient and updates it. Which parameter that is, it finds as in
`kitsune.kernels.adam_triton`, whose arithmetic it uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from kitsune.kernels.adam_triton import _NO_BLOCK, _log, _odd, _pick, _update
from kitsune.kernels.linear_triton import (
    Form,
    compile_options,
    describe,
    forms,
    is_aligned,
    multiply,
    num_tiles,
    tile_of,
)
from kitsune.kernels.tuning import choose

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]
T = TypeVar("T")

WIDTHS = (8, 16)
"""A launch takes this many parameters, the smallest that suffices."""
_ALIGNED_ELEMENTS = tl.constexpr(8)  # at two bytes each, they fill the widest load
_WEIGHT = tl.constexpr(0)
_ALIGNED_WEIGHT = tl.constexpr(1)
_BIAS = tl.constexpr(2)

# From small to large. For MLPs at small batches, those of 64 x 16 with 4 warps were the fastest on an H200.
_FORMS = (
    Form(64, 16, 64, 1, 4, 3),
    Form(16, 16, 64, 1, 4, 3),
    Form(16, 16, 64, 4, 4, 3),
    Form(16, 64, 64, 1, 4, 3),
    Form(32, 32, 64, 1, 4, 3),
    Form(64, 32, 64, 1, 4, 3),
    Form(64, 64, 32, 1, 4, 4),
    Form(128, 64, 32, 1, 8, 4),
)


@triton.jit
def _column_sums(
    grad_output: tl.tensor,
    row_stride: tl.tensor,
    cols: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
) -> tl.tensor:
    totals = tl.zeros((depth, block_cols), dtype=tl.float32)
    for start in range(0, num_rows, depth):
        rows = (start + tl.arange(0, depth)).to(tl.int64)
        mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
        totals += tl.load(grad_output + rows[:, None] * row_stride + cols[None, :], mask, other=0.0).to(tl.float32)
    return tl.sum(totals, 0)


@triton.jit
def _layer(
    block: tl.tensor,
    odd_first_blocks: tl.tuple,
    grad_outputs: tl.tuple,
    inputs: tl.tuple,
    odd_batches: tl.tuple,
    odd_rows: tl.tuple,
    odd_cols: tl.tuple,
    odd_grad_strides: tl.tuple,
    odd_input_strides: tl.tuple,
) -> tuple[tl.tensor, ...]:
    """What the gradient of the parameter to which `block` belongs is computed from."""
    return (
        _pick(block, odd_first_blocks, grad_outputs),
        _pick(block, odd_first_blocks, inputs),
        _pick(block, odd_first_blocks, odd_batches) >> 1,
        _pick(block, odd_first_blocks, odd_rows) >> 1,
        _pick(block, odd_first_blocks, odd_cols) >> 1,
        _pick(block, odd_first_blocks, odd_grad_strides) >> 1,
        _pick(block, odd_first_blocks, odd_input_strides) >> 1,
    )


@triton.jit
def _gradient(
    tile: tl.tensor,
    layer: tl.tuple,
    is_bias: tl.tensor,
    aligned: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A tile of the gradient of a weight (rows, cols) or of a bias (rows, 1), its offsets, and their mask."""
    grad_output, x, batch, num_rows, num_cols, grad_stride, input_stride = layer
    if aligned:  # which multiples these are, Triton can see in the arithmetic
        num_rows = num_rows // _ALIGNED_ELEMENTS * _ALIGNED_ELEMENTS
        num_cols = num_cols // _ALIGNED_ELEMENTS * _ALIGNED_ELEMENTS
    dtype: tl.constexpr = grad_output.dtype.element_ty
    rows, cols = tile_of(tile, num_cols, block_rows, block_cols)
    if is_bias:
        sums = _column_sums(grad_output, grad_stride, rows, batch, num_rows, block_rows, depth)
        total = tl.broadcast_to(sums[:, None], (block_rows, block_cols))
    else:
        total = multiply(
            grad_output, 1, grad_stride, x, 1, input_stride,
            rows, cols, num_rows, num_cols, batch, dtype, precision, block_rows, block_cols, depth, slices, aligned,
        )  # fmt: skip
    offsets = rows[:, None] * num_cols + cols[None, :]
    mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
    return total.to(dtype).to(tl.float32), offsets, mask


@triton.jit
def _addresses(pointer: tl.tensor, offsets: tl.tensor, aligned: tl.constexpr) -> tl.tensor:
    """Of a tile. The hint is for these alone: one on what `_pick` returns would hold in both of a kernel's branches."""
    addresses = pointer + offsets
    if aligned:
        addresses = tl.multiple_of(addresses, (1, 16))
    return addresses


@triton.jit
def _adam_tile(
    tile: tl.tensor,
    layer: tl.tuple,
    tensors: tl.tuple,
    numbers: tl.tuple,
    is_bias: tl.tensor,
    aligned: tl.constexpr,
    amsgrad: tl.constexpr,
    decay: tl.constexpr,
    maximize: tl.constexpr,
    has_shadows: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> None:
    parameter, exp_avg, exp_avg_sq, max_exp_avg_sq, grad_memory, shadow = tensors
    rate, step_size, root_correction2, beta1, weight1, beta2, weight2, weight_decay, eps = numbers
    grad, offsets, mask = _gradient(
        tile, layer, is_bias, aligned, precision, block_rows, block_cols, depth, slices
    )  # fmt: skip
    param_at = _addresses(parameter, offsets, aligned)
    grad_at = _addresses(grad_memory, offsets, aligned)
    tl.store(grad_at, grad, mask)
    tl.debug_barrier()  # `_update` may read what other threads of this program have written
    _update(
        param_at, grad_at, _addresses(exp_avg, offsets, aligned), _addresses(exp_avg_sq, offsets, aligned),
        _addresses(max_exp_avg_sq, offsets, aligned), mask, rate, step_size, root_correction2,
        beta1, weight1, beta2, weight2, weight_decay, eps, amsgrad, decay, maximize,
    )  # fmt: skip
    if has_shadows:
        tl.debug_barrier()
        tl.store(_addresses(shadow, offsets, aligned), tl.load(param_at, mask).to(shadow.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["lr", "found_inf"])
def _linear_adam(
    grad_outputs: tl.tuple,
    inputs: tl.tuple,
    odd_batches: tl.tuple,
    odd_rows: tl.tuple,
    odd_cols: tl.tuple,
    odd_grad_strides: tl.tuple,
    odd_input_strides: tl.tuple,
    odd_kinds: tl.tuple,
    odd_first_blocks: tl.tuple,
    parameters: tl.tuple,
    exp_avgs: tl.tuple,
    exp_avg_sqs: tl.tuple,
    max_exp_avg_sqs: tl.tuple,
    grads: tl.tuple,
    shadows: tl.tuple,
    steps: tl.tuple,
    lr: tl.tensor,
    found_inf: tl.tensor,
    beta1: tl.tensor,
    weight1: tl.tensor,
    log_beta1: tl.float64,
    beta2: tl.tensor,
    weight2: tl.tensor,
    log_beta2: tl.float64,
    weight_decay: tl.tensor,
    eps: tl.tensor,
    amsgrad: tl.constexpr,
    decay: tl.constexpr,
    maximize: tl.constexpr,
    has_shadows: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> None:
    if found_inf is not None:  # noqa: SIM102 - the address must not be read where there is none
        if tl.load(found_inf) == 1:
            return
    block = tl.program_id(0)
    tile = block - (_pick(block, odd_first_blocks, odd_first_blocks) >> 1)
    kind = _pick(block, odd_first_blocks, odd_kinds) >> 1
    layer = _layer(
        block, odd_first_blocks, grad_outputs, inputs, odd_batches, odd_rows, odd_cols, odd_grad_strides,
        odd_input_strides,
    )  # fmt: skip
    tensors = (
        _pick(block, odd_first_blocks, parameters),
        _pick(block, odd_first_blocks, exp_avgs),
        _pick(block, odd_first_blocks, exp_avg_sqs),
        _pick(block, odd_first_blocks, max_exp_avg_sqs),
        _pick(block, odd_first_blocks, grads),
        _pick(block, odd_first_blocks, shadows),
    )
    rate = tl.load(lr)
    count = tl.load(_pick(block, odd_first_blocks, steps)).to(tl.float64)
    step_size = tl.div_rn(rate, (1 - tl.exp(count * log_beta1)).to(tl.float32))
    root_correction2 = tl.sqrt_rn((1 - tl.exp(count * log_beta2)).to(tl.float32))
    numbers = (rate, step_size, root_correction2, beta1, weight1, beta2, weight2, weight_decay, eps)
    if kind == _ALIGNED_WEIGHT:
        _adam_tile(
            tile, layer, tensors, numbers, False, True, amsgrad, decay, maximize, has_shadows,
            precision, block_rows, block_cols, depth, slices,
        )  # fmt: skip
    else:
        _adam_tile(
            tile, layer, tensors, numbers, kind == _BIAS, False, amsgrad, decay, maximize, has_shadows,
            precision, block_rows, block_cols, depth, slices,
        )  # fmt: skip


@triton.jit
def _sgd_tile(
    tile: tl.tensor,
    layer: tl.tuple,
    tensors: tl.tuple,
    numbers: tl.tuple,
    is_bias: tl.tensor,
    aligned: tl.constexpr,
    has_momentum: tl.constexpr,
    decays: tl.constexpr,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    has_grads: tl.constexpr,
    has_shadows: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> None:
    parameter, buffer, grad_memory, shadow = tensors
    rate, momentum, undamped, weight_decay = numbers
    grad, offsets, mask = _gradient(
        tile, layer, is_bias, aligned, precision, block_rows, block_cols, depth, slices
    )  # fmt: skip
    if has_grads:
        tl.store(_addresses(grad_memory, offsets, aligned), grad, mask)
    param_at = _addresses(parameter, offsets, aligned)
    param = tl.load(param_at, mask)
    if maximize:
        grad = -grad
    if decays:
        grad += param * weight_decay
    if has_momentum:
        buffer_at = _addresses(buffer, offsets, aligned)
        average = tl.fma(grad, undamped, tl.load(buffer_at, mask) * momentum)  # see `_update`
        tl.store(buffer_at, average, mask)
        if nesterov:
            grad += average * momentum
        else:
            grad = average
    param -= rate * grad
    tl.store(param_at, param, mask)
    if has_shadows:
        tl.store(_addresses(shadow, offsets, aligned), param.to(shadow.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["lr", "found_inf"])
def _linear_sgd(
    grad_outputs: tl.tuple,
    inputs: tl.tuple,
    odd_batches: tl.tuple,
    odd_rows: tl.tuple,
    odd_cols: tl.tuple,
    odd_grad_strides: tl.tuple,
    odd_input_strides: tl.tuple,
    odd_kinds: tl.tuple,
    odd_first_blocks: tl.tuple,
    parameters: tl.tuple,
    momentum_buffers: tl.tuple,
    grads: tl.tuple,
    shadows: tl.tuple,
    lr: tl.tensor,
    found_inf: tl.tensor,
    momentum: tl.tensor,
    undamped: tl.tensor,
    weight_decay: tl.tensor,
    has_momentum: tl.constexpr,
    decays: tl.constexpr,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    has_grads: tl.constexpr,
    has_shadows: tl.constexpr,
    precision: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> None:
    if found_inf is not None:  # noqa: SIM102 - the address must not be read where there is none
        if tl.load(found_inf) == 1:
            return
    block = tl.program_id(0)
    tile = block - (_pick(block, odd_first_blocks, odd_first_blocks) >> 1)
    kind = _pick(block, odd_first_blocks, odd_kinds) >> 1
    layer = _layer(
        block, odd_first_blocks, grad_outputs, inputs, odd_batches, odd_rows, odd_cols, odd_grad_strides,
        odd_input_strides,
    )  # fmt: skip
    tensors = (
        _pick(block, odd_first_blocks, parameters),
        _pick(block, odd_first_blocks, momentum_buffers),
        _pick(block, odd_first_blocks, grads),
        _pick(block, odd_first_blocks, shadows),
    )
    numbers = (tl.load(lr), momentum, undamped, weight_decay)
    if kind == _ALIGNED_WEIGHT:
        _sgd_tile(
            tile, layer, tensors, numbers, False, True, has_momentum, decays, nesterov, maximize,
            has_grads, has_shadows, precision, block_rows, block_cols, depth, slices,
        )  # fmt: skip
    else:
        _sgd_tile(
            tile, layer, tensors, numbers, kind == _BIAS, False, has_momentum, decays, nesterov, maximize,
            has_grads, has_shadows, precision, block_rows, block_cols, depth, slices,
        )  # fmt: skip


def linear_adam(
    grad_outputs: Tensors,
    inputs: Tensors,
    layers: Sequence[int],
    parameters: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    grads: Tensors,
    shadows: Tensors,
    *,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled: bool,
    maximize: bool,
    found_inf: torch.Tensor | None = None,
    allow_tf32: bool = False,
    form: Form | None = None,
) -> None:
    """Launches the kernel of `kitsune.kernels.grouped_update.linear_adam_`; without a `form`, the fastest is chosen."""
    _launch(
        _linear_adam,
        grad_outputs,
        inputs,
        layers,
        written=[
            parameters,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs or exp_avg_sqs,
            grads or [torch.empty_like(parameter) for parameter in parameters],  # see `_adam_tile`
            shadows or parameters,
        ],
        read=[steps],
        lr=lr,
        found_inf=found_inf,
        numbers=(beta1, 1 - beta1, _log(beta1), beta2, 1 - beta2, _log(beta2), weight_decay, eps),
        constants={
            "amsgrad": bool(max_exp_avg_sqs),
            "decay": "none" if weight_decay == 0 else "decoupled" if decoupled else "coupled",
            "maximize": maximize,
            "has_shadows": bool(shadows),
        },
        allow_tf32=allow_tf32,
        form=form,
    )


def linear_sgd(
    grad_outputs: Tensors,
    inputs: Tensors,
    layers: Sequence[int],
    parameters: Tensors,
    momentum_buffers: Tensors,
    grads: Tensors,
    shadows: Tensors,
    *,
    lr: torch.Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    found_inf: torch.Tensor | None = None,
    allow_tf32: bool = False,
    form: Form | None = None,
) -> None:
    """Launches the kernel of `kitsune.kernels.grouped_update.linear_sgd_`; without a `form`, the fastest is chosen."""
    _launch(
        _linear_sgd,
        grad_outputs,
        inputs,
        layers,
        written=[parameters, momentum_buffers or parameters, grads or parameters, shadows or parameters],
        read=[],
        lr=lr,
        found_inf=found_inf,
        numbers=(momentum, 1 - dampening, weight_decay),
        constants={
            "has_momentum": bool(momentum_buffers),
            "decays": weight_decay != 0,
            "nesterov": nesterov,
            "maximize": maximize,
            "has_grads": bool(grads),
            "has_shadows": bool(shadows),
        },
        allow_tf32=allow_tf32,
        form=form,
    )


def _launch(
    kernel: Any,
    grad_outputs: Tensors,
    inputs: Tensors,
    layers: Sequence[int],
    written: Lists,
    read: Lists,
    *,
    lr: torch.Tensor,
    found_inf: torch.Tensor | None,
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    allow_tf32: bool,
    form: Form | None,
) -> None:
    """Launches `kernel` for each part of the parameters, which are the first of the lists `written`."""
    for part in _parts(grad_outputs, inputs, layers, written[0]):
        grads, xs = ([tensors[layers[index]] for index in part] for tensors in (grad_outputs, inputs))
        states, scalars = ([[one[index] for index in part] for one in lists] for lists in (written, read))

        def run(
            form: Form,
            states: Lists,
            found_inf: torch.Tensor | None,
            grads: Tensors = grads,
            xs: Tensors = xs,
            scalars: Lists = scalars,
        ) -> None:
            num_blocks, shape = _geometry(grads, xs, states, form)
            kernel[(num_blocks,)](
                _padded(grads),
                _padded(xs),
                *shape,
                *map(_padded, (*states, *scalars)),
                lr,
                found_inf,
                *numbers,
                **constants,
                **compile_options(form, grads[0].dtype, allow_tf32),
            )

        run(form or _fastest(kernel, grads, xs, states, f"{constants} tf32={allow_tf32}", run), states, found_inf)


def _parts(
    grad_outputs: Tensors, inputs: Tensors, layers: Sequence[int], parameters: Tensors
) -> Iterator[tuple[int, ...]]:
    """Indices of parameters that hold anything, for a launch each: pointers of a list must be of one data type."""
    by_type: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (layer, parameter) in enumerate(zip(layers, parameters, strict=True)):
        if parameter.numel():
            by_type.setdefault((grad_outputs[layer].dtype, inputs[layer].dtype), []).append(index)
    for indices in by_type.values():
        for begin in range(0, len(indices), WIDTHS[-1]):
            yield tuple(indices[begin : begin + WIDTHS[-1]])


def _fastest(
    kernel: Any, grads: Tensors, xs: Tensors, states: Lists, options: str, run: Callable[[Form, Lists, None], None]
) -> Form:
    """The fastest form; it is found on copies of what the kernel updates."""
    copies: list[list[torch.Tensor]] = []
    copying = Lock()

    def trial(form: Form) -> None:
        with copying:  # several threads try a form each, and the first comer makes the copies for all
            if not copies:
                copies.extend([[tensor.clone() for tensor in tensors] for tensors in states])
        run(form, copies, None)

    kinds = [_kind(grad, x, one) for grad, x, *one in zip(grads, xs, *states, strict=True)]
    key = f"{kernel.__name__} {describe([*grads, *xs, *states[0]])} {kinds} {options}"
    rows, cols, batch = (max(sizes) for sizes in zip(*map(_sizes, grads, xs, states[0]), strict=True))
    return choose(key, forms(rows, cols, batch, _FORMS), trial, grads[0].device)


def _geometry(grads: Tensors, xs: Tensors, states: Lists, form: Form) -> tuple[int, list[tuple[int, ...]]]:
    """The number of programs, and what the kernels take by the names odd_batches to odd_first_blocks."""
    sizes = list(map(_sizes, grads, xs, states[0]))
    rows, cols, batches = (list(some) for some in zip(*sizes, strict=True))
    first_blocks = [0, *itertools.accumulate(num_tiles(form, *size[:2]) for size in sizes)]
    num_blocks = first_blocks.pop()
    strides = [[tensor.stride(0) for tensor in tensors] for tensors in (grads, xs)]
    kinds = [_kind(grad, x, one) for grad, x, *one in zip(grads, xs, *states, strict=True)]
    lists = [_odd(_padded(numbers)) for numbers in (batches, rows, cols, *strides, kinds)]
    unused = _width(first_blocks) - len(first_blocks)
    return num_blocks, [*lists, _odd(first_blocks + [_NO_BLOCK] * unused)]


def _sizes(grad: torch.Tensor, x: torch.Tensor, parameter: torch.Tensor) -> tuple[int, int, int]:
    """Rows and columns of a gradient, of which a bias has one, and the size of the batch it is summed over."""
    return grad.shape[1], x.shape[1] if parameter.ndim == 2 else 1, grad.shape[0]


def _kind(grad: torch.Tensor, x: torch.Tensor, states: Tensors) -> int:
    if states[0].ndim == 1:
        return int(_BIAS.value)
    numbers = (*states[0].shape, grad.stride(0), x.stride(0))
    aligned = all(number % _ALIGNED_ELEMENTS.value == 0 for number in numbers)
    return int((_ALIGNED_WEIGHT if aligned and all(map(is_aligned, (grad, x, *states))) else _WEIGHT).value)


def _width(items: Sequence[object]) -> int:
    return next(width for width in WIDTHS if len(items) <= width)


def _padded(items: Sequence[T]) -> tuple[T, ...]:
    """To the width of a launch, by the last."""
    return (*items, *[items[-1]] * (_width(items) - len(items)))
