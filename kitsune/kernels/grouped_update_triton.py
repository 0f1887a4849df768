"""The Triton kernels of `kitsune.kernels.grouped_update`, and their launches. To be imported where Triton is installed.

A program computes one tile of one parameter's gradient and updates it, by the arithmetic of
`kitsune.kernels.adam_triton`. Parameters that are alike have a branch of their own in the kernel, compiled for their
shape. A branch for all would choose from a dozen lists first, and hold in registers what the most demanding one needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kitsune.kernels.adam_triton import _log, corrections, update
from kitsune.kernels.launch_triton import await_previous, launched
from kitsune.kernels.linear_triton import (
    SMALLEST_BLOCK,
    Form,
    describe,
    forms,
    is_aligned,
    multiply,
    precision_of,
    tile_of,
)
from kitsune.kernels.tuning import choose

Tensors = Sequence[torch.Tensor]
Lists = Sequence[Tensors]
Group = tuple[int, ...]
"""Indices of parameters that are alike: they and what belongs to them have the same shapes, strides and data types."""
Groups = tuple[tuple[torch.Tensor, ...], ...]
"""The tensors of several groups."""

PARAMETERS_A_LAUNCH = 16

# From small to large. For MLPs at small batches, those of 64 x 16 with 8 warps were the fastest on an H200.
_FORMS = (
    Form(64, 16, 64, 1, 8, 3),
    Form(16, 16, 64, 1, 4, 3),
    Form(16, 16, 64, 4, 4, 3),
    Form(16, 64, 64, 1, 4, 3),
    Form(32, 32, 64, 1, 4, 3),
    Form(64, 32, 64, 1, 4, 3),
    Form(64, 64, 32, 1, 4, 4),
    Form(128, 64, 32, 1, 8, 4),
    Form(128, 64, 64, 1, 4, 4),
    Form(128, 128, 64, 1, 8, 4),
)

_MOST_UNROLLED = 1024
"""Products that a thread adds at a time where no tensor cores do: each is an instruction, in the code for each group,
and with more of them a form takes seconds to compile."""

_MOST_READ_FIRST = 32
"""Elements of a tile that a thread has: of larger ones the registers do not hold what is read before the product."""


class _Layout(NamedTuple):
    """How a launch is divided: constants of a kernel, each with an entry for every group of parameters that are alike.

    Attributes:
        first_blocks: the program that has the first tile; at the end the number of programs.
        num_tiles: of one parameter.
        batches: how many rows are summed over.
        shapes: rows and columns of the gradient; a bias has no columns.
        strides: how far rows of the gradient of the output, and of the layer's input, are apart.
        tiles: rows and columns of a tile.
        precisions: see `precision_of`.
        aligned: whether loads and stores of 16 bytes may begin at the first elements.
        read_first: whether what is updated is read before the gradient is computed.
    """

    first_blocks: tuple[int, ...]
    num_tiles: tuple[int, ...]
    batches: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    strides: tuple[tuple[int, int], ...]
    tiles: tuple[tuple[int, int], ...]
    precisions: tuple[str, ...]
    aligned: tuple[bool, ...]
    read_first: tuple[bool, ...]


@triton.jit
def _choose(member: tl.tensor, pointers: tl.tuple, aligned: tl.constexpr, index: tl.constexpr) -> tl.tensor:
    """The one of the pointers that has this place."""
    pointer = pointers[0]
    for place in tl.static_range(1, len(pointers)):
        pointer = tl.where(member == place, pointers[place], pointer)
    if aligned[index] and len(pointers) > 1:
        pointer = tl.multiple_of(pointer, 16)  # Triton knows it of each, and forgets it
    return pointer


@triton.jit
def _column_sums(
    grad_output: tl.tensor,
    row_stride: tl.constexpr,
    cols: tl.tensor,
    num_rows: tl.constexpr,
    num_cols: tl.constexpr,
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
def _place(
    tile: tl.tensor, index: tl.constexpr, shapes: tl.constexpr, tiles: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The offsets of a tile of a gradient, and their mask."""
    num_rows: tl.constexpr = shapes[index][0]
    num_cols: tl.constexpr = shapes[index][1]
    if num_cols == 0:
        offsets = tile.to(tl.int64) * tiles[index][0] + tl.arange(0, tiles[index][0])
        mask = offsets < num_rows
    else:
        rows, cols = tile_of(tile, num_cols, tiles[index][0], tiles[index][1])
        offsets = rows[:, None] * num_cols + cols[None, :]
        mask = (rows[:, None] < num_rows) & (cols[None, :] < num_cols)
    return offsets, mask


@triton.jit
def _gradient(
    tile: tl.tensor,
    index: tl.constexpr,
    grad_output: tl.tensor,
    x: tl.tensor,
    batches: tl.constexpr,
    shapes: tl.constexpr,
    strides: tl.constexpr,
    tiles: tl.constexpr,
    precisions: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> tl.tensor:
    """A tile of the gradient of a weight (rows, cols) or of a bias (rows,), in float32."""
    dtype: tl.constexpr = grad_output.dtype.element_ty
    num_rows: tl.constexpr = shapes[index][0]
    num_cols: tl.constexpr = shapes[index][1]
    block_rows: tl.constexpr = tiles[index][0]
    block_cols: tl.constexpr = tiles[index][1]
    batch: tl.constexpr = batches[index]
    precision: tl.constexpr = precisions[index]
    if num_cols == 0:
        cols = tile.to(tl.int64) * block_rows + tl.arange(0, block_rows)
        total = _column_sums(grad_output, strides[index][0], cols, batch, num_rows, block_rows, depth)
    else:
        rows, cols = tile_of(tile, num_cols, block_rows, block_cols)
        total = multiply(
            grad_output, 1, strides[index][0], x, 1, strides[index][1], rows, cols, num_rows, num_cols, batch,
            dtype, precision, block_rows, block_cols, depth, slices,
        )  # fmt: skip
    return total.to(dtype).to(tl.float32)


# No argument may be called `params`: Triton 3.6 uses that name itself.
@launched(do_not_specialize=["lr", "found_inf"])
def _linear_adam(
    grad_outputs: tl.tuple,
    inputs: tl.tuple,
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
    has_grads: tl.constexpr,
    has_shadows: tl.constexpr,
    first_blocks: tl.constexpr,
    num_tiles: tl.constexpr,
    batches: tl.constexpr,
    shapes: tl.constexpr,
    strides: tl.constexpr,
    tiles: tl.constexpr,
    precisions: tl.constexpr,
    aligned: tl.constexpr,
    read_first: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> None:
    await_previous()
    if found_inf is not None:  # noqa: SIM102 - the address must not be read where there is none
        if tl.load(found_inf) == 1:
            return
    block = tl.program_id(0)
    for index in tl.static_range(len(parameters)):
        if (block >= first_blocks[index]) & (block < first_blocks[index + 1]):
            member = (block - first_blocks[index]) // num_tiles[index]
            tile = (block - first_blocks[index]) % num_tiles[index]
            offsets, mask = _place(tile, index, shapes, tiles)
            param_at = _choose(member, parameters[index], aligned, index) + offsets
            exp_avg_at = _choose(member, exp_avgs[index], aligned, index) + offsets
            exp_avg_sq_at = _choose(member, exp_avg_sqs[index], aligned, index) + offsets
            if read_first[index]:  # none of it waits for the gradient
                before = tl.load(param_at, mask)
                average = tl.load(exp_avg_at, mask)
                average_of_squares = tl.load(exp_avg_sq_at, mask)
            rate = tl.load(lr)
            count = tl.load(_choose(member, steps[index], aligned, index))
            step_size, root_correction2 = corrections(rate, count, log_beta1, log_beta2)
            grad = _gradient(
                tile, index, _choose(member, grad_outputs[index], aligned, index),
                _choose(member, inputs[index], aligned, index), batches, shapes, strides, tiles, precisions,
                depth, slices,
            )  # fmt: skip
            if has_grads:
                tl.store(_choose(member, grads[index], aligned, index) + offsets, grad, mask)
            if not read_first[index]:
                before = tl.load(param_at, mask)
                average = tl.load(exp_avg_at, mask)
                average_of_squares = tl.load(exp_avg_sq_at, mask)
            param = update(
                before, grad, average, average_of_squares, param_at, exp_avg_at, exp_avg_sq_at,
                _choose(member, max_exp_avg_sqs[index], aligned, index) + offsets, mask, rate, step_size,
                root_correction2, beta1, weight1, beta2, weight2, weight_decay, eps, amsgrad, decay, maximize,
            )  # fmt: skip
            if has_shadows:
                shadow = _choose(member, shadows[index], aligned, index)
                tl.store(shadow + offsets, param.to(shadow.dtype.element_ty), mask)


@launched(do_not_specialize=["lr", "found_inf"])
def _linear_sgd(
    grad_outputs: tl.tuple,
    inputs: tl.tuple,
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
    first_blocks: tl.constexpr,
    num_tiles: tl.constexpr,
    batches: tl.constexpr,
    shapes: tl.constexpr,
    strides: tl.constexpr,
    tiles: tl.constexpr,
    precisions: tl.constexpr,
    aligned: tl.constexpr,
    read_first: tl.constexpr,
    depth: tl.constexpr,
    slices: tl.constexpr,
) -> None:
    await_previous()
    if found_inf is not None:  # noqa: SIM102 - the address must not be read where there is none
        if tl.load(found_inf) == 1:
            return
    block = tl.program_id(0)
    for index in tl.static_range(len(parameters)):
        if (block >= first_blocks[index]) & (block < first_blocks[index + 1]):
            member = (block - first_blocks[index]) // num_tiles[index]
            tile = (block - first_blocks[index]) % num_tiles[index]
            offsets, mask = _place(tile, index, shapes, tiles)
            param_at = _choose(member, parameters[index], aligned, index) + offsets
            if read_first[index]:  # it does not wait for the gradient
                param = tl.load(param_at, mask)
            grad = _gradient(
                tile, index, _choose(member, grad_outputs[index], aligned, index),
                _choose(member, inputs[index], aligned, index), batches, shapes, strides, tiles, precisions,
                depth, slices,
            )  # fmt: skip
            if has_grads:
                tl.store(_choose(member, grads[index], aligned, index) + offsets, grad, mask)
            if not read_first[index]:
                param = tl.load(param_at, mask)
            if maximize:
                grad = -grad
            if decays:
                grad += param * weight_decay
            if has_momentum:
                # See `update`.
                buffer_at = _choose(member, momentum_buffers[index], aligned, index) + offsets
                average = tl.fma(grad, undamped, tl.load(buffer_at, mask) * momentum)
                tl.store(buffer_at, average, mask)
                if nesterov:
                    grad += average * momentum
                else:
                    grad = average
            param -= tl.load(lr) * grad
            tl.store(param_at, param, mask)
            if has_shadows:
                shadow = _choose(member, shadows[index], aligned, index)
                tl.store(shadow + offsets, param.to(shadow.dtype.element_ty), mask)


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
        flags={
            "amsgrad": bool(max_exp_avg_sqs),
            "decay": "none" if weight_decay == 0 else "decoupled" if decoupled else "coupled",
            "maximize": maximize,
            "has_grads": bool(grads),
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
        flags={
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
    flags: dict[str, bool | str],
    allow_tf32: bool,
    form: Form | None,
) -> None:
    """Launches `kernel` for each part of the parameters, which are the first of the lists `written`."""
    operands = [[tensors[layer] for layer in layers] for tensors in (grad_outputs, inputs)]
    for part in _parts([*operands, *written]):

        def run(
            form: Form, states: Sequence[Groups], found_inf: torch.Tensor | None, part: Sequence[Group] = part
        ) -> None:
            grads, xs, *scalars = (_grouped(tensors, part) for tensors in (*operands, *read))
            layout = _layout(grads, xs, states, form, allow_tf32)
            kernel[(layout.first_blocks[-1],)](
                grads,
                xs,
                *states,
                *scalars,
                lr,
                found_inf,
                *numbers,
                **flags,
                **layout._asdict(),
                depth=form.depth,
                slices=form.slices,
                num_warps=form.num_warps,
                num_stages=form.num_stages,
            )

        grads, xs, *states = (_grouped(tensors, part) for tensors in (*operands, *written))
        run(form or _fastest(kernel, grads, xs, states, str(flags), allow_tf32, run), states, found_inf)


def _parts(lists: Lists) -> Iterator[Sequence[Group]]:
    """Groups of parameters that hold anything, and are alike, for a launch each.

    Args:
        lists: what belongs to each parameter: the gradient of the output, the layer's input, the parameter, its state.
    """
    alike: dict[object, list[int]] = {}
    for index, tensors in enumerate(zip(*lists, strict=True)):
        if tensors[2].numel():
            kind = tensors[2].shape, *((one.shape[0], one.stride(), one.dtype) for one in tensors[:2])
            alike.setdefault((kind, all(map(is_aligned, tensors))), []).append(index)
    part: list[Group] = []
    for indices in alike.values():
        for begin in range(0, len(indices), PARAMETERS_A_LAUNCH):
            group = tuple(indices[begin : begin + PARAMETERS_A_LAUNCH])
            if sum(map(len, part)) + len(group) > PARAMETERS_A_LAUNCH:
                yield part
                part = []
            part.append(group)
    if part:
        yield part


def _grouped(tensors: Tensors, part: Sequence[Group]) -> Groups:
    return tuple(tuple(tensors[index] for index in group) for group in part)


def _fastest(
    kernel: Any,
    grads: Groups,
    xs: Groups,
    states: Sequence[Groups],
    options: str,
    allow_tf32: bool,
    run: Callable[[Form, Sequence[Groups], None], None],
) -> Form:
    """The fastest form; it is found on copies of what the kernel updates."""
    copies: list[Groups] = []
    copying = Lock()

    def trial(form: Form) -> None:
        with copying:  # several threads try a form each, and the first comer makes the copies for all
            if not copies:
                copies.extend([tuple(tuple(one.clone() for one in group) for group in groups) for groups in states])
        run(form, copies, None)

    aligned = all(is_aligned(one) for groups in states for group in groups for one in group)
    described = describe([one for groups in (grads, xs, states[0]) for group in groups for one in group])
    shapes = [(*_shape(group[0]), grad[0].shape[0]) for grad, group in zip(grads, states[0], strict=True)]
    rows, cols, batch = (max(sizes) for sizes in zip(*shapes, strict=True))
    key = f"{kernel.__name__} {described} {aligned} {options} tf32={allow_tf32}"
    found = forms(rows, cols, batch, _FORMS)
    has_tensor_cores = allow_tf32 or all(group[0].dtype != torch.float32 for group in grads)
    return choose(key, found if has_tensor_cores else _compiled_soon(found), trial, grads[0][0].device)


def _compiled_soon(candidates: Sequence[Form]) -> Sequence[Form]:
    """Those that are, or the first one."""
    products = [form.rows * form.cols * form.depth * form.slices // (32 * form.num_warps) for form in candidates]
    return [form for form, each in zip(candidates, products, strict=True) if each <= _MOST_UNROLLED] or candidates[:1]


def _layout(grads: Groups, xs: Groups, states: Sequence[Groups], form: Form, allow_tf32: bool) -> _Layout:
    firsts = [(grad[0], x[0]) for grad, x in zip(grads, xs, strict=True)]
    shapes = tuple(_shape(group[0]) for group in states[0])
    tiles = tuple((_block(rows, form.rows), _block(cols, form.cols)) for rows, cols in shapes)
    num_tiles = tuple(
        triton.cdiv(rows, block_rows) * triton.cdiv(cols or 1, block_cols)
        for (rows, cols), (block_rows, block_cols) in zip(shapes, tiles, strict=True)
    )
    groups = zip(grads, xs, *states, strict=True)
    return _Layout(
        (0, *itertools.accumulate(len(group) * num for group, num in zip(grads, num_tiles, strict=True))),
        num_tiles,
        tuple(grad.shape[0] for grad, _ in firsts),
        shapes,
        tuple((grad.stride(0), x.stride(0)) for grad, x in firsts),
        tiles,
        tuple(precision_of(grad.dtype, allow_tf32) for grad, _ in firsts),
        tuple(all(is_aligned(one) for tensors in group for one in tensors) for group in groups),
        tuple(rows * cols <= _MOST_READ_FIRST * 32 * form.num_warps for rows, cols in tiles),
    )


def _shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Rows and columns; a bias has no columns."""
    return parameter.shape[0], parameter.shape[1] if parameter.ndim == 2 else 0


def _block(size: int, largest: int) -> int:
    """How much of a side of a gradient a tile takes."""
    return min(largest, max(SMALLEST_BLOCK, int(triton.next_power_of_2(size))))
