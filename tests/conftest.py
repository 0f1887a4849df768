"""What every test shares: a fixed seed, the skip of GPU tests, and the sizes of property-based runs."""

import logging
import os
import random
import signal
from typing import Any

import pytest
import torch
from hypothesis import settings

LONG = ("tests/kitsune/test_zoo.py", "tests/kitsune/test_parity.py", "tests/kitsune/differential/test_loops.py")
"""Files of long tests that share nothing: they start first, each test in any process that is free."""

settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=400, deadline=None, derandomize=False)
settings.load_profile("default")


def pytest_configure() -> None:
    """Of several test processes, each has one core; all can be interrupted, as some tests do.

    What a shell runs in the background may have been started with interrupts ignored. torch describes every capture
    at length to a log where anybody listens, as pytest does where a log does not propagate.
    """
    log = logging.getLogger("torch.__trace")
    log.propagate = True
    log.handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file run in one process, which makes once what they share; those in `LONG` run anywhere."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if nodeid.startswith(LONG) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith((*LONG, "tests/harness/test_asv.py")))
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
