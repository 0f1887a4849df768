"""Calls of `torch.autograd.Function.apply` in a graph, and their backward passes while these are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import _get_proxies, get_innermost_proxy_mode

from kitsune.errors import Refusal, RefusedError

_Gradients = Sequence[Tensor | None]

_tangents: list[Tensor] = []
"""Those that the backward pass starts from that is being traced. It may run in a thread of autograd's."""


@dataclass
class AppliedFunction:
    """A call of a function's `apply` in a graph.

    Attributes:
        function: the function's class.
        objects: arguments that a graph cannot hold, by place or by name; the graph has None there.
        differentiable: the places of the results that get gradients.
        missing: the sets of these gradients without which the backward pass is known to run; None: any.
    """

    function: type[Function]
    objects: dict[int | str, Any] = field(default_factory=dict)
    differentiable: Sequence[int] = ()
    missing: set[frozenset[int]] | None = None

    def target(self) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """What the graph calls. It returns the tensors among the function's results; a single one if that is all."""

        def apply(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
            places = [self.objects.get(place, argument) for place, argument in enumerate(args)]
            names = {name: self.objects.get(name, argument) for name, argument in kwargs.items()}
            results = self.function.apply(*places, **names)
            if isinstance(results, Tensor):
                self._watch([results])
                return results
            tensors = [one for one in results if isinstance(one, Tensor)] if isinstance(results, tuple) else []
            self._watch(tensors)
            return tuple(tensors)

        apply.__name__ = f"apply_{self.function.__name__}"
        return apply

    def _watch(self, results: Sequence[Tensor]) -> None:
        """Has the backward pass told of, where it is being traced."""
        if get_innermost_proxy_mode() is None:
            return
        for node in {result.grad_fn for result in results} - {None}:
            assert node is not None
            if getattr(type(node), "_forward_cls", None) is not self.function:
                raise RefusedError(Refusal(f"{name_of(self.function)} writes to a part of another tensor (mark_dirty)"))
            watch = _Watch(self)
            node.register_prehook(watch.begin)
            node.register_hook(watch.end)


class _Watch:
    """Sees one backward pass of a function.

    Where one may run without the gradients of some of the model's outputs, what is computed from these alone becomes
    zero. That is right for a function that has no gradient at all then; not for one that has others.
    """

    def __init__(self, applied: AppliedFunction) -> None:
        self._applied = applied
        self._given = frozenset[fx.Node]()

    def begin(self, gradients: _Gradients) -> None:
        applied = self._applied
        missing = frozenset(place for place in applied.differentiable if gradients[place] is None)
        name = name_of(applied.function)
        if applied.missing is not None and missing not in applied.missing:
            raise RefusedError(Refusal(f"{name}.backward() gets None for gradients that it cannot do without"))
        if len(_tangents) > 1:
            found = {_reached(gradient) for gradient in gradients if gradient is not None}
            if len(found) != 1:
                raise RefusedError(Refusal(f"of the results of {name}, not all lead to the same outputs of the model"))
            (self._given,) = found

    def end(self, results: _Gradients, _gradients: _Gradients) -> None:
        if len(_tangents) > 1 and any(_reached(one) != self._given for one in results if one is not None):
            name = name_of(self._applied.function)
            reason = f"a gradient that {name}.backward() returns is not computed from those that it gets"
            raise RefusedError(Refusal(f"{reason}, in a model with several outputs"))


@contextmanager
def going_back_from(tangents: Sequence[Tensor]) -> Iterator[None]:
    """Within, gradients are traced that start from `tangents`, of which some may be missing later."""
    _tangents[:] = tangents
    try:
        yield
    finally:
        _tangents.clear()


def name_of(function: type[Function]) -> str:
    """As messages name it."""
    return f"{function.__module__}.{function.__qualname__}"


def _reached(tensor: Tensor) -> frozenset[fx.Node]:
    """Which of the tangents `tensor` is computed from."""
    ends = {proxy.node for tangent in _tangents for proxy in _get_proxies(tangent)}
    seen = set[fx.Node]()
    waiting = [proxy.node for proxy in _get_proxies(tensor)]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [] if node in ends else node.all_input_nodes
    return frozenset(seen & ends)
