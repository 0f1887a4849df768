"""Launches kernels as on a GPU that is not there: their arguments are bound, and what they are compiled to is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

import torch

C = TypeVar("C")
Launches = Callable[[], object]


class Compiled(NamedTuple):
    """What becomes of a kernel in one form, with one kind of arguments."""

    name: str
    ptx: str
    shared_bytes: int


_found: dict[str, Compiled] = {}


def bind(launches: Launches) -> list[str]:
    """The names of the kernels that `launches` launches, whose arguments and options Triton accepts.

    `launches` is a function of a module's top level. Its tensors are on the CPU and stand for those on a GPU; where
    it lets the fastest form of a kernel be chosen, all of them are launched.

    Raises:
        TypeError, KeyError: by Triton, where they do not fit a kernel.
    """
    return [one.name for one in _elsewhere(launches, compiles=False)]


def compiled(launches: Launches) -> list[Compiled]:
    """What becomes of each kernel that `launches` (see `bind`) launches, for compute capability 9.0."""
    return _elsewhere(launches, compiles=True)


def pretending(function: Callable[..., C], *args: object) -> C:
    """What `function` returns in another process, which takes it that there is a GPU, and launches nothing.

    `function` is one of a module's top level.
    """
    return _in_another_process(True, function, *args)


def _elsewhere(launches: Launches, compiles: bool) -> list[Compiled]:
    return _in_another_process(compiles, _run, launches)


def _in_another_process(compiles: bool, function: Callable[..., C], *args: object) -> C:
    """Where Triton can be told that there is a GPU."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_pretend, initargs=(compiles,)) as pool:
        return pool.submit(function, *args).result()


class _Driver:
    """What Triton asks a driver before it launches anything."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _pretend(compiles: bool) -> None:
    """That tensors are on a GPU. To be called before the modules of kernels are imported."""
    from triton.runtime import JITFunction, driver

    from kitsune.kernels import tuning

    def with_grid(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            made = kernel.run(*arguments, grid=grid, warmup=True, **options)
            name = kernel.__name__
            if made is None:
                _found[name] = Compiled(name, "", 0)
            else:
                _found[made.hash] = Compiled(name, made.asm["ptx"], made.metadata.shared)

        return launch

    driver.set_active(_Driver())
    JITFunction.__getitem__ = with_grid
    if not compiles:
        JITFunction._do_compile = lambda *_: None
    tuning.choose = _run_all  # type: ignore[assignment]
    torch.Tensor.is_cuda = True  # type: ignore[misc, assignment]


def choose_first() -> None:
    """In such a process: of the forms of a kernel one is launched. To be called before its module is imported."""
    from kitsune.kernels import tuning

    tuning.choose = lambda key, forms, run, device: forms[0]  # type: ignore[assignment]


def _run_all(key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> C:
    for form in forms:
        run(form)
    return forms[0]


def _run(launches: Launches) -> list[Compiled]:
    launches()
    return list(_found.values())
