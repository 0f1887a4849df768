"""Sparse gradients, of embeddings, as their values and their coordinates.

Graphs know dense tensors alone. A backward pass returns the values of such a gradient; its coordinates are what the
embedding was given, and a tensor of both is made outside of the graph, as torch's `embedding_sparse_backward` does it.
How many there are without those of padding depends on data: all are computed, and then those are left out.
Values and coordinates of tensors that are not coalesced have no public names, and the public constructor warns that it
checks nothing, where autograd, which makes them by the other one, does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kitsune.errors import Refusal, RefusedError

_make = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
_make_unsafe = torch.ops.aten._sparse_coo_tensor_unsafe.default
_SIGNATURE = inspect.signature(functional.embedding)
_MEMBERS: Mapping[object, int] = {torch.ops.aten._indices.default: 3, torch.ops.aten._values.default: 4}
_DENSE = (
    "use embeddings with sparse=False (and Adam, not SparseAdam), or name the parts of the model without them: "
    "KitsuneOptimizer(..., model=)"
)


class SparseGradient(NamedTuple):
    """A gradient of which a part of a backward pass returns the values.

    Attributes:
        place: of it among the gradients of the part.
        size: of the gradient.
        padding: the row that gets none; None: all get theirs.
    """

    place: int
    size: torch.Size
    padding: int | None

    def made(self, values: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
        """The gradient. Coordinates (1, N) are copied; without padding, `values` (N, D) are taken as they are."""
        if self.padding is None:
            coordinates = coordinates.clone()
        else:
            is_kept = coordinates[0] != self.padding
            coordinates, values = coordinates[:, is_kept], values[is_kept]
        gradient: torch.Tensor = _make_unsafe(coordinates, values, self.size)
        return gradient


class PaddingLeftOut(TorchFunctionMode):
    """Within, embeddings with sparse gradients have no padding, which only these gradients show."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: list[tuple[torch.Tensor, int | None]] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is not functional.embedding:
            return function(*args, **kwargs or {})
        bound = _SIGNATURE.bind(*args, **kwargs or {})
        bound.apply_defaults()
        given = bound.arguments
        if given["sparse"]:
            table, padding = given["weight"], given["padding_idx"]
            self._tables.append((table, None if padding is None else padding % table.size(0)))
            given["padding_idx"] = None
        return function(*bound.args, **bound.kwargs)

    def padding(self, table: torch.Tensor) -> int | None:
        """That of a table that gets a sparse gradient.

        Raises:
            RefusedError: it has several, or it was not it that was looked up, but a copy.
        """
        found = {padding for other, padding in self._tables if other is table}
        if len(found) != 1:
            why = "with several paddings" if found else "but not by nn.Embedding of the parameter itself"
            raise refuse_sparse(table, f"and it is looked up {why}")
        return found.pop()


def refuse_sparse(gradient: torch.Tensor, why: str) -> RefusedError:
    """The error for a sparse gradient, or the table that gets it, that cannot be captured."""
    return RefusedError(Refusal(f"a gradient of shape {tuple(gradient.shape)} is sparse, {why}", remedy=_DENSE))


def members(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the coordinates of a sparse gradient. To be called while tracing.

    Raises:
        RefusedError: it is of another kind.
    """
    if gradient.layout is not torch.sparse_coo:
        raise refuse_sparse(gradient, f"in the layout {gradient.layout}")
    return gradient._values(), gradient._indices()


def take_apart(graph: fx.Graph) -> None:
    """Has what reads the values or the coordinates of a sparse tensor read those that the tensor was made of.

    Raises:
        RefusedError: it is the result of another operator, as where it is the sum of the gradients of two embeddings.
    """
    for node in list(graph.nodes):
        if node.target not in _MEMBERS:
            continue
        made = node.args[0]
        if made.target is not _make:
            raise refuse_sparse(made.meta["val"], f"and is what {made.target} gives, not one lookup of an embedding")
        node.replace_all_uses_with(made.args[_MEMBERS[node.target]])
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_make):
        if not node.users:
            graph.erase_node(node)
