"""A U-Net that predicts the noise in images, as diffusion models train it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.workload import Workload
from models.zoo.drawn import Drawn, mean_squared_error, smooth_images

_NUM_STEPS = 1000
_NUM_GROUPS = 8
_NUM_FREQUENCIES = 64


class ResidualBlock(nn.Module):
    """Two convolutions, each behind GroupNorm and SiLU, with the step's embedding added between."""

    def __init__(self, channels_in: int, channels_out: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_NUM_GROUPS, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1)
        self.step = nn.Linear(embedding, channels_out)
        self.norm2 = nn.GroupNorm(_NUM_GROUPS, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, kernel_size=3, padding=1)
        is_wider = channels_in != channels_out
        self.skip = nn.Conv2d(channels_in, channels_out, kernel_size=1) if is_wider else nn.Identity()

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """(N, channels_out, H, W) of (N, channels_in, H, W) and the step's embedding (N, embedding)."""
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.step(functional.silu(step))[:, :, None, None]
        output: Tensor = self.skip(x) + self.conv2(functional.silu(self.norm2(hidden)))
        return output


class SpatialAttention(nn.Module):
    """Self-attention of four heads over pixels; queries, keys and values are parts of one 1x1 convolution's output."""

    def __init__(self, channels: int, num_heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_NUM_GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, kernel_size=1)
        self.output = nn.Conv2d(channels, channels, kernel_size=1)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) of the same."""
        n, channels, height, width = x.shape
        parts = self.qkv(self.norm(x)).reshape(n, 3, self.num_heads, channels // self.num_heads, height * width)
        q, k, v = parts.transpose(-1, -2).unbind(1)
        attended = functional.scaled_dot_product_attention(q, k, v)
        output: Tensor = x + self.output(attended.transpose(-1, -2).reshape(n, channels, height, width))
        return output


class DiffusionUNet(nn.Module):
    """The U-Net of denoising diffusion (Ho et al., 2020), with three resolutions and attention at the lower two.

    `width` is the number of channels at the highest resolution, a multiple of 8; the lower ones have twice and four
    times as many.
    """

    frequencies: Tensor

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        embedding = 4 * width
        self.stem = nn.Conv2d(3, width, kernel_size=3, padding=1)
        self.embed = nn.Sequential(
            nn.Linear(2 * _NUM_FREQUENCIES, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.down1 = ResidualBlock(width, width, embedding)
        self.down2 = ResidualBlock(width, 2 * width, embedding)
        self.attention2 = SpatialAttention(2 * width)
        self.down3 = ResidualBlock(2 * width, 4 * width, embedding)
        self.attention3 = SpatialAttention(4 * width)
        self.middle = ResidualBlock(4 * width, 4 * width, embedding)
        self.up3 = ResidualBlock(8 * width, 2 * width, embedding)
        self.up2 = ResidualBlock(4 * width, width, embedding)
        self.up1 = ResidualBlock(2 * width, width, embedding)
        self.norm = nn.GroupNorm(_NUM_GROUPS, width)
        self.head = nn.Conv2d(width, 3, kernel_size=3, padding=1)
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, -9, _NUM_FREQUENCIES)))

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """The noise (N, 3, H, W) in images (N, 3, H, W) at steps (N,) int64; H and W are multiples of 4."""
        images, steps = x
        angles = steps[:, None].float() * self.frequencies
        step = self.embed(torch.cat([angles.sin(), angles.cos()], dim=1))
        down1 = self.down1(self.stem(images), step)
        down2 = self.attention2(self.down2(functional.avg_pool2d(down1, 2), step))
        down3 = self.attention3(self.down3(functional.avg_pool2d(down2, 2), step))
        up = self.up3(torch.cat([self.middle(down3, step), down3], dim=1), step)
        up = self.up2(torch.cat([functional.interpolate(up, scale_factor=2.0), down2], dim=1), step)
        up = self.up1(torch.cat([functional.interpolate(up, scale_factor=2.0), down1], dim=1), step)
        noise: Tensor = self.head(functional.silu(self.norm(up)))
        return noise


@dataclass(frozen=True)
class NoisyImages(Drawn):
    """Smooth images at random steps of diffusion, with the noise that was added by then (a cosine schedule)."""

    side: int

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Images (batch_size, 3, side, side) float32 and steps (batch_size,) int64; noise shaped as the images."""
        clean = smooth_images(batch_size, 3, self.side, source)
        noise = torch.randn(clean.shape, generator=source)
        steps = torch.randint(_NUM_STEPS, (batch_size,), generator=source)
        angles = steps[:, None, None, None] / _NUM_STEPS * (math.pi / 2)
        return (angles.cos() * clean + angles.sin() * noise, steps), noise


def workload(*, tiny: bool) -> Workload:
    """The diffusion U-Net of 96 channels on 3x64x64 images."""
    return Workload(
        name="diffusion_unet",
        module=DiffusionUNet(8 if tiny else 96),
        loss_fn=mean_squared_error,
        data=NoisyImages(16 if tiny else 64),
        default_batch_size={"cpu": 2, "cuda": 16},
        learning_rate=1e-4,
        channels_last=True,
    )
