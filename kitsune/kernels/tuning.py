"""Chooses between forms of a kernel by timing them on the user's device and shapes, once."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

import torch

from kitsune.device import leave_recordings_alone, synchronize
from kitsune.kernels import compile_client
from kitsune.timing import CostCache, device_us, trials

C = TypeVar("C")

_MOST_COMPILERS = 32  # more of them would wait for Python's lock

_NEVER_US = 1e11  # kept for forms that Triton refuses

_chosen: dict[tuple[str, torch.device], object] = {}


class NotChosenYet(Exception):
    """Which form of a kernel to compile is known once others, which are being compiled, have been timed."""


class Compilers:
    """Threads that compile forms of kernels, no more of them at a time than there are processors.

    They let the compile server do it, once it is ready (see `compile_client`).

    A context: when it is left, the forms that are being compiled are finished, and no others are.

    Args:
        limit_s: after so many seconds they stop.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self._pool = ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1), "kitsune-compiler")
        self._deadline = time.monotonic() + limit_s
        self._claimed: set[tuple[str, torch.device]] = set()
        self._claiming = threading.Lock()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._pool.shutdown()

    def stop(self) -> None:
        """Lets no other form begin: who waits for one gets a `CancelledError`. It takes no lock."""
        self._deadline = -math.inf

    @property
    def have_stopped(self) -> bool:
        return time.monotonic() > self._deadline

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Within, on this thread, `choose` compiles what it would try, times nothing and remembers no choice.

        It raises `NotChosenYet` where all forms are being compiled, or have been, for another call with the same key:
        the kernel may be another variant, and then one form of it is enough.
        """
        token = _ahead.set(self)
        try:
            with compile_client.elsewhere():
                yield
        finally:
            _ahead.reset(token)

    def claim(self, key: str, device: torch.device) -> None:
        """Raises `NotChosenYet` but for the first who comes with a key."""
        with self._claiming:
            if (key, device) in self._claimed:
                raise NotChosenYet(key)
            self._claimed.add((key, device))

    def run(self, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> list[Exception | None]:
        """Compiles forms by running each of them once, on the default stream; returns why some do not work.

        Compilers hold Python's lock for a small part of the time only. When this returns or raises, none of `forms`
        runs any more.

        Raises:
            CancelledError: the context is stopped.
            TypeError, torch.OutOfMemoryError: as `choose`.
        """

        def prepare(form: C) -> Exception | None:
            if self.have_stopped:
                raise CancelledError
            with torch.cuda.device(device), torch.no_grad(), compile_client.elsewhere():
                leave_recordings_alone(device)
                try:
                    run(form)
                except (TypeError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # noqa: BLE001 - out of resources, or no code for it, in Triton's many ways
                    return error
            return None

        begun = [self._pool.submit(prepare, form) for form in forms]
        try:
            return [one.result() for one in begun]
        finally:
            for one in begun:
                one.cancel()
            wait(begun)


_ahead: ContextVar[Compilers | None] = ContextVar("kitsune_ahead", default=None)
"""Where `choose` has forms compiled ahead; of each thread, so that launches on others are as ever."""


def choose(key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> C:
    """The form for which `run` takes the least time on `device`.

    It is timed at the first call with a key; the times are kept on disk, for this device and these versions. On the
    CPU, where kernels are interpreted, and where there is only one, the first form is chosen without timing. Within
    `Compilers.ahead` any form that works is returned, and nothing is timed or remembered.

    Args:
        key: names the kernel and whatever its time depends on: shapes, strides, data types, options.
        forms: their `repr` must tell them apart.
        run: launches the kernel in that form; it is called often, and first by several threads with a form each, so
            it must not change anything that matters. The first call with a key must not come while a CUDA graph is
            being recorded. A form that fails to compile or needs more resources than the device has raises, and is
            passed over.

    Raises:
        RuntimeError: no form works. Its cause is the failure of the first one that may pass, if there is such.
        torch.OutOfMemoryError: there is too little memory to run a form.
        TypeError: a launch does not fit its kernel, which is no matter of the form.
    """
    if device.type != "cuda" or len(forms) == 1:
        return forms[0]
    compilers = _ahead.get()
    if compilers is not None:
        return _compiled(key, forms, run, device, compilers)
    known = _chosen.get((key, device))
    if known is None:
        known = _chosen[key, device] = _fastest(key, forms, run, device)
    return known  # type: ignore[return-value]


def _costs(device: torch.device) -> CostCache:
    return CostCache.of(device)


def _fastest(key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> C:
    costs = _costs(device)
    entries = _entries(key, forms)
    new = [place for place, us in enumerate(_times_us(costs, entries)) if us is None]
    errors = _prepare([forms[place] for place in new], [entries[place] for place in new], run, device)
    failures = {place: error for place, error in zip(new, errors, strict=True) if error is not None}
    best_us = min((us for us in _times_us(costs, entries) if us is not None), default=math.inf)
    for place in new:
        if place not in failures:
            _tell(entries[place])
            us = device_us(partial(run, forms[place]), device, limit_s=0.05, rival_us=best_us)
            costs.put(entries[place], us)
            best_us = min(best_us, us)
    if len(failures) < len(forms):
        for place in [place for place, error in failures.items() if is_of_compiler(error)]:
            costs.put(entries[place], _NEVER_US)
    working = [place for place, entry in enumerate(entries) if (costs.get(entry) or 0.0) < _NEVER_US]
    working = [place for place in working if place not in failures]
    if not working:
        reasons = "; ".join(f"{_first_line(error)} for {forms[place]!r}" for place, error in failures.items())
        passing = [error for error in failures.values() if not is_of_compiler(error)]
        cause = (passing or list(failures.values()))[0]
        raise RuntimeError(f"no form of a kernel works on {device}: {reasons}; the kernel is {key}") from cause
    costs.save()
    return forms[min(working, key=lambda place: costs.get(entries[place]) or 0.0)]


def _compiled(
    key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device, compilers: Compilers
) -> C:
    """A form that works, when those have been compiled that `choose` would time, or else the one it would choose."""
    costs = _costs(device)
    times_us = _times_us(costs, _entries(key, forms))
    new = [form for form, us in zip(forms, times_us, strict=True) if us is None]
    timed = [(us, place) for place, us in enumerate(times_us) if us is not None and us < _NEVER_US]
    fastest = [forms[min(timed)[1]]] if timed else []
    known = _chosen.get((key, device))
    if known is None and new:
        compilers.claim(key, device)
        compile_client.start()
    wanted: Sequence[C] = [known] if known is not None else new or fastest  # type: ignore[list-item]
    errors = compilers.run(wanted, run, device)
    working = [form for form, error in zip(wanted, errors, strict=True) if error is None]
    if not working and not (new and fastest):
        raise RuntimeError(f"no form of a kernel works on {device}; the kernel is {key}") from errors[0]
    return (working or fastest)[0]


def _times_us(costs: CostCache, entries: Sequence[str]) -> list[float | None]:
    """What is known of forms. Nothing, where it says that none works: the kernel would not be there, so it is wrong."""
    times_us = [costs.get(entry) for entry in entries]
    is_hopeless = all(us is not None and us >= _NEVER_US and us != trials.KILLED_US for us in times_us)
    return [None] * len(entries) if is_hopeless else times_us


def _entries(key: str, forms: Sequence[C]) -> list[str]:
    """Where the times of forms are in the cache."""
    return [f"kernel {key} {form!r}" for form in forms]


def is_of_compiler(error: BaseException) -> bool:
    """Whether Triton refuses the kernel itself, as it will at every try."""
    try:
        from triton.compiler import CompilationError  # Triton is optional
        from triton.runtime.errors import OutOfResources
    except ImportError:
        return False
    return isinstance(error, (CompilationError, OutOfResources))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _tell(entry: str) -> None:
    trials.trying(f"a form of a kernel: {entry}", {entry: trials.KILLED_US})


def _prepare(
    forms: Sequence[C], entries: Sequence[str], run: Callable[[C], object], device: torch.device
) -> list[Exception | None]:
    """Compiles all forms at the same time; returns why some do not work."""
    if not forms:
        return []
    if trials.are_one_by_one():
        found: list[Exception | None] = []
        with Compilers() as compilers:
            for form, entry in zip(forms, entries, strict=True):
                _tell(entry)
                found += compilers.run([form], run, device)
                synchronize(device)
        return found
    compile_client.start()
    synchronize(device)  # the threads run on another stream than the one that makes their inputs
    with Compilers() as compilers:
        found = compilers.run(forms, run, device)
    synchronize(device)
    return found
