"""The switches of torch that decide which kernels a call runs.

They are read at every call. The public properties of `torch.backends` take microseconds each, for Python code around
the functions that are called here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import _C

from kitsune.native.facts import Fact, result

Reading = tuple[Callable[..., Hashable], tuple[Any, ...]]
"""A function that reads a switch, and its arguments."""


def ambient(device: torch.device) -> Hashable:
    """What is switched on at present, as far as it concerns operators on `device`."""
    return tuple([read(*args) for read, args in _readings(device)])


def ambient_facts(device: torch.device) -> list[Fact]:
    """That all of it is as it is."""
    return [result(read, *args) for read, args in _readings(device)]


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast computes in at present, on devices of a kind; None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


_LEAVE = {
    _C._functorch.TransformType.Vmap: _C._functorch._vmap_decrement_nesting,
    _C._functorch.TransformType.Grad: _C._functorch._grad_decrement_nesting,
    _C._functorch.TransformType.Jvp: _C._functorch._jvp_decrement_nesting,
    _C._functorch.TransformType.Functionalize: _C._functorch._func_decrement_nesting,
}
"""How `torch.func` leaves its transforms. What leaves all of them at once leaves twice as many in torch 2.11."""


@contextmanager
def regions_left() -> Iterator[None]:
    """Leaves what a captured function has entered: regions of autocast, `no_grad`, and transforms of `torch.func`.

    It leaves them itself, but where an exception ends it: in a graph of Dynamo's, entering and leaving are functions
    among others.
    """
    grad, cached, depth = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _autocast_depth()
    levels = _C._functorch.get_dynamic_layer_stack_depth()
    switches = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        yield
    finally:
        while _C._functorch.get_dynamic_layer_stack_depth() > levels:
            _LEAVE[_C._functorch.peek_interpreter_stack().key()]()
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cached)
        for kind, enabled, dtype in switches:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        while _autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _autocast_depth() -> int:
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _readings(device: torch.device) -> tuple[Reading, ...]:
    """What is to be read at present: autocast has a dtype only where it is on."""
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return _switches(kind)
    return (torch.get_autocast_dtype, (kind,)), *_switches(kind)


@cache
def _switches(kind: str) -> tuple[Reading, ...]:
    common: tuple[Reading, ...] = (
        (torch.is_autocast_enabled, (kind,)),
        (torch.is_grad_enabled, ()),
        (torch.is_inference_mode_enabled, ()),
        (_C._get_deterministic_algorithms, ()),
        (torch.get_default_dtype, ()),
        (_C._get_mkldnn_enabled, ()),  # which recurrent layers are told apart by
    )
    if kind != "cuda":
        return common
    return (
        *common,
        (_C._get_fp32_precision_getter, ("cuda", "matmul")),
        (_C._get_fp32_precision_getter, ("cuda", "conv")),
        (_C._get_fp32_precision_getter, ("cuda", "rnn")),
        (_C._get_cublas_allow_fp16_reduced_precision_reduction, ()),
        (_C._get_cublas_allow_bf16_reduced_precision_reduction, ()),
        (_C._get_cublas_allow_fp16_accumulation, ()),
        (_C._get_cudnn_enabled, ()),
        (_C._get_cudnn_benchmark, ()),
        (_C._get_cudnn_deterministic, ()),
        (_C._get_flash_sdp_enabled, ()),
        (_C._get_mem_efficient_sdp_enabled, ()),
        (_C._get_math_sdp_enabled, ()),
        (_C._get_cudnn_sdp_enabled, ()),
    )
