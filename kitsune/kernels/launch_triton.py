"""How Triton kernels are launched: on GPUs that can, before the kernel ahead of them has ended.

That is programmatic dependent launch, of NVIDIA's compute capability 9.0 on ("CUDA C++ Programming Guide", section
"Programmatic Dependent Launch and Synchronization"): a kernel's programs are brought onto the device while the last
ones of the kernel before it run, and wait there. To be imported where Triton is installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction, driver

from kitsune.kernels import compile_client
from kitsune.kernels.compile_client import CompileServer, Elsewhere


def _is_dependent() -> bool:
    if triton.knobs.runtime.interpret:
        return False
    try:
        target = driver.active.get_current_target()
    except RuntimeError:
        if torch.cuda.is_available():
            raise
        return False
    others = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return bool(target.backend == "cuda" and target.arch >= 90) and all(other >= (9, 0) for other in others)


_IS_DEPENDENT = tl.constexpr(_is_dependent())
_OPTIONS = {"launch_pdl": True} if _IS_DEPENDENT.value else {}


class Kernel:
    """A kernel of Triton. Indexed with a grid it is what launches it, as with `triton.jit`."""

    def __init__(self, function: Callable[..., None], options: Mapping[str, Any]) -> None:
        self.__name__ = function.__name__
        self._compiled = triton.jit(function, **options)
        self._is_settled = not isinstance(self._compiled, JITFunction)  # the interpreter has no keys

    @property
    def compiled(self) -> Any:
        """What `triton.jit` makes of it."""
        if not self._is_settled:  # what it calls may be defined after it, and is by now
            _settle_key(self._compiled)
            self._is_settled = True
        return self._compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        launch = partial(self.compiled[grid], **_OPTIONS)
        server = compile_client.current()
        return launch if server is None else partial(self._launch_compiled_by, server, grid, launch)

    def _launch_compiled_by(
        self, server: CompileServer, grid: tuple[int, ...], launch: Callable[..., object], *args: Any, **options: Any
    ) -> object:
        def compile() -> None:
            with triton.AsyncCompileMode(Elsewhere(server, self.compiled.fn.__module__, self.__name__)):
                self.compiled.warmup(*args, grid=grid, **_OPTIONS, **options)

        copy_context().run(compile)  # of its own: after an error the mode would stay in force on this thread
        return launch(*args, **options)


def _settle_key(function: JITFunction[Any]) -> None:
    """Lets Triton find the key of what is compiled after those of the functions that it calls.

    With whichever comes first it takes their globals into account or does not (`DependenciesFinder._update_hash` asks
    for them before they are known), and what one process has compiled another one would not find in the cache.
    """
    for called in inspect.getclosurevars(function.fn).globals.values():
        if isinstance(called, JITFunction):
            _settle_key(called)
    function.cache_key  # noqa: B018 - it is kept


def launched(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """`triton.jit` for kernels, with its options. Their first statement is `await_previous()`."""
    return lambda function: Kernel(function, options)


@triton.jit
def await_previous() -> None:
    """Waits for the kernels that were launched before, of which this one may read or overwrite anything.

    Each program of each kernel calls it before it touches memory, whatever it does then: what is launched after a
    kernel waits for that one only, and takes it that all before it have ended, too. Then the next kernel may come.
    """
    if _IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
