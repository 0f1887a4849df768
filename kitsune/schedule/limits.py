"""What a device can do at most, as far as the cost of an operator depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# One product for each compute capability, from NVIDIA's data sheets (dense, boost clocks): multiprocessors; TFLOP/s of
# matrix products in float16 or bfloat16, TF32, float32, float64; GB/s.
_PRODUCTS = {
    (7, 0): (80, 125.0, 15.7, 15.7, 7.8, 900.0),  # V100 SXM2
    (7, 5): (40, 65.0, 8.1, 8.1, 0.25, 320.0),  # T4
    (8, 0): (108, 312.0, 156.0, 19.5, 19.5, 2039.0),  # A100 80 GB
    (8, 6): (84, 154.8, 77.4, 38.7, 0.6, 768.0),  # RTX A6000
    (8, 9): (142, 362.0, 183.0, 91.6, 1.4, 864.0),  # L40S
    (9, 0): (132, 989.4, 494.7, 66.9, 66.9, 4800.0),  # H200
    (10, 0): (148, 2250.0, 1125.0, 80.0, 40.0, 8000.0),  # B200
    (12, 0): (170, 209.5, 104.8, 104.8, 1.64, 1792.0),  # RTX 5090
}

# Measured on an H200 against its data sheet: a bfloat16 matrix product, 782 of 989.4 TFLOP/s; a copy, 4.26 of 4.8 TB/s.
_ARITHMETIC_REACHED = 782 / 989.4
_BANDWIDTH_REACHED = 4.26 / 4.8

_CPU_CORE_FLOPS = 50e9  # half of what two 8-wide fused multiply-adds a cycle give at 3 GHz
_CPU_CORE_BYTES = 10e9  # of eight channels of DDR4 shared by 20 cores
_CPU_GRAIN = 32_768  # at::internal::GRAIN_SIZE: elements for which torch uses one thread


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of a device, as reached by good kernels.

    Attributes:
        name: of the device.
        bytes_per_s: memory traffic, read and written together.
        half_flops: floating-point operations a second of matrix products in float16 and bfloat16.
        tf32_flops: the same in TF32.
        single_flops: the same in float32.
        double_flops: the same in float64.
        launch_us: from one kernel to the next that depends on it, the smallest kernel included.
        sync_us: what a fork to another stream, or a join, adds.
        num_multiprocessors: parts of the device, of which an operator uses at least one; threads on the CPU.
        parallel_items: elements of results in work at once when the device is full.
        tf32_matmul: whether matrix products of float32 are computed in TF32.
        tf32_convolution: whether convolutions of float32 are.
    """

    name: str
    bytes_per_s: float
    half_flops: float
    tf32_flops: float
    single_flops: float
    double_flops: float
    launch_us: float
    sync_us: float
    num_multiprocessors: int
    parallel_items: int
    tf32_matmul: bool = False
    tf32_convolution: bool = False

    def flops_per_s(self, dtype: torch.dtype, *, convolution: bool) -> float:
        """Floating-point operations a second of matrix products or convolutions of `dtype`."""
        if dtype in (torch.float64, torch.complex128):
            return self.double_flops
        if dtype.itemsize < 4:
            return self.half_flops
        in_tf32 = self.tf32_convolution if convolution else self.tf32_matmul
        return self.tf32_flops if in_tf32 else self.single_flops


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of `device` under torch's present flags.

    A GPU is estimated from the data sheet of a product of its compute capability (or the closest older
    one), by the number of multiprocessors, and from the share of it that was measured on an H200: exact
    for that one, the right order of magnitude for others.
    """
    if device.type != "cuda":
        return cpu_limits(torch.get_num_threads())
    properties = torch.cuda.get_device_properties(device)
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return cuda_limits(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor,
        tf32_matmul=matmul.fp32_precision == "tf32",
        tf32_convolution=conv.fp32_precision == "tf32",
    )


def cuda_limits(
    name: str,
    capability: tuple[int, int],
    num_multiprocessors: int = 132,
    threads: int = 2048,
    *,
    tf32_matmul: bool = False,
    tf32_convolution: bool = True,
) -> DeviceLimits:
    """The limits of a GPU with `num_multiprocessors` of `threads` each; the defaults are an H200's and torch's.

    `launch_us` was measured on an H200 in a CUDA graph (a chain of dependent kernels), and `sync_us` too (parallel
    branches there). Elementwise kernels of torch compute four elements a thread; a multiprocessor full of them has
    as many elements as one tile of 64 by 128 of a matrix product has, so one figure serves both.
    """
    known = max((row for row in _PRODUCTS if row <= capability), default=min(_PRODUCTS))
    reference, half, tf32, single, double, gigabytes = _PRODUCTS[known]
    part = num_multiprocessors / reference
    flops = part * _ARITHMETIC_REACHED * 1e12
    return DeviceLimits(
        name=name,
        bytes_per_s=part * _BANDWIDTH_REACHED * gigabytes * 1e9,
        half_flops=half * flops,
        tf32_flops=tf32 * flops,
        single_flops=single * flops,
        double_flops=double * flops,
        launch_us=0.96,
        sync_us=1.0,
        num_multiprocessors=num_multiprocessors,
        parallel_items=num_multiprocessors * threads * 4,
        tf32_matmul=tf32_matmul,
        tf32_convolution=tf32_convolution,
    )


def cpu_limits(num_threads: int) -> DeviceLimits:
    """Rough limits of `num_threads` cores of a server: good enough to plan where no GPU is.

    An operator takes torch about 3 us to dispatch. There are no streams: `sync_us` is the price of a second
    thread's answer, about 10 us, which keeps a schedule from forking for little.
    """
    flops = num_threads * _CPU_CORE_FLOPS
    return DeviceLimits(
        name="cpu",
        bytes_per_s=num_threads * _CPU_CORE_BYTES,
        half_flops=flops / 2,  # converted to float32 and back
        tf32_flops=flops,
        single_flops=flops,
        double_flops=flops / 2,
        launch_us=3.0,
        sync_us=10.0,
        num_multiprocessors=num_threads,
        parallel_items=num_threads * _CPU_GRAIN,
    )
