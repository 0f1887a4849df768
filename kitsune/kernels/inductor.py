"""Inductor as a generator of code for regions.

`torch._inductor.standalone_compile` is not public, but documented, and meant for graphs that Dynamo did not capture.
`torch.compile` would trace a region again, guard it and look its guards up at every call, and without the context that
`standalone_compile` sets up Inductor does not find what it made for an equal graph before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._inductor
from torch import fx

from kitsune.device import refuse_inductor
from kitsune.kernels.regions import Backend, Code

# What makes results those of eager mode, to the rounding of sums: low-precision values are rounded between operators
# (which also keeps Triton from contracting products and sums), float32 division is correctly rounded. Kitsune
# records CUDA graphs itself.
_OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "use_fast_math": False,
    "triton.cudagraphs": False,
}


def _compile(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Code:
    known = torch._inductor.list_options()
    options = {name: value for name, value in _OPTIONS.items() if name in known}
    return torch._inductor.standalone_compile(
        module, list(inputs), dynamic_shapes="from_example_inputs", options={"config_patches": options}
    )


def _compile_program(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Code:
    """As `torch.compile` would: values in the midst of generated code are float32.

    What one version of Inductor fails at in its search for what to fuse it may do without the latest kind of search.
    """
    known = torch._inductor.list_options()
    error: Exception | None = None
    for tried in _SEARCHES:
        wanted = {**tried, "triton.cudagraphs": False, "fallback_random": True}  # random numbers are those of eager
        options = {name: value for name, value in wanted.items() if name in known}
        try:
            return torch._inductor.standalone_compile(
                module, list(inputs), dynamic_shapes="from_example_inputs", options={"config_patches": options}
            )
        except Exception as failure:  # noqa: BLE001 - it fails in many ways
            error = error or failure
    assert error is not None
    raise error


_SEARCHES: tuple[dict[str, Any], ...] = ({}, {"loop_ordering_after_fusion": False})

PROGRAMS = Backend("program", refuse_inductor, _compile_program)
"""The same, for whole programs."""

INDUCTOR = Backend("inductor", refuse_inductor, _compile)
"""Generates Triton for CUDA and C++ for the CPU, for exactly the given sizes and strides; keeps it on disk."""
