"""What torch would keep of captures until the process ends, given back.

Dynamo keeps what it compiled for a function, its guards with it: the function's code refers to what was compiled,
whose original, the same code, is a value of one of Dynamo's dictionaries for as long as that exists. Guards are also
held by finalizers of the classes and functions that they look at, most of which live as long as the process. Besides,
`fx` keeps the source of every graph module, fake tensors remember what each operator gives for arguments of each shape,
and Dynamo's metrics the call stack of each of its notes. Of all this only what captures of Kitsune's have made is
dropped: what `torch.compile` keeps for the user stays. The names of it are private.
"""

from __future__ import annotations

import itertools
import linecache
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.utils import get_metrics_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module


class Retention:
    """What Dynamo keeps of one compiled function; it is given back when `owner` is dropped.

    Args:
        owner: runs the function, and nobody else does.
        code: of the function, and of no other one.
    """

    def __init__(self, owner: object, code: types.CodeType) -> None:
        self._finalizers: list[weakref.finalize[..., Any]] = []
        weakref.finalize(owner, _give_back, code, self._finalizers).atexit = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """The guards that this thread makes within are the function's."""
        with mock.patch.object(CheckFunctionManager, "id_ref", _noting(self._finalizers)):
            yield


def _give_back(code: types.CodeType, finalizers: list[weakref.finalize[..., Any]]) -> None:
    reset_code(code)
    for finalizer in finalizers:
        finalizer.detach()


def _noting(finalizers: list[weakref.finalize[..., Any]]) -> Callable[..., int]:
    """What Dynamo calls for an object whose `id` is guarded: a guard must not hold once the object is gone."""
    id_ref: Callable[..., int] = CheckFunctionManager.id_ref
    thread = threading.get_ident()

    def note(manager: Any, subject: object, name: str) -> int:
        if threading.get_ident() != thread:
            return id_ref(manager, subject, name)
        if id(subject) not in manager._weakrefs and type(subject).__weakrefoffset__:
            manager._weakrefs[id(subject)] = weakref.ref(subject)
            finalizers.append(weakref.finalize(subject, partial(manager.invalidate, obj_str=name)))
        return id(subject)

    return note


@contextmanager
def no_traces() -> Iterator[None]:
    """What is traced within leaves nothing behind but its results.

    The source of graph modules is for tracebacks alone, which then tell the line without its text.
    """
    sources: list[str] = []
    num_results, edits = len(FakeTensorMode.cache), _edits()
    num_edits = len(edits)
    with mock.patch.object(graph_module._loader, "cache", _noting_sources(sources)):
        try:
            yield
        finally:
            _drop_sources(sources)
            _drop_results(num_results)
            del edits[num_edits:]


def _noting_sources(sources: list[str]) -> Callable[..., str]:
    """What `fx` calls with the source of a graph module; returns the name of the file that it is taken for."""
    keep: Callable[..., str] = graph_module._loader.cache
    thread = threading.get_ident()

    def cache(*args: Any, **kwargs: Any) -> str:
        name = keep(*args, **kwargs)
        if threading.get_ident() == thread:
            sources.append(name)
        return name

    return cache


def _drop_sources(names: list[str]) -> None:
    for name in names:
        graph_module._loader.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)


def _drop_results(num_before: int) -> None:
    """Those of fake tensors, but for the first so many."""
    results = FakeTensorMode.cache
    for key in list(itertools.islice(reversed(results), max(len(results) - num_before, 0))):
        results.pop(key, None)


def _edits() -> list[Any]:
    """The notes of Dynamo's metrics, which only grow."""
    edits: list[Any] = get_metrics_context()._edits
    return edits
