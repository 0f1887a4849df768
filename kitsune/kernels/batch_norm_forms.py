"""The forms of the batch norm kernels: how a tensor is cut into tiles and programs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from kitsune.kernels.batch_norm import Layout

_TILES_A_PROGRAM = 4  # where nothing is summed
_MOST_ROWS_OF_ONE_PROGRAM = 2**15  # with more, one program a block of channels takes too long
_MOST_PARTIALS = 1024
_MERGED_AT_ONCE = 2**12  # one program merges all, and waits for memory once for each so many
_AHEAD = 3  # of each of up to five tensors; in float32 that is more shared memory than small devices have


class Form(NamedTuple):
    """A tile is `block_rows` times `block_channels` values.

    Sums over rows are made by up to `num_partials` programs for each block of channels; the last one to end adds up
    their partial sums. With 1 partial one program for each block of channels does all in one launch. While a program
    computes a tile it loads the next ones: `loads_ahead` counts those in work, so that with 1 it waits for each.
    """

    block_rows: int
    block_channels: int
    num_warps: int
    num_partials: int
    loads_ahead: int = 1


class Split(NamedTuple):
    """How the rows of one tensor are shared among programs."""

    num_partials: int
    rows_a_partial: int  # a multiple of a tile's
    num_row_programs: int  # where nothing is summed
    rows_a_program: int
    block_partials: int  # a power of 2: partial sums of a block of channels that are merged at once


def split(form: Form, layout: Layout) -> Split:
    tiles_a_partial = _cdiv(_cdiv(layout.rows, form.num_partials), form.block_rows)
    rows_a_partial = tiles_a_partial * form.block_rows
    num_partials = _cdiv(layout.rows, rows_a_partial)
    rows_a_program = _TILES_A_PROGRAM * form.block_rows
    return Split(
        num_partials,
        rows_a_partial,
        _cdiv(layout.rows, rows_a_program),
        rows_a_program,
        min(_power_of_2(num_partials), _MERGED_AT_ONCE // form.block_channels),
    )


@cache
def forms(layout: Layout, num_processors: int) -> tuple[Form, ...]:
    """At most twelve, for a device of so many multiprocessors; the first is a fair choice for most shapes."""
    found = []
    for block_rows, block_channels, num_warps, programs_a_processor, ahead in _two_launches(layout):
        blocks = _cdiv(layout.rows, block_rows), _cdiv(layout.channels, block_channels)
        wanted = programs_a_processor * num_processors // blocks[1]
        num_partials = max(2, min(wanted, blocks[0], _MOST_PARTIALS))
        found.append(Form(block_rows, block_channels, num_warps, num_partials, ahead))
    if layout.rows <= _MOST_ROWS_OF_ONE_PROGRAM:
        for block_rows, block_channels, num_warps, ahead in _one_launch(layout):
            found.append(Form(min(block_rows, _power_of_2(layout.rows)), block_channels, num_warps, 1, ahead))
    return tuple(dict.fromkeys(found))


# Rows, channels and warps of a tile. Where channels come last, threads read along them, else along the rows.

_CHANNELS_FIRST: tuple[tuple[int, int, int], ...] = ((2048, 1, 4), (4096, 1, 8), (512, 4, 4))


def _two_launches(layout: Layout) -> Iterator[tuple[int, int, int, int, int]]:
    """A tile, how many programs a multiprocessor gets, and how many loads are ahead."""
    ahead: tuple[tuple[int, int, int], ...] = ()
    waiting = _CHANNELS_FIRST
    if layout.channels_last:
        ahead, waiting = ((64, 64, 4), (64, 32, 4), (32, 64, 4)), ((64, 32, 4),)
    for tile in ahead:
        for programs_a_processor in (2, 1):
            yield *_within(tile, layout), programs_a_processor, _AHEAD
    for tile in waiting:
        for programs_a_processor in (4, 8):
            yield *_within(tile, layout), programs_a_processor, 1


def _one_launch(layout: Layout) -> Iterator[tuple[int, int, int, int]]:
    """A tile, and how many loads are ahead."""
    if layout.channels_last:
        for tile in ((128, 16, 4), (256, 16, 8), (128, 32, 8)):
            yield *_within(tile, layout), _AHEAD
        yield *_within((64, 64, 8), layout), 1
    else:
        for tile in _CHANNELS_FIRST:
            yield *_within(tile, layout), 1


def _within(tile: tuple[int, int, int], layout: Layout) -> tuple[int, int, int]:
    """A tile as large, of no more channels than there are."""
    block_rows, block_channels, num_warps = tile
    fewer = min(block_channels, _power_of_2(layout.channels))
    return block_rows * block_channels // fewer, fewer, num_warps


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _power_of_2(number: int) -> int:
    """The smallest one that is no less than `number`."""
    return 1 << (number - 1).bit_length()
