"""A GAN that learns eight clusters of points in the plane: `python -m examples.gan`.

Two models, two optimizers, alternating steps, as in PyTorch's DCGAN tutorial: the discriminator's gradients of real and
generated points add up before its step, and those that the generator's step leaves in it are thrown away.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import kitsune
from examples.run import Run, add_options

_SPREAD = 0.05


def mlp(inputs: int, width: int, outputs: int) -> nn.Module:
    """Three linear layers."""
    hidden = nn.Linear(width, width)
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), hidden, nn.LeakyReLU(0.2), nn.Linear(width, outputs)
    )


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains; logs how far generated points lie from the nearest cluster, on average."""
    parser = argparse.ArgumentParser(prog="python -m examples.gan", description="A GAN of points in the plane.")
    add_options(parser, batch_size=256)
    parser.add_argument("--iterations", type=int, default=3000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="of the models (default: %(default)s)")
    parser.add_argument("--latent", type=int, default=16, metavar="N", help="numbers that make a point")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate (default: %(default)s)")
    parser.add_argument("--log-interval", type=int, default=100, metavar="N")
    options = parser.parse_args(arguments)
    run = Run(options)
    device, count = run.device, options.batch_size
    angles = torch.arange(8, device=device) * (math.pi / 4)
    centers = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)

    def distance(points: Tensor) -> float:
        return torch.cdist(points, centers).min(dim=1).values.mean().item()

    generator, discriminator = mlp(options.latent, options.width, 2), mlp(2, options.width, 1)
    generator.to(device)
    discriminator.to(device)
    criterion = nn.BCEWithLogitsLoss()
    real_label, fake_label = torch.ones(count, 1, device=device), torch.zeros(count, 1, device=device)
    fixed_noise = torch.randn(512, options.latent, device=device)

    optimizer_d: torch.optim.Optimizer = torch.optim.Adam(discriminator.parameters(), options.lr, betas=(0.5, 0.999))
    optimizer_g: torch.optim.Optimizer = torch.optim.Adam(generator.parameters(), options.lr, betas=(0.5, 0.999))
    if not options.plain:
        optimizer_d = kitsune.KitsuneOptimizer(optimizer_d)  # <- the one changed line,
        optimizer_g = kitsune.KitsuneOptimizer(optimizer_g)  # <- for each optimizer

    for iteration in range(1, options.iterations + 1):
        discriminator.zero_grad()
        clusters = torch.randint(len(centers), (count,), device=device)
        real = centers[clusters] + _SPREAD * torch.randn(count, 2, device=device)
        loss_real = criterion(discriminator(real), real_label)
        loss_real.backward()
        fake = generator(torch.randn(count, options.latent, device=device))
        loss_fake = criterion(discriminator(fake.detach()), fake_label)
        loss_fake.backward()
        optimizer_d.step()

        generator.zero_grad()
        loss_g = criterion(discriminator(fake), real_label)
        loss_g.backward()
        optimizer_g.step()

        if iteration % options.log_interval == 0:
            with torch.no_grad():
                far = distance(generator(fixed_noise))
            loss_d = loss_real.item() + loss_fake.item()
            run.log(f"iteration {iteration}", loss_d=loss_d, loss_g=loss_g.item(), distance=far)
    return run.finish(optimizer_d, optimizer_g)


if __name__ == "__main__":
    main()
