"""A neural radiance field: a perceptron that is asked along rays for what they meet."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.workload import Workload
from models.zoo.drawn import Drawn, mean_squared_error

_NEAR, _FAR = 1.0, 5.0


def encoded(x: Tensor, num_frequencies: int) -> Tensor:
    """(..., D * (1 + 2 * num_frequencies)) of (..., D): the values, then their sines and cosines at each frequency."""
    octaves = math.pi * 2.0 ** torch.arange(num_frequencies, device=x.device)
    angles = (x[..., None] * octaves).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], dim=-1)


class RadianceField(nn.Module):
    """NeRF (Mildenhall et al., 2020): densities and colours at points, composed along each ray.

    Eight layers of `width` units, the encoded points joining in again before the fifth; `num_samples` points of each
    ray, at fixed distances. Densities are softplus's, with which no ray is without a gradient at the beginning.
    """

    distances: Tensor

    def __init__(self, width: int = 256, num_samples: int = 64) -> None:
        super().__init__()
        position, direction = 3 * 21, 3 * 9
        self.first = self._layers(position, width)
        self.second = self._layers(width + position, width)
        self.density = nn.Linear(width, 1)
        self.feature = nn.Linear(width, width)
        self.colour = nn.Sequential(nn.Linear(width + direction, width // 2), nn.ReLU(), nn.Linear(width // 2, 3))
        self.register_buffer("distances", torch.linspace(_NEAR, _FAR, num_samples))

    def forward(self, x: Tensor) -> Tensor:
        """Colours (N, 3) of rays (N, 6): where each begins, and its direction, of length 1."""
        origins, directions = x[:, None, :3], x[:, None, 3:]
        points = encoded(origins + directions * self.distances[:, None], 10)
        hidden = self.second(torch.cat([self.first(points), points], dim=-1))
        seen_from = encoded(directions, 4).expand(-1, len(self.distances), -1)
        colours = torch.sigmoid(self.colour(torch.cat([self.feature(hidden), seen_from], dim=-1))).float()
        spacing = (_FAR - _NEAR) / (len(self.distances) - 1)
        opacity = 1 - torch.exp(-functional.softplus(self.density(hidden).squeeze(-1).float()) * spacing)
        passed = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], dim=-1), dim=-1)
        return ((opacity * passed[:, :-1])[..., None] * colours).sum(1)

    @staticmethod
    def _layers(fan_in: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(fan_in, width), nn.ReLU()]
            fan_in = width
        return nn.Sequential(*layers)


@dataclass(frozen=True)
class Rays(Drawn):
    """Rays from a sphere of radius 3 towards a coloured ball at its middle, and what they see of it."""

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Rays (batch_size, 6) and colours (batch_size, 3), float32; black where a ray misses the ball."""
        origins = functional.normalize(torch.randn((batch_size, 3), generator=source), dim=1)
        aims = 0.6 * torch.randn((batch_size, 3), generator=source)
        directions = functional.normalize(aims - 3 * origins, dim=1)
        nearest = 3 * origins - directions * (3 * origins * directions).sum(1, keepdim=True)
        depth = (1 - nearest.pow(2).sum(1, keepdim=True)).clamp(min=0)
        colours = (0.5 + 0.5 * (nearest - depth.sqrt() * directions)) * (depth > 0)
        return torch.cat([3 * origins, directions], dim=1), colours


def workload(*, tiny: bool) -> Workload:
    """The radiance field of 256 units, asked at 64 points of each ray; the batch size is the number of rays."""
    return Workload(
        name="nerf",
        module=RadianceField(16, 8) if tiny else RadianceField(),
        loss_fn=mean_squared_error,
        data=Rays(),
        default_batch_size={"cpu": 32, "cuda": 1024},
        learning_rate=5e-4,
    )
