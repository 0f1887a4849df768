"""A variational autoencoder of images."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.workload import Workload
from models.zoo.drawn import Drawn, smooth_images

_NUM_HALVINGS = 4


class VariationalAutoencoder(nn.Module):
    """A convolutional variational autoencoder (Kingma and Welling, 2013) of 3-channel images `side` pixels wide.

    The noise of its latent values is an input, so that a step is a function of its batch.
    """

    def __init__(self, side: int = 64, width: int = 32, num_latents: int = 128) -> None:
        super().__init__()
        widths = [width * 2**index for index in range(_NUM_HALVINGS)]
        self.small = (widths[-1], side // 2**_NUM_HALVINGS, side // 2**_NUM_HALVINGS)
        num_features = self.small[0] * self.small[1] * self.small[2]
        down: list[nn.Module] = []
        for channels_in, channels_out in itertools.pairwise((3, *widths)):
            down += [nn.Conv2d(channels_in, channels_out, 4, stride=2, padding=1), nn.BatchNorm2d(channels_out)]
            down += [nn.LeakyReLU()]
        self.encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(num_features, 2 * num_latents))
        self.expansion = nn.Linear(num_latents, num_features)
        up: list[nn.Module] = []
        for channels_in, channels_out in itertools.pairwise(reversed(widths)):
            up += [nn.ConvTranspose2d(channels_in, channels_out, 4, stride=2, padding=1), nn.BatchNorm2d(channels_out)]
            up += [nn.LeakyReLU()]
        self.decoder = nn.Sequential(*up, nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1))

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Of images (N, 3, side, side) and noise (N, num_latents): the images again, and the latents' distribution.

        That is their means and the logarithms of their variances, both (N, num_latents).
        """
        images, noise = x
        means, log_variances = self.encoder(images).chunk(2, dim=1)
        latents = means + noise * torch.exp(0.5 * log_variances)
        again: Tensor = self.decoder(self.expansion(latents).unflatten(1, self.small))
        return again, means, log_variances


@dataclass(frozen=True)
class ImagesWithNoise(Drawn):
    """Smooth images to be reconstructed, and the noise to draw their latent values with."""

    side: int
    num_latents: int

    def draw(self, batch_size: int, source: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Images (batch_size, 3, side, side) and noise (batch_size, num_latents), float32; the images once more."""
        images = smooth_images(batch_size, 3, self.side, source)
        return (images, torch.randn((batch_size, self.num_latents), generator=source)), images.clone()


def evidence_loss(output: tuple[Tensor, Tensor, Tensor], images: Tensor) -> Tensor:
    """The negative evidence lower bound per pixel: the squared error, and the divergence from a normal prior."""
    again, means, log_variances = (tensor.float() for tensor in output)
    divergence = -0.5 * (1 + log_variances - means.pow(2) - log_variances.exp()).sum()
    return functional.mse_loss(again, images) + divergence / images.numel()


def workload(*, tiny: bool) -> Workload:
    """The variational autoencoder on 3x64x64 images."""
    return Workload(
        name="vae",
        module=VariationalAutoencoder(16, 4, 8) if tiny else VariationalAutoencoder(),
        loss_fn=evidence_loss,
        data=ImagesWithNoise(16, 8) if tiny else ImagesWithNoise(64, 128),
        default_batch_size={"cpu": 8, "cuda": 64},
        learning_rate=1e-3,
        channels_last=True,
    )
