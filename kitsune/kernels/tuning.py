"""Chooses between forms of a kernel by timing them on the user's device and shapes, once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

from kitsune.device import synchronize
from kitsune.timing import CostCache, device_us

C = TypeVar("C")

_MOST_COMPILERS = 12

_chosen: dict[tuple[str, torch.device], object] = {}


def choose(key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> C:
    """The form for which `run` takes the least time on `device`.

    It is timed at the first call with a key; the times are kept on disk, for this device and these versions. On the
    CPU, where kernels are interpreted, and where there is only one, the first form is chosen without timing.

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
    known = _chosen.get((key, device))
    if known is None:
        known = _chosen[key, device] = _fastest(key, forms, run, device)
    return known  # type: ignore[return-value]


@cache
def _costs(device: torch.device) -> CostCache:
    return CostCache.of(device)


def _fastest(key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> C:
    costs = _costs(device)
    entries = [f"kernel {key} {form!r}" for form in forms]
    new = [place for place, entry in enumerate(entries) if costs.get(entry) is None]
    errors = _prepare([forms[place] for place in new], run, device)
    failures = {place: error for place, error in zip(new, errors, strict=True) if error is not None}
    for place in new:
        if place not in failures:
            us = device_us(lambda form=forms[place]: run(form), device, limit_s=0.05)  # type: ignore[misc]
            costs.put(entries[place], us)
    working = [place for place in range(len(forms)) if place not in failures]
    if not working:
        reasons = "; ".join(f"{_first_line(error)} for {forms[place]!r}" for place, error in failures.items())
        cause = next((error for error in failures.values() if not is_of_compiler(error)), failures[0])
        raise RuntimeError(f"no form of a kernel works on {device}: {reasons}; the kernel is {key}") from cause
    costs.save()
    return forms[min(working, key=lambda place: costs.get(entries[place]) or 0.0)]


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


def _prepare(forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> list[Exception | None]:
    """Compiles all forms at the same time, by running each of them once; returns why some do not work.

    Compilers hold Python's lock for a small part of the time only.
    """

    def prepare(form: C) -> Exception | None:
        with torch.cuda.device(device), torch.no_grad():
            try:
                run(form)
            except (TypeError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - out of resources, or no code for it, in Triton's many ways
                return error
        return None

    if not forms:
        return []
    synchronize(device)  # the threads run on another stream than the one that makes their inputs
    with ThreadPoolExecutor(min(_MOST_COMPILERS, os.cpu_count() or 1)) as pool:
        found = list(pool.map(prepare, forms))
    synchronize(device)
    return found
