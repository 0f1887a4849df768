"""The guarded front end: Dynamo finds out what Python does in a call, and watches whether that changes.

This is the only module that touches `torch._dynamo`. `torch.compile` with a backend of one's own
is public; its exceptions, which tell the line that could not be captured, are not.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import exc

from kitsune.errors import Refusal, RefusedError

FlatCall = Callable[..., Sequence[Any]]


class GuardedFunction:
    """A Python function that runs as flat graphs, as long as Dynamo's guards hold.

    Args:
        function: called with the arguments of each call; must be a plain function whose closure
            holds everything it uses.
        on_graph: given the graph of a call (a `GraphModule` over flat tensors: parameters,
            buffers and arguments in the order of their use), returns what runs in its place. It is
            called at the first call, and again whenever a guard has failed.

    Dynamo keeps its graphs, and a limit on their number, with a function's code object, so each
    `GuardedFunction` gets a code object of its own.
    """

    def __init__(self, function: Callable[..., Any], on_graph: Callable[[fx.GraphModule], FlatCall]) -> None:
        own = types.FunctionType(
            function.__code__.replace(),
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self.num_graphs = 0
        self._on_graph = on_graph
        self._compiled = torch.compile(own, backend=self._backend, fullgraph=True, dynamic=False)

    def __call__(self, *args: Any) -> Any:
        """Calls the function.

        Raises:
            RefusedError: Dynamo cannot express the call as one graph. The function has not run.
        """
        try:
            return self._compiled(*args)
        except exc.TorchDynamoException as error:
            raise RefusedError(_refusal(error)) from error

    def _backend(self, graph: fx.GraphModule, _examples: Sequence[torch.Tensor]) -> FlatCall:
        self.num_graphs += 1
        return self._on_graph(graph)


def _refusal(error: exc.TorchDynamoException) -> Refusal:
    stack = getattr(error, "real_stack", None)
    culprit = None
    if stack:
        frame = stack[-1]
        culprit = f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return Refusal(f"the call is not one graph: {reason}", culprit)
