"""Loads what the worker has found into the process that trains."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses import FakeTensorMode

from kitsune.device import leave_recordings_alone
from kitsune.engine.rewriting import Rewritten
from kitsune.engine.worker.messages import Faster, Region
from kitsune.errors import Refusal
from kitsune.graph.serialize import unpacked, unpacked_tensors
from kitsune.kernels.inductor import INDUCTOR, PROGRAMS
from kitsune.kernels.regions import region_operator
from kitsune.passes.programs import program_operator


def loaded(one: Faster, mode: FakeTensorMode, device: torch.device) -> Rewritten:
    """A program that the worker has found, with the generated operators that it calls; on any thread.

    Args:
        mode: of the program's values.
        device: where it runs.

    Raises:
        Exception: it cannot be loaded here; compilers fail in many ways.
    """
    leave_recordings_alone(device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with compile_lock, on_device, torch.no_grad():  # Inductor's options are those of the process
        for region in one.regions:
            _load(region, mode)
    return unpacked(one.program, mode), one.fusions


def _load(region: Region, mode: FakeTensorMode) -> None:
    module = unpacked(region.module, mode)
    if region.layouts is None:
        program_operator(module, PROGRAMS)
        return
    inputs, outputs = (unpacked_tensors(some, mode) for some in region.layouts)
    operator = region_operator(module, inputs, outputs, INDUCTOR)
    if isinstance(operator, Refusal):
        raise RuntimeError(f"generated code that the second process has tried is refused here: {operator}")
