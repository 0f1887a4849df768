"""The graph that the front end makes of a call, for tests of what comes after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kitsune.capture.frontend import GuardedFunction


class Catcher:
    """Keeps the graph and the flat tensors of the latest call, and computes its outputs."""

    graph: fx.GraphModule
    flat: list[Tensor]

    def run(self, graph: fx.GraphModule, flat: Sequence[Tensor]) -> Sequence[Any]:
        self.graph, self.flat = graph, list(flat)
        outputs: Sequence[Any] = graph(*flat)
        return outputs


def flat_graph(module: torch.nn.Module, *args: Any) -> tuple[fx.GraphModule, list[Tensor]]:
    """The flat graph of `module(*args)` and its inputs. The call is made, with all its effects."""
    catcher = Catcher()
    call: Callable[..., Any] = lambda *args: module(*args)  # noqa: E731
    GuardedFunction(call, catcher.run)(*args)
    return catcher.graph, catcher.flat
