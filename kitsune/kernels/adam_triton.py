"""The Triton kernel of `kitsune::adam_`, and its launches. To be imported where Triton is installed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kitsune.kernels.launch_triton import await_previous, launched

Tensors = Sequence[torch.Tensor]

# Measured on an H200. With 64 tensors a launch, choosing among them takes longer than the update.
TENSORS_A_LAUNCH = 32
FEW_TENSORS = 16  # a launch is this wide for models of no more tensors
_BLOCK_SIZE = 512
_NUM_WARPS = 4
_NO_BLOCK = 2**30 - 1  # as the first block of a tensor: no program reaches it
_ALIGNMENT_BYTES = 16


@triton.jit
def _pick(block: tl.tensor, odd_first_blocks: tl.tuple, values: tl.tuple) -> tl.tensor:
    """The one of `values` (pointers or numbers) that belongs to the tensor in which `block` lies."""
    value = values[0]
    for index in tl.static_range(1, len(values)):
        value = tl.where(2 * block + 1 >= odd_first_blocks[index], values[index], value)
    return value


@triton.jit
def _at(pointer: tl.tensor, offsets: tl.tensor, aligned: tl.constexpr) -> tl.tensor:
    """The addresses of a block. Triton cannot see through `_pick` that they begin at a multiple of 16 bytes."""
    addresses = pointer + offsets
    if aligned:
        addresses = tl.multiple_of(addresses, 16)
    return addresses


_INVERSE_FACTORIALS = tl.constexpr(tuple(1 / math.factorial(number) for number in range(14)))


@triton.jit
def _exp(x: tl.tensor) -> tl.tensor:
    """The exponential function of a float64 scalar that is not positive, to a few units in the last place.

    As `tl.exp`, but without branches, so that others are computed at the same time.
    """
    x = tl.maximum(x, -700.0)
    shifted = tl.fma(x, 1.4426950408889634, 6755399441055744.0)  # its lowest bits are the nearest integer
    integer = shifted - 6755399441055744.0
    power = ((shifted.to(tl.int64, bitcast=True) + 1023) << 52).to(tl.float64, bitcast=True)
    x = tl.fma(integer, -1.9082149292705877e-10, tl.fma(integer, -0.6931471803691238, x))
    series = x * _INVERSE_FACTORIALS[13] + _INVERSE_FACTORIALS[12]  # of Taylor
    for place in tl.static_range(12):
        series = tl.fma(series, x, _INVERSE_FACTORIALS[11 - place])
    return series * power


# `tl.sqrt_rn` and `tl.div_rn` branch at each element, and so keep a thread's elements from being computed side by side.


@triton.jit
def _root(x: tl.tensor) -> tl.tensor:
    """The square root of a float32 block or scalar, rounded to nearest."""
    is_small = x < 2.0**-100
    scaled = tl.where(is_small, x * 2.0**100, x)
    inverse = tl.rsqrt(scaled)
    root = scaled * inverse
    root = tl.fma(tl.fma(-root, root, scaled), 0.5 * inverse, root)
    return tl.where((x == 0) | (x == float("inf")), x, tl.where(is_small, root * 2.0**-50, root))


@triton.jit
def _quotient(x: tl.tensor, y: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """The quotient of float32 blocks or scalars, rounded to nearest; `inverse` is nearly that of `y`.

    It may be off by a unit in the last place where `x` is smaller than 2**-100.
    """
    closer = tl.fma(inverse, tl.fma(-y, inverse, 1.0), inverse)
    quotient = x * closer
    quotient = tl.fma(tl.fma(-y, quotient, x), closer, quotient)
    return tl.where(quotient == quotient, quotient, x * inverse)  # of infinities and zeros


@triton.jit
def corrections(
    lr: tl.tensor, count: tl.tensor, log_beta1: tl.float64, log_beta2: tl.float64
) -> tuple[tl.tensor, tl.tensor]:
    """The step size in the step of this number, and the square root of the second bias correction."""
    count = count.to(tl.float64)
    correction1 = (1 - _exp(count * log_beta1)).to(tl.float32)
    correction2 = (1 - _exp(count * log_beta2)).to(tl.float32)
    return _quotient(lr, correction1, 1 / correction1), _root(correction2)


@triton.jit
def update(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    param_at: tl.tensor,
    exp_avg_at: tl.tensor,
    exp_avg_sq_at: tl.tensor,
    max_exp_avg_sq_at: tl.tensor,
    mask: tl.tensor,
    lr: tl.tensor,
    step_size: tl.tensor,
    root_correction2: tl.tensor,
    beta1: tl.tensor,
    weight1: tl.tensor,
    beta2: tl.tensor,
    weight2: tl.tensor,
    weight_decay: tl.tensor,
    eps: tl.tensor,
    amsgrad: tl.constexpr,
    decay: tl.constexpr,
    maximize: tl.constexpr,
) -> tl.tensor:
    """Adam's step for a block, with what is there of it; returns the new parameters."""
    # Of a sum of two products either may be rounded, and compilers choose anew in each branch and for each data type.
    # It is said here, as torch has it, so that what an element becomes does not depend on where it lies.
    if maximize:
        grad = -grad
    if decay == "decoupled":
        param *= 1 - lr * weight_decay
    elif decay == "coupled":
        grad += param * weight_decay
    difference = grad - exp_avg
    exp_avg = tl.where(weight1 < 0.5, exp_avg + weight1 * difference, grad - difference * beta1)
    exp_avg_sq = tl.fma(grad * grad, weight2, exp_avg_sq * beta2)
    tl.store(exp_avg_at, exp_avg, mask)
    tl.store(exp_avg_sq_at, exp_avg_sq, mask)
    if amsgrad:
        largest = tl.load(max_exp_avg_sq_at, mask)
        exp_avg_sq = tl.maximum(largest, exp_avg_sq, propagate_nan=tl.PropagateNan.ALL)
        tl.store(max_exp_avg_sq_at, exp_avg_sq, mask)
    denominator = _quotient(_root(exp_avg_sq), root_correction2, 1 / root_correction2) + eps
    inverse_root = tl.rsqrt(denominator)
    param = tl.fma(_quotient(exp_avg, denominator, inverse_root * inverse_root), -step_size, param)
    tl.store(param_at, param, mask)
    return param


@triton.jit
def _update_block(
    param_at: tl.tensor,
    grad_at: tl.tensor,
    exp_avg_at: tl.tensor,
    exp_avg_sq_at: tl.tensor,
    max_exp_avg_sq_at: tl.tensor,
    mask: tl.tensor,
    lr: tl.tensor,
    step_size: tl.tensor,
    root_correction2: tl.tensor,
    beta1: tl.tensor,
    weight1: tl.tensor,
    beta2: tl.tensor,
    weight2: tl.tensor,
    weight_decay: tl.tensor,
    eps: tl.tensor,
    amsgrad: tl.constexpr,
    decay: tl.constexpr,
    maximize: tl.constexpr,
) -> None:
    update(
        tl.load(param_at, mask), tl.load(grad_at, mask).to(tl.float32),
        tl.load(exp_avg_at, mask), tl.load(exp_avg_sq_at, mask),
        param_at, exp_avg_at, exp_avg_sq_at, max_exp_avg_sq_at, mask, lr, step_size, root_correction2,
        beta1, weight1, beta2, weight2, weight_decay, eps, amsgrad, decay, maximize,
    )  # fmt: skip


# Triton compiles anew for numbers in tuples that are 1 or multiples of 16. Sizes and first blocks hence come as
# odd numbers, 2 n + 1, so that one compilation serves all models. No argument may be called `params`: Triton 3.6
# uses that name itself.
@launched(do_not_specialize=["lr", "found_inf"])
def _adam(
    parameters: tl.tuple,
    grads: tl.tuple,
    exp_avgs: tl.tuple,
    exp_avg_sqs: tl.tuple,
    max_exp_avg_sqs: tl.tuple,
    steps: tl.tuple,
    odd_sizes: tl.tuple,
    odd_first_blocks: tl.tuple,
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
    aligned: tl.constexpr,
    block_size: tl.constexpr,
) -> None:
    await_previous()
    if found_inf is not None:  # noqa: SIM102 - the address must not be read where there is none
        if tl.load(found_inf) == 1:
            return
    block = tl.program_id(0)
    first_block = _pick(block, odd_first_blocks, odd_first_blocks) >> 1
    size = (_pick(block, odd_first_blocks, odd_sizes) >> 1).to(tl.int64)
    param = _pick(block, odd_first_blocks, parameters)
    grad = _pick(block, odd_first_blocks, grads)
    exp_avg = _pick(block, odd_first_blocks, exp_avgs)
    exp_avg_sq = _pick(block, odd_first_blocks, exp_avg_sqs)
    max_exp_avg_sq = exp_avg_sq
    if amsgrad:
        max_exp_avg_sq = _pick(block, odd_first_blocks, max_exp_avg_sqs)
    rate = tl.load(lr)
    count = tl.load(_pick(block, odd_first_blocks, steps))
    step_size, root_correction2 = corrections(rate, count, log_beta1, log_beta2)
    start = (block - first_block).to(tl.int64) * block_size
    offsets = start + tl.arange(0, block_size)
    if start + block_size <= size:
        _update_block(
            _at(param, offsets, aligned), _at(grad, offsets, aligned), _at(exp_avg, offsets, aligned),
            _at(exp_avg_sq, offsets, aligned), _at(max_exp_avg_sq, offsets, aligned), None,
            rate, step_size, root_correction2,
            beta1, weight1, beta2, weight2, weight_decay, eps, amsgrad, decay, maximize,
        )  # fmt: skip
    else:
        _update_block(
            _at(param, offsets, aligned), _at(grad, offsets, aligned), _at(exp_avg, offsets, aligned),
            _at(exp_avg_sq, offsets, aligned), _at(max_exp_avg_sq, offsets, aligned), offsets < size,
            rate, step_size, root_correction2,
            beta1, weight1, beta2, weight2, weight_decay, eps, amsgrad, decay, maximize,
        )  # fmt: skip


def launch(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    *,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled: bool,
    maximize: bool,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Launches the kernel on the current stream, once for every `TENSORS_A_LAUNCH` of the tensors that hold anything.

    The arguments are those of `kitsune.kernels.adam.adam_`, which checks them.
    """
    chosen = [index for index, param in enumerate(params) if param.numel()]
    decay = "none" if weight_decay == 0 else "decoupled" if decoupled else "coupled"
    width = FEW_TENSORS if len(chosen) <= FEW_TENSORS else TENSORS_A_LAUNCH
    for begin in range(0, len(chosen), width):
        part = chosen[begin : begin + width]
        sizes = [params[index].numel() for index in part]
        first_blocks = [0, *itertools.accumulate(triton.cdiv(size, _BLOCK_SIZE) for size in sizes)]
        num_blocks = first_blocks.pop()
        unused = width - len(part)
        part += part[-1:] * unused
        lists = [
            tuple(tensors[index] for index in part)
            for tensors in (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs or exp_avg_sqs, steps)
        ]
        _adam[(num_blocks,)](
            *lists,
            _odd(sizes + [1] * unused),
            _odd(first_blocks + [_NO_BLOCK] * unused),
            lr,
            found_inf,
            beta1,
            1 - beta1,
            _log(beta1),
            beta2,
            1 - beta2,
            _log(beta2),
            weight_decay,
            eps,
            amsgrad=bool(max_exp_avg_sqs),
            decay=decay,
            maximize=maximize,
            aligned=all(tensor.data_ptr() % _ALIGNMENT_BYTES == 0 for tensors in lists[:5] for tensor in tensors),
            block_size=_BLOCK_SIZE,
            num_warps=_NUM_WARPS,
        )


def _odd(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(2 * number + 1 for number in numbers)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
