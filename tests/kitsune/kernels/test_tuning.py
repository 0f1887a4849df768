"""The choice between forms of a kernel, with times that the test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from kitsune.kernels import tuning
from kitsune.kernels.tuning import choose
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

    def device_us(self, run: Callable[[], object], _device: torch.device, *, limit_s: float) -> float:
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
        tuning._costs.cache_clear()
        tuning._chosen.clear()
        monkeypatch.setattr(tuning, "device_us", device.device_us)
        monkeypatch.setattr(tuning, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        return device

    monkeypatch.setattr(CostCache, "of", classmethod(lambda cls, _device: cls(tmp_path, HERE)))
    yield make
    tuning._costs.cache_clear()
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
