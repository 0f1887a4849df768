"""The timer against sleeps of known length, and the cache of times against damage, other processes and full disks."""

from __future__ import annotations

import itertools
import json
import logging
import math
import multiprocessing
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune import cache_files
from kitsune.cache_files import CacheDirectory
from kitsune.config import cache_dir
from kitsune.timing import CostCache, device_us, replayed_us
from kitsune.timing import cache as cache_module
from kitsune.timing import identity as identity_module
from kitsune.timing import stopwatch as stopwatch_module
from kitsune.timing import timer as timer_module
from kitsune.timing.identity import identity

CPU = torch.device("cpu")
HERE = {"device": "test", "torch": "2"}


class Counted:
    """Calls a function and counts."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.calls = 0
        self._function = function

    def __call__(self) -> None:
        self.calls += 1
        self._function()


def filled(directory: Path, **entries: float) -> CostCache:
    cache = CostCache(directory, HERE)
    for key, us in entries.items():
        cache.put(key, us)
    assert cache.save() is None
    return cache


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("costs-*.json")
    return path


@pytest.mark.parametrize("milliseconds", [1, 4])
def test_a_sleep_takes_its_time(milliseconds: int) -> None:
    us = device_us(lambda: time.sleep(milliseconds / 1e3), CPU)
    assert milliseconds * 1e3 <= us <= milliseconds * 1e3 * 3 + 5e3


def test_short_calls_are_repeated_more_often_than_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now_us = 0.0

    def takes(us: float) -> Counted:
        def pass_time() -> None:
            nonlocal now_us
            now_us += us

        return Counted(pass_time)

    monkeypatch.setattr(timer_module, "time", SimpleNamespace(perf_counter=lambda: now_us / 1e6))
    short, long = takes(1.0), takes(2000.0)
    assert (device_us(short, CPU), device_us(long, CPU)) == pytest.approx((1.0, 2000.0))
    assert short.calls > 100 > 10 >= long.calls


def test_the_limit_bounds_the_number_of_blocks() -> None:
    call = Counted(lambda: time.sleep(1e-3))
    assert device_us(call, CPU, limit_s=0.0) >= 1e3
    assert call.calls == 2, "one to warm up, one to time"


def test_one_slow_call_does_not_count() -> None:
    pauses = iter([0.002, 0.002, 0.05, *[0.002] * 10])
    assert device_us(lambda: time.sleep(next(pauses)), CPU) < 2e4


HOST_US = 70.0


@pytest.mark.parametrize(("first_ahead", "tries"), [(0, 1), (2, 3), (9, 3)])
def test_a_host_that_falls_behind_gets_a_longer_head_start(
    first_ahead: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_starts: list[float] = []

    def block(run: object, device: object, num_calls: int, head_start_us: float) -> tuple[float, float, bool]:
        head_starts.append(head_start_us)
        return float(len(head_starts)), HOST_US * num_calls, len(head_starts) > first_ahead

    monkeypatch.setattr(timer_module, "_cuda_block_after", block)
    blocks = timer_module._CudaBlocks(lambda: None, torch.device("cuda"))
    assert blocks(3) == tries
    assert all(later > earlier for earlier, later in itertools.pairwise(head_starts))
    del head_starts[1:]
    blocks(10)
    known = first_ahead < tries
    assert (head_starts[1] > 10 * HOST_US) == known, "enough for a host whose pace is known"


class Machine:
    """A host and a device with one queue, each with its clock, in microseconds.

    Attributes:
        head_starts: what the device got to wait for, before the given piece of work.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_us = self.device_us = 0.0
        self.head_starts: dict[int, float] = {}
        self.pieces = 0
        monkeypatch.setattr(stopwatch_module.time, "perf_counter", lambda: self.host_us * 1e-6)
        monkeypatch.setattr(stopwatch_module, "keep_busy", self._keep_busy)
        monkeypatch.setattr(stopwatch_module._Events, "_now", lambda _: Event(self))
        self.stopwatch = stopwatch_module.stopwatch(torch.device("cuda"))

    def step(self, *, launch_us: float, work_us: float, rest_us: float, waits: bool) -> None:
        """One of a loop: the device begins with the work when all of it is launched; then does something else."""

        def work() -> None:
            self.host_us += launch_us
            self._do(work_us)

        self.stopwatch.time(work)
        self.pieces += 1
        self._do(7.0)
        self.host_us = max(self.host_us + rest_us, self.device_us if waits else 0.0)

    def _keep_busy(self, us: float, _device: torch.device) -> None:
        self.head_starts[self.pieces] = us
        self._do(us)

    def _do(self, us: float) -> None:
        self.device_us = max(self.device_us, self.host_us) + us


class Event:
    def __init__(self, machine: Machine) -> None:
        self._machine, self.us = machine, max(machine.device_us, machine.host_us)

    def query(self) -> bool:
        return self.us <= self._machine.host_us

    def synchronize(self) -> None:
        self._machine.host_us = max(self._machine.host_us, self.us)

    def elapsed_time(self, end: Event) -> float:
        return (end.us - self.us) * 1e-3


def test_work_of_a_loop_that_runs_on_is_timed_in_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is slower than the device, but has a head start that is enough for all of it."""
    machine = Machine(monkeypatch)
    for _ in range(2):
        machine.pieces = 0
        machine.head_starts.clear()
        for _ in range(7):
            machine.step(launch_us=50.0, work_us=40.0, rest_us=20.0, waits=False)
        assert machine.stopwatch.read() == pytest.approx([40.0] * 7)
        assert list(machine.head_starts) == [0]
    assert machine.stopwatch.read() == []


def test_work_of_a_loop_that_waits_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits before each piece, but for long only before the first."""
    machine = Machine(monkeypatch)
    for _ in range(7):
        machine.step(launch_us=50.0, work_us=40.0, rest_us=20.0, waits=True)
    assert machine.stopwatch.read() == pytest.approx([40.0] * 7)
    first, *others = machine.head_starts.values()
    assert others == pytest.approx([100.0] * 6)
    assert 7 * 50.0 < first < 20 * 60.0


def test_a_slow_launch_makes_the_device_wait_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for _ in range(2):
        machine.step(launch_us=1e6, work_us=40.0, rest_us=0.0, waits=True)
    machine.step(launch_us=50.0, work_us=40.0, rest_us=0.0, waits=True)
    assert machine.head_starts[2] == 20_000.0
    assert machine.stopwatch.read()[-1] == pytest.approx(40.0)


@pytest.mark.gpu
def test_device_time_is_the_devices() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    y = torch.empty_like(x)
    small = torch.zeros(1, device=device)
    gap = device_us(lambda: small.add_(1), device)
    copy = device_us(lambda: y.copy_(x), device)
    assert 0 < gap < 20
    assert copy > 2 * gap
    assert device_us(lambda: torch.cuda._sleep(2_000_000), device) == pytest.approx(
        2 * device_us(lambda: torch.cuda._sleep(1_000_000), device), rel=0.3
    )


@pytest.mark.gpu
def test_a_call_that_makes_the_host_wait_can_be_timed() -> None:
    device = torch.device("cuda")
    value = torch.ones((), device=device)
    assert device_us(value.item, device, limit_s=0.1) > 0


@pytest.mark.gpu
def test_a_replayed_chain_takes_about_as_long_as_a_live_one() -> None:
    device = torch.device("cuda")
    value = torch.zeros(1, device=device)
    replayed, live = replayed_us(lambda: value.add_(1), device), device_us(lambda: value.add_(1), device)
    assert 0.2 < replayed < 10
    assert 0.2 < live / replayed < 10


def test_what_was_put_is_found_again(tmp_path: Path) -> None:
    cache = CostCache(tmp_path, HERE)
    assert cache.get("mm") is None
    cache.put("mm", 2.5)
    cache.put("zero", 0.0)
    assert cache.get("mm") == 2.5
    assert CostCache(tmp_path, HERE).get("mm") is None, "not before it is saved"
    assert cache.save() is None
    again = CostCache(tmp_path, HERE)
    assert (again.get("mm"), again.get("zero"), again.get("conv")) == (2.5, 0.0, None)


@given(entries=st.dictionaries(st.text(max_size=20), st.floats(0, 1e11), max_size=8))
def test_every_key_and_time_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, float]
) -> None:
    directory = tmp_path_factory.mktemp("cache")
    cache = CostCache(directory, HERE)
    for key, us in entries.items():
        cache.put(key, us)
    assert cache.save() is None
    again = CostCache(directory, HERE)
    assert {key: again.get(key) for key in entries} == entries


@pytest.mark.parametrize("us", [math.nan, math.inf, -1.0, True, "3", None])
def test_only_times_are_taken(tmp_path: Path, us: object) -> None:
    with pytest.raises(ValueError, match="mm"):
        CostCache(tmp_path, HERE).put("mm", us)  # type: ignore[arg-type]


def test_nothing_is_written_without_need(tmp_path: Path) -> None:
    CostCache(tmp_path / "cache", HERE).save()
    assert not (tmp_path / "cache").exists()
    cache = filled(tmp_path, mm=1.0)
    stamp = only_file(tmp_path).stat().st_mtime_ns
    assert cache.save() is None
    assert only_file(tmp_path).stat().st_mtime_ns == stamp


def test_a_cache_that_knows_nothing_is_empty(tmp_path: Path) -> None:
    cache = CostCache(tmp_path, {})
    assert cache.is_empty
    cache.put("mm", 1.0)
    assert not cache.is_empty
    cache.save()
    assert not CostCache(tmp_path, {}).is_empty


def test_without_a_directory_it_lives_in_memory() -> None:
    cache = CostCache(None, HERE)
    cache.put("mm", 1.0)
    assert cache.save() is None
    assert cache.get("mm") == 1.0


def test_another_identity_has_another_file(tmp_path: Path) -> None:
    filled(tmp_path, mm=1.0)
    assert CostCache(tmp_path, {**HERE, "torch": "3"}).get("mm") is None


def damaged(change: Callable[[dict[str, object]], object]) -> Callable[[str], str]:
    """The text of a file with its content changed."""

    def changed(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return changed


def sealed(us: object) -> Callable[[str], str]:
    """The text of a file that was written whole, with `us` in it."""
    return damaged(lambda content: content.update(us={"mm": us}, seal=cache_module._seal({"mm": us})))


def nested(depth: int) -> object:
    value: object = 1.5
    for _ in range(depth):
        value = [value]
    return value


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "garbage": lambda text: "\x00\xff" * 40,
    "deep": lambda text: "[" * 100_000,
    "other type": lambda text: json.dumps([text]),
    "number": lambda text: "3",
    "one digit": lambda text: text.replace("1.5", "1.6"),
    "NaN": sealed(math.nan),
    "infinity": sealed(math.inf),
    "huge": sealed(10**400),
    "negative": sealed(-1.5),
    "text": sealed("1.5"),
    "truth": sealed(True),
    "nothing": sealed(None),
    "nested": sealed({}),
    "deep, sealed": sealed(nested(900)),
    "deep beside": damaged(lambda content: content.update(identity=nested(900))),
    "deep seal": damaged(lambda content: content.update(seal=nested(900))),
    "many digits": lambda text: text.replace("1.5", "1" * 100_000),
    "half a character": lambda text: text.replace("mm", "\\ud800"),
    "no seal": damaged(lambda content: content.pop("seal")),
    "old format": damaged(lambda content: content.update(format=0)),
    "no format": damaged(lambda content: content.pop("format")),
    "other identity": damaged(lambda content: content.update(identity={"device": "other"})),
    "no identity": damaged(lambda content: content.pop("identity")),
    "no times": damaged(lambda content: content.pop("us")),
    "list of times": damaged(lambda content: content.update(us=[1.0])),
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path: Path, damage: str) -> None:
    filled(tmp_path, mm=1.5)
    path = only_file(tmp_path)
    text = path.read_text()
    spoiled = DAMAGE[damage](text)
    assert spoiled != text
    path.write_text(spoiled, encoding="latin-1")
    assert CostCache(tmp_path, HERE).get("mm") is None
    filled(tmp_path, conv=2.0)
    again = CostCache(tmp_path, HERE)
    assert (again.get("mm"), again.get("conv")) == (None, 2.0)


@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_no_changed_byte_gives_another_time(tmp_path_factory: pytest.TempPathFactory, position: int, byte: int) -> None:
    directory = tmp_path_factory.mktemp("cache")
    filled(directory, mm=1.5)
    content = bytearray(only_file(directory).read_bytes())
    content[position % len(content)] = byte
    only_file(directory).write_bytes(content)
    assert CostCache(directory, HERE).get("mm") in (None, 1.5)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, mm=1.0)
    monkeypatch.setattr(cache_module, "_MOST_BYTES", 10)
    assert CostCache(tmp_path, HERE).get("mm") is None


def test_the_oldest_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_MOST_ENTRIES", 3)
    filled(tmp_path, a=1.0, b=2.0)
    filled(tmp_path, c=3.0, d=4.0)
    again = CostCache(tmp_path, HERE)
    assert [again.get(key) for key in "abcd"] == [None, 2.0, 3.0, 4.0]


def test_files_of_other_identities_and_of_killed_processes_make_room(tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / f"costs-{number:02}.{'json' if number % 2 else 'tmp'}"
        path.write_text("{}")
        os.utime(path, (number, number))
    (tmp_path / "other.json").write_text("of somebody else")
    filled(tmp_path, mm=1.0)
    assert len(list(tmp_path.glob("costs-*.json"))) == 16
    assert not list(tmp_path.glob("costs-*.tmp"))
    assert (tmp_path / "costs-39.json").exists()
    assert not (tmp_path / "costs-01.json").exists()
    assert (tmp_path / "other.json").exists()
    assert CostCache(tmp_path, HERE).get("mm") == 1.0


def test_what_others_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    first, second = CostCache(tmp_path, HERE), CostCache(tmp_path, HERE)
    first.put("a", 1.0)
    second.put("b", 2.0)
    assert first.save() is None
    assert second.save() is None
    assert (second.get("a"), CostCache(tmp_path, HERE).get("a"), CostCache(tmp_path, HERE).get("b")) == (1.0, 1.0, 2.0)


def write_many(directory: Path, name: str) -> None:
    for number in range(30):
        filled(directory, **{f"{name}{number}": float(number)})


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(tmp_path, name)) for name in "ab"]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        text = [path.read_text() for path in tmp_path.glob("costs-*.json")]
        assert all(json.loads(each)["format"] == 1 for each in text), "a reader never sees half a file"
    for process in processes:
        process.join()
        assert process.exitcode == 0
    cache = CostCache(tmp_path, HERE)
    assert all(cache.get(f"{name}{number}") == number for name in "ab" for number in range(30))


def test_threads_may_share_one(tmp_path: Path) -> None:
    cache = CostCache(tmp_path, HERE)

    def fill(name: str) -> None:
        for number in range(20):
            cache.put(f"{name}{number}", float(number))
            cache.save()

    threads = [threading.Thread(target=fill, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = CostCache(tmp_path, HERE)
    assert all(again.get(f"{name}{number}") == number for name in "abc" for number in range(20))


def test_a_lock_that_is_never_given_back_does_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_LOCK_SECONDS", 0.05)
    with CacheDirectory.open(tmp_path) as directory, directory.locked("costs.lock", 0.05):
        filled(tmp_path, mm=1.0)
    assert CostCache(tmp_path, HERE).get("mm") == 1.0


def test_a_directory_that_cannot_be_made_is_told_and_borne(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CostCache(tmp_path / "file" / "cache", HERE)
    cache.put("mm", 1.0)
    note = cache.save()
    assert note is not None
    assert str(tmp_path) in note
    assert cache.get("mm") == 1.0


def test_a_disk_that_is_full_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(tmp_path, mm=1.0)

    def full(*args: object, **_: object) -> None:
        raise OSError(28, "No space left on device")

    cache.put("conv", 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert "No space" in str(cache.save())
    assert not list(tmp_path.glob("*.tmp"))
    assert CostCache(tmp_path, HERE).get("mm") == 1.0
    assert cache.save() is None, "tried again"
    assert CostCache(tmp_path, HERE).get("conv") == 2.0


def test_a_directory_in_its_place_is_an_empty_cache(tmp_path: Path) -> None:
    filled(tmp_path, mm=1.0)
    path = only_file(tmp_path)
    path.unlink()
    path.mkdir()
    cache = CostCache(tmp_path, HERE)
    assert cache.get("mm") is None
    cache.put("mm", 2.0)
    assert cache.save() is not None


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "second name", "socket"])
def test_a_special_file_in_its_place_is_an_empty_cache_and_is_replaced(tmp_path: Path, kind: str) -> None:
    """It is not waited for, and nothing is written through it."""
    path = only_file(filled(tmp_path / "cache", mm=1.0).path.parent)  # type: ignore[union-attr]
    special(path, kind)
    assert CostCache(path.parent, HERE).get("mm") is None
    filled(path.parent, conv=2.0)
    assert CostCache(path.parent, HERE).get("conv") == 2.0
    assert path.is_file()
    assert not path.is_symlink()
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "second name", "socket", "directory"])
def test_a_special_file_in_place_of_the_lock_is_told_and_borne(tmp_path: Path, kind: str) -> None:
    """It is not waited for, and the target of a link is not made."""
    lock = filled(tmp_path / "cache", mm=1.0).path.with_name("costs.lock")  # type: ignore[union-attr]
    special(lock, kind)
    cache = CostCache(lock.parent, HERE)
    assert cache.get("mm") == 1.0
    cache.put("conv", 2.0)
    note = cache.save()
    assert note is not None
    assert "costs.lock" in note
    assert not (tmp_path / "missing").exists()
    assert cache.get("conv") == 2.0


def special(path: Path, kind: str) -> None:
    """Puts something else in place of a file, which has another name from then on."""
    other = path.parent.parent / "other"
    path.rename(other)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "dangling link":
        path.symlink_to(other.with_name("missing"))
    elif kind == "second name":
        path.hardlink_to(other)
    elif kind == "directory":
        path.mkdir()
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)


def test_where_others_can_write_nothing_is_read_or_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_files._tell.cache_clear()
    filled(tmp_path / "cache", mm=1.0)
    (tmp_path / "cache").chmod(0o777)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    cache = CostCache(tmp_path / "cache", HERE)
    assert cache.get("mm") is None
    cache.put("conv", 2.0)
    note = cache.save()
    assert note is not None
    assert "others can write" in note
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == before
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    (tmp_path / "cache").chmod(0o700)
    assert CostCache(tmp_path / "cache", HERE).get("mm") == 1.0


def test_it_is_made_for_the_user_alone(tmp_path: Path) -> None:
    earlier = os.umask(0)
    try:
        filled(tmp_path / "a" / "cache", mm=1.0)
    finally:
        os.umask(earlier)
    made = [tmp_path / "a", tmp_path / "a" / "cache", *(tmp_path / "a" / "cache").iterdir()]
    assert len(made) == 4
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)


def test_the_directory_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KITSUNE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "kitsune"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "kitsune"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "kitsune"
    monkeypatch.setenv("KITSUNE_CACHE_DIR", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    assert CostCache.of(CPU).path is not None
    assert CostCache.of(CPU).path.parent == tmp_path / "mine"  # type: ignore[union-attr]


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KITSUNE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_dir() is None
    assert CostCache.of(CPU).save() is None


def test_the_identity_names_device_and_software() -> None:
    facts = identity(CPU)
    assert facts["device"].startswith("cpu ")
    assert facts["torch"] == torch.__version__
    assert set(facts) == {"device", "threads", "torch", "triton", "kitsune"}
    assert identity(CPU) == facts


@pytest.fixture
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a device and of its software is as on a GPU of some kind."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90100)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    say_of_driver(monkeypatch, "580.1")


def say_of_driver(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    read_text = Path.read_text

    def read(path: Path, **options: Any) -> str:
        of_driver = path == Path("/proc/driver/nvidia/version")
        return f"NVRM version: NVIDIA {version}\nGCC version: 14\n" if of_driver else read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", read)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "device": lambda patch: patch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU"),
    "capability": lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 1)),
    "driver": lambda patch: say_of_driver(patch, "590.2"),
    "cuda": lambda patch: patch.setattr(torch.version, "cuda", "13.1"),
    "cudnn": lambda patch: patch.setattr(torch.backends.cudnn, "version", lambda: 90200),
    "torch": lambda patch: patch.setattr(torch, "__version__", "3.0"),
    "triton": lambda patch: patch.setattr(identity_module, "_triton_version", lambda: "4.0"),
    "kitsune": lambda patch: patch.setattr(identity_module, "_digest_of_sources", lambda: "other sources"),
}


@pytest.mark.usefixtures("_a_gpu")
def test_times_of_a_gpu_are_not_used_where_anything_else_is_there(tmp_path: Path) -> None:
    here = identity(torch.device("cuda"))
    assert identity(torch.device("cuda")) == here
    assert set(here) == set(CHANGES)
    times = CostCache(tmp_path, here)
    times.put("add", 1.5)
    assert times.save() is None
    assert CostCache(tmp_path, here).get("add") == 1.5
    for part, change in CHANGES.items():
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            there = identity(torch.device("cuda"))
        assert CostCache(tmp_path, there).get("add") is None, part


@pytest.mark.gpu
def test_the_identity_of_a_gpu_names_its_driver() -> None:
    facts = identity(torch.device("cuda"))
    assert facts["device"] == torch.cuda.get_device_name()
    assert set(facts) == {"device", "capability", "driver", "cuda", "cudnn", "torch", "triton", "kitsune"}
    assert facts["driver"]
