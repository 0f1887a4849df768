"""Lightning, with one changed line in `configure_optimizers`: `python -m examples.with_lightning --synthetic`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
from examples.data import Batch, add_data_options, batches
from examples.mnist import Net
from examples.run import Run, add_options
from models import datasets, torchvision_loading
from models.synthetic import SyntheticImages

torchvision_loading.import_torchvision("transforms")  # Lightning does, and fails where operators of it are missing

from lightning.pytorch import LightningModule, Trainer  # noqa: E402


class Classifier(LightningModule):
    """The network of the MNIST example.

    Args:
        run: is told of losses.
        plain: whether to train without Kitsune.
        manual: whether `training_step` runs the backward pass and the optimizer itself.
    """

    def __init__(self, run: Run, *, plain: bool, manual: bool) -> None:
        super().__init__()
        self.net: nn.Module = Net()
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self._run, self._plain = run, plain
        self.automatic_optimization = not manual

    def training_step(self, batch: Batch, index: int) -> Tensor:
        data, target = batch
        loss = functional.nll_loss(self.net(data), target)
        if index % 10 == 0:
            self._run.log(f"epoch {self.current_epoch + 1}, batch {index}", loss=loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not self._plain:
            self.optimizer = kitsune.KitsuneOptimizer(self.optimizer)  # <- the one changed line
        return self.optimizer


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains."""
    parser = argparse.ArgumentParser(prog="python -m examples.with_lightning", description="MNIST with Lightning.")
    add_options(parser, batch_size=64)
    add_data_options(parser)
    parser.add_argument("--manual", action="store_true", help="Lightning's manual optimization")
    parser.add_argument("--precision", default="32-true", help="Lightning's (default: %(default)s)")
    options = parser.parse_args(arguments)
    run = Run(options)
    train_loader, _ = batches(SyntheticImages((1, 28, 28)), datasets.mnist, parser, options)
    model = Classifier(run, plain=options.plain, manual=options.manual)
    trainer = Trainer(
        accelerator=run.device.type,
        devices=1,
        max_epochs=options.epochs,
        precision=options.precision,
        gradient_clip_val=None if options.manual else 1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train_loader)
    return run.finish(model.optimizer)


if __name__ == "__main__":
    main()
