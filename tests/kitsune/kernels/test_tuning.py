"""The choice between forms of a kernel, with times that the test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitsune.kernels import tuning
from kitsune.kernels.tuning import Compilers, NotChosenYet, choose
from kitsune.timing import CostCache

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HERE = {"device": "test", "torch": "2"}

Times = Mapping[str, float | Exception]


class Device:
    """Runs forms, which take the times that it is given, or raise; counts what is timed."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.timed: list[str] = []
        self.runs: list[tuple[str, threading.Thread]] = []

    def run(self, form: str) -> None:
        self.runs.append((form, threading.current_thread()))
        if isinstance(found := self.times[form], Exception):
            raise found

    def device_us(self, run: Callable[[], object], _device: torch.device, *, limit_s: float, rival_us: float) -> float:
        assert 0 < limit_s < 1
        run()
        form, _ = self.runs[-1]
        self.timed.append(form)
        us = self.times[form]
        assert isinstance(us, float)
        return us


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Times], Device]]:
    def make(times: Times) -> Device:
        """A process of its own, as far as choices are remembered."""
        device = Device(times)
        tuning._chosen.clear()
        monkeypatch.setattr(tuning, "device_us", device.device_us)
        monkeypatch.setattr(tuning, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        return device

    monkeypatch.setattr(CostCache, "of", classmethod(lambda cls, _device: cls(tmp_path, HERE)))
    yield make
    tuning._chosen.clear()


def test_the_fastest_is_chosen_and_timed_once(device: Callable[[Times], Device]) -> None:
    gpu = device({"small": 3.0, "middle": 1.0, "large": 2.0})
    for _ in range(3):
        assert choose("mm 64x64", ("small", "middle", "large"), gpu.run, CUDA) == "middle"
    assert gpu.timed == ["small", "middle", "large"]
    assert sorted(form for form, thread in gpu.runs if thread is not threading.main_thread()) == sorted(gpu.timed)


def test_other_keys_and_other_devices_are_other_choices(device: Callable[[Times], Device]) -> None:
    gpu = device({"small": 3.0, "large": 2.0})
    assert choose("mm 64x64", ("small", "large"), gpu.run, CUDA) == "large"
    gpu.times = {"small": 1.0, "large": 2.0}
    assert choose("mm 8x8", ("small", "large"), gpu.run, CUDA) == "small"
    assert choose("mm 64x64", ("small", "large"), gpu.run, CUDA) == "large"


def test_another_process_finds_the_times_on_disk(device: Callable[[Times], Device]) -> None:
    gpu = device({"small": 3.0, "large": 2.0})
    choose("mm", ("small", "large"), gpu.run, CUDA)
    gpu = device({})
    assert choose("mm", ("small", "large"), gpu.run, CUDA) == "large"
    assert gpu.timed == gpu.runs == []


def test_a_form_that_does_not_work_is_passed_over(device: Callable[[Times], Device]) -> None:
    class OutOfResources(Exception):
        """Triton's is no RuntimeError either."""

    gpu = device({"small": 3.0, "large": OutOfResources("out of resource: shared memory")})
    assert choose("mm", ("large", "small"), gpu.run, CUDA) == "small"
    assert gpu.timed == ["small"]


def test_where_none_works_all_reasons_are_told(device: Callable[[Times], Device]) -> None:
    """That of the first form at the front, and of each the first line."""
    reason = ValueError("no code\nat line 3")
    gpu = device({"small": reason, "large": RuntimeError("out of resource")})
    told = "on cuda:0: ValueError: no code for 'small'; RuntimeError: out of resource for 'large'; the kernel is mm 8x8"
    with pytest.raises(RuntimeError, match=told) as raised:
        choose("mm 8x8", ("small", "large"), gpu.run, CUDA)
    assert raised.value.__cause__ is reason


def test_what_may_pass_is_the_cause_before_what_a_compiler_refuses(device: Callable[[Times], Device]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.errors import OutOfResources  # Triton is optional

    refused, passing = OutOfResources(2, 1, "shared memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
    for times, cause in (({"large": refused}, refused), ({"large": refused, "small": passing}, passing)):
        gpu = device({"other": refused, **times})
        with pytest.raises(RuntimeError, match="no form") as raised:
            choose("mm", tuple(gpu.times), gpu.run, CUDA)
        assert raised.value.__cause__ is cause


def test_too_little_memory_is_no_matter_of_the_form(device: Callable[[Times], Device]) -> None:
    gpu = device({"small": 3.0, "large": torch.OutOfMemoryError("CUDA out of memory")})
    with pytest.raises(torch.OutOfMemoryError):
        choose("mm", ("small", "large"), gpu.run, CUDA)
    gpu.times = {"small": 3.0, "large": 2.0}
    assert choose("mm", ("small", "large"), gpu.run, CUDA) == "large"


def test_a_launch_that_does_not_fit_its_kernel_is_no_matter_of_the_form(device: Callable[[Times], Device]) -> None:
    gpu = device({"small": 3.0, "large": TypeError("got multiple values for argument 'depth'")})
    with pytest.raises(TypeError, match="multiple values for argument 'depth'"):
        choose("mm", ("small", "large"), gpu.run, CUDA)
    assert gpu.timed == []


def test_on_the_cpu_and_without_a_choice_nothing_is_timed(device: Callable[[Times], Device]) -> None:
    gpu = device({})
    assert choose("mm", ("small", "large"), gpu.run, CPU) == "small"
    assert choose("mm", ("only",), gpu.run, CUDA) == "only"
    assert gpu.timed == gpu.runs == []


def test_ahead_all_forms_are_compiled_at_the_same_time_and_none_is_timed(
    device: Callable[[Times], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, together = device({"small": 3.0, "middle": 1.0, "large": 2.0}), threading.Barrier(3)
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 3)

    def run(form: str) -> None:
        together.wait(timeout=60)
        gpu.run(form)

    with Compilers() as compilers, compilers.ahead():
        assert choose("mm", ("small", "middle", "large"), run, CUDA) == "small"
    assert sorted(form for form, _ in gpu.runs) == ["large", "middle", "small"]
    assert gpu.timed == []
    assert choose("mm", ("small", "middle", "large"), gpu.run, CUDA) == "middle", "a choice was remembered"
    assert gpu.timed == ["small", "middle", "large"]


def test_there_are_no_more_compilers_than_processors(
    device: Callable[[Times], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many threads have kernels compiled."""
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 2)
    forms = tuple(map(str, range(8)))
    gpu = device(dict.fromkeys(forms, 1.0))
    with Compilers() as compilers, ThreadPoolExecutor(4) as threads:

        def part(number: int) -> None:
            with compilers.ahead():
                choose(f"mm {number}", forms, gpu.run, CUDA)

        list(threads.map(part, range(4)))
    assert len(gpu.runs) == 4 * len(forms)
    assert len({thread for _, thread in gpu.runs}) <= 2


@pytest.mark.parametrize("ahead", [False, True])
def test_the_compile_server_is_there_for_what_is_not_known(
    ahead: bool, device: Callable[[Times], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    elsewhere: list[bool] = []
    monkeypatch.setattr(tuning.compile_client, "start", lambda: started.append(True))
    gpu = device({"small": 3.0, "large": 2.0})

    def run(form: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            elsewhere.append(tuning.compile_client._elsewhere.get())
        gpu.run(form)

    for _ in range(2):
        with Compilers() as compilers, compilers.ahead() if ahead else nullcontext():
            choose("mm", ("small", "large"), run, CUDA)
        if ahead:
            choose("mm", ("small", "large"), run, CUDA)
    assert started == [True] * (2 if ahead else 1), "once for each time that forms are compiled"
    assert elsewhere
    assert all(elsewhere)


def test_ahead_is_of_the_thread_that_says_so(device: Callable[[Times], Device]) -> None:
    gpu = device({"small": 3.0, "large": 2.0})
    with Compilers() as compilers, compilers.ahead(), ThreadPoolExecutor(1) as other:
        assert other.submit(choose, "mm", ("small", "large"), gpu.run, CUDA).result() == "large"
    assert gpu.timed == ["small", "large"]


def test_ahead_of_what_is_known_only_the_choice_is_compiled(device: Callable[[Times], Device]) -> None:
    """Known to this process, or on disk."""
    gpu = device({"small": 3.0, "large": 2.0})
    choose("mm", ("small", "large"), gpu.run, CUDA)
    for forget in (False, True):
        gpu = device({"large": 2.0}) if forget else gpu
        gpu.runs.clear()
        with Compilers() as compilers, compilers.ahead():
            for _ in range(2):  # variants
                assert choose("mm", ("small", "large"), gpu.run, CUDA) == "large"
        assert [form for form, _ in gpu.runs] == ["large", "large"]


def test_ahead_the_second_variant_waits_for_the_choice(device: Callable[[Times], Device]) -> None:
    gpu = device({"small": 3.0, "large": 2.0})
    with Compilers() as compilers, compilers.ahead():
        choose("mm", ("small", "large"), gpu.run, CUDA)
        with pytest.raises(NotChosenYet):
            choose("mm", ("small", "large"), gpu.run, CUDA)
    assert len(gpu.runs) == 2


def test_ahead_a_form_that_does_not_work_is_passed_over(device: Callable[[Times], Device]) -> None:
    reason = ValueError("no code")
    gpu = device({"small": reason, "large": 2.0})
    with Compilers() as compilers, compilers.ahead():
        assert choose("mm", ("small", "large"), gpu.run, CUDA) == "large"
        with pytest.raises(RuntimeError, match="no form of a kernel works") as raised:
            choose("of one form that works nowhere", ("small", "small"), gpu.run, CUDA)
    assert raised.value.__cause__ is reason


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), TypeError("two values")])
def test_ahead_nothing_runs_any_more_when_a_run_fails(error: Exception, device: Callable[[Times], Device]) -> None:
    gpu = device({"small": error, "large": 2.0})
    with Compilers() as compilers, compilers.ahead():
        with pytest.raises(type(error)):
            choose("mm", ("small", "large"), gpu.run, CUDA)
        ran = len(gpu.runs)
    assert len(gpu.runs) == ran


def test_who_waits_for_stopped_compilers_is_told(
    device: Callable[[Times], Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = device({"small": 3.0, "large": 2.0})
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 1)
    with Compilers() as compilers, compilers.ahead():

        def run(form: str) -> None:
            compilers.stop()
            gpu.run(form)

        with pytest.raises(CancelledError):
            choose("mm", ("small", "large"), run, CUDA)
    assert [form for form, _ in gpu.runs] == ["small"]


def test_what_the_compiler_refuses_is_not_tried_by_another_process(device: Callable[[Times], Device]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.errors import OutOfResources  # Triton is optional

    passing = RuntimeError("it may pass")
    gpu = device({"large": OutOfResources(2, 1, "shared memory"), "middle": passing, "small": 3.0})
    assert choose("mm", tuple(gpu.times), gpu.run, CUDA) == "small"
    gpu = device({"large": 1.0, "middle": 2.0, "small": 3.0})
    assert choose("mm", tuple(gpu.times), gpu.run, CUDA) == "middle"
    assert gpu.timed == ["middle"]


def test_where_what_may_pass_fails_nothing_is_chosen_that_the_compiler_refuses(
    device: Callable[[Times], Device],
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.errors import OutOfResources  # Triton is optional

    gpu = device({"large": OutOfResources(2, 1, "shared memory"), "small": 3.0})
    choose("mm", ("large", "small"), gpu.run, CUDA)
    passing = RuntimeError("it may pass")
    gpu = device({"other": passing})
    with pytest.raises(RuntimeError, match="no form of a kernel works") as raised:
        choose("mm", ("large", "other"), gpu.run, CUDA)
    assert raised.value.__cause__ is passing


def poisoned(forms: Sequence[str], us: float, folder: Path) -> None:
    """A file that says the same of all forms, as no process has written it."""
    cache = CostCache(folder, HERE)
    for entry in tuning._entries("mm", forms):
        cache.put(entry, us)
    assert cache.save() is None


@pytest.mark.parametrize("us", [tuning._NEVER_US, 9e11])
def test_a_file_that_says_that_no_form_works_is_not_believed(
    us: float, device: Callable[[Times], Device], tmp_path: Path
) -> None:
    gpu = device({"small": 3.0, "large": 2.0})
    poisoned(tuple(gpu.times), us, tmp_path)
    with Compilers() as compilers, compilers.ahead():
        assert choose("mm", tuple(gpu.times), gpu.run, CUDA) == "small", "of those that work"
    assert choose("mm", tuple(gpu.times), gpu.run, CUDA) == "large"
    gpu = device({})
    assert choose("mm", ("small", "large"), gpu.run, CUDA) == "large", "what was timed is kept"


def test_where_no_form_works_indeed_that_is_said(device: Callable[[Times], Device], tmp_path: Path) -> None:
    gpu = device({"small": ValueError("no code"), "large": RuntimeError("none")})
    poisoned(tuple(gpu.times), tuning._NEVER_US, tmp_path)
    with pytest.raises(RuntimeError, match="no form of a kernel works"):
        choose("mm", tuple(gpu.times), gpu.run, CUDA)
    with Compilers() as compilers, compilers.ahead(), pytest.raises(RuntimeError, match="no form of a kernel works"):
        choose("mm", tuple(gpu.times), gpu.run, CUDA)


@given(times=st.lists(st.sampled_from([None, 0.0, 1.0, 5e-324, 1e10, tuning._NEVER_US, 9e11]), min_size=2, max_size=3))
def test_whatever_a_file_says_a_form_that_works_is_chosen(
    times: list[float | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, forms = tmp_path_factory.mktemp("cache"), tuple("abc"[: len(times)])
    cache = CostCache(folder, HERE)
    for entry, us in zip(tuning._entries("mm", forms), times, strict=True):
        if us is not None:
            cache.put(entry, us)
    cache.save()
    with pytest.MonkeyPatch.context() as patch:
        gpu = Device(dict.fromkeys(forms, 2.0))
        tuning._chosen.clear()
        patch.setattr(tuning, "device_us", gpu.device_us)
        patch.setattr(tuning, "synchronize", lambda device: None)
        patch.setattr(tuning.compile_client, "start", lambda: None)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(CostCache, "of", classmethod(lambda cls, _device: cls(folder, HERE)))
        with Compilers() as compilers, compilers.ahead():
            assert choose("mm", forms, gpu.run, CUDA) in forms
        assert choose("mm", forms, gpu.run, CUDA) in forms
    tuning._chosen.clear()
