"""What disturbs a measurement: the GPU's clocks, temperature and power, and what else the host is doing.

The GPU is asked through NVML, the driver's own library, by ctypes: it is there wherever the driver is, and no package
is needed. Nothing here ever fails: what cannot be read is said to be unavailable, and why.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_TEMPERATURE_OF_GPU = 0
_CLOCK_OF_SM = 1

REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
    0x100: "display clocks",
}
"""NVML's clock-event reasons (``nvmlClocksEventReasons``)."""

THROTTLING = 0x8 | 0x20 | 0x40 | 0x80
"""Reasons that spoil a measurement. A power cap is none: where a step draws that much it is part of the device, it
holds for all variants, and no repetition would be without it; it is recorded."""


@dataclass(frozen=True)
class GpuState:
    """One reading: temperature in °C, power in W, the SMs' clock in MHz; None is what this GPU does not tell."""

    reasons: int
    temperature_c: int | None
    power_w: float | None
    clock_mhz: int | None

    @property
    def is_throttled(self) -> bool:
        """Whether the GPU protects itself just now."""
        return bool(self.reasons & THROTTLING)


class Gpu(Protocol):
    """Something that gives readings of a GPU."""

    def read(self) -> GpuState: ...


class Nvml:
    """One GPU, as NVML knows it.

    Args:
        uuid: the GPU's, as ``nvidia-smi -L`` prints it.
        load: opens a shared library by its name.

    Raises:
        OSError: there is no NVML, or it does not know the GPU; the message says which.
    """

    def __init__(self, uuid: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> None:
        self._library = load(_LIBRARY)
        self._handle = ctypes.c_void_p()
        status = self._library.nvmlInit_v2()
        if status == _SUCCESS:
            status = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle))
        if status != _SUCCESS:
            raise OSError(f"NVML does not give access to the GPU {uuid} (code {status})")

    def read(self) -> GpuState:
        """The state just now; some microseconds to a millisecond."""
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", ctypes.c_ulonglong())
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong())
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint())
        return GpuState(
            reasons=reasons or 0,
            temperature_c=self._ask("nvmlDeviceGetTemperature", ctypes.c_uint(), _TEMPERATURE_OF_GPU),
            power_w=None if milliwatts is None else milliwatts / 1000,
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint(), _CLOCK_OF_SM),
        )

    def _ask(self, name: str, answer: ctypes.c_uint | ctypes.c_ulonglong, *arguments: int) -> int | None:
        """A number from a function of NVML; None where this driver has no such function or this GPU no such number."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return None
        return answer.value if function(self._handle, *arguments, ctypes.byref(answer)) == _SUCCESS else None


class GpuWatch:
    """Watches a GPU over a round.

    Args:
        gpu: where readings come from; a text says why there are none.
    """

    def __init__(self, gpu: Gpu | str) -> None:
        self._gpu = gpu
        self._states: list[GpuState] = []

    def is_throttled(self) -> bool:
        """Reads once more; whether the GPU protects itself just now."""
        if isinstance(self._gpu, str):
            return False
        self._states.append(self._gpu.read())
        return self._states[-1].is_throttled

    def summary(self) -> dict[str, object]:
        """What the readings said, as JSON can hold it: which reasons, and the least and the most of each number."""
        if isinstance(self._gpu, str):
            return {"unavailable": self._gpu}
        reasons = 0
        for state in self._states:
            reasons |= state.reasons
        return {
            "readings": len(self._states),
            "reasons": [name for bit, name in REASONS.items() if reasons & bit],
            "temperature_c": _range([state.temperature_c for state in self._states]),
            "power_w": _range([state.power_w for state in self._states]),
            "clock_mhz": _range([state.clock_mhz for state in self._states]),
        }


def watch(device_type: str) -> GpuWatch:
    """Watches torch's current GPU, or says why it cannot. Expects that the device has been started."""
    if device_type != "cuda":
        return GpuWatch("measured on the CPU")
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        return GpuWatch(Nvml(uuid))
    except OSError as error:
        return GpuWatch(str(error))


class HostWatch:
    """Notes what else the host does from now on.

    Args:
        stat: the kernel's counters of CPU time.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._begin = time.monotonic()
        self._own = resource.getrusage(resource.RUSAGE_SELF)
        self._counters = _cpu_seconds(stat)

    def summary(self) -> dict[str, object]:
        """Up to now, as JSON can hold it.

        ``busy_elsewhere`` is the share of all cores' time that other processes used and ``stolen`` that which the
        hypervisor gave to others (None where the kernel does not tell); ``preemptions`` is how often this process had
        to give way; ``load_1min`` the load average.
        """
        now = resource.getrusage(resource.RUSAGE_SELF)
        own_s = now.ru_utime + now.ru_stime - self._own.ru_utime - self._own.ru_stime
        counters, cores = _cpu_seconds(self._stat), os.cpu_count() or 1
        busy_elsewhere = stolen = None
        if counters is not None and self._counters is not None:
            available_s = max(1e-3, (time.monotonic() - self._begin) * cores)
            busy_s, stolen_s = (after - before for after, before in zip(counters, self._counters, strict=True))
            busy_elsewhere = round(min(1.0, max(0.0, (busy_s - own_s) / available_s)), 4)
            stolen = round(min(1.0, max(0.0, stolen_s / available_s)), 4)
        return {
            "busy_elsewhere": busy_elsewhere,
            "stolen": stolen,
            "preemptions": now.ru_nivcsw - self._own.ru_nivcsw,
            "load_1min": round(os.getloadavg()[0], 2),
        }


def _cpu_seconds(stat: Path) -> tuple[float, float] | None:
    """Seconds that all cores together were busy and that were stolen since the start of the system."""
    try:
        fields = stat.read_text(encoding="ascii").splitlines()[0].split()
        user, nice, system, _, _, interrupts, soft, steal = (int(field) for field in fields[1:9])
    except (OSError, ValueError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupts + soft) / ticks, steal / ticks


def _range(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
