"""Chooses between forms of a kernel by timing them on the user's device and shapes, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

from kitsune.timing import CostCache, device_us

C = TypeVar("C")

_chosen: dict[tuple[str, torch.device], object] = {}


def choose(key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> C:
    """The form for which `run` takes the least time on `device`.

    It is timed at the first call with a key; the times are kept on disk, for this device and these versions. On the
    CPU, where kernels are interpreted, and where there is only one, the first form is chosen without timing.

    Args:
        key: names the kernel and whatever its time depends on: shapes, strides, data types, options.
        forms: their `repr` must tell them apart.
        run: launches the kernel in that form; it is called often, so it must not change anything that matters. The
            first call with a key must not come while a CUDA graph is being recorded. A form that fails to compile or
            needs more resources than the device has raises, and is passed over.

    Raises:
        RuntimeError: no form works.
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
    times: list[float] = []
    failures: list[str] = []
    for form in forms:
        entry = f"kernel {key} {form!r}"
        us = costs.get(entry)
        if us is None:
            try:
                us = device_us(lambda form=form: run(form), device, limit_s=0.05)  # type: ignore[misc]
            except (RuntimeError, ValueError) as error:  # out of resources, or no code for it
                failures.append(f"{form!r}: {error}")
                us = float("inf")
            else:
                costs.put(entry, us)
        times.append(us)
    if min(times) == float("inf"):
        raise RuntimeError(f"no form of the kernel {key} works on {device}: {'; '.join(failures)}")
    costs.save()
    return forms[times.index(min(times))]
