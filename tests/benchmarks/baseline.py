"""``python -m tests.benchmarks.baseline``: plain PyTorch training of every model, as a first look at a machine."""

import sys

import torch

from tests.benchmarks.models import create_lenet, create_mlp, create_resnet18, workload_of
from tests.benchmarks.runner import BenchmarkConfig, run_baseline_benchmark

_ITERATIONS = {"cpu": 20, "cuda": 100}


def main() -> int:
    """Prints a summary for each model at its default batch size."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for create in (create_mlp, create_lenet, create_resnet18):
        model = create()
        batch_size = workload_of(model).default_batch_size[device]
        config = BenchmarkConfig(batch_size=batch_size, num_iterations=_ITERATIONS[device], num_warmup=5)
        print(run_baseline_benchmark(model, config).summary(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
