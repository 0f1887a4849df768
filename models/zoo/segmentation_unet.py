"""A U-Net that labels the pixels of images."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.workload import Workload
from models.zoo.drawn import Drawn, smooth_images

_NUM_CLASSES = 4
_NOISE = 0.5


def convolutions(channels_in: int, channels_out: int) -> nn.Sequential:
    """Two 3x3 convolutions with BatchNorm and ReLU: (N, channels_in, H, W) to (N, channels_out, H, W)."""
    layers: list[nn.Module] = []
    for source, target in ((channels_in, channels_out), (channels_out, channels_out)):
        layers += [nn.Conv2d(source, target, 3, padding=1, bias=False), nn.BatchNorm2d(target), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class SegmentationUNet(nn.Module):
    """U-Net (Ronneberger et al., 2015) with BatchNorm and four halvings, from `width` channels to 16 times as many."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**index for index in range(5)]
        self.stem = convolutions(3, width)
        self.down = nn.ModuleList(itertools.starmap(convolutions, itertools.pairwise(widths)))
        pairs = list(itertools.pairwise(reversed(widths)))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for wide, narrow in pairs)
        self.up = nn.ModuleList(itertools.starmap(convolutions, pairs))
        self.head = nn.Conv2d(width, _NUM_CLASSES, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 4, H, W) of images (N, 3, H, W); H and W are multiples of 16."""
        levels = [self.stem(x)]
        for layers in self.down:
            levels.append(layers(functional.max_pool2d(levels[-1], 2)))
        hidden = levels.pop()
        for widen, layers in zip(self.widen, self.up, strict=True):
            hidden = layers(torch.cat([levels.pop(), widen(hidden)], dim=1))
        logits: Tensor = self.head(hidden)
        return logits


@dataclass(frozen=True)
class LabelledPixels(Drawn):
    """Images in noise whose pixels have one of four classes: how bright the first channel is without the noise."""

    side: int

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images (batch_size, 3, side, side) float32 and classes (batch_size, side, side) int64."""
        images = smooth_images(batch_size, 3, self.side, source)
        classes = torch.bucketize(images[:, 0].contiguous(), torch.tensor([-0.5, 0.0, 0.5]))
        return images + _NOISE * torch.randn(images.shape, generator=source), classes


def pixel_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """The mean cross-entropy of logits (N, 4, H, W) against classes (N, H, W) int64, computed in float32."""
    return functional.cross_entropy(logits.float(), classes)


def workload(*, tiny: bool) -> Workload:
    """The U-Net of 32 channels on 3x256x256 images."""
    return Workload(
        name="segmentation_unet",
        module=SegmentationUNet(4 if tiny else 32),
        loss_fn=pixel_loss,
        data=LabelledPixels(16 if tiny else 256),
        default_batch_size={"cpu": 1, "cuda": 8},
        learning_rate=1e-3,
        channels_last=True,
    )
