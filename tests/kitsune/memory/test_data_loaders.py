"""Prefetching from `torch.utils.data.DataLoader` in its forms: the batches of a plain loop over it, in their order."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, get_worker_info

import kitsune
from kitsune.memory.reader import Reader


class Numbers(Dataset[dict[str, Tensor]]):
    """Item `i` is `{"x": [i, i], "y": i}`; item `torn` cannot be read."""

    def __init__(self, count: int = 12, torn: int | None = None) -> None:
        self.count = count
        self.torn = torn

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.torn:
            raise ValueError(f"torn page {index}")
        return {"x": torch.full((2,), float(index)), "y": torch.tensor(index)}


class Stream(IterableDataset[int]):
    """The numbers to 12, shared out to the workers."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(12) if worker is None else range(worker.id, 12, worker.num_workers))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    gc.collect()  # what earlier tests left is not for workers to destroy
    yield
    gc.collect()
    assert [thread for thread in threading.enumerate() if isinstance(thread, Reader)] == []
    assert multiprocessing.active_children() == []


def numbers(batches: Any) -> list[list[int]]:
    return [batch["y"].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_map_style(workers: int) -> None:
    loader = DataLoader(Numbers(), batch_size=5, num_workers=workers)
    prefetched = kitsune.prefetch(loader)
    assert len(prefetched) == 3
    for _ in range(2):
        batches = list(prefetched)
        assert numbers(batches) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
        assert all(torch.equal(batch["x"][:, 1], batch["y"].float()) for batch in batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_of_the_dataset(workers: int) -> None:
    """It comes after the batches before it; and the loader goes on after it, as it does without prefetching."""

    def outcomes(batches: Any) -> list[Any]:
        seen: list[Any] = []
        iterator = iter(batches)
        while True:
            try:
                seen.append(next(iterator)["y"].tolist())
            except StopIteration:
                return seen
            except ValueError as error:
                seen.append(str(error).replace("worker process 1", "worker process 0"))

    loader = DataLoader(Numbers(torn=7), batch_size=3, num_workers=workers)
    seen = outcomes(kitsune.prefetch(loader))
    assert [item for item in seen if isinstance(item, list)] == [[0, 1, 2], [3, 4, 5], [9, 10, 11]]
    assert "torn page 7" in seen[2]
    assert "in __getitem__" in seen[2] or workers == 0  # the worker's own traceback, in the text
    assert len(seen) == len(outcomes(loader))


def test_persistent_workers_survive_a_break() -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
    prefetched = kitsune.prefetch(loader)
    for batch in prefetched:
        assert batch["y"].tolist() == [0, 1]
        break
    workers = {process.pid for process in multiprocessing.active_children()}
    assert numbers(prefetched) == [[index, index + 1] for index in range(0, 12, 2)]
    assert {process.pid for process in multiprocessing.active_children()} == workers


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_has_no_length(workers: int) -> None:
    prefetched = kitsune.prefetch(DataLoader(Stream(), batch_size=3, num_workers=workers))
    assert sorted(torch.cat(list(prefetched)).tolist()) == list(range(12))
    with pytest.raises(TypeError):
        len(prefetched)


def test_a_batch_sampler() -> None:
    sampler = BatchSampler(SequentialSampler(range(12)), batch_size=4, drop_last=True)
    assert numbers(kitsune.prefetch(DataLoader(Numbers(), batch_sampler=sampler))) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_pinned_memory() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
        assert numbers(kitsune.prefetch(DataLoader(Numbers(4), batch_size=2, pin_memory=True))) == [[0, 1], [2, 3]]


def test_shuffling_is_that_of_the_plain_loop() -> None:
    """Also where the step draws from the same generator while the loader is read ahead."""

    def epochs(batches: Any) -> tuple[list[list[int]], list[float]]:
        torch.manual_seed(5)
        order, drawn = [], []
        for _ in range(3):
            for batch in batches:
                order.append(batch["y"].tolist())
                drawn.append(float(functional.dropout(torch.ones(9)).sum()))
        return order, drawn

    loader = DataLoader(Numbers(), batch_size=5, shuffle=True)
    assert epochs(kitsune.prefetch(loader, depth=3)) == epochs(loader)
