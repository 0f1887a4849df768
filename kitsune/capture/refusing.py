"""How a capture is refused from within Dynamo, for good.

After some exceptions of its own Dynamo goes on in another way: where arguments are constants it calls the function
itself, where `in` fails it goes through the members, and `next()` takes a list's first. Where it ends a capture is
private.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

from torch._dynamo import exc
from torch._dynamo.output_graph import OutputGraph

_refused: list[exc.Unsupported] = []  # there is one capture at a time


def refuse(problem: str) -> NoReturn:
    """Refuses the capture, whatever Dynamo makes of the exception.

    Raises:
        torch._dynamo.exc.Unsupported: always; it knows the line of the user's program.
    """
    error = exc.Unsupported(problem)
    _refused.append(error)
    raise error


def take_back(error: Exception) -> None:
    """It ended only an attempt, without which the capture goes on."""
    _refused[:] = [one for one in _refused if one is not error]


@contextmanager
def for_good() -> Iterator[None]:
    """Within, no graph is made of a call that was refused."""
    finish = OutputGraph.compile_subgraph

    def compile_subgraph(graph: OutputGraph, *args: Any, **options: Any) -> Any:
        if _refused:
            raise _refused[0]
        return finish(graph, *args, **options)

    _refused.clear()
    try:
        with mock.patch.object(OutputGraph, "compile_subgraph", compile_subgraph):
            yield
    finally:
        _refused.clear()
