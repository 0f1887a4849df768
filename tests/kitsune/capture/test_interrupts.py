"""Ctrl-C while something is captured."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from kitsune.capture.interrupts import held_interrupts
from kitsune.capture.sole import sole_capture


@pytest.fixture(autouse=True)
def _pythons_own() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_comes_at_the_end() -> None:
    done = []

    def capture() -> None:
        with sole_capture(), sole_capture():
            interrupt()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        capture()
    assert done


def test_the_second_one_comes_at_once() -> None:
    done = []

    def hold() -> None:
        with held_interrupts():
            interrupt()
            done.append(1)
            interrupt()
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        hold()
    assert done == [1]


def test_an_error_comes_with_it() -> None:
    def fail() -> None:
        with held_interrupts():
            interrupt()
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as raised:
        fail()
    assert isinstance(raised.value.__context__, ValueError)


def test_a_handler_of_the_users_is_called_once() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    with held_interrupts():
        interrupt()
        assert not calls
    interrupt()
    assert calls == [signal.SIGINT] * 2
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_is_installed_meanwhile_stays() -> None:
    with held_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_signals_that_are_ignored_and_other_threads_are_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = []

    def hold() -> None:
        with held_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
