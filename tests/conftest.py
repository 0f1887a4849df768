"""What every test shares: a fixed seed, the skip of GPU tests, and the sizes of property-based runs."""

import os
import random
import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=1000, deadline=None)
settings.load_profile("default")


def pytest_configure() -> None:
    """Of several test processes, each has one core; all can be interrupted, as some tests do.

    What a shell runs in the background may have been started with interrupts ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds the global generators of Python and torch before each test; the value is the seed."""
    value = 0
    random.seed(value)
    torch.manual_seed(value)
    return value
