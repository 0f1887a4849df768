"""Compiles kernels for a GPU that is not there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8"}


class Launch(NamedTuple):
    """What Triton compiles a kernel for.

    Attributes:
        module, name: of the kernel.
        signature: the type of each argument, by name.
        constants: the values that are known, by place.
        attributes: by place, that numbers and addresses are multiples of 16.
    """

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], object]
    attributes: dict[tuple[int, ...], list[list[object]]]
    num_warps: int


class OfflineKernel:
    """Stands for a kernel of a module: it notes its launches, instead of making them.

    Attributes:
        launches: all that were asked for.
    """

    def __init__(self, module: str, kernel: Any) -> None:
        self._module, self._kernel = module, kernel
        self.launches: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._note

    def _note(self, *positional: Any, num_warps: int, **named: Any) -> None:
        values = dict(zip(self._kernel.arg_names, positional, strict=False)) | named
        launch = Launch(self._module, self._kernel.__name__, {}, {}, {}, num_warps)
        for place, parameter in enumerate(self._kernel.params):
            value = values[parameter.name]
            tensor = isinstance(value, torch.Tensor)
            if parameter.is_constexpr or (not tensor and value == 1):
                launch.signature[parameter.name], launch.constants[(place,)] = "constexpr", value
                continue
            launch.signature[parameter.name] = _TYPES[value.dtype] if tensor else "i32"
            if tensor or value % 16 == 0:
                launch.attributes[(place,)] = [["tt.divisibility", 16]]
        self.launches.append(launch)


def ptx(launches: Sequence[Launch]) -> list[str]:
    """What becomes of each for compute capability 9.0.

    Another process compiles: Triton 3.6 cannot any more after its interpreter has run.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_compile, launches))


def _compile(launch: Launch) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(launch.module), launch.name)
    source = ASTSource(kernel, launch.signature, launch.constants, launch.attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.num_warps})
    text: str = made.asm["ptx"]
    return text
