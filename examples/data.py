"""Batches of images for the examples: real ones where they are or can be fetched, else synthetic ones to learn."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from models.datasets import DatasetError
from models.synthetic import SyntheticImages

Batch = tuple[Tensor, Tensor]

_SYNTHETIC_BATCHES = {True: 200, False: 20}
_HELD_OUT = 1_000_000  # the numbers of batches that are not trained on begin here


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what is trained on, and for how long."""
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data set (default: %(default)s)")
    parser.add_argument("--download", action="store_true", help="fetch the data set if it is not there")
    parser.add_argument("--synthetic", action="store_true", help="train on synthetic images of the same shape instead")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N batches of each epoch")


def batches(
    synthetic: SyntheticImages,
    dataset: Callable[..., Any],
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[Batches, Batches]:
    """Those to train on and those to test with. Ends the program where the data set cannot be had.

    Args:
        rank, ranks: which of so many processes this is; each trains on batches of its own, and tests with all.
    """
    try:
        training = Batches(synthetic, dataset, options, train=True, rank=rank, ranks=ranks)
        return training, Batches(synthetic, dataset, options, train=False)
    except DatasetError as error:
        parser.error(f"{error}. Give --download to fetch it, --data if it lies elsewhere, or --synthetic.")


class Batches:
    """The batches of an epoch, as often as they are iterated.

    Args:
        synthetic: gives synthetic ones.
        dataset: loads the real ones: called with the folder, and `train` and `download`.
        options: as parsed with `add_options` and `add_data_options`.
        train: batches to train on; else those to test with.
        rank, ranks: see `batches`.
    """

    def __init__(
        self,
        synthetic: SyntheticImages,
        dataset: Callable[..., Any],
        options: argparse.Namespace,
        *,
        train: bool,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._synthetic, self._options, self._train = synthetic, options, train
        self._rank, self._ranks = rank, ranks
        self._loader: DataLoader[Any] | None = None
        if not options.synthetic:
            images = dataset(options.data, train=train, download=options.download)
            share: DistributedSampler[Any] | None = (
                DistributedSampler(images, ranks, rank, drop_last=train) if ranks > 1 else None
            )
            self._loader = DataLoader(
                images,
                options.batch_size,
                shuffle=train and share is None,
                sampler=share,
                drop_last=train,
                num_workers=2,
                persistent_workers=True,
            )

    def shuffle(self, epoch: int) -> None:
        """Has the processes share out the images anew; to be called before each epoch where there are several."""
        if self._loader is not None and isinstance(self._loader.sampler, DistributedSampler):
            self._loader.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        length = _SYNTHETIC_BATCHES[self._train] if self._loader is None else len(self._loader)
        limit = self._options.limit
        return length if limit is None else min(length, limit)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._draw() if self._loader is None else iter(self._loader)
        return islice(batches, len(self))

    def _draw(self) -> Iterator[Batch]:
        first = 0 if self._train else _HELD_OUT
        for index in range(len(self)):
            yield self._synthetic.batch(self._options.batch_size, index=first + index * self._ranks + self._rank)
