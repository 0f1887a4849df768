"""A gradient scaler of Kitsune's own, for float16 in a loop that has none.

As with `torch.amp.GradScaler`, it is the loss that is multiplied, and with it all that goes back from it: in float16
small gradients become zero. Here the loop does not say which tensor that is. So the outputs of its models are followed,
and so is what it makes of them, until `backward()` is called on one of these. After that gradients are divided again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kitsune.capture.autograd_graph import nodes_behind
from kitsune.capture.following import FollowedTensor, followed, plainly, unfollowed
from kitsune.capture.watch import is_watched
from kitsune.loop.following import AS_PLAIN, VIEWS

_Params = Callable[[], Iterable[torch.nn.Parameter]]


class LossScale:
    """By how much losses are multiplied: it falls and grows by the rules of `torch.amp.GradScaler`, and has its state.

    Args:
        device_type: of the parameters.
    """

    def __init__(self, device_type: str) -> None:
        self._rules = _Rules(device_type)

    def get_scale(self) -> float:
        """The scale; waits for the device."""
        return float(self._rules.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as `torch.amp.GradScaler.state_dict` gives it."""
        return self._rules.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` of one of these, or of a `torch.amp.GradScaler`, has given."""
        self._rules.load_state_dict(state_dict)

    def on(self, device: torch.device) -> Tensor:
        """The scale, a tensor of one element on `device`."""
        if self._rules._scale is None:
            self._rules.scale(torch.zeros((), device=device))
        assert self._rules._scale is not None
        return self._rules._scale.to(device)

    def update_unless_infinite(self, param_groups: list[dict[str, Any]], update: Callable[[], Any]) -> Any:
        """Calls `update`, unless a gradient is infinite or NaN, and changes the scale accordingly.

        Returns:
            What `update` does, or None.
        """
        grads = [param.grad for group in param_groups for param in group["params"] if param.grad is not None]
        if not grads:
            return update()
        self.on(grads[0].device)
        result = self._rules.step(_Optimizer(param_groups, update))  # type: ignore[arg-type]  # it asks for no more
        self._rules.update()
        return result


class _Rules(torch.amp.GradScaler):
    """Torch's, for gradients that are divided already. What divides there is private, and looks for infinities, too."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, torch.ones_like(inv_scale), found_inf, allow_fp16)


class _Optimizer(NamedTuple):
    """What a scaler asks of an optimizer."""

    param_groups: list[dict[str, Any]]
    step: Callable[[], Any]


class ScaledLosses:
    """Follows what a loop makes of its models' outputs, and scales backward passes from there.

    A pass is scaled by the least scale of all loops that own a parameter which it reaches. Gradients that were there
    before are multiplied for its time, as it adds to them.

    Args:
        scale: of the loop.
        params: those that it owns.

    Attributes:
        was_scaled: whether a backward pass was scaled since this was last set to False.
    """

    def __init__(self, scale: LossScale, params: _Params) -> None:
        self.was_scaled = False
        self._scale, self._params = scale, params
        with _changing:
            _all.add(self)

    def follow(self, output: Any) -> Any:
        """The output of a model, as the loop gets it: with tensors in lists, tuples and the like followed."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or is_watched():
            return output
        return pytree.tree_map(self._followed, output)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See `kitsune.capture.following.Follower`."""
        if function is Tensor.backward:
            return self.backward(*args, **kwargs)
        if function in AS_PLAIN:
            args = (args[0].as_subclass(Tensor), *args[1:])
        with plainly():
            result = function(*args, **kwargs)
        if not isinstance(result, (list, tuple)):
            is_attribute = getattr(function, "__name__", "") == "__get__" and function not in VIEWS
            return result if is_attribute else self._followed(result)
        items = [self._followed(one) for one in result]
        if all(one is other for one, other in zip(items, result, strict=True)):
            return result
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)

    def backward(
        self,
        loss: FollowedTensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """What `Tensor.backward` does; scaled, unless the gradients have a graph of their own."""
        plain = unfollowed(loss)
        if create_graph or (gradient is None and loss.numel() != 1):
            plain.backward(gradient, retain_graph, create_graph, inputs)
            return
        if inputs is None:
            reached, owners = self._reached(plain)
        else:
            reached, owners = [inputs] if isinstance(inputs, Tensor) else list(inputs), [self]
        scale = reduce(torch.minimum, [owner._scale.on(loss.device) for owner in owners])
        inverse = scale.double().reciprocal().float()
        seed = (torch.ones_like(plain) if gradient is None else gradient) * scale
        _multiply(reached, scale)
        try:
            plain.backward(seed, retain_graph, inputs=inputs)
        finally:
            _multiply(reached, inverse)
        for owner in owners:
            owner.was_scaled = True

    def value(self, place: int) -> Tensor:
        """See `kitsune.capture.following.Follower`; there are no pending tensors."""
        raise AssertionError(place)

    def reveal(self) -> None:
        """There are no pending tensors."""

    def close(self) -> None:
        """Another kind of tensor has its own way with this one, which is not followed any further."""

    def _followed(self, value: Any) -> Any:
        is_to_be = type(value) is Tensor and value.requires_grad and value.grad_fn is not None
        return followed(value, self, None) if is_to_be else value

    def _reached(self, loss: Tensor) -> tuple[list[Tensor], list[ScaledLosses]]:
        """The tensors whose gradients a backward pass from `loss` may change, and the loops that own some of them.

        That includes what these loops own: functions may add to gradients unseen.
        """
        leaves = _leaves(loss)
        found = {id(leaf): leaf for leaf in leaves}
        owners = [self]
        with _changing:
            others = tuple(_all)
        for other in others:
            if other is not self and any(id(param) in found for param in other._params()):
                owners.append(other)
        for owner in owners:
            found.update((id(param), param) for param in owner._params())
        return list(found.values()), owners


_all: weakref.WeakSet[ScaledLosses] = weakref.WeakSet()
_changing = threading.Lock()  # in whichever thread


def _multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies the gradients of `tensors`, each once."""
    grads = {id(tensor.grad): tensor.grad for tensor in tensors if tensor.grad is not None}
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for grad in grads.values():
            if grad.layout is torch.strided:
                by_device.setdefault(grad.device, []).append(grad)
            else:
                grad.mul_(factor.to(grad.device))
        for device, dense in by_device.items():
            torch._foreach_mul_(dense, factor.to(device))


def _leaves(loss: Tensor) -> list[Tensor]:
    """Those at which a backward pass from `loss` accumulates gradients."""
    return [node.variable for node in nodes_behind([loss]) if node.name() == "torch::autograd::AccumulateGrad"]
