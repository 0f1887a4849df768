"""A loop with Hugging Face Accelerate, unchanged but for one line: `python -m examples.with_accelerate --synthetic`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

import kitsune
from examples.data import add_data_options, batches
from examples.mnist import Net
from examples.run import Run, add_options
from models import datasets
from models.synthetic import SyntheticImages


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains and tests."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.with_accelerate", description="MNIST with Hugging Face Accelerate."
    )
    add_options(parser, batch_size=64)
    add_data_options(parser)
    parser.add_argument("--precision", choices=("no", "bf16", "fp16"), default="no", help="(default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, metavar="N", help="batches to an update (default: 2)")
    options = parser.parse_args(arguments)
    run = Run(options)
    train_loader, test_loader = batches(SyntheticImages((1, 28, 28)), datasets.mnist, parser, options)

    accelerator = Accelerator(
        cpu=run.device.type == "cpu",
        mixed_precision=options.precision,
        gradient_accumulation_steps=options.accumulate,
    )
    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line

    scheduler = CosineAnnealingLR(optimizer, options.epochs * len(train_loader))
    prepared, stepping, scheduling = accelerator.prepare(model, optimizer, scheduler)
    for epoch in range(1, options.epochs + 1):
        prepared.train()
        for index, (data, target) in enumerate(train_loader):
            with accelerator.accumulate(prepared):
                loss = functional.nll_loss(prepared(data.to(accelerator.device)), target.to(accelerator.device))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                stepping.step()
                scheduling.step()
                stepping.zero_grad()
            if index % 10 == 0:
                run.log(f"epoch {epoch}, batch {index} of {len(train_loader)}", loss=loss.item())
        prepared.eval()
        with torch.no_grad():
            found = [
                (prepared(data.to(accelerator.device)).argmax(dim=1).cpu() == target).float().mean()
                for data, target in test_loader
            ]
        run.log(f"epoch {epoch}, test", accuracy=float(torch.stack(found).mean()))
    return run.finish(optimizer)


if __name__ == "__main__":
    main()
