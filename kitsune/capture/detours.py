"""Gradients that reach tensors without a value by ways that were not followed.

What torch does not tell of (an `autograd.Function`, a script function) has recorded such a tensor as one that nothing
was computed for. `backward()` comes to its hook, which goes on; `torch.autograd.grad` comes to what it is asked for
alone. Here it goes on as well. Both call one private function of torch's, which has no public place to be watched from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, autograd
from torch.autograd.graph import _engine_run_backward

from kitsune.capture.autograd_graph import nodes_behind
from kitsune.capture.following import GOING_ON, PendingTensor, plainly, valued
from kitsune.errors import KitsuneError

_UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)


def go_on_from_detours() -> None:
    """From now on, `torch.autograd.grad` goes on from pending tensors to what these are computed from."""
    autograd._engine_run_backward = _run_backward  # type: ignore[assignment, attr-defined]


def _run_backward(
    outputs: Sequence[Any],
    gradients: Sequence[Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> Any:
    ends = _pending_behind(outputs) if inputs else []
    if not ends:
        return _engine_run_backward(
            outputs, gradients, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad=accumulate_grad
        )
    if accumulate_grad:
        raise KitsuneError(
            "backward(inputs=) cannot go through an autograd.Function or a script function of an output of the model "
            "with defer_loss=True; leave inputs out, or set defer_loss=False"
        )
    with _without_hooks(ends):
        found: Sequence[Tensor | None] = _engine_run_backward(
            outputs, gradients, keep_graph, create_graph, (*inputs, *ends), True, accumulate_grad=False
        )
    own, at_ends = found[: len(inputs)], found[len(inputs) :]
    reached = [(valued(end), gradient) for end, gradient in zip(ends, at_ends, strict=True) if gradient is not None]
    if reached:
        values, rest = zip(*reached, strict=True)
        others = _run_backward(values, rest, keep_graph, create_graph, inputs, True)
        own = tuple(map(_sum, own, others))
    if not allow_unreachable and any(gradient is None for gradient in own):
        raise RuntimeError(_UNUSED)
    return own


def _pending_behind(outputs: Sequence[Any]) -> list[PendingTensor]:
    nodes = nodes_behind([output for output in outputs if isinstance(output, Tensor)])
    leaves = [getattr(node, "variable", None) for node in nodes]
    return [leaf for leaf in leaves if isinstance(leaf, PendingTensor)]


@contextmanager
def _without_hooks(ends: Sequence[PendingTensor]) -> Iterator[None]:
    """Within, gradients of `ends` are not led on: autograd runs hooks of all that it is asked for."""
    with plainly():
        hooks: list[Any] = [end._backward_hooks for end in ends]
    kept = [some.pop(GOING_ON) for some in hooks]
    try:
        yield
    finally:
        for some, one in zip(hooks, kept, strict=True):
            some[GOING_ON] = one


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
