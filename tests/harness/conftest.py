"""Tests of the harness judge what is kept, never how fast it is: one thread each lets them share a machine well."""

import threading
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def single_thread() -> Iterator[None]:
    """One thread in this process and in those it starts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture
def no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of libraries that other tests have started do nothing that a fork would hold for ever."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
