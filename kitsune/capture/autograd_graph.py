"""The graph that autograd has recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


def nodes_behind(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """The nodes that a backward pass from `tensors` goes through, each once, in no particular order."""
    seen, waiting = set[Any](), [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]
