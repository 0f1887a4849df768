"""Traces functions of flat tensors down to ATen, through autograd, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from kitsune.capture.ambient import regions_left
from kitsune.capture.fills import FILLS
from kitsune.capture.host_constants import fold
from kitsune.capture.recomputing import BACKWARD
from kitsune.capture.retention import no_traces
from kitsune.capture.sole import sole_capture
from kitsune.capture.sparse import refuse_sparse, take_apart
from kitsune.errors import Refusal, RefusedError
from kitsune.graph.dataflow import storage_of
from kitsune.graph.grouped_products import described, name_own
from kitsune.graph.recurrent import keep_for_backward
from kitsune.graph.verify import innermost_line, refuse_graph

FlatFunction = Callable[..., Sequence[torch.Tensor | None]]


@no_traces()
def trace(function: FlatFunction, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The ATen graph of `function(*inputs)`: one placeholder an input, a list of tensors (or None) as output.

    Tracing computes on fake tensors: nothing is read from or written to `inputs`, and no random
    number is drawn. Views, in-place writes and operators that draw random numbers stay as they are; assignments of a
    number by a mask become fills, and what is copied from the host that is constant there, an attribute.

    Raises:
        RefusedError: the function cannot be traced, or what was traced is not a legal graph; or another thread is in
            the midst of a capture.
    """
    try:
        with sole_capture(), fx.traceback.preserve_node_meta(), regions_left(), described():
            torch.set_autocast_cache_enabled(False)  # it would outlive the tracing and hold fake tensors
            module = make_fx(function, decomposition_table=FILLS, tracing_mode="fake")(*inputs)
    except RefusedError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, AssertionError) as error:
        # Fake tensors stand for the user's values, so any operator may object in its own way.
        raise RefusedError(_refusal(error)) from error
    fold(module)
    keep_for_backward(module)
    name_own(module)
    take_apart(module)
    refusal = refuse_graph(module.graph)
    if refusal is not None:
        raise RefusedError(refusal)
    return module


def _refusal(error: Exception) -> Refusal:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, GuardOnDataDependentSymNode):
        causes = [line.removeprefix("Caused by:").strip(" ()") for line in lines if line.startswith("Caused by:")]
        return Refusal("what Python does depends on the values of a tensor", causes[0] if causes else None)
    if isinstance(error, DynamicOutputShapeException):
        return Refusal(f"a result of {error.func} has a size that depends on data")
    return Refusal(f"tracing failed: {type(error).__name__}: {lines[0] if lines else ''}", innermost_line(lines))


def interpret(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Runs `graph` node by node, so that what is traced meanwhile remembers the user's source lines."""
    result: Sequence[torch.Tensor] = fx.Interpreter(graph).run(*inputs)
    return result


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    autocast: torch.dtype | None = None,
    *,
    may_be_sparse: bool = False,
) -> list[torch.Tensor | None]:
    """Gradients of `outputs` weighted by `tangents`; None for inputs that they do not depend on.

    As in a backward pass inside of `autocast`; outside of it for None. To be called while tracing.

    Raises:
        RefusedError: there are no inputs, or one gradient is sparse, unless it `may_be_sparse`.
    """
    if not inputs:
        raise RefusedError(Refusal("no parameter that is trained takes part"))
    within = torch.autocast(inputs[0].device.type, dtype=autocast, enabled=autocast is not None)
    with within, fx.traceback.annotate(BACKWARD):
        grads: list[torch.Tensor | None] = list(torch.autograd.grad(outputs, inputs, tangents, allow_unused=True))
    sparse = [grad for grad in grads if grad is not None and grad.layout is not torch.strided]
    if sparse and not may_be_sparse:
        raise refuse_sparse(sparse[0], "and steps that give such ones are not captured")
    return grads


def own_gradients(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """`grads`, each in memory of its own and laid out like its parameter, as autograd's accumulation leaves them.

    Backward formulas may return one tensor for several parameters, an input, or an expanded value;
    writing to such a gradient in place would write to the others as well. To be called while tracing.
    """
    taken = {storage_of(tensor) for tensor in inputs}
    owned = []
    for param, grad in zip(params, grads, strict=True):
        if storage_of(grad) in taken or not same_layout(grad, param) or grad.dtype != param.dtype:
            grad = torch.empty_like(param, requires_grad=False).copy_(grad)
        taken.add(storage_of(grad))
        owned.append(grad.detach())
    return owned


def same_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of the same sizes have the same strides, where those matter."""
    strides = zip(first.size(), first.stride(), second.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in strides)
