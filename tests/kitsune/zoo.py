"""Models of kinds that the benchmarks do not have, small enough to train on a CPU in a test."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.torchvision_loading import import_torchvision

Batch = tuple[Tensor, Tensor]


class Kind(NamedTuple):
    """A model to train.

    Attributes:
        build: the module; what it draws comes from torch's global generator.
        loss_fn: of its output and the target.
        batch: inputs and targets, a function of the generator.
    """

    build: Callable[[], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[torch.Generator], Batch]


class UNet(nn.Module):
    """Two levels: convolutions with batch norm, max-pooling, transposed convolutions, and the skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = _two(3, 8), _two(8, 16), _two(16, 32)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1 = _two(32, 16), _two(16, 8)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        y = self.up2(self.bottom(functional.max_pool2d(second, 2)))
        y = self.up1(self.join2(torch.cat([y, second], 1)))
        return self.last(self.join1(torch.cat([y, first], 1)))


def _two(channels: int, features: int) -> nn.Module:
    layers: list[nn.Module] = []
    for taken in (channels, features):
        layers += [
            nn.Conv2d(taken, features, 3, padding=1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class LanguageLSTM(nn.Module):
    """Two layers with dropout between; the decoder shares the embedding's weights."""

    def __init__(self, vocabulary: int = 50, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.decoder(hidden)


class GraphNetwork(nn.Module):
    """Three rounds of messages along fixed random edges, added up at their ends, and the mean over nodes."""

    edges: Tensor

    def __init__(self, num_nodes: int = 12, num_edges: int = 40, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("edges", torch.randint(num_nodes, (2, num_edges)))
        self.encode = nn.Linear(4, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.updates = nn.ModuleList(nn.GRUCell(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.decode = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        nodes = torch.tanh(self.encode(x))
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = functional.leaky_relu(message(torch.cat([nodes[:, source], nodes[:, target]], -1)))
            received = torch.zeros_like(nodes).index_add(1, target, sent)
            nodes = update(received.flatten(0, 1), nodes.flatten(0, 1)).view_as(nodes)
        return self.decode(self.norm(nodes).mean(1))


class Denoiser(nn.Module):
    """A diffusion model of points: it noises its input itself, at times that it draws, and predicts the noise."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(2 + width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(3)
        )
        self.last = nn.Linear(width, 2)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        time = torch.rand(len(x), 1, device=x.device)
        noise = torch.randn_like(x)
        noised = torch.cos(time * math.pi / 2) * x + torch.sin(time * math.pi / 2) * noise
        frequencies = torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(1e4) / (self.width // 2)))
        angles = time * 1000 * frequencies
        y = self.first(torch.cat([noised, angles.sin(), angles.cos()], -1))
        for block in self.blocks:
            y = y + block(y)
        return (self.last(y) - noise).square().mean(-1)


def _images(generator: torch.Generator) -> Batch:
    return torch.randn(4, 3, 64, 64, generator=generator), torch.randint(10, (4,), generator=generator)


def _masks(generator: torch.Generator) -> Batch:
    x = torch.randn(2, 3, 16, 16, generator=generator)
    return x, (x.mean(1, keepdim=True) > 0).float()


def _texts(generator: torch.Generator) -> Batch:
    tokens = torch.randint(50, (3, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _points(generator: torch.Generator) -> Batch:
    return torch.randn(16, 2, generator=generator), torch.zeros(16)


def _graphs(generator: torch.Generator) -> Batch:
    return torch.randn(5, 12, 4, generator=generator), torch.randint(3, (5,), generator=generator)


def _of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _classifier(name: str) -> Kind:
    def build() -> nn.Module:
        module: nn.Module = getattr(import_torchvision("models"), name)(num_classes=10)
        return module

    return Kind(build, functional.cross_entropy, _images)


ZOO = {
    "mobilenet_v2": _classifier("mobilenet_v2"),
    "densenet121": _classifier("densenet121"),
    "efficientnet_b0": _classifier("efficientnet_b0"),
    "u-net": Kind(UNet, functional.binary_cross_entropy_with_logits, _masks),
    "lstm": Kind(LanguageLSTM, _of_tokens, _texts),
    "graph network": Kind(GraphNetwork, functional.cross_entropy, _graphs),
    "denoiser": Kind(Denoiser, functional.mse_loss, _points),
}
