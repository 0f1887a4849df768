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

from kitsune.kernels.adam_triton import _NO_BLOCK, _log, _odd, _pick, update
from kitsune.kernels.linear_triton import (
    Form,
    describe,
    forms,
    is_aligned,
    multiply,
    num_tiles,
    precision_of,
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
_WIDE = tl.constexpr(4)  # added where the input is float32 among others that are not

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
def _wide(layer: tl.tuple) -> tuple[tl.tensor, ...]:
    """A layer whose input is float32, though its pointer came in a list of others."""
    grad_output, x, batch, num_rows, num_cols, grad_stride, input_stride = layer
    x = x.to(tl.pointer_type(tl.float32), bitcast=True)
    return grad_output, x, batch, num_rows, num_cols, grad_stride, input_stride


@triton.jit
def _size(layer: tl.tuple, aligned: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Rows and columns of a gradient; if they are multiples, Triton can see it in the arithmetic."""
    num_rows, num_cols = layer[3], layer[4]
    if aligned:
        num_rows = num_rows // _ALIGNED_ELEMENTS * _ALIGNED_ELEMENTS
        num_cols = num_cols // _ALIGNED_ELEMENTS * _ALIGNED_ELEMENTS
    return num_rows, num_cols


@triton.jit
def _place(
    tile: tl.tensor, layer: tl.tuple, aligned: tl.constexpr, block_rows: tl.constexpr, block_cols: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The offsets of a tile of a gradient, and their mask."""
    num_rows, num_cols = _size(layer, aligned)
    rows, cols = tile_of(tile, num_cols, block_rows, block_cols)
    return rows[:, None] * num_cols + cols[None, :], (rows[:, None] < num_rows) & (cols[None, :] < num_cols)


@triton.jit
def _gradient(
    tile: tl.tensor, layer: tl.tuple, is_bias: tl.tensor, aligned: tl.constexpr, form: tl.constexpr
) -> tl.tensor:
    """A tile of the gradient of a weight (rows, cols) or of a bias (rows, 1), in float32."""
    grad_output, x, batch, _, _, grad_stride, input_stride = layer
    num_rows, num_cols = _size(layer, aligned)
    dtype: tl.constexpr = grad_output.dtype.element_ty
    precision: tl.constexpr = form[0]
    block_rows: tl.constexpr = form[1]
    block_cols: tl.constexpr = form[2]
    depth: tl.constexpr = form[3]
    slices: tl.constexpr = form[4]
    rows, cols = tile_of(tile, num_cols, block_rows, block_cols)
    if is_bias:
        sums = _column_sums(grad_output, grad_stride, rows, batch, num_rows, block_rows, depth)
        total = tl.broadcast_to(sums[:, None], (block_rows, block_cols))
    else:
        total = multiply(
            grad_output, 1, grad_stride, x, 1, input_stride,
            rows, cols, num_rows, num_cols, batch, dtype, precision, block_rows, block_cols, depth, slices, aligned,
        )  # fmt: skip
    return total.to(dtype).to(tl.float32)


@triton.jit
def _addresses(pointer: tl.tensor, offsets: tl.tensor, aligned: tl.constexpr) -> tl.tensor:
    """Of a tile. The hint is for these alone: one on what `_pick` returns would hold in both of a kernel's branches."""
    addresses = pointer + offsets
    if aligned:
        addresses = tl.multiple_of(addresses, (1, 16))
    return addresses


@triton.jit
def _by_kind(
    update_tile: tl.constexpr,
    kind: tl.tensor,
    mixed: tl.constexpr,
    tile: tl.tensor,
    layer: tl.tuple,
    tensors: tl.tuple,
    numbers: tl.tuple,
    flags: tl.constexpr,
    form: tl.constexpr,
) -> None:
    """Calls `update_tile` as the parameter's kind demands: each branch is compiled by itself."""
    if mixed and kind >= _WIDE:
        if kind == _WIDE + _ALIGNED_WEIGHT:
            update_tile(tile, _wide(layer), tensors, numbers, False, True, flags, form)
        else:
            update_tile(tile, _wide(layer), tensors, numbers, False, False, flags, form)
    elif kind == _ALIGNED_WEIGHT:
        update_tile(tile, layer, tensors, numbers, False, True, flags, form)
    else:
        update_tile(tile, layer, tensors, numbers, kind == _BIAS, False, flags, form)


@triton.jit
def _adam_tile(
    tile: tl.tensor,
    layer: tl.tuple,
    tensors: tl.tuple,
    numbers: tl.tuple,
    is_bias: tl.tensor,
    aligned: tl.constexpr,
    flags: tl.constexpr,
    form: tl.constexpr,
) -> None:
    parameter, exp_avg, exp_avg_sq, max_exp_avg_sq, grad_memory, shadow = tensors
    rate, step_size, root_correction2, beta1, weight1, beta2, weight2, weight_decay, eps = numbers
    amsgrad: tl.constexpr = flags[0]
    decay: tl.constexpr = flags[1]
    maximize: tl.constexpr = flags[2]
    has_grads: tl.constexpr = flags[3]
    has_shadows: tl.constexpr = flags[4]
    block_rows: tl.constexpr = form[1]
    block_cols: tl.constexpr = form[2]
    offsets, mask = _place(tile, layer, aligned, block_rows, block_cols)
    param_at = _addresses(parameter, offsets, aligned)
    exp_avg_at = _addresses(exp_avg, offsets, aligned)
    exp_avg_sq_at = _addresses(exp_avg_sq, offsets, aligned)
    # Read first: none of it waits for the gradient.
    before = tl.load(param_at, mask)
    average = tl.load(exp_avg_at, mask)
    average_of_squares = tl.load(exp_avg_sq_at, mask)
    grad = _gradient(tile, layer, is_bias, aligned, form)
    if has_grads:
        tl.store(_addresses(grad_memory, offsets, aligned), grad, mask)
    param = update(
        before, grad, average, average_of_squares, param_at, exp_avg_at, exp_avg_sq_at,
        _addresses(max_exp_avg_sq, offsets, aligned), mask, rate, step_size, root_correction2,
        beta1, weight1, beta2, weight2, weight_decay, eps, amsgrad, decay, maximize,
    )  # fmt: skip
    if has_shadows:
        tl.store(_addresses(shadow, offsets, aligned), param.to(shadow.dtype.element_ty), mask)


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
    flags: tl.constexpr,
    mixed: tl.constexpr,
    form: tl.constexpr,
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
    _by_kind(_adam_tile, kind, mixed, tile, layer, tensors, numbers, flags, form)


@triton.jit
def _sgd_tile(
    tile: tl.tensor,
    layer: tl.tuple,
    tensors: tl.tuple,
    numbers: tl.tuple,
    is_bias: tl.tensor,
    aligned: tl.constexpr,
    flags: tl.constexpr,
    form: tl.constexpr,
) -> None:
    parameter, buffer, grad_memory, shadow = tensors
    rate, momentum, undamped, weight_decay = numbers
    has_momentum: tl.constexpr = flags[0]
    decays: tl.constexpr = flags[1]
    nesterov: tl.constexpr = flags[2]
    maximize: tl.constexpr = flags[3]
    has_grads: tl.constexpr = flags[4]
    has_shadows: tl.constexpr = flags[5]
    block_rows: tl.constexpr = form[1]
    block_cols: tl.constexpr = form[2]
    offsets, mask = _place(tile, layer, aligned, block_rows, block_cols)
    param_at = _addresses(parameter, offsets, aligned)
    param = tl.load(param_at, mask)  # first: it does not wait for the gradient
    grad = _gradient(tile, layer, is_bias, aligned, form)
    if has_grads:
        tl.store(_addresses(grad_memory, offsets, aligned), grad, mask)
    if maximize:
        grad = -grad
    if decays:
        grad += param * weight_decay
    if has_momentum:
        buffer_at = _addresses(buffer, offsets, aligned)
        average = tl.fma(grad, undamped, tl.load(buffer_at, mask) * momentum)  # see `update`
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
    flags: tl.constexpr,
    mixed: tl.constexpr,
    form: tl.constexpr,
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
    _by_kind(_sgd_tile, kind, mixed, tile, layer, tensors, numbers, flags, form)


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
            grads or parameters,
            shadows or parameters,
        ],
        read=[steps],
        lr=lr,
        found_inf=found_inf,
        numbers=(beta1, 1 - beta1, _log(beta1), beta2, 1 - beta2, _log(beta2), weight_decay, eps),
        flags=(
            bool(max_exp_avg_sqs),
            "none" if weight_decay == 0 else "decoupled" if decoupled else "coupled",
            maximize,
            bool(grads),
            bool(shadows),
        ),
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
        flags=(bool(momentum_buffers), weight_decay != 0, nesterov, maximize, bool(grads), bool(shadows)),
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
    flags: tuple[bool | str, ...],
    allow_tf32: bool,
    form: Form | None,
) -> None:
    """Launches `kernel` for each part of the parameters, which are the first of the lists `written`."""
    for part in _parts(grad_outputs, layers, written[0]):
        grads, xs = ([tensors[layers[index]] for index in part] for tensors in (grad_outputs, inputs))
        mixed = len({x.dtype for x in xs}) > 1
        states, scalars = ([[one[index] for index in part] for one in lists] for lists in (written, read))

        def run(
            form: Form,
            states: Lists,
            found_inf: torch.Tensor | None,
            grads: Tensors = grads,
            xs: Tensors = xs,
            scalars: Lists = scalars,
            mixed: bool = mixed,
        ) -> None:
            num_blocks, shape = _geometry(grads, xs, states, form)
            kernel[(num_blocks,)](
                _padded(grads),
                _padded([_as(x, grad.dtype) if mixed else x for grad, x in zip(grads, xs, strict=True)]),
                *shape,
                *map(_padded, (*states, *scalars)),
                lr,
                found_inf,
                *numbers,
                flags=flags,
                mixed=mixed,
                form=(precision_of(grads[0].dtype, allow_tf32), *form[:4]),
                num_warps=form.num_warps,
                num_stages=form.num_stages,
            )

        run(form or _fastest(kernel, grads, xs, states, f"{flags} tf32={allow_tf32}", run), states, found_inf)


def _parts(grad_outputs: Tensors, layers: Sequence[int], parameters: Tensors) -> Iterator[tuple[int, ...]]:
    """Indices of parameters that hold anything, for a launch each, which is for gradients of one data type."""
    by_type: dict[torch.dtype, list[int]] = {}
    for index, (layer, parameter) in enumerate(zip(layers, parameters, strict=True)):
        if parameter.numel():
            by_type.setdefault(grad_outputs[layer].dtype, []).append(index)
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

    kinds = _kinds(grads, xs, states)
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
    kinds = _kinds(grads, xs, states)
    lists = [_odd(_padded(numbers)) for numbers in (batches, rows, cols, *strides, kinds)]
    unused = _width(first_blocks) - len(first_blocks)
    return num_blocks, [*lists, _odd(first_blocks + [_NO_BLOCK] * unused)]


def _sizes(grad: torch.Tensor, x: torch.Tensor, parameter: torch.Tensor) -> tuple[int, int, int]:
    """Rows and columns of a gradient, of which a bias has one, and the size of the batch it is summed over."""
    return grad.shape[1], x.shape[1] if parameter.ndim == 2 else 1, grad.shape[0]


def _kinds(grads: Tensors, xs: Tensors, states: Lists) -> list[int]:
    mixed = len({x.dtype for x in xs}) > 1
    return [_kind(grad, x, one, mixed) for grad, x, *one in zip(grads, xs, *states, strict=True)]


def _kind(grad: torch.Tensor, x: torch.Tensor, states: Tensors, mixed: bool) -> int:
    if states[0].ndim == 1:
        return int(_BIAS.value)
    numbers = (*states[0].shape, grad.stride(0), x.stride(0))
    aligned = all(number % _ALIGNED_ELEMENTS.value == 0 for number in numbers)
    kind = _ALIGNED_WEIGHT if aligned and all(map(is_aligned, (grad, x, *states))) else _WEIGHT
    wide = _WIDE.value if mixed and x.dtype == torch.float32 else 0
    return int(kind.value + wide)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """What passes its address as that of values of another type."""
    return tensor if tensor.dtype == dtype else triton.reinterpret(tensor, dtype)


def _width(items: Sequence[object]) -> int:
    return next(width for width in WIDTHS if len(items) <= width)


def _padded(items: Sequence[T]) -> tuple[T, ...]:
    """To the width of a launch, by the last."""
    return (*items, *[items[-1]] * (_width(items) - len(items)))
