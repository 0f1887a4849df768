"""Copies to a CUDA device ahead of the step: no race in either direction, and what `Tensor.to` gives."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import kitsune
from kitsune.memory.copies import CudaCopies, Sent
from kitsune.memory.prefetch import Prefetch
from kitsune.memory.reader import Reader

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
SHORT, LONG = 10_000_000, 2_000_000_000  # cycles of a busy stream: some milliseconds, about a second
TIMEOUT_S = 60


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def images(count: int) -> list[Tensor]:
    """Different in all places, so that no old contents of memory could pass for a batch."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 3, 32, 32, generator=generator) for _ in range(count)]


def busy_step(x: Tensor) -> Tensor:
    """Reads `x` long after the call has returned."""
    torch.cuda._sleep(SHORT)
    return x.clone()


def equal(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(mine.cpu(), other) for mine, other in zip(seen, expected, strict=True))


class Delayed(CudaCopies):
    """Copies that take long."""

    def __call__(self, leaves: Sequence[Any]) -> Sent:
        for stream in self.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SHORT)
        return super().__call__(leaves)


class Unawaited(Delayed):
    """Hands batches out without waiting for their copies."""

    def _receive(self, sent: Sequence[Any], events: Sequence[torch.cuda.Event]) -> None:
        super()._receive(sent, [])


class Unrecorded(CudaCopies):
    """Does not tell the allocator who reads the batches."""

    def _receive(self, sent: Sequence[Any], events: Sequence[torch.cuda.Event]) -> None:
        super()._receive([], events)


# Races


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_batches_are_whole_while_the_device_is_busy(depth: int, pinned: bool) -> None:
    batches = images(100)
    loader = ((batch.pin_memory() if pinned else batch.clone(),) for batch in batches)
    seen = [busy_step(*batch) for batch in kitsune.prefetch(loader, "cuda", depth=depth)]
    assert equal(seen, batches)


def test_on_a_stream_of_the_users() -> None:
    batches = images(50)
    with torch.cuda.stream(torch.cuda.Stream()):
        seen = [busy_step(batch) for batch in kitsune.prefetch(batches, "cuda")]
        assert equal(seen, batches)


def test_batches_that_are_kept_stay_as_they_are() -> None:
    batches = images(100)
    kept = []
    for batch in kitsune.prefetch(batches, "cuda"):
        torch.cuda._sleep(SHORT)
        kept.append(batch)
    assert equal(kept, batches)
    assert len({batch.data_ptr() for batch in kept}) == 100


def test_the_host_gets_ahead_of_the_device_by_few_batches() -> None:
    """It would fill the device with batches that are not used yet."""
    ends = []
    for _ in kitsune.prefetch(images(20), "cuda"):
        torch.cuda._sleep(SHORT)
        ends.append(torch.cuda.current_stream().record_event())
        assert all(end.query() for end in ends[:-5])


@pytest.mark.parametrize("kind", [Delayed, Unawaited])
def test_every_tensor_of_a_batch_is_awaited(kind: type[CudaCopies], cuda: torch.device) -> None:
    batches = [tuple(images(6)) for _ in range(10)]
    seen = [[tensor.clone() for tensor in batch] for batch in Prefetch(batches, cuda, 2, kind(cuda))]
    alike = [equal(mine, batch) for mine, batch in zip(seen, batches, strict=True)]
    assert all(alike) == (kind is Delayed)


def test_what_the_user_writes_stays_written() -> None:
    batches = images(20)
    kept = [batch.add_(1) for batch in kitsune.prefetch(batches, "cuda")]
    assert equal(kept, [batch + 1 for batch in images(20)])
    assert equal(batches, images(20))


def test_a_loader_may_compute_on_the_device(cuda: torch.device) -> None:
    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in images(20):
            torch.cuda._sleep(SHORT)
            yield batch.to(cuda, non_blocking=True) * 2, batch

    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        reading = iter(kitsune.prefetch(loader(), cuda))
        with torch.cuda.stream(stream):  # not the stream on which the loader computes
            seen = [(doubled.clone(), batch.clone()) for doubled, batch in reading]
            assert equal([doubled for doubled, _ in seen], [batch * 2 for batch in images(20)])
            assert equal([batch for _, batch in seen], images(20))


@pytest.mark.parametrize(("kind", "right"), [(Delayed, True), (Unawaited, False), (Unrecorded, False)])
def test_a_race_would_be_seen(kind: type[CudaCopies], right: bool, cuda: torch.device) -> None:
    batches = images(30)
    seen = []
    for batch in Prefetch(batches, cuda, 2, kind(cuda)):
        if kind is Unrecorded:
            torch.cuda._sleep(SHORT)  # the batch is read when its memory may have been given to the next but two
        seen.append(batch.clone())
        del batch
    assert equal(seen, batches) == right


# Overlap


def test_copies_run_while_the_device_computes(cuda: torch.device) -> None:
    copies = CudaCopies(cuda)
    batches = [batch.pin_memory() for batch in images(4)]
    computing, sent = threading.Event(), threading.Semaphore(0)

    def loader() -> Iterator[Tensor]:
        yield batches[0]
        assert computing.wait(TIMEOUT_S)
        yield from batches[1:]

    def counting(leaves: Sequence[Any]) -> Sent:
        on_its_way = copies(leaves)
        sent.release()
        return on_its_way

    assert equal(list(Prefetch(batches, cuda, 2, copies)), batches)  # the allocator now has memory for them
    reading = iter(Prefetch(loader(), cuda, 2, counting))
    next(reading)
    torch.cuda._sleep(LONG)
    computed = torch.cuda.current_stream().record_event()
    computing.set()
    for _ in range(3):  # the batch in hand, and the two ahead of it
        assert sent.acquire(timeout=TIMEOUT_S)
    copies.streams[0].synchronize()
    assert not computed.query()


@pytest.fixture
def _no_synchronization() -> Iterator[None]:
    """Lets torch raise at every call, of any thread, that would wait for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_synchronization")
@pytest.mark.parametrize("pinned", [False, True])
def test_no_thread_waits_for_the_device(pinned: bool, cuda: torch.device) -> None:
    batches = [batch.pin_memory() if pinned else batch for batch in images(10)]
    assert len([busy_step(batch) for batch in kitsune.prefetch(batches, cuda)]) == 10


# What arrives


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(8, 6)[::2, 1::2],
        lambda: torch.randn(6).expand(4, 6),
        lambda: torch.randn(8, 6).pin_memory()[::2, 1::2],
        lambda: torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last).pin_memory(),
        lambda: torch.tensor(3),
        lambda: torch.empty(0, 3),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3).requires_grad_(),
        lambda: torch.randn(3).to(torch.bfloat16),
    ],
)
def test_a_tensor_arrives_as_by_to(make: Callable[[], Tensor], cuda: torch.device) -> None:
    tensor = make()
    (given,) = kitsune.prefetch([tensor], cuda)
    expected = tensor.detach().to(cuda)
    assert torch.equal(given.detach(), expected)
    assert (given.stride(), given.dtype, given.device) == (expected.stride(), expected.dtype, expected.device)
    assert given.requires_grad == tensor.requires_grad
    assert given.is_leaf


def test_special_tensors_arrive(cuda: torch.device) -> None:
    weight = torch.ones(3, requires_grad=True)
    sparse, nested = torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"sparse": sparse, "nested": nested, "packed": packed, "result": weight * 2, "own": nn.Parameter(weight)}
    (given,) = kitsune.prefetch([batch], cuda)
    assert given["sparse"].is_sparse
    assert torch.equal(given["sparse"].to_dense().cpu(), torch.eye(3))
    assert [part.tolist() for part in given["nested"].unbind()] == [[1.0, 1.0], [1.0, 1.0, 1.0]]
    assert given["packed"].data.device == cuda
    assert given["packed"].batch_sizes.device == CPU
    given["result"].sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]
    assert given["own"].device == cuda


def test_a_tensor_on_the_device_is_handed_out_itself(cuda: torch.device) -> None:
    there = torch.ones(3, device=cuda)
    ((first, second),) = kitsune.prefetch([(there, torch.ones(3))], cuda)
    assert first is there
    assert second.device == cuda


def test_the_device(cuda: torch.device) -> None:
    for device in (None, "cuda", cuda.index, cuda):
        prefetched = kitsune.prefetch([torch.ones(1)], device)
        assert prefetched.device == cuda
        assert next(iter(prefetched)).device == cuda


class Pinnable:
    """A batch type of the user's that DataLoader can pin and pytree does not know."""

    def __init__(self, samples: Iterable[Tensor]) -> None:
        self.x = torch.stack(list(samples))

    def pin_memory(self) -> Pinnable:
        self.x = self.x.pin_memory()
        return self


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_data_loader(workers: int, pinned: bool, cuda: torch.device) -> None:
    data = images(12)
    prefetched = kitsune.prefetch(DataLoader(data, batch_size=5, num_workers=workers, pin_memory=pinned), cuda)
    for _ in range(2):
        assert equal([busy_step(batch) for batch in prefetched], [torch.stack(data[at : at + 5]) for at in (0, 5, 10)])


def test_a_batch_type_of_the_users_stays_as_it_is(cuda: torch.device) -> None:
    loader = DataLoader(images(4), batch_size=4, pin_memory=True, collate_fn=Pinnable)
    (batch,) = kitsune.prefetch(loader, cuda)
    assert isinstance(batch, Pinnable)
    assert batch.x.is_pinned()


# The end


def test_nothing_is_left_behind(cuda: torch.device) -> None:
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = allocated()
    prefetched = kitsune.prefetch(images(20), cuda, depth=4)
    for _ in range(3):
        for index, batch in enumerate(prefetched):
            busy_step(batch)
            if index == 5:
                break
        del batch
        assert [thread for thread in threading.enumerate() if isinstance(thread, Reader)] == []
        assert allocated() == before


def test_memory_is_used_again(cuda: torch.device) -> None:
    """In a loop that waits for each step, batches take turns in the memory of those in use and in readiness."""
    places = set()
    for batch in kitsune.prefetch(images(100), cuda, depth=2):
        places.add(batch.data_ptr())
        busy_step(batch)
        del batch
        torch.cuda.synchronize()
    assert len(places) <= 8
