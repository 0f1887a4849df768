"""Triton's key of itself, made by a thread."""

from __future__ import annotations

import sys
import threading

import pytest

from kitsune.kernels.triton_key import make_ahead


def test_it_is_made_before_it_is_needed() -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    make_ahead()
    for thread in threading.enumerate():
        if thread.name == "kitsune-triton-key":
            thread.join(60)
    assert cache.triton_key.cache_info().currsize == 1


def test_without_triton_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    before = threading.active_count()
    make_ahead()
    assert threading.active_count() == before


def test_where_there_can_be_no_thread_whoever_needs_it_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    make_ahead()
