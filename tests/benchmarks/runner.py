"""Times plain PyTorch training of one model with the harness's own variants and timer."""

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from harness import memory, variants
from harness.timer import synchronize, time_block
from harness.variants.building import start
from harness.variants.training import ingredients
from tests.benchmarks.models import workload_of

_BLOCKS = 10


@dataclass(frozen=True)
class BenchmarkConfig:
    """How a model is trained and for how long.

    ``device`` is "cpu" or "cuda" with an optional index; None takes the GPU where there is one.
    """

    batch_size: int = 64
    num_iterations: int = 100
    num_warmup: int = 10
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_iterations", "num_warmup"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class BenchmarkResult:
    """Seconds per iteration of each timed block, and what training came to.

    Peaks are bytes in the steady state: allocated on the GPU, else the process's resident set.
    """

    model: str
    device: str
    config: BenchmarkConfig
    iteration_s: tuple[float, ...]
    peak_bytes: int
    final_loss: float

    @property
    def median_s(self) -> float:
        """Seconds of a typical iteration."""
        return statistics.median(self.iteration_s)

    @property
    def samples_per_second(self) -> float:
        """Training throughput."""
        return self.config.batch_size / self.median_s

    def summary(self) -> str:
        """The result in a few lines for a person."""
        milliseconds = [seconds * 1e3 for seconds in (self.median_s, min(self.iteration_s), max(self.iteration_s))]
        return "\n".join(
            (
                f"{self.model}, batch {self.config.batch_size}, eager float32 on {self.device}",
                "  iteration   {:.3f} ms (blocks from {:.3f} to {:.3f} ms)".format(*milliseconds),
                f"  throughput  {self.samples_per_second:,.0f} samples/s",
                f"  peak        {self.peak_bytes / 2**20:,.0f} MiB",
                f"  final loss  {self.final_loss:.4f}",
            )
        )


def run_baseline_benchmark(model: nn.Module, config: BenchmarkConfig | None = None) -> BenchmarkResult:
    """Trains a model of :mod:`tests.benchmarks.models` by a plain loop and times it in blocks of iterations.

    Raises:
        ValueError: the model is not one of those.
    """
    config = config or BenchmarkConfig()
    workload = workload_of(model)
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    variant = variants.get("eager_fp32")
    training = start(variant, ingredients(variant, workload, config.batch_size, device))
    training.run(config.num_warmup)
    synchronize(device)
    memory.reset_peak(device)
    count = min(_BLOCKS, config.num_iterations)
    sizes = [config.num_iterations // count + (index < config.num_iterations % count) for index in range(count)]
    times = tuple(time_block(training.run, size, device).wall_s for size in sizes)
    peak = memory.peak(device)
    return BenchmarkResult(
        model=workload.name,
        device=str(device),
        config=config,
        iteration_s=times,
        peak_bytes=peak.rss_bytes if peak.allocated_bytes is None else peak.allocated_bytes,
        final_loss=training.run(1).item(),
    )
