"""Whether an attention mask is the causal one, at whose values torch's transformers look where they are not told.

`nn.TransformerEncoder` and `nn.TransformerDecoder` leave such a mask to kernels that need none (`is_causal=`). A mask
that is made of sizes and numbers alone is the same in every replay, so it is looked at once. Any other is applied as it
is, which is right whatever it holds.

Private are the function of torch's that looks, Dynamo's variables, and the nodes behind them.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch.nn.modules import transformer
from torch.utils._python_dispatch import TorchDispatchMode

_detect: Callable[[Tensor, None, int], bool] = transformer._detect_is_causal_mask
_PARAMETERS = inspect.signature(_detect)


@contextmanager
def answered() -> Iterator[None]:
    """Within, Dynamo takes `answer` for the result of a call, where it gives one."""
    inline: Callable[..., Any] = InliningInstructionTranslator.inline_call

    def inline_call(parent: Any, function: Any, args: Sequence[Any], kwargs: Any, **options: Any) -> Any:
        known = answer(function, args, kwargs)
        return inline(parent, function, args, kwargs, **options) if known is None else known

    with mock.patch.object(InliningInstructionTranslator, "inline_call", inline_call):
        yield


def answer(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any | None:
    """What Dynamo takes for the result of a call of torch's function that looks; None for calls that it has to trace.

    Those are calls of other functions, and those that look at no values. So is that of a mask with a gradient: the
    causal one gets none in plain PyTorch.

    Args:
        function, args, kwargs: the call, in Dynamo's variables.
    """
    if getattr(function, "fn", None) is not _detect:
        return None
    mask, hint, length = (argument.realize() for argument in _PARAMETERS.bind(*args, **kwargs).args)
    if not isinstance(mask, TensorVariable) or mask.requires_grad or hint.as_python_constant() is not None:
        return None
    return ConstantVariable.create(_is_always_causal(mask.as_proxy().node, length.as_python_constant()))


def _is_always_causal(mask: fx.Node, length: int) -> bool:
    """Whether it is, and depends on nothing that could be otherwise in a replay."""
    nodes = _behind(mask)
    if not _can_be_made_again(nodes):
        return False
    made: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad(), _NothingRandom():  # type: ignore[no-untyped-call]
            for node in nodes:
                made[node] = _make(node, made)
    except _RandomError:
        return False
    return _detect(made[mask], None, length)


class _RandomError(Exception):
    """Random numbers were to be drawn."""


class _NothingRandom(TorchDispatchMode):
    """Random numbers are not drawn within it: a `_RandomError` is raised."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _RandomError
        return func(*args, **(kwargs or {}))


def _behind(mask: fx.Node) -> list[fx.Node]:
    """What the mask is made of, in the graph's order; the mask is the last."""
    found, waiting = set[fx.Node](), [mask]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return [node for node in mask.graph.nodes if node in found]


def _can_be_made_again(nodes: Sequence[fx.Node]) -> bool:
    """Whether they are made of nothing else, and all are tensors to which they alone have written."""
    values = [node.meta.get("example_value") for node in nodes]
    writes = Counter(id(value) for node, value in zip(nodes, values, strict=True) if _writes(node))
    return all(
        node.op in ("call_function", "call_method")
        and isinstance(value, Tensor)
        and value._version == writes[id(value)]
        for node, value in zip(nodes, values, strict=True)
    )


def _writes(node: fx.Node) -> bool:
    """Whether its function writes to what it is given, as their names tell: `mul_`, and not `__eq__`."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _make(node: fx.Node, made: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
