"""A fixture for pytest-benchmark: ``kitsune_benchmark`` holds a training step with Kitsune against eager PyTorch.

    def test_step_is_faster(kitsune_benchmark):
        step = kitsune_benchmark(build)  # a function that returns a Workload
        assert step.verdict is not Verdict.SLOWER

pytest-benchmark's table shows the seconds of Kitsune's steps; eager's, the ratio with its interval and the verdict are
in ``extra_info``, and so in what ``--benchmark-json`` and ``--benchmark-autosave`` keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.step_comparison import Form, Precision, StepComparison, compare_step, typical

__all__ = ["KitsuneBenchmark", "kitsune_benchmark"]


class KitsuneBenchmark:
    """What the fixture is: call it once in a test."""

    def __init__(self, benchmark: BenchmarkFixture) -> None:
        self._benchmark = benchmark

    def __call__(
        self,
        build: Callable[[], object] | str,
        *,
        batch_size: int | None = None,
        form: Form = "trainstep",
        precision: Precision = "fp32",
        rounds: int = 3,
        margin: float = 0.03,
    ) -> StepComparison:
        """Measures in fresh processes; see :func:`harness.step_comparison.compare_step`, which gives the errors.

        Args:
            build: a function at the top of a file, which is imported anew in each process; or its source as a text.
        """
        source = build if isinstance(build, str) else _source_of(build)
        found: list[StepComparison] = []

        def measure() -> None:
            found.append(
                compare_step(
                    source, batch_size=batch_size, form=form, precision=precision, rounds=rounds, margin=margin
                )
            )

        self._benchmark.pedantic(measure, rounds=1, iterations=1)
        (comparison,) = found
        self._record(comparison)
        return comparison

    def _record(self, comparison: StepComparison) -> None:
        ratio = comparison.ratio
        self._benchmark.extra_info.update(
            {
                "case": comparison.case,
                "eager_s": typical(comparison.eager_s),
                "kitsune_s": typical(comparison.kitsune_s),
                "ratio": ratio.ratio,
                "low": ratio.low if ratio.has_interval else None,
                "high": ratio.high if ratio.has_interval else None,
                "rounds": ratio.rounds,
                "verdict": comparison.verdict.value,
            }
        )
        if self._benchmark.stats is not None:  # None where benchmarks are disabled
            self._benchmark.stats.stats.data[:] = comparison.kitsune_s


@pytest.fixture
def kitsune_benchmark(benchmark: BenchmarkFixture) -> KitsuneBenchmark:
    """Measures a training step with Kitsune against eager PyTorch, by the statistics of Kitsune's own benchmarks."""
    return KitsuneBenchmark(benchmark)


def _source_of(build: Callable[[], object]) -> str:
    file, name = inspect.getsourcefile(build), getattr(build, "__qualname__", "")
    if file is None or not name.isidentifier():
        raise ValueError(f"{build!r} is no function at the top of a file, where fresh processes could find it")
    return f"{file}:{name}"
