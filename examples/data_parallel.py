"""MNIST on several GPUs, one process each: `torchrun --nproc-per-node 2 -m examples.data_parallel --download`.

The loop is the usual one around a `DistributedDataParallel`. Without torchrun it is the loop of a single process.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import kitsune
from examples.data import Batches, add_data_options, batches
from examples.mnist import Net
from examples.run import Run, add_options
from models import datasets
from models.synthetic import SyntheticImages


@contextmanager
def process_group(device: str | None) -> Iterator[tuple[int, int, str | None]]:
    """Meets the other processes; gives this one's rank, their number, and the device to train on.

    What was wrapped should be gone when this ends: a wrapper that is given up after its group may wait for ever.
    """
    if not dist.is_torchelastic_launched():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    elif device != "cpu" and torch.cuda.is_available():
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size(), device
    finally:
        gc.collect()
        dist.destroy_process_group()


def train(
    run: Run,
    model: DistributedDataParallel,
    loader: Batches,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    accumulate: int,
) -> None:
    """One epoch. Gradients are reduced with the last of `accumulate` batches."""
    model.train()
    loader.shuffle(epoch)
    optimizer.zero_grad()
    for index, (data, target) in enumerate(loader, 1):
        data, target = data.to(run.device), target.to(run.device)
        model.require_backward_grad_sync = index % accumulate == 0
        loss = functional.nll_loss(model(data), target)
        (loss / accumulate).backward()
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and index % 10 == 0:
            run.log(f"epoch {epoch}, batch {index} of {len(loader)}", loss=loss.item())


def test(run: Run, model: DistributedDataParallel, loader: Batches, epoch: int) -> None:
    """The accuracy on images that were not trained on."""
    model.eval()
    correct = count = 0
    with torch.no_grad():
        for data, target in loader:
            correct += int((model.module(data.to(run.device)).argmax(dim=1) == target.to(run.device)).sum())
            count += len(target)
    run.log(f"epoch {epoch}, test", accuracy=correct / count)


def main(arguments: Sequence[str] | None = None) -> Run:
    """Trains and tests."""
    parser = argparse.ArgumentParser(prog="python -m examples.data_parallel", description="MNIST on several GPUs.")
    add_options(parser, batch_size=64)
    add_data_options(parser)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="batches an update (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    with process_group(options.device) as (rank, ranks, options.device):
        return train_and_test(parser, options, rank, ranks)


def train_and_test(parser: argparse.ArgumentParser, options: argparse.Namespace, rank: int, ranks: int) -> Run:
    """What one of the processes does."""
    run = Run(options)
    train_loader, test_loader = batches(
        SyntheticImages((1, 28, 28)), datasets.mnist, parser, options, rank=rank, ranks=ranks
    )
    model = DistributedDataParallel(Net().to(run.device))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    if not options.plain:
        optimizer = kitsune.KitsuneOptimizer(optimizer)  # <- the one changed line

    for epoch in range(1, options.epochs + 1):
        train(run, model, train_loader, optimizer, epoch, options.accumulate)
        if rank == 0:
            test(run, model, test_loader, epoch)
    return run.finish(optimizer) if rank == 0 else run


if __name__ == "__main__":
    main()
