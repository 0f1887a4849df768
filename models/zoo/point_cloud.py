"""A classifier of point clouds."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.drawing import generator
from models.workload import Workload
from models.zoo.drawn import Drawn

_NUM_CLASSES = 10


def point_layers(*widths: int) -> nn.Sequential:
    """Linear layers with BatchNorm and ReLU that treat each point alone: (N, widths[0], P) to (N, widths[-1], P)."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Conv1d(fan_in, fan_out, 1), nn.BatchNorm1d(fan_out), nn.ReLU()]
    return nn.Sequential(*layers)


class PointNet(nn.Module):
    """PointNet (Qi et al., 2017), which turns the cloud before it looks at it; without dropout.

    `width` is that of the first layer; the last one before the pooling is 16 times as wide.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.turn_features = point_layers(3, width, 2 * width, 16 * width)
        self.turn = nn.Sequential(nn.Linear(16 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 9))
        self.features = point_layers(3, width, width, 2 * width, 16 * width)
        self.classifier = nn.Sequential(
            nn.Linear(16 * width, 8 * width, bias=False),
            nn.BatchNorm1d(8 * width),
            nn.ReLU(),
            nn.Linear(8 * width, _NUM_CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10) of clouds (N, P, 3)."""
        points = x.transpose(1, 2)
        turn = self.turn(self.turn_features(points).amax(-1)).unflatten(1, (3, 3))
        turn = turn + torch.eye(3, dtype=turn.dtype, device=turn.device)
        logits: Tensor = self.classifier(self.features(turn @ points).amax(-1))
        return logits


@dataclass(frozen=True)
class Clouds(Drawn):
    """Points on ellipsoids: each class has one of its own, with noise on its surface."""

    num_points: int

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Clouds (batch_size, num_points, 3) float32 and classes (batch_size,) int64."""
        classes = torch.randint(_NUM_CLASSES, (batch_size,), generator=source)
        shapes = torch.randn((_NUM_CLASSES, 3, 3), generator=generator("ellipsoids"))
        points = torch.randn((batch_size, self.num_points, 3), generator=source)
        surface = points / points.norm(dim=-1, keepdim=True) @ shapes[classes]
        return surface + 0.05 * torch.randn(points.shape, generator=source), classes


def workload(*, tiny: bool) -> Workload:
    """PointNet on clouds of 1,024 points."""
    return Workload(
        name="pointnet",
        module=PointNet(4 if tiny else 64),
        loss_fn=nn.CrossEntropyLoss(),
        data=Clouds(32 if tiny else 1024),
        default_batch_size={"cpu": 4, "cuda": 32},
        learning_rate=1e-3,
    )
