"""Prefetching on the CPU: what a plain loop over the loader gives, one thread and `depth` batches ahead of it."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kitsune
from kitsune.memory import reader
from kitsune.memory.copies import Copies, Sent
from kitsune.memory.prefetch import Pass, Prefetch
from tests.kitsune.training import Training, batch, net_and_adam

CPU, META = torch.device("cpu"), torch.device("meta")
TIMEOUT_S = 60  # of waits that end at once unless something is broken

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Sample:
    """A container that pytree does not know."""

    x: Tensor


def readers() -> list[reader.Reader]:
    return [thread for thread in threading.enumerate() if isinstance(thread, reader.Reader)]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    assert readers() == []


class Counted:
    """An iterable of `count` batches that knows how many of them were read, in all passes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            self.read += 1
            yield torch.tensor([index])

    def __len__(self) -> int:
        return self.count


# What comes out


def containers(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    small = st.lists(leaves, max_size=3)
    named = st.dictionaries(st.sampled_from(["a", "b", "c"]), leaves, max_size=3)
    return small | small.map(tuple) | named | named.map(OrderedDict) | st.builds(Pair, leaves, leaves)


def tensors() -> st.SearchStrategy[Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=4)
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool])
    return st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)


others = st.none() | st.integers() | st.text(max_size=3) | st.builds(Sample, tensors())
trees = st.recursive(tensors() | others, containers, max_leaves=6)


def moved(tree: Any, device: torch.device) -> Any:
    """`tree` on `device`, by the definition: containers rebuilt one by one."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return type(tree)((key, moved(value, device)) for key, value in tree.items())
    if isinstance(tree, Pair):
        return Pair(*(moved(value, device) for value in tree))
    return type(tree)(moved(value, device) for value in tree) if isinstance(tree, list | tuple) else tree


def described(tree: Any) -> Any:
    """What can be compared with `==`, also of tensors without data."""
    if isinstance(tree, Tensor):
        values = None if tree.is_meta else tree.tolist()
        return tree.shape, tree.stride(), tree.dtype, tree.device, tree.requires_grad, values
    if isinstance(tree, dict):
        return type(tree), [(key, described(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return type(tree), [described(value) for value in tree]
    return id(tree) if isinstance(tree, Sample) else tree


@given(st.lists(trees, max_size=5), st.integers(1, 4), st.sampled_from([CPU, META]))
def test_a_pass_gives_the_loaders_batches(batches: list[Any], depth: int, device: torch.device) -> None:
    prefetched = kitsune.prefetch(batches, device, depth=depth)
    expected = described([moved(tree, device) for tree in batches])
    for _ in range(2):
        assert described(list(prefetched)) == expected


@given(st.lists(trees, max_size=3))
def test_the_cpu_hands_out_the_loaders_own_objects(batches: list[Any]) -> None:
    assert [id(tree) for tree in kitsune.prefetch(batches, "cpu")] == [id(tree) for tree in batches]


def test_what_lies_on_the_device_stays_what_it_is() -> None:
    there, here = torch.ones(2, device="meta"), torch.ones(2)
    ((first, second),) = kitsune.prefetch([(there, here)], "meta")
    assert first is there
    assert second.is_meta


def test_strides_and_requires_grad_are_kept() -> None:
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    ((moved_image, turned),) = kitsune.prefetch([(image, torch.ones(3, 4).t())], "meta")
    assert moved_image.is_contiguous(memory_format=torch.channels_last)
    assert moved_image.requires_grad
    assert turned.stride() == (1, 4)


class Encoding(UserDict[str, Any]):
    """What a tokenizer may return: a mapping with attributes of its own."""

    def __init__(self, data: dict[str, Any], language: str) -> None:
        super().__init__(data)
        self.language = language


def test_a_mapping_of_the_users_moves() -> None:
    inner = Encoding({"mask": torch.ones(2)}, "de")
    batch = [Encoding({"ids": torch.ones(3), "inner": inner, "length": 3}, "en"), torch.ones(1)]
    ((moved, other),) = kitsune.prefetch([batch], META)
    assert type(moved) is Encoding
    assert (moved.language, moved["inner"].language, moved["length"]) == ("en", "de", 3)
    assert list(moved) == ["ids", "inner", "length"]
    assert moved["ids"].device == moved["inner"]["mask"].device == other.device == META
    assert batch[0]["ids"].device == inner["mask"].device == CPU, "the loader's own object stays as it is"
    ((same, _),) = kitsune.prefetch([batch], CPU)
    assert same is batch[0]


class Doubling(UserDict[str, Any]):
    """Computes what it gives of what it keeps."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) * 2


def test_a_mapping_that_computes_its_values_computes_them_once() -> None:
    (moved,) = kitsune.prefetch([Doubling({"length": 3, "x": torch.ones(1)})], META)
    assert moved["length"] == 6
    assert moved["x"].device == META


def test_a_packed_sequence_moves_as_a_whole() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    ((sequence, label),) = kitsune.prefetch([(packed, "label")], "meta")
    assert sequence.data.is_meta
    assert sequence.batch_sizes.device == CPU  # where PyTorch wants it
    assert label == "label"


# The interface


def test_the_device() -> None:
    assert kitsune.prefetch([], "cpu").device == CPU
    assert kitsune.prefetch([], META).device == META
    if not torch.cuda.is_available():
        assert kitsune.prefetch([]).device == CPU


@pytest.mark.parametrize("depth", [0, -1, 1.0, "2", None, True])
def test_a_bad_depth_is_refused(depth: Any) -> None:
    with pytest.raises(ValueError, match=r"depth must be .* at least 1, not"):
        kitsune.prefetch([], depth=depth)


@pytest.mark.parametrize("loader", [None, 3, Sample(torch.ones(1))])
def test_what_cannot_be_iterated_is_refused(loader: Any) -> None:
    with pytest.raises(TypeError, match=type(loader).__name__):
        kitsune.prefetch(loader)


def test_a_sequence_without_iter_will_do() -> None:
    class Items:
        def __getitem__(self, index: int) -> int:
            return [5, 6][index]

    assert list(kitsune.prefetch(Items())) == [5, 6]  # type: ignore[arg-type]


def test_the_length_is_the_loaders() -> None:
    assert len(kitsune.prefetch(Counted(7))) == 7
    with pytest.raises(TypeError, match="no length: generator"):
        len(kitsune.prefetch(number for number in range(3)))
    assert list(kitsune.prefetch(number for number in range(3))) == [0, 1, 2]


def test_a_one_shot_loader_has_one_pass() -> None:
    prefetched = kitsune.prefetch(iter([1, 2]))
    assert [list(prefetched), list(prefetched)] == [[1, 2], []]


def test_passes_at_the_same_time_are_independent() -> None:
    prefetched = kitsune.prefetch(Counted(5), "cpu")
    assert [(int(first), int(second)) for first, second in zip(prefetched, prefetched, strict=True)] == [
        (index, index) for index in range(5)
    ]


# How far ahead


def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread to make `condition` true."""
    waiting = threading.Event()
    for _ in range(TIMEOUT_S * 1000):
        if condition():
            return
        waiting.wait(0.001)
    raise TimeoutError


@given(st.integers(1, 5), st.integers(0, 9))
def test_the_loader_is_read_depth_batches_ahead(depth: int, count: int) -> None:
    loader = Counted(count)
    ahead = []
    reading = iter(kitsune.prefetch(loader, depth=depth))
    for consumed in range(count + 1):
        until(lambda: loader.read == min(count, consumed + depth))  # noqa: B023 - called here and now
        ahead.append(loader.read - consumed)
        next(reading, None)
    assert max(ahead) <= depth
    assert loader.read == count


def test_no_more_than_depth_batches_are_alive() -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def loader() -> Iterator[Tensor]:
        for _ in range(20):
            alive.append(sum(reference() is not None for reference in made))
            value = torch.ones(1)
            made.append(weakref.ref(value))
            yield value
            del value

    for _ in kitsune.prefetch(loader(), depth=3):
        pass
    assert max(alive) <= 2 + 2  # two in readiness, and two handed out: a loop's variable lets the last go too late


def test_the_loader_works_while_the_step_runs() -> None:
    stepping, loaded = threading.Event(), threading.Event()

    def loader() -> Iterator[int]:
        yield 0
        assert stepping.wait(TIMEOUT_S)
        loaded.set()
        yield 1

    for _ in kitsune.prefetch(loader()):
        stepping.set()
        assert loaded.wait(TIMEOUT_S)


# Exceptions


class Scripted:
    """Gives the items of a script, raises those that are exceptions, and goes on after them."""

    def __init__(self, script: Sequence[int | BaseException]) -> None:
        self.script = iter(script)

    def __iter__(self) -> Scripted:
        return self

    def __next__(self) -> int:
        item = next(self.script)
        if isinstance(item, BaseException):
            raise item
        return item


def observed(loader: Iterable[Any]) -> list[Any]:
    """What a consumer sees who goes on after every exception, until the end and once beyond it."""
    seen: list[Any] = []
    iterator = iter(loader)
    ends = 0
    while ends < 2:
        try:
            seen.append(next(iterator))
        except StopIteration:
            ends += 1
        except BaseException as error:  # noqa: BLE001 - that is what is observed
            seen.append(error)
    return seen


errors = st.sampled_from([ValueError, KeyError, SystemExit, KeyboardInterrupt, GeneratorExit]).map(lambda kind: kind())


@given(st.lists(st.integers() | errors, max_size=6), st.integers(1, 3))
def test_exceptions_come_where_they_occurred(script: list[int | BaseException], depth: int) -> None:
    assert observed(kitsune.prefetch(Scripted(script), depth=depth)) == observed(Scripted(script))


def test_a_generator_ends_with_its_exception() -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise ValueError("torn page")

    first, second = observed(kitsune.prefetch(loader()))
    assert first == 1
    assert str(second) == "torn page"
    assert [frame.name for frame in traceback.extract_tb(second.__traceback__)][-1] == "loader"


def test_an_exception_is_in_no_cycle() -> None:
    class TornPageError(Exception):
        pass

    def loader() -> Iterator[int]:
        raise TornPageError
        yield 1

    gc.collect()
    gc.disable()
    try:
        seen = None
        try:
            next(iter(kitsune.prefetch(loader())))
        except TornPageError as error:
            seen = weakref.ref(error)
        assert seen is not None
        assert seen() is None
    finally:
        gc.enable()


def test_iter_raises_at_once() -> None:
    class Closed:
        def __iter__(self) -> Iterator[int]:
            raise OSError("closed")

    with pytest.raises(OSError, match="closed"):
        iter(kitsune.prefetch(Closed()))


# The end of a pass


@given(st.integers(0, 6), st.integers(1, 4))
def test_a_break_ends_the_thread_and_drops_the_batches(taken: int, depth: int) -> None:
    batches: list[weakref.ref[Tensor]] = []

    def loader() -> Iterator[Tensor]:
        for _ in range(6):
            value = torch.ones(1)
            batches.append(weakref.ref(value))
            yield value
            del value

    for index, _ in enumerate(kitsune.prefetch(loader(), depth=depth), start=1):
        if index >= taken:
            break
    del _
    assert readers() == []
    assert [reference() for reference in batches if reference() is not None] == []


def test_close_ends_a_pass() -> None:
    loader = Counted(9)
    reading = iter(kitsune.prefetch(loader, depth=2))
    assert isinstance(reading, Pass)
    next(reading)
    reading.close()
    assert readers() == []
    assert loader.read <= 3
    assert list(reading) == []
    reading.close()


def test_a_generator_loader_is_closed_in_the_consumers_thread() -> None:
    closed_in = []

    def loader() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed_in.append(threading.current_thread())

    for _ in kitsune.prefetch(loader()):
        break
    assert closed_in == [threading.current_thread()]


def test_a_pass_in_a_cycle_ends_when_collected() -> None:
    reading = iter(kitsune.prefetch(Counted(9)))
    next(reading)
    reading.myself = reading  # type: ignore[attr-defined]
    del reading
    assert len(readers()) == 1
    gc.collect()
    assert readers() == []


class Stuck:
    """Gives a batch, then is stuck until it is released."""

    def __init__(self) -> None:
        self.busy, self.released = threading.Event(), threading.Event()
        self.batches = self._batches()

    def __iter__(self) -> Iterator[int]:
        return self.batches

    def _batches(self) -> Iterator[int]:
        yield 0
        self.busy.set()
        assert self.released.wait(TIMEOUT_S)
        yield 1
        yield 2


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    monkeypatch.setattr(reader, "_GRACE_S", 0.01)
    loader = Stuck()
    yield loader
    loader.released.set()
    until(lambda: readers() == [])


def test_a_stuck_loader_does_not_hold_up_a_break(stuck: Stuck) -> None:
    for _ in kitsune.prefetch(stuck):
        assert stuck.busy.wait(TIMEOUT_S)
        break
    (left,) = readers()
    assert left.daemon
    stuck.released.set()
    left.join(TIMEOUT_S)
    assert next(stuck.batches) == 2  # it was not read on


def test_a_new_pass_waits_for_a_loader_in_the_middle_of_a_batch(stuck: Stuck) -> None:
    for _ in kitsune.prefetch(stuck):
        assert stuck.busy.wait(TIMEOUT_S)
        break
    threading.Timer(0.1, stuck.released.set).start()
    assert list(kitsune.prefetch(stuck)) == [2]  # a generator being executed could not be advanced


def test_an_interrupt_ends_a_pass_that_waits(stuck: Stuck) -> None:
    def interrupt() -> None:
        assert stuck.busy.wait(TIMEOUT_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    reading = iter(kitsune.prefetch(stuck))
    next(reading)
    threading.Timer(0.1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        next(reading)
    assert not stuck.released.is_set()
    assert list(reading) == []
    assert all(left.stopped for left in readers())


def test_a_stuck_loader_does_not_hold_up_the_end_of_the_program() -> None:
    program = """
import threading, kitsune
def loader():
    yield 1
    threading.Event().wait()
reading = iter(kitsune.prefetch(loader(), "cpu"))
print(next(reading))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert (run.stdout, run.stderr) == ("1\n", "")


# The thread


def state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.ones(1).is_inference(),
    )


@pytest.mark.parametrize(
    "mode",
    [torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: META],
    ids=["plain", "no", "inference", "meta"],
)
def test_the_thread_works_in_the_surroundings_of_the_caller(mode: Callable[[], Any]) -> None:
    def loader() -> Iterator[tuple[object, ...]]:
        yield state()
        yield state()

    with mode():
        expected, seen = list(loader()), list(kitsune.prefetch(loader(), "cpu"))
    assert seen == expected


def test_the_loader_is_started_here_and_read_there() -> None:
    threads = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            threads.append(threading.current_thread())
            return self

        def __next__(self) -> int:
            threads.append(threading.current_thread())
            raise StopIteration

    assert list(kitsune.prefetch(Loader())) == []
    started, read = threads
    assert started is threading.current_thread()
    assert read.name == "kitsune prefetch"


# Copies that arrive late


class LateCopies:
    """A device whose copies are only done when they are waited for: until then its memory holds NaN."""

    def __init__(self) -> None:
        self.sent_by: set[threading.Thread] = set()
        self.received_by: set[threading.Thread] = set()

    def __call__(self, leaves: Sequence[Any]) -> Sent:
        self.sent_by.add(threading.current_thread())
        pairs = [(leaf, torch.full_like(leaf, torch.nan)) for leaf in leaves]
        return Sent([there for _, there in pairs], lambda: self.arrive(pairs))

    def arrive(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.received_by.add(threading.current_thread())
        for here, there in pairs:
            there.copy_(here)


class NeverReceived(LateCopies):
    def arrive(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        pass


class OneBuffer(LateCopies):
    """Rewrites memory that it has handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.empty(4)

    def __call__(self, leaves: Sequence[Any]) -> Sent:
        return Sent([self.buffer for _ in leaves], lambda: self.arrive([(leaf, self.buffer) for leaf in leaves]))


def numbered(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.full((4,), float(index))} for index in range(count)]


def all_right(copies: Copies, depth: int) -> bool:
    """Whether batches that are kept to the end hold what the loader gave."""
    kept = list(Prefetch(numbered(10), CPU, depth, copies))
    return all(torch.equal(given["x"], mine["x"]) for given, mine in zip(kept, numbered(10), strict=True))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_are_handed_out_when_they_have_arrived(depth: int) -> None:
    copies = LateCopies()
    assert all_right(copies, depth)
    assert threading.current_thread() not in copies.sent_by
    assert copies.received_by == {threading.current_thread()}


@pytest.mark.parametrize("broken", [NeverReceived, OneBuffer])
def test_wrong_copies_would_be_seen(broken: type[LateCopies]) -> None:
    assert not all_right(broken(), 2)


def test_a_copy_that_fails_is_raised_in_place_of_its_batch() -> None:
    def copies(leaves: Sequence[Any]) -> Sent:
        if leaves == [2]:
            raise torch.OutOfMemoryError("no room")
        return Sent(leaves, lambda: None)

    first, error, last = observed(Prefetch([1, 2, 3], CPU, 2, copies))
    assert (first, last) == (1, 3)
    assert isinstance(error, torch.OutOfMemoryError)


# Training


def test_training_on_prefetched_batches(device: torch.device) -> None:
    """The whole step, replayed, on batches copied ahead: bit for bit what it gives on batches that lie there."""
    plain, prefetched = Training("train_step", *on(device)), Training("train_step", *on(device))
    loader = [batch(index)[0] for index in range(12)]
    for ahead, here in zip(kitsune.prefetch(loader, device), loader, strict=True):
        assert torch.equal(prefetched.step(*ahead), plain.step(*(value.to(device) for value in here)))


def on(device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, _ = net_and_adam()
    model.to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.05, fused=True)


# Processes that are forked


def in_fork(function: Callable[[], object], fork: Callable[[], int] = os.fork) -> str:
    """What the function returns, or raises, in a forked process; it fails the test where it waits for ever."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            told = repr(function())
        except Exception as error:  # noqa: BLE001 - the test compares it
            told = repr(error)
        os.write(writing, told.encode())
        os._exit(0)
    try:
        assert select.select([reading], [], [], TIMEOUT_S)[0], "it waits"
        return os.read(reading, 10_000).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def numbers(batches: Iterable[Tensor]) -> list[int]:
    return [int(batch) for batch in batches]


def settled(batches: Pass[Tensor]) -> None:
    """Returns when as many batches as may be are read ahead, and the loader is left alone."""
    reader = batches._reader
    assert reader is not None
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and (reader._is_reading or (reader.is_alive() and not reader._room.empty())):
        time.sleep(0.001)


FORKS = {"Python": os.fork, "C": ctypes.PyDLL(None).fork}
"""The second as by libraries: no handler of Python's runs. Python's lock is kept."""


@pytest.mark.parametrize("fork", sorted(FORKS))
@pytest.mark.parametrize("depth", [1, 3, 20])
@pytest.mark.parametrize("taken", [0, 4, 10])
def test_a_pass_goes_on_in_a_forked_process(taken: int, depth: int, fork: str) -> None:
    """As a plain iterator does, and in the parent as if nothing had been."""
    batches = iter(kitsune.prefetch(Counted(10), depth=depth))
    first = [int(next(batches)) for _ in range(taken)]
    settled(batches)
    assert in_fork(lambda: (numbers(batches), numbers(batches)), FORKS[fork]) == repr((list(range(taken, 10)), []))
    assert first + numbers(batches) == list(range(10))


@pytest.mark.parametrize("fork", sorted(FORKS))
def test_a_new_pass_in_a_forked_process(fork: str) -> None:
    """Of a loader that the parent is in the middle of, too."""
    prefetched = kitsune.prefetch(Counted(10))
    batches = iter(prefetched)
    next(batches)
    settled(batches)
    assert in_fork(lambda: numbers(prefetched), FORKS[fork]) == repr(list(range(10)))
    assert in_fork(lambda: numbers(kitsune.prefetch(Counted(5))), FORKS[fork]) == repr(list(range(5)))
    assert in_fork(lambda: (batches.close(), numbers(batches)), FORKS[fork]) == repr((None, []))
    assert numbers(batches) == list(range(1, 10))


def test_a_forked_process_of_a_forked_process() -> None:
    batches = iter(kitsune.prefetch(Counted(10)))
    next(batches)
    settled(batches)

    def child() -> str:
        second = next(batches)
        settled(batches)
        return f"{int(second)} {in_fork(lambda: numbers(batches))} {numbers(batches)}"

    rest = list(range(2, 10))
    assert in_fork(child) == repr(f"1 {rest} {rest}")
    assert numbers(batches) == list(range(1, 10))


def test_exceptions_of_the_loader_come_in_a_forked_process() -> None:
    def fails() -> Iterator[Tensor]:
        yield torch.tensor([0])
        yield torch.tensor([1])
        raise ValueError("of the loader")

    for taken, depth in ((0, 5), (1, 1), (2, 3)):
        batches = iter(kitsune.prefetch(fails(), depth=depth))
        for _ in range(taken):
            next(batches)
        settled(batches)
        assert in_fork(lambda batches=batches: numbers(batches)) == repr(ValueError("of the loader"))
        batches.close()


@pytest.mark.parametrize("fork", sorted(FORKS))
def test_in_the_middle_of_a_batch_a_forked_process_is_told(stuck: Stuck, fork: str) -> None:
    """The loader cannot be asked for the next batch: it is still making this one, for ever."""
    batches = iter(kitsune.prefetch(stuck))
    next(batches)
    assert stuck.busy.wait(TIMEOUT_S)
    time.sleep(0.05)  # until its thread waits, and has given Python's lock back
    assert "begin another one there" in in_fork(lambda: next(batches), FORKS[fork])
    assert in_fork(batches.close, FORKS[fork]) == "None"
    stuck.released.set()
    assert list(batches) == [1, 2]
