"""The Triton kernels of batch norm's forward, and the tiles that those of the backward share.

A tensor is a matrix of rows (places of images) and channels. Each program sums by how much its rows differ from the
mean of its first tile, and the squares of that. As the tile is one of T, its mean is no more than sqrt(T) standard
deviations off, so that variances lose at most a factor of 1 + T in precision, and as a rule nothing, however large the
mean is. The statistics of programs are merged as in Chan, Golub and LeVeque, "Algorithms for computing the sample
variance: analysis and recommendations" (1983), which has both. The order of sums is fixed, whichever program comes last
of those for a block of channels: it is the one that merges what all of them have found.

A normalization is a tuple: x, weight, bias, save_mean, save_invstd; what belongs to its training is another:
running_mean, running_var, momentum, 1 - momentum, eps; and its values for a block of channels are a third: mean,
invstd, scale, shift. Where there is a second normalization, `b`, both results are added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kitsune.kernels.launch_triton import await_previous, launched

# Tiles


@triton.jit
def addresses(
    tensor: tl.tensor,
    start: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
) -> tl.tensor:
    """The addresses of `block_rows` rows from `start` on, in these channels."""
    rows = tl.arange(0, block_rows)
    if channels_last:
        first = tensor + start.to(tl.int64) * num_channels
        return first + (rows[:, None] * num_channels + channels[None, :])
    else:
        images = (start + rows) // spatial
        places = (start + rows) % spatial
        firsts = (images.to(tl.int64) * num_channels)[:, None] + channels[None, :]
        return tensor + (firsts * spatial + places[:, None])


@triton.jit
def valid_in(
    start: tl.tensor, end: tl.tensor, channels: tl.tensor, num_channels: tl.tensor, block_rows: tl.constexpr
) -> tl.tensor:
    return (start + tl.arange(0, block_rows) < end)[:, None] & (channels < num_channels)[None, :]


@triton.jit
def values_of(
    norm: tl.tuple,
    mean: tl.tensor,
    invstd: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    block_channels: tl.constexpr,
) -> tl.tuple:
    mask = channels < num_channels
    _, weight, bias, _, _ = norm
    scale = invstd
    if weight is not None:
        scale = invstd * tl.load(weight + channels, mask, other=0.0)
    shift = tl.zeros((block_channels,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + channels, mask, other=0.0)
    return mean, invstd, scale, shift


@triton.jit
def known_values(
    norm: tl.tuple, channels: tl.tensor, num_channels: tl.tensor, block_channels: tl.constexpr
) -> tl.tuple:
    mask = channels < num_channels
    _, _, _, save_mean, save_invstd = norm
    mean = tl.load(save_mean + channels, mask, other=0.0)
    invstd = tl.load(save_invstd + channels, mask, other=0.0)
    return values_of(norm, mean, invstd, channels, num_channels, block_channels)


@triton.jit
def normalized(centered: tl.tensor, values: tl.tuple) -> tl.tensor:
    """The same bits wherever it is computed: the compiler has no choice of what to fuse."""
    _, _, scale, shift = values
    return tl.fma(
        centered, tl.broadcast_to(scale[None, :], centered.shape), tl.broadcast_to(shift[None, :], centered.shape)
    )


# Statistics


@triton.jit
def _statistics(
    x: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> tl.tuple:
    """The mean and the sum of squared deviations of each channel over the rows from `begin` to `end`."""
    at = addresses(x, begin, channels, num_channels, spatial, channels_last, block_rows)
    valid = valid_in(begin, end, channels, num_channels, block_rows)
    first = tl.sum(tl.load(at, valid, other=0.0).to(tl.float32), 0)
    shift = first / tl.minimum(end - begin, block_rows).to(tl.float32)
    sums = tl.zeros((block_rows, block_channels), tl.float32)
    squares = tl.zeros((block_rows, block_channels), tl.float32)
    for tile in tl.range(tl.cdiv(end - begin, block_rows), num_stages=loads_ahead):
        start = begin + tile * block_rows
        valid = valid_in(start, end, channels, num_channels, block_rows)
        at = addresses(x, start, channels, num_channels, spatial, channels_last, block_rows)
        value = tl.load(at, valid, other=0.0).to(tl.float32)
        shifted = tl.where(valid, value - shift[None, :], 0.0)
        sums += shifted
        squares += shifted * shifted
    total = tl.sum(sums, 0)
    mean = total / (end - begin).to(tl.float32)
    m2 = tl.sum(squares, 0) - total * mean
    return shift + mean, tl.where(m2 < 0, 0.0, m2)  # by rounding, where all values are the same


@triton.jit
def finished(
    norm: tl.tuple,
    training: tl.tuple,
    mean: tl.tensor,
    m2: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
) -> tl.tensor:
    """Stores the statistics, updates the running ones, and returns the inverse standard deviation."""
    mask = channels < num_channels
    _, _, _, save_mean, save_invstd = norm
    running_mean, running_var, momentum, keep, eps = training
    invstd = tl.div_rn(1.0, tl.sqrt_rn(m2 / rows.to(tl.float32) + eps))
    tl.store(save_mean + channels, mean, mask)
    tl.store(save_invstd + channels, invstd, mask)
    if running_mean is not None:
        unbiased = m2 / (rows - 1).to(tl.float32)
        old_mean = tl.load(running_mean + channels, mask)
        old_var = tl.load(running_var + channels, mask)
        tl.store(running_mean + channels, keep * old_mean + momentum * mean, mask)
        tl.store(running_var + channels, keep * old_var + momentum * unbiased, mask)
    return invstd


@triton.jit
def is_last(counter: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Whether all others of `count` programs that share a counter have been here before: it is 0 before and after.

    For the last one, what the others have stored until then is there to be loaded, but from the memory that processors
    share, which is what ".cg" is for: their own caches may hold what was there before.
    """
    tl.debug_barrier()  # all threads have stored; one of them counts
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merged(
    partials: tl.tensor,
    num_partials: tl.tensor,
    rows: tl.tensor,
    rows_a_partial: tl.tensor,
    channels: tl.tensor,
    num_channels: tl.tensor,
    block_partials: tl.constexpr,
) -> tl.tuple:
    """The mean and the sum of squared deviations over all rows. Partials are merged with every `block_partials`th."""
    valid = channels < num_channels
    stride = num_partials * num_channels
    parts = tl.arange(0, block_partials)
    mask = (parts < num_partials)[:, None] & valid[None, :]
    at = partials + parts[:, None] * num_channels + channels[None, :]
    mean = tl.load(at, mask, other=0.0, cache_modifier=".cg")
    m2 = tl.load(at + stride, mask, other=0.0, cache_modifier=".cg")
    shift = tl.load(partials + channels, valid, other=0.0, cache_modifier=".cg")
    weights = _rows_of(parts, num_partials, rows, rows_a_partial)
    for first in tl.range(block_partials, num_partials, block_partials, loop_unroll_factor=2):
        parts = first + tl.arange(0, block_partials)
        mask = (parts < num_partials)[:, None] & valid[None, :]
        at = partials + parts[:, None] * num_channels + channels[None, :]
        more_m2 = tl.load(at + stride, mask, other=0.0, cache_modifier=".cg")
        delta = tl.load(at, mask, other=0.0, cache_modifier=".cg") - mean
        delta = tl.where(mask, delta, 0.0)
        more = _rows_of(parts, num_partials, rows, rows_a_partial)
        share = more / tl.maximum(weights + more, 1.0)
        mean += delta * share[:, None]
        m2 += more_m2 + delta * delta * (weights * share)[:, None]
        weights += more
    shifted = mean - shift[None, :]
    mean = tl.sum(weights[:, None] * shifted, 0) / rows.to(tl.float32)
    deviation = shifted - mean[None, :]
    m2 = tl.sum(m2 + weights[:, None] * deviation * deviation, 0)
    return shift + mean, m2


@triton.jit
def _rows_of(parts: tl.tensor, num_partials: tl.tensor, rows: tl.tensor, rows_a_partial: tl.tensor) -> tl.tensor:
    counts = tl.minimum(rows_a_partial, rows - parts * rows_a_partial)
    return tl.where(parts < num_partials, counts, 0).to(tl.float32)


@launched()
def partial_statistics(
    partials: tl.tensor,
    counters: tl.tensor,
    a: tl.tuple,
    training_a: tl.tuple,
    b: tl.tuple,
    training_b: tl.tuple,
    rows: tl.tensor,
    num_channels: tl.tensor,
    spatial: tl.tensor,
    rows_a_partial: tl.tensor,
    channels_last: tl.constexpr,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    block_partials: tl.constexpr,
    loads_ahead: tl.constexpr,
) -> None:
    """The third axis of the grid is that of the normalizations; each has a counter for each block of channels."""
    await_previous()
    part, num_partials = tl.program_id(0), tl.num_programs(0)
    begin = part * rows_a_partial
    end = tl.minimum(begin + rows_a_partial, rows)
    channels = tl.program_id(1) * block_channels + tl.arange(0, block_channels)
    mask = channels < num_channels
    branch = tl.program_id(2)
    if b[0] is None:
        mean, m2 = _statistics(
            a[0], begin, end, channels, num_channels, spatial, channels_last, block_rows, block_channels, loads_ahead
        )
    else:
        if branch == 0:
            mean, m2 = _statistics(
                a[0], begin, end,
                channels, num_channels, spatial, channels_last, block_rows, block_channels, loads_ahead,
            )  # fmt: skip
        else:
            mean, m2 = _statistics(
                b[0], begin, end,
                channels, num_channels, spatial, channels_last, block_rows, block_channels, loads_ahead,
            )  # fmt: skip
    partials += 2 * num_partials * branch * num_channels
    tl.store(partials + part * num_channels + channels, mean, mask)
    tl.store(partials + (part + num_partials) * num_channels + channels, m2, mask)
    if is_last(counters + branch * tl.num_programs(1) + tl.program_id(1), num_partials):
        of_all, m2_of_all = merged(partials, num_partials, rows, rows_a_partial, channels, num_channels, block_partials)
        if b[0] is None:
            finished(a, training_a, of_all, m2_of_all, rows, channels, num_channels)
        else:
            if branch == 0:
                finished(a, training_a, of_all, m2_of_all, rows, channels, num_channels)
            else:
                finished(b, training_b, of_all, m2_of_all, rows, channels, num_channels)


# Forward


@triton.jit
def _store_results(
    y: tl.tensor,
    residual: tl.tensor,
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
    loads_ahead: tl.constexpr,
) -> None:
    for tile in tl.range(tl.cdiv(end - begin, block_rows), num_stages=loads_ahead):
        start = begin + tile * block_rows
        valid = valid_in(start, end, channels, num_channels, block_rows)
        at = addresses(a[0], start, channels, num_channels, spatial, channels_last, block_rows)
        result = normalized(tl.load(at, valid, other=0.0).to(tl.float32) - values_a[0][None, :], values_a)
        if residual is not None:
            at = addresses(residual, start, channels, num_channels, spatial, channels_last, block_rows)
            result += tl.load(at, valid, other=0.0).to(tl.float32)
        if b[0] is not None:
            at = addresses(b[0], start, channels, num_channels, spatial, channels_last, block_rows)
            result += normalized(tl.load(at, valid, other=0.0).to(tl.float32) - values_b[0][None, :], values_b)
        if relu:
            result = tl.where(result <= 0, 0.0, result)
        at = addresses(y, start, channels, num_channels, spatial, channels_last, block_rows)
        tl.store(at, result.to(y.dtype.element_ty), valid)


@launched()
def apply(
    y: tl.tensor,
    residual: tl.tensor,
    a: tl.tuple,
    b: tl.tuple,
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
    values_a = known_values(a, channels, num_channels, block_channels)
    values_b = values_a
    if b[0] is not None:
        values_b = known_values(b, channels, num_channels, block_channels)
    _store_results(
        y, residual, a, values_a, b, values_b,
        begin, end, channels, num_channels, spatial, relu, channels_last, block_rows, loads_ahead,
    )  # fmt: skip


@launched()
def forward_in_one(
    y: tl.tensor,
    residual: tl.tensor,
    a: tl.tuple,
    training_a: tl.tuple,
    b: tl.tuple,
    training_b: tl.tuple,
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
    mean, m2 = _statistics(
        a[0], begin, rows, channels, num_channels, spatial, channels_last, block_rows, block_channels, loads_ahead
    )
    invstd = finished(a, training_a, mean, m2, rows, channels, num_channels)
    values_a = values_of(a, mean, invstd, channels, num_channels, block_channels)
    values_b = values_a
    if b[0] is not None:
        mean, m2 = _statistics(
            b[0], begin, rows, channels, num_channels, spatial, channels_last, block_rows, block_channels, loads_ahead
        )
        invstd = finished(b, training_b, mean, m2, rows, channels, num_channels)
        values_b = values_of(b, mean, invstd, channels, num_channels, block_channels)
    _store_results(
        y, residual, a, values_a, b, values_b,
        begin, rows, channels, num_channels, spatial, relu, channels_last, block_rows, loads_ahead,
    )  # fmt: skip
