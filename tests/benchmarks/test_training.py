"""``pytest tests/benchmarks -m benchmark``: training steps of the harness's variants under pytest-benchmark."""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import models
from harness import variants
from harness.timer import synchronize
from harness.variants.availability import unavailable
from harness.variants.building import start
from harness.variants.training import prepare

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_BLOCKS = 5
_STEPS_TO_SETTLE = 50  # within them every variant has decided how it runs


@pytest.mark.benchmark
@pytest.mark.parametrize("variant", [name for name in variants.names() if not name.startswith("compile")])
@pytest.mark.parametrize("model", models.names())
def test_training_steps(benchmark: BenchmarkFixture, model: str, variant: str) -> None:
    chosen = variants.get(variant)
    reason = unavailable(chosen, DEVICE, None)
    if reason is not None:
        pytest.skip(reason)
    batch_size = models.build(model).default_batch_size[DEVICE.type]
    training = start(chosen, prepare(chosen, model, batch_size, DEVICE))
    for _ in range(_STEPS_TO_SETTLE):
        training.run(1)
        if training.settled:
            break
    steps = 50 if DEVICE.type == "cuda" else 5

    def block() -> None:
        training.run(steps)
        synchronize(DEVICE)

    benchmark.group = f"{model}, batch {batch_size}, {chosen.precision}, {steps} steps"
    benchmark.pedantic(block, rounds=_BLOCKS, warmup_rounds=1)  # type: ignore[no-untyped-call]
