"""A physics-informed network: its loss has derivatives of its output by its input in it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.workload import Workload
from models.zoo.drawn import Drawn

_VISCOSITY = 0.01 / math.pi


class PhysicsInformedNetwork(nn.Module):
    """A perceptron that solves Burgers' equation (Raissi et al., 2019): u_t + u u_x = 0.01/pi u_xx on [-1, 1]."""

    def __init__(self, width: int = 64, num_layers: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(num_layers - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of points inside (N, 2), place and time, and points at the beginning (N, 2): what is to be 0, and u.

        The first is by how much the equation fails inside, (N, 1), the other u at the beginning, (N, 1).
        """
        inside, beginning = x
        inside = inside.detach().requires_grad_()
        u = self.layers(inside)
        u_x, u_t = _gradient(u, inside).split(1, dim=1)
        u_xx = _gradient(u_x, inside)[:, :1]
        return u_t + u * u_x - _VISCOSITY * u_xx, self.layers(beginning)


def _gradient(values: Tensor, points: Tensor) -> Tensor:
    """The derivatives (N, 2) of values (N, 1) by their points (N, 2), which can be derived again."""
    (found,) = torch.autograd.grad(values, points, torch.ones_like(values), create_graph=True)
    return found


@dataclass(frozen=True)
class Collocation(Drawn):
    """Points of place and time inside, and others at the beginning, where u is -sin(pi x)."""

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Points inside and at the beginning, both (batch_size, 2) float32; u at the latter, (batch_size, 1)."""
        inside = torch.rand((batch_size, 2), generator=source) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
        places = torch.rand((batch_size, 1), generator=source) * 2 - 1
        return (inside, torch.cat([places, torch.zeros_like(places)], dim=1)), -torch.sin(math.pi * places)


def equation_loss(output: tuple[Tensor, Tensor], values: Tensor) -> Tensor:
    """The mean square of what is to be 0, and the mean squared error at the beginning, computed in float32."""
    residual, beginning = output
    return residual.float().pow(2).mean() + functional.mse_loss(beginning.float(), values)


def workload(*, tiny: bool) -> Workload:
    """The network of six layers of 64 units."""
    return Workload(
        name="physics_informed",
        module=PhysicsInformedNetwork(8, 2) if tiny else PhysicsInformedNetwork(),
        loss_fn=equation_loss,
        data=Collocation(),
        default_batch_size={"cpu": 64, "cuda": 4096},
        learning_rate=1e-3,
    )
