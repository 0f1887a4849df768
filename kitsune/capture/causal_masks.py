"""Whether an attention mask is the causal one: torch's transformers look at its values, so a capture must know.

`nn.TransformerEncoder` and `nn.TransformerDecoder` choose by it what their attention runs, where they are not told
(`is_causal=`). Of a mask that is made of sizes and numbers alone, the answer is known for good. Of one that is made of
a tensor that the model keeps or is given, a guard asks again before each replay, if that is another tensor than before
or was written to; that waits for the device, as plain PyTorch does every time.

Private are the function of torch's that asks, Dynamo's variables, the nodes behind them, and its guards.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.guards import install_guard
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch.nn.modules import transformer
from torch.utils._python_dispatch import TorchDispatchMode

_detect: Callable[[Tensor, None, int], bool] = transformer._detect_is_causal_mask
_PARAMETERS = inspect.signature(_detect)
_MAKING = ("call_function", "call_method")


def answer(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any | None:
    """What Dynamo takes for the answer to torch's question; None for other calls, and where it cannot be told.

    Args:
        function: that which is called.
        args, kwargs: its arguments, as Dynamo has them.
    """
    if function is not _detect:
        return None
    mask, hint, length = (argument.realize() for argument in _PARAMETERS.bind(*args, **kwargs).args)
    if not isinstance(mask, TensorVariable) or hint.as_python_constant() is not None:
        return None
    nodes = _behind(mask.as_proxy().node)
    inputs = [node.meta["grapharg"] for node in nodes if node.op == "placeholder"]
    if len(inputs) > 1 or not _can_be_made_again(nodes):
        return None
    try:
        question = _Question(nodes, length.as_python_constant(), *(given.example for given in inputs))
    except _RandomError:
        return None
    for given in inputs:
        install_guard(given.source.make_guard(partial(_guard, question=question)))
    return ConstantVariable.create(question.answer)


class _Question:
    """Whether a mask is the causal one, asked of the tensor that it is made of, if it is made of one.

    Args:
        nodes: make the mask, which is the last of them.
        length: the mask's.
        inputs: that tensor, or none.

    Attributes:
        answer: of `inputs`.

    Raises:
        _RandomError: the mask depends on random numbers, of which none was drawn.
    """

    def __init__(self, nodes: Sequence[fx.Node], length: int, *inputs: Tensor) -> None:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}  # or tensors of the capture would stay
        graph.output(copies[nodes[-1]])
        self._mask = fx.GraphModule(torch.nn.Module(), graph)
        self._length = length
        self._same: tuple[weakref.ref[Tensor], int] | None = None
        with _NothingRandom():  # type: ignore[no-untyped-call]
            self.answer = self._ask(*inputs)

    def has_same_answer(self, tensor: Tensor) -> bool:
        """Whether another answer would be given of `tensor`; it is asked only if that can be."""
        if self._same is not None:
            reference, version = self._same
            if reference() is tensor and tensor._version == version:
                return True
        is_same = self._ask(tensor) == self.answer
        if is_same and not tensor.is_inference():
            self._same = weakref.ref(tensor), tensor._version
        return is_same

    def _ask(self, *inputs: Tensor) -> bool:
        with torch.no_grad():
            return _detect(self._mask(*inputs), None, self._length)


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
    """Whether all values are tensors that `nodes` alone have written to, and inputs were not written to."""
    writes: Counter[int] = Counter()
    for node in nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor) or (node.op not in _MAKING and "grapharg" not in node.meta):
            return False
        writes[id(value)] += _writes(node)
    return all(
        value._version == (writes[id(value)] if node.op in _MAKING else 0)
        for node, value in ((node, node.meta["example_value"]) for node in nodes)
    )


def _writes(node: fx.Node) -> bool:
    """Whether its function writes to what it is given, as their names tell: `mul_`, and not `__eq__`."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _guard(builder: Any, guard: Any, question: _Question) -> None:
    """Makes Dynamo ask before each call, of what it finds where the mask's tensor came from.

    At the root, as Dynamo does not look at the tensors of a module to which nothing was assigned.
    """
    place, variables_of_modules = compile(guard.name, "<guard>", "eval"), builder.scope["G"]

    def holds(variables: dict[str, Any]) -> bool:
        return question.has_same_answer(eval(place, {"G": variables_of_modules, "L": variables}))

    text = ["the attention mask is the causal one, or is not, as before"]
    builder.guard_manager.root.add_lambda_guard(holds, text, guard.user_stack)
