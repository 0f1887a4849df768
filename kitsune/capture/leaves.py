"""Tensors that a call makes and has gradients computed for: `hidden_states.requires_grad = True`.

Speech models do so with their inputs, so that checkpoints after them see that gradients are wanted. Nobody reads that
gradient, as the tensor does not outlive the call. In a captured call what follows is recorded as in plain PyTorch, and
the gradient, which no parameter gets any of, is left out.

Where Dynamo assigns attributes, and the values behind its nodes, are private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, fx
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, TensorVariable

from kitsune.capture.called import ASSIGNMENTS, realized
from kitsune.errors import Refusal
from kitsune.graph import dataflow
from kitsune.graph.verify import source_line


@contextmanager
def followed() -> Iterator[None]:
    """Within, Dynamo has such an assignment in its graph, as a call of `requires_grad_`."""
    call: Callable[..., Any] = ASSIGNMENTS.call_function

    def call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: Any) -> Any:
        is_assignment = not isinstance(variable, BuiltinVariable) or variable.fn is setattr
        if is_assignment and len(args) == 3 and _is_wanted(tx, *map(realized, args)):
            tensor = realized(args[0])
            tx.output.create_proxy("call_method", "requires_grad_", (tensor.as_proxy(),), {})
            tensor.as_proxy().node.meta["example_value"].requires_grad_()
            tensor.requires_grad = True
            return ConstantVariable.create(None)
        return call(variable, tx, args, kwargs)

    with mock.patch.object(ASSIGNMENTS, "call_function", call_function):
        yield


def refuse_kept(graph: fx.Graph) -> Refusal | None:
    """None if no such tensor outlives the call whose graph Dynamo has made: its gradient would be missing."""
    marked = {id(_example(node.args[0])): node for node in graph.find_nodes(op="call_method", target="requires_grad_")}
    for result in dataflow.outputs(graph):
        if result is not None and id(_example(result)) in marked:
            place = source_line(marked[id(_example(result))])
            return Refusal("a tensor whose requires_grad the model sets is returned, or kept", place)
    return None


def _is_wanted(tx: Any, tensor: Any, name: Any, value: Any) -> bool:
    """Whether `requires_grad` of a tensor becomes True that the call itself has made, and that is a leaf."""
    if type(tensor) is not TensorVariable or tensor.source is not None or not name.is_python_constant():
        return False
    if name.as_python_constant() != "requires_grad" or not value.is_python_constant():
        return False
    example = _example(tensor.as_proxy().node)
    is_given = any(_example(node) is example for node in dataflow.placeholders(tx.output.graph))
    is_leaf = isinstance(example, Tensor) and example.is_leaf and example.is_floating_point()
    return value.as_python_constant() is True and is_leaf and not is_given and tx.output.current_tracer.parent is None


def _example(node: Any) -> Any:
    return node.meta.get("example_value")
