"""Benchmarks to call from Python or pytest, on top of :mod:`harness`; its full measurement is ``make bench``."""

from tests.benchmarks.runner import BenchmarkConfig, BenchmarkResult, run_baseline_benchmark

__all__ = ["BenchmarkConfig", "BenchmarkResult", "run_baseline_benchmark"]
