"""Sparse gradients, of embeddings, as their values and their coordinates.

Graphs know dense tensors alone. A backward pass returns the values of such a gradient; its coordinates are what the
embedding was given, and a tensor of both is made outside of the graph, as torch's `embedding_sparse_backward` does it.
How many there are without those of padding depends on data: all are computed, with -1 for padding, and then those are
left out. Values and coordinates of tensors that are not coalesced have no public names, and the public constructor
warns that it checks nothing, where autograd, which makes them by the other one, does not.
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

_aten = torch.ops.aten
_make = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_MEMBERS: Mapping[object, int] = {_aten._indices.default: 3, _aten._values.default: 4}
_SIGNATURE = inspect.signature(functional.embedding)
_DENSE = (
    "use embeddings with sparse=False (and Adam, not SparseAdam), or name the parts of the model without them: "
    "KitsuneOptimizer(..., model=)"
)


class SparseGradient(NamedTuple):
    """A gradient of which a part of a backward pass returns the values.

    Attributes:
        place: of it among the gradients of the part.
        size: of the gradient.
        has_padding: whether coordinates may be -1, of rows to be left out.
        words: positions of the flat inputs that were looked up, or a view of them, which autograd keeps.
    """

    place: int
    size: torch.Size
    has_padding: bool = False
    words: tuple[int, ...] = ()

    def made(self, values: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
        """The gradient. Coordinates (1, N) are copied; without padding, `values` (N, D) are taken as they are."""
        if self.has_padding:
            is_kept = coordinates[0] >= 0
            return _made(coordinates[:, is_kept], values[is_kept], self.size)
        return _made(coordinates.clone(), values, self.size)


class LookingUp(TorchFunctionMode):
    """Within, the sparse gradients of embeddings with padding can be traced; see the top of this module."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is functional.embedding:
            bound = _SIGNATURE.bind(*args, **kwargs or {})
            bound.apply_defaults()
            words, table, padding, max_norm, norm_type, is_scaled, is_sparse = bound.args
            if padding is not None and is_sparse and not is_scaled:
                if max_norm is not None:
                    with torch.no_grad():
                        functional.embedding(words, table, None, max_norm, norm_type)  # for what it does to the table
                return _Lookup.apply(table, words, padding % table.size(0))  # type: ignore[no-untyped-call]
        return function(*args, **kwargs or {})


class _Lookup(torch.autograd.Function):
    """Rows of a table, with a sparse gradient whose coordinates are -1 for padding."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, words: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(words)
        ctx.padding, ctx.size = padding, table.size()
        return torch.embedding(table, words)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        (words,) = ctx.saved_tensors
        rows = words.reshape(1, -1).long()
        rows = rows.masked_fill(rows == ctx.padding, -1)
        return _made(rows, grad.reshape(-1, grad.size(-1)), ctx.size), None, None


def _made(coordinates: torch.Tensor, values: torch.Tensor, size: torch.Size) -> torch.Tensor:
    made: torch.Tensor = _make(
        1, 1, size, coordinates, values, dtype=values.dtype, layout=torch.sparse_coo, device=values.device
    )
    return made


def refuse_sparse(gradient: torch.Tensor, why: str) -> RefusedError:
    """The error for a sparse gradient that cannot be captured."""
    return RefusedError(Refusal(f"a gradient of shape {tuple(gradient.shape)} is sparse, {why}", remedy=_DENSE))


def members(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the coordinates of a sparse gradient. To be called while tracing."""
    return gradient._values(), gradient._indices()


def take_apart(module: fx.GraphModule) -> None:
    """Has what reads the values or the coordinates of a sparse tensor read those that the tensor was made of.

    Raises:
        RefusedError: it is the result of another operator, as where it is the sum of the gradients of two embeddings;
            or something else is done with it.
    """
    graph = module.graph
    for node in [node for node in graph.nodes if node.target in _MEMBERS]:
        made = node.args[0]
        if made.target is not _make:
            raise refuse_sparse(made.meta["val"], f"and is what {made.target} gives, not one lookup of an embedding")
        node.replace_all_uses_with(made.args[_MEMBERS[node.target]])
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_make):
        for user in node.users:
            raise refuse_sparse(node.meta["val"], f"and is given to {user.target}")
        graph.erase_node(node)
    module.recompile()


def looked_up(coordinates: fx.Node) -> tuple[fx.Node, bool]:
    """What an embedding was given to whose gradient these `coordinates` belong; whether that leaves padding out.

    Raises:
        RefusedError: there is no such embedding.
    """
    node, has_padding = coordinates, False
    while not any(user.target is _aten.embedding.default and user.args[1] is node for user in node.users):
        if not node.all_input_nodes:
            raise refuse_sparse(coordinates.meta["val"], "and not the gradient of an embedding")
        has_padding |= node.target is _aten.masked_fill.Scalar
        node = node.all_input_nodes[0]
    return node, has_padding
