"""The forms of the kernels for convolutions: how images are cut into tiles, and the work into programs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_SMALLEST_TILE = 64  # pixels
_SMALLEST_BLOCK = 64  # channels of a result that one program computes
_BLOCK_IN = 64  # channels of an operand that are fetched at once: rows of 128 bytes, as wide as the engine swizzles


class Tile(NamedTuple):
    """So many images, rows and columns; each a power of 2."""

    images: int
    rows: int
    columns: int


class Form(NamedTuple):
    """A program computes a tile of `pixels` in `block_out` channels, `block_in` channels of a tap at a time.

    `loads_ahead` counts the steps whose operands are being fetched, the present one included.
    """

    pixels: int
    block_out: int
    num_warps: int
    loads_ahead: int
    block_in: int = _BLOCK_IN


class GradForm(NamedTuple):
    """A program adds up `block_out` by `block_in` channels over a part of the tiles, for one row of the kernel.

    There are `parts` of the tiles.
    """

    pixels: int
    block_out: int
    block_in: int
    num_warps: int
    loads_ahead: int
    parts: int


# Measured on an H200 with convolutions of 64 to 512 channels: large tiles where there are many, so that processors have
# several programs each, and with fewer programs more loads ahead or smaller tiles.
_NARROW_MANY = (Form(128, 64, 4, 3),)
_NARROW_FEW = (Form(128, 64, 4, 6), Form(_SMALLEST_TILE, 64, 4, 6))
_MANY = (Form(128, 128, 4, 3), Form(128, 64, 4, 3))
_ENOUGH = (Form(128, 128, 4, 4), Form(128, 64, 4, 6))
_FEW = (Form(128, 64, 4, 6), Form(64, 128, 4, 6))
_GRAD_TILES = ((128, 64, 64, 4, 3), (64, 64, 128, 4, 3), (64, 64, 64, 4, 4))


class Images(NamedTuple):
    """How many images are cut into tiles, and their height and width.

    Attributes:
        is_row: whether it is a row of all pixels of other images.
    """

    num: int
    size: tuple[int, int]
    is_row: bool = False


@cache
def forms(images: Images, num_channels: int, num_processors: int, exact: bool) -> tuple[Form, ...]:
    """Those that are worth timing for results of `num_channels`; the first is a fair choice.

    Args:
        exact: only those whose tiles fill the images.
    """
    pixels = images.num * images.size[0] * images.size[1]
    programs = _cdiv(pixels, 128) * _cdiv(num_channels, 128) / num_processors  # for each processor, of large tiles
    if num_channels <= _SMALLEST_BLOCK:
        found = _NARROW_MANY if programs > 2 else _NARROW_FEW
    elif programs > 1.5:
        found = _MANY
    else:
        found = _ENOUGH if programs > 0.7 else _FEW
    fitting = tuple(form for form in found if not exact or tiling(images, form.pixels, exact) is not None)
    return fitting or _NARROW_FEW[-1:]


@cache
def grad_forms(images: Images, channels: tuple[int, int], kernel_h: int, num_processors: int) -> tuple[GradForm, ...]:
    """Those for weights of these numbers of channels, results first."""
    found = []
    for pixels, block_out, block_in, num_warps, loads_ahead in _GRAD_TILES:
        tile = run_of_pixels(images, pixels)
        if tile is None or max(block_out - channels[0], block_in - channels[1]) >= _SMALLEST_BLOCK:
            continue
        programs = kernel_h * _cdiv(channels[0], block_out) * _cdiv(channels[1], block_in)
        tiles = num_tiles(images, tile)
        for programs_a_processor in (1, 2):
            parts = max(1, min(tiles, programs_a_processor * num_processors // programs))
            found.append(GradForm(pixels, block_out, block_in, num_warps, loads_ahead, parts))
    return tuple(dict.fromkeys(found))


@cache
def tiling(images: Images, pixels: int, exact: bool) -> Tile | None:
    """The tiles of `pixels` of which the fewest cover the images; of equal ones the squarest, of the fewest images.

    Args:
        exact: only those that fill the images; None where there are none.
    """
    shape = (images.num, *images.size)
    fitting = [
        tile
        for tile in _tiles(pixels)
        if not exact or all(length % side == 0 for length, side in zip(shape, tile, strict=True))
    ]
    return min(
        fitting,
        key=lambda tile: (num_tiles(images, tile), tile.images, max(tile[1:]) // min(tile[1:]), tile.rows),
        default=None,
    )


@cache
def run_of_pixels(images: Images, pixels: int) -> Tile | None:
    """The tile of `pixels` that follow one another in memory; None where there is none that fills the images."""
    height, width = images.size
    if height == images.num == 1:
        return Tile(1, 1, pixels)
    for tile in _tiles(pixels):
        if tile.columns == width and (tile.rows == height or (tile.images == 1 and height % tile.rows == 0)):
            return tile
    return None


def has_exact_tiles(images: Images) -> bool:
    """Whether some form has tiles that fill the images."""
    return tiling(images, _SMALLEST_TILE, exact=True) is not None  # halves of larger ones fill them, too


def has_runs_of_pixels(images: Images) -> bool:
    """Whether some form has tiles of pixels that follow one another."""
    return any(run_of_pixels(images, pixels) is not None for pixels, *_ in _GRAD_TILES)


def num_tiles(images: Images, tile: Tile) -> int:
    """How many tiles cover the images."""
    height, width = images.size
    return _cdiv(images.num, tile.images) * _cdiv(height, tile.rows) * _cdiv(width, tile.columns)


def _tiles(pixels: int) -> Iterator[Tile]:
    images = 1
    while images <= pixels:
        rows = 1
        while images * rows <= pixels:
            yield Tile(images, rows, pixels // (images * rows))
            rows *= 2
        images *= 2


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)
