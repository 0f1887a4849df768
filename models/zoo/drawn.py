"""Data sets of which every batch is drawn anew, from a generator that is a function of the batch alone."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.drawing import batch_generator
from models.workload import Inputs, float32_on_the_cpu, map_tensors


@dataclass(frozen=True)
class Drawn(ABC):
    """An endless set of examples, cut into numbered batches as `models.workload.Data` asks.

    The fields of a data set tell its batches from those of others.
    """

    def batch(self, batch_size: int, *, index: int = 0, device: torch.device | str = "cpu") -> tuple[Inputs, Tensor]:
        """Batch number `index`: what `draw` says, on the device.

        Raises ValueError for a batch size below 1 or a negative index.
        """
        source = batch_generator(self, batch_size, index)
        with float32_on_the_cpu():
            x, y = self.draw(batch_size, source)
        return map_tensors(lambda tensor: tensor.to(device), x), y.to(device)

    @abstractmethod
    def draw(self, batch_size: int, source: torch.Generator) -> tuple[Inputs, Tensor]:
        """A batch on the CPU, of so many rows; everything in it that is random comes from `source`."""


def smooth_images(batch_size: int, channels: int, side: int, source: torch.Generator) -> Tensor:
    """(batch_size, channels, side, side) float32: random images without fine detail, of variance 1 or a little less."""
    coarse = torch.randn((batch_size, channels, 7, 7), generator=source)
    return functional.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=True)


def mean_squared_error(output: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of an output against `y` of the same shape, computed in float32."""
    return functional.mse_loss(output.float(), y)
