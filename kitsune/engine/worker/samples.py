"""What a program's inputs hold, told to another process closely enough that it behaves there as it does here.

Integers and Booleans are told exactly: they are indices, counts and masks. Of large floating-point tensors their range,
mean and spread are told, and others like them are drawn; small ones are told exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_MOST_EXACT = 4096
"""Elements of a floating-point tensor that is told exactly."""

_MOST_BYTES = 64 * 2**20
"""Of an integer tensor that is told exactly; of larger ones the range is told."""


class Sample(NamedTuple):
    """What a tensor holds.

    Attributes:
        values: all of it, on the CPU; None where it is drawn.
        least, most, mean, spread: of what is drawn.
    """

    values: torch.Tensor | None
    least: float = 0.0
    most: float = 0.0
    mean: float = 0.0
    spread: float = 0.0


def sampled(inputs: Sequence[torch.Tensor]) -> list[Sample]:
    """Of each input. The device is waited for once, and little is copied from it."""
    with torch.no_grad():
        drawn = [place for place, tensor in enumerate(inputs) if not _is_exact(tensor)]
        figures = [_figures(inputs[place].detach()) for place in drawn]
        listed = torch.stack(figures).tolist() if figures else []
        found = dict(zip(drawn, listed, strict=True))
        return [
            Sample(None, *found[place]) if place in found else Sample(tensor.detach().cpu().contiguous().clone())
            for place, tensor in enumerate(inputs)
        ]


def drawn(samples: Sequence[Sample], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that hold what was told, and lie in memory as `values`, which are fake, do; equal at each call."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        return [_drawn(sample, value, generator) for sample, value in zip(samples, values, strict=True)]


def _is_exact(tensor: torch.Tensor) -> bool:
    is_rounded = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= _MOST_EXACT if is_rounded else tensor.nbytes <= _MOST_BYTES


def _figures(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    least, most = torch.aminmax(real)
    wide = real.to(_precision(real.dtype))
    spread, mean = torch.std_mean(wide, correction=0)
    return torch.stack([one.double() for one in (least, most, mean, spread)])


def _drawn(sample: Sample, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    device = value.device
    size = [1 if stride == 0 else size for size, stride in zip(value.size(), value.stride(), strict=True)]
    made = torch.empty_strided(size, value.stride(), dtype=value.dtype, device=device)
    places = [slice(0, one) for one in size]
    if sample.values is not None:
        made.copy_(sample.values[tuple(places)])
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        real = torch.view_as_real(made) if value.dtype.is_complex else made
        seed = int(torch.randint(2**62, (), generator=generator))
        here = torch.Generator(device).manual_seed(seed)
        noise = torch.randn(real.size(), generator=here, device=device, dtype=_precision(real.dtype))
        real.copy_(noise.mul_(sample.spread).add_(sample.mean).clamp_(sample.least, sample.most))
    else:
        made.copy_(torch.randint(int(sample.least), int(sample.most) + 1, size, generator=generator))
    return made.expand(value.size())


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
