"""What reinforcement learning trains: a small policy with its value, and a deep Q-network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.drawing import generator
from models.workload import Workload
from models.zoo.drawn import Drawn, smooth_images

_NUM_OBSERVATIONS = 24
_NUM_ACTIONS = 4
_NUM_BUTTONS = 6


class PolicyAndValue(nn.Module):
    """An actor and a critic on two shared layers of `width` units, as for control with few observations."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(_NUM_OBSERVATIONS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy = nn.Linear(width, _NUM_ACTIONS)
        self.value = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 5) of observations (N, 24): the logits of four actions, then the value."""
        hidden = self.body(x)
        return torch.cat([self.policy(hidden), self.value(hidden)], dim=1)


@dataclass(frozen=True)
class Observations(Drawn):
    """Observations of a situation in which one action is right: the one whose own direction they lie in most."""

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Observations (batch_size, 24) float32 and actions (batch_size,) int64."""
        directions = torch.randn((_NUM_OBSERVATIONS, _NUM_ACTIONS), generator=generator("directions of actions"))
        observations = torch.randn((batch_size, _NUM_OBSERVATIONS), generator=source)
        return observations, (observations @ directions).argmax(1)


def policy_and_value_loss(output: Tensor, actions: Tensor) -> Tensor:
    """The cross-entropy of the policy against actions (N,) int64, and half the value's mean square, in float32."""
    policy = functional.cross_entropy(output[:, :_NUM_ACTIONS].float(), actions)
    return policy + 0.5 * output[:, _NUM_ACTIONS].float().pow(2).mean()


class QNetwork(nn.Module):
    """The convolutional Q-network of Mnih et al. (2015), of four frames of 84x84 pixels; `width` is its first layer's.

    It gives the values of the actions that were taken.
    """

    def __init__(self, width: int = 32, hidden: int = 512) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, width, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, kernel_size=3),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.values = nn.Sequential(nn.Linear(2 * width * 7 * 7, hidden), nn.ReLU(), nn.Linear(hidden, _NUM_BUTTONS))

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """Values (N,) of frames (N, 4, 84, 84) uint8 and the actions taken (N,) int64, of six."""
        frames, actions = x
        values = self.values(self.features(frames.float() / 255))
        taken: Tensor = values.gather(1, actions[:, None]).squeeze(1)
        return taken


@dataclass(frozen=True)
class Transitions(Drawn):
    """Frames with the action that was taken and what it was worth: how bright its own part of the frame is."""

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Frames (batch_size, 4, 84, 84) uint8 and actions (batch_size,) int64; their worth (batch_size,) float32."""
        actions = torch.randint(_NUM_BUTTONS, (batch_size,), generator=source)
        frames = (128 + 50 * smooth_images(batch_size, 4, 84, source)).clamp(0, 255).to(torch.uint8)
        bands = frames.float().mean(1).unflatten(1, (_NUM_BUTTONS, -1)).mean((2, 3))
        worth = bands[torch.arange(batch_size), actions]
        return (frames, actions), worth / 50 - 128 / 50


def temporal_difference_loss(values: Tensor, worth: Tensor) -> Tensor:
    """The mean Huber loss of values (N,) against what the actions were worth (N,), computed in float32."""
    return functional.smooth_l1_loss(values.float(), worth)


def policy_value(*, tiny: bool) -> Workload:
    """A policy and its value: two layers of 64 units on 24 observations."""
    return Workload(
        name="policy_value",
        module=PolicyAndValue(16 if tiny else 64),
        loss_fn=policy_and_value_loss,
        data=Observations(),
        default_batch_size={"cpu": 256, "cuda": 256},
        learning_rate=1e-3,
    )


def dqn(*, tiny: bool) -> Workload:
    """The deep Q-network on four frames of 84x84 pixels."""
    return Workload(
        name="dqn",
        module=QNetwork(4, 16) if tiny else QNetwork(),
        loss_fn=temporal_difference_loss,
        data=Transitions(),
        default_batch_size={"cpu": 16, "cuda": 32},
        learning_rate=2.5e-4,
        channels_last=True,
    )
