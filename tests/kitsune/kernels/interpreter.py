"""Triton's interpreter for the tests of kernels that multiply matrices: a kernel's module, defined once more for it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch


def interpreted(*names: str) -> ModuleType:
    """The last of the modules `kitsune.kernels.<name>`, for the interpreter.

    Which of the two runs a kernel is decided where it is defined. So the modules are executed anew, each with those
    before it, from which it may import; from others it may not, as these would be interpreted from then on. They are
    to be run where `patch_interpreter` holds.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    modules, before = [], set(sys.modules)
    with pytest.MonkeyPatch.context() as scope:
        scope.setenv("TRITON_INTERPRET", "1")
        for name in ("launch_triton", *names):
            modules.append(_execute(f"kitsune.kernels.{name}"))
            scope.setitem(sys.modules, f"kitsune.kernels.{name}", modules[-1])
    others = sorted(name for name in set(sys.modules) - before if re.match(r"kitsune\.kernels\..*_triton", name))
    assert not others, f"what {names[-1]} imports is to be named before it: {others}"
    return modules[-1]


def patch_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter run Triton's own functions (`tl.cdiv`) in nested calls, and compute in bfloat16.

    It also needs help to read a scalar with NumPy from 2.4 on, and to leave Triton as it was after nested calls, so
    that the same process can compile kernels.
    """
    from triton import language as tl
    from triton.runtime import JITFunction, interpreter
    from triton.runtime.interpreter import InterpretedFunction

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        scope = interpreter._patch_lang(function.fn)
        try:
            return function.rewrite()(*args, **kwargs)
        finally:
            scope.restore()

    patch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
    patch.setattr(InterpretedFunction, "__call__", call)
    for name, function in list(vars(tl).items()):
        if isinstance(function, JITFunction):
            patch.setattr(tl, name, InterpretedFunction(function.fn))
    _let_it_compute_in_bfloat16(patch)


def _execute(name: str) -> ModuleType:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location(name, found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _let_it_compute_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as integers, which it multiplies as such, and truncates what it rounds to them."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy()
        return TensorHandle(rounded.view(np.uint16).reshape(src.data.shape), dst_type.scalar)

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        floats = [cast(self, one, tl.float32) if one.dtype.scalar == tl.bfloat16 else one for one in (a, b)]
        return dot(self, *floats, *rest)

    for name in ("create_fp_trunc", "cast_impl"):
        patch.setattr(InterpreterBuilder, name, rounding_cast)
    patch.setattr(InterpreterBuilder, "create_dot", dot_of_floats)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The root mean square error, in units of the root mean square of the exact values."""
    difference = found.double() - exact
    return (difference.square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-300)).item()


def as_laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides, or at an address that is no multiple of 16 bytes."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "sliced":
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
        wide[..., 1 : 1 + tensor.shape[-1]] = tensor
        return wide[..., 1 : 1 + tensor.shape[-1]]
    assert layout == "contiguous"
    return tensor.contiguous()


def normal(shape: Sequence[int], dtype: torch.dtype, device: str, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed values, the same on each device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tuple(shape), generator=generator) * scale).to(device, dtype)
