"""Deterministic images with learnable classes, for training that means something without any file or network."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.drawing import batch_generator, check_signal, generator

_PROTOTYPES_PER_CLASS = 3
_COARSE_SIDE = 7
_MAX_SHIFT = 2


@dataclass(frozen=True)
class SyntheticImages:
    """An endless set of labelled images, cut into numbered batches.

    Every class has a few smooth random prototypes; an image is one of its class's prototypes, moved by up to two
    pixels and buried in white noise. Pixels have mean 0 and variance 1, like normalized photographs. Every batch is
    computed on the CPU from a generator of its own: the same in every process and for every device, without touching
    torch's global random state. Batches of different numbers are fresh draws, so any number that was not trained on
    serves as held-out data.
    """

    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    num_classes: int = 10
    seed: int = 0
    signal: float = 0.3
    """The prototype's share of an image's standard deviation, in (0, 1); the rest is noise. More pixels need less."""

    def __post_init__(self) -> None:
        check_signal(self.signal)

    def batch(self, batch_size: int, *, index: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Batch number `index`: images (batch_size, *shape) float32, contiguous, and labels (batch_size,) int64.

        Raises ValueError for a batch size below 1 or a negative index.
        """
        source = batch_generator(self, batch_size, index)
        labels = torch.randint(self.num_classes, (batch_size,), generator=source, device="cpu")
        variants = torch.randint(_PROTOTYPES_PER_CLASS, (batch_size,), generator=source, device="cpu")
        shifts = torch.randint(-_MAX_SHIFT, _MAX_SHIFT + 1, (2, batch_size, 1), generator=source, device="cpu")
        coarse = _coarse_prototypes(self.shape, self.num_classes, self.seed)[labels, variants]
        images = _shifted(_smooth(coarse, self.shape[1:]), shifts)
        noise = torch.randn(images.shape, generator=source, dtype=torch.float32, device="cpu")
        images = self.signal * images + (1 - self.signal**2) ** 0.5 * noise
        return images.to(device), labels.to(device)


@functools.lru_cache(maxsize=8)
def _coarse_prototypes(shape: tuple[int, int, int], num_classes: int, seed: int) -> Tensor:
    """(num_classes, prototypes per class, channels, 7, 7) float32: whole ones would take gigabytes for large images."""
    channels = shape[0]
    coarse_shape = (num_classes, _PROTOTYPES_PER_CLASS, channels, _COARSE_SIDE, _COARSE_SIDE)
    source = generator("prototypes", shape, num_classes, seed)
    return torch.randn(coarse_shape, generator=source, dtype=torch.float32, device="cpu")


def _smooth(coarse: Tensor, size: tuple[int, int]) -> Tensor:
    """(batch, channels, *size) float32, each image of mean 0 and variance 1."""
    smooth = functional.interpolate(coarse, size=size, mode="bilinear", align_corners=False)
    deviation, mean = torch.std_mean(smooth, dim=(1, 2, 3), keepdim=True)
    return (smooth - mean) / deviation


def _shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Each image rolled by its own number of rows `shifts[0]` and columns `shifts[1]`, both (batch, 1)."""
    batch_size, channels, height, width = images.shape
    rows = (torch.arange(height, device="cpu") - shifts[0]) % height
    columns = (torch.arange(width, device="cpu") - shifts[1]) % width
    samples = torch.arange(batch_size, device="cpu")
    return images[
        samples[:, None, None, None],
        torch.arange(channels, device="cpu")[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
