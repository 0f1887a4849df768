"""The interface, with runs too short to say anything about speed."""

import dataclasses

import pytest
from torch import nn

from tests.benchmarks import BenchmarkConfig, run_baseline_benchmark
from tests.benchmarks.models import create_lenet, create_mlp, create_resnet18, workload_of


@pytest.mark.parametrize(
    ("create", "name"), [(create_mlp, "mlp"), (create_lenet, "lenet"), (create_resnet18, "resnet18")]
)
def test_a_model_knows_its_workload(create: object, name: str) -> None:
    assert callable(create)
    model = create()
    assert isinstance(model, nn.Module)
    assert workload_of(model).name == name


def test_a_baseline_has_a_summary() -> None:
    config = BenchmarkConfig(batch_size=4, num_iterations=13, num_warmup=1, device="cpu")
    result = run_baseline_benchmark(create_mlp(), config)
    assert len(result.iteration_s) == 10
    assert min(result.iteration_s) <= result.median_s <= max(result.iteration_s)
    assert result.samples_per_second == 4 / result.median_s
    summary = result.summary()
    assert "mlp, batch 4, eager float32 on cpu" in summary
    assert "samples/s" in summary


def test_a_run_of_one_iteration_is_one_block() -> None:
    result = run_baseline_benchmark(create_mlp(), BenchmarkConfig(batch_size=2, num_iterations=1, device="cpu"))
    assert len(result.iteration_s) == 1


def test_a_model_from_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="create_mlp"):
        run_baseline_benchmark(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["batch_size", "num_iterations", "num_warmup"])
def test_a_config_is_checked(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(BenchmarkConfig(), **{name: 0})
