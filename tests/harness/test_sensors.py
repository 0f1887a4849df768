import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import sensors
from harness.sensors import GpuState, GpuWatch, HostWatch, Nvml

UUID = "GPU-1b2c"


ANSWERS = {
    "nvmlDeviceGetCurrentClocksEventReasons": 0x44,
    "nvmlDeviceGetPowerUsage": 412_500,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1755,
}


class Library:
    """An NVML that knows one GPU and answers with fixed numbers."""

    def __init__(self, missing: tuple[str, ...] = (), refused: tuple[str, ...] = ()) -> None:
        self.missing, self.refused = missing, refused

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise AttributeError(name)
        if name == "nvmlInit_v2":
            return lambda: 0
        if name == "nvmlDeviceGetHandleByUUID":
            return lambda uuid, handle: 0 if uuid == UUID.encode() else 6
        if name == "nvmlDeviceGetCurrentClocksThrottleReasons":
            return self.answering(0x8)
        return self.answering(ANSWERS[name], 3 if name in self.refused else 0)

    @staticmethod
    def answering(value: int, status: int = 0) -> Any:
        def function(handle: object, *arguments: Any) -> int:
            arguments[-1]._obj.value = value
            return status

        return function


def nvml(**options: tuple[str, ...]) -> Nvml:
    return Nvml(UUID, lambda name: Library(**options))  # type: ignore[arg-type,return-value]


def test_a_reading_has_units() -> None:
    assert nvml().read() == GpuState(reasons=0x44, temperature_c=61, power_w=412.5, clock_mhz=1755)


def test_an_older_driver_is_asked_by_the_older_name() -> None:
    assert nvml(missing=("nvmlDeviceGetCurrentClocksEventReasons",)).read().reasons == 0x8


def test_what_a_gpu_does_not_tell_is_none() -> None:
    state = nvml(refused=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature")).read()
    assert (state.power_w, state.temperature_c, state.clock_mhz) == (None, None, 1755)


def test_an_unknown_gpu_and_a_missing_library_are_told() -> None:
    with pytest.raises(OSError, match="GPU-other"):
        Nvml("GPU-other", lambda name: Library())  # type: ignore[arg-type,return-value]
    with pytest.raises(OSError, match="libnvidia-ml"):
        Nvml(UUID, lambda name: ctypes.CDLL("no-such-" + name))


@pytest.mark.parametrize(
    ("reasons", "throttled"), [(0, False), (0x1, False), (0x4, False), (0x8, True), (0x20, True), (0x44, True)]
)
def test_only_protection_counts_as_throttling(reasons: int, throttled: bool) -> None:
    assert GpuState(reasons, None, None, None).is_throttled is throttled


class Readings:
    def __init__(self, *states: GpuState) -> None:
        self.states = list(states)

    def read(self) -> GpuState:
        return self.states.pop(0)


def test_a_watch_sums_up_its_readings() -> None:
    watch = GpuWatch(Readings(GpuState(0x4, 50, 300.0, 1980), GpuState(0x44, 70, None, 1200)))
    assert [watch.is_throttled(), watch.is_throttled()] == [False, True]
    assert watch.summary() == {
        "readings": 2,
        "reasons": ["power cap", "thermal slowdown by hardware"],
        "temperature_c": [50, 70],
        "power_w": [300.0, 300.0],
        "clock_mhz": [1200, 1980],
    }


def test_without_a_gpu_a_watch_says_why() -> None:
    watch = sensors.watch("cpu")
    assert not watch.is_throttled()
    assert watch.summary() == {"unavailable": "measured on the CPU"}


@pytest.mark.gpu
def test_this_gpu_is_read_or_said_to_be_unreadable() -> None:
    torch.zeros(1, device="cuda")
    watch = sensors.watch("cuda")
    watch.is_throttled()
    assert watch.summary().get("unavailable") or watch.summary()["readings"] == 1


def test_the_host_is_summed_up(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 900 0 0 0 0 0 0\n")
    watch = HostWatch(stat)
    watch._begin -= 10
    stat.write_text("cpu  200 0 200 900 0 0 0 50 0 0\n")
    found = watch.summary()
    assert isinstance(found["busy_elsewhere"], float)
    assert isinstance(found["stolen"], float)
    assert 0 < found["stolen"] < found["busy_elsewhere"] <= 1


def test_a_host_that_does_not_tell_is_no_error(tmp_path: Path) -> None:
    found = HostWatch(tmp_path / "absent").summary()
    assert found["busy_elsewhere"] is found["stolen"] is None
    assert isinstance(found["preemptions"], int)
