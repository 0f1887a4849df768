"""Whether any module of the process was compiled: to look at all of them takes longer than to make an optimizer.

That a module is wrapped by `torch.compile`, whose class for that is private, or compiled in place, is noted from the
first question on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from kitsune.capture.watch import is_compiled


class Compilations:
    """What is known of this process's."""

    def __init__(self) -> None:
        self._is_watching = self._has_any = False

    def any_among(self, modules: Callable[[], Iterable[torch.nn.Module]]) -> bool:
        """Whether one of `modules`, which are all that there are, may be compiled. They are looked at once."""
        if not self._is_watching:
            self._is_watching = True
            self._watch(OptimizedModule, "__init__")
            self._watch(torch.nn.Module, "compile")
            self._has_any |= any(map(is_compiled, modules()))
        return self._has_any

    def _watch(self, kind: type, name: str) -> None:
        compile_it: Callable[..., Any] = getattr(kind, name)

        @functools.wraps(compile_it)
        def noting(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._has_any = True
            return compile_it(module, *args, **kwargs)

        setattr(kind, name, noting)


compilations = Compilations()
