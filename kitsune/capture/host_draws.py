"""Numbers that a model on a device draws on the host, and for which there is one answer (see `known_answers`).

A graph on a device cannot draw them: `torch.rand([]) < self.layerdrop` draws from the host's generator, whatever the
model is on. They are drawn after each replay instead, so that the generator goes on as in plain PyTorch. No other
number is drawn on the host in such a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from kitsune.capture.known_answers import is_only_compared
from kitsune.graph import dataflow


@dataclass(frozen=True)
class HostDraws:
    """Calls of `torch.rand`, by their arguments, in their order."""

    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()

    def draw(self) -> None:
        """Draws from the host's generator what a call would."""
        for args, kwargs in self.calls:
            torch.rand(*args, **kwargs)


def take_draws(module: fx.GraphModule) -> HostDraws:
    """Takes out of a graph that Dynamo made, which is changed, what is drawn on the host where its inputs are not."""
    graph = module.graph
    if all(map(_is_on_host, dataflow.placeholders(graph))):
        return HostDraws()
    draws = [node for node in graph.nodes if is_only_compared(node) and _is_on_host(node)]
    draws = [node for node in draws if not any(user.users for user in node.users)]
    calls = [(tuple(node.args), dict(node.kwargs)) for node in draws]
    for node in draws:
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)
    module.recompile()
    return HostDraws(calls)


def _is_on_host(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return not isinstance(example, Tensor) or example.device.type == "cpu"
