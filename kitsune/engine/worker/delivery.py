"""Loads what the worker has found into the process that trains."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from torch._subclasses import FakeTensorMode

from kitsune.engine.rewriting import Rewritten
from kitsune.engine.worker.messages import Faster, Region
from kitsune.errors import Refusal
from kitsune.graph.serialize import unpacked, unpacked_tensors
from kitsune.kernels.inductor import INDUCTOR
from kitsune.kernels.regions import region_operator


def loaded(programs: Sequence[Faster], mode: FakeTensorMode) -> Generator[None, None, tuple[Rewritten, ...]]:
    """The programs that the worker has found, with the generated operators that they call. Yields after each piece.

    Args:
        mode: of the programs' values.

    Raises:
        RuntimeError, LookupError: one cannot be loaded here.
    """
    found: list[Rewritten] = []
    for one in programs:
        for region in one.regions:
            _load(region, mode)
            yield
        found.append((unpacked(one.program, mode), one.fusions))
        yield
    return tuple(found)


def _load(region: Region, mode: FakeTensorMode) -> None:
    module = unpacked(region.module, mode)
    inputs, outputs = (unpacked_tensors(some, mode) for some in (region.inputs, region.outputs))
    operator = region_operator(module, inputs, outputs, INDUCTOR)
    if isinstance(operator, Refusal):
        raise RuntimeError(f"generated code that the second process has tried is refused here: {operator}")
