"""``pytest tests/benchmarks/test_prefetch.py -m benchmark``: an epoch with and without `kitsune.prefetch`."""

import time
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import kitsune

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_BATCHES = 40
_WAIT_S = 0.005


class Slow:
    """Batches of images whose loading waits, as for a disk, and takes no processor."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(_BATCHES):
            time.sleep(_WAIT_S)
            yield torch.ones(16, 3, 32, 32)


def plain(loader: Iterable[Tensor]) -> Iterable[Tensor]:
    return (batch.to(DEVICE) for batch in loader)


def ahead(loader: Iterable[Tensor]) -> Iterable[Tensor]:
    return kitsune.prefetch(loader, DEVICE)


def one_ahead(loader: Iterable[Tensor]) -> Iterable[Tensor]:
    return kitsune.prefetch(loader, DEVICE, depth=1)


def settle() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.benchmark
@pytest.mark.parametrize("read", [plain, one_ahead, ahead])
def test_a_loader_that_waits(benchmark: BenchmarkFixture, read: Callable[[Iterable[Tensor]], Iterable[Tensor]]) -> None:
    """A step as long as the loading of its batch: at best half the time of taking turns."""

    def epoch() -> None:
        for _ in read(Slow()):
            time.sleep(_WAIT_S)
        settle()

    benchmark.group = f"{_BATCHES} batches, {_WAIT_S * 1e3:g} ms to load, {_WAIT_S * 1e3:g} ms a step, on {DEVICE}"
    benchmark.pedantic(epoch, rounds=5, warmup_rounds=1)  # type: ignore[no-untyped-call]


@pytest.mark.benchmark
@pytest.mark.parametrize("read", [plain, one_ahead, ahead])
def test_batches_in_memory(benchmark: BenchmarkFixture, read: Callable[[Iterable[Tensor]], Iterable[Tensor]]) -> None:
    """Nothing to wait for: the price of the thread."""
    batches = [torch.ones(16, 3, 32, 32)] * 1000

    def epoch() -> None:
        for _ in read(batches):
            pass
        settle()

    benchmark.group = f"1000 batches in memory, no step, on {DEVICE}"
    benchmark.pedantic(epoch, rounds=5, warmup_rounds=1)  # type: ignore[no-untyped-call]
