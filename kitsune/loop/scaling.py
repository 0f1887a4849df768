"""A gradient scaler of Kitsune's own, for float16 in a loop that has none.

The loop's loss is not scaled: terms that do not come from a model would be, too. What goes back through a call of a
model is scaled within it (see `kitsune.kernels.scaled_gradient`), and the loop gets gradients as they are, or infinite
ones, after which the update is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kitsune.errors import KitsuneError
from kitsune.kernels.scaled_gradient import scaled_gradient
from kitsune.loop.guarded_step import Call


class GradScaler(torch.amp.GradScaler):
    """As torch's, of which it has the rules, the options and the state, for gradients that are no multiples any more.

    It only looks for infinities. What divides is a private method of torch's.
    """

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, torch.ones_like(inv_scale), found_inf, allow_fp16)

    def on(self, device: torch.device) -> Tensor:
        """The scale, a tensor of one element on `device`: always the same one."""
        if self._scale is None:
            self.scale(torch.zeros((), device=device))
        assert self._scale is not None
        return self._scale

    def update_unless_infinite(self, param_groups: list[dict[str, Any]], update: Callable[[], None]) -> None:
        """Calls `update`, unless a gradient is infinite or NaN, and changes the scale accordingly."""
        grads = [param.grad for group in param_groups for param in group["params"] if param.grad is not None]
        if not grads:
            update()
            return
        self.on(grads[0].device)
        self.step(_Optimizer(param_groups, update))  # type: ignore[arg-type]  # it asks for no more of an optimizer
        self.update()


class _Optimizer(NamedTuple):
    """What a scaler asks of an optimizer."""

    param_groups: list[dict[str, Any]]
    step: Callable[[], None]


def scaled(call: Call, scale: Tensor) -> Call:
    """`call`, with the gradients of its outputs multiplied by `scale`. Those of what it reads are multiples, too."""

    def scaled_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return scaled_outputs(call(args, kwargs), scale)

    return scaled_call


def unscaled(call: Call, scale: Tensor) -> Call:
    """`call`, a scaled one, with the gradients of what it reads divided by `scale`."""

    def unscaled_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return call(args, kwargs)
        stand_ins = list[tuple[Tensor, Tensor]]()

        def apart(value: Any) -> Any:
            if not _has_gradient(value):
                return value
            stand_ins.append((value.detach().requires_grad_(), value))
            return stand_ins[-1][0]

        args, kwargs = pytree.tree_map(apart, (args, kwargs))
        return unscaled_outputs(call(args, kwargs), scale, stand_ins)

    return unscaled_call


def scaled_outputs(output: Any, scale: Tensor) -> Any:
    """`output` of a call, with gradients multiplied by `scale`: all tensors in lists, tuples and the like."""
    return pytree.tree_map(lambda one: scaled_gradient(one, scale) if _has_gradient(one) else one, output)


def unscaled_outputs(output: Any, scale: Tensor, stand_ins: Sequence[tuple[Tensor, Tensor]] = ()) -> Any:
    """`output` of a scaled call, with gradients divided by `scale` where they leave it.

    The call keeps a graph of its own, whose backward pass runs within that of what is returned.

    Args:
        stand_ins: leaves that the call was given, each with what it stands for; the other leaves are found.
    """
    leaves, spec = pytree.tree_flatten(output)
    places = [place for place, leaf in enumerate(leaves) if _has_gradient(leaf)]
    if not places:
        return output
    outputs = [leaves[place] for place in places]
    known = {id(inner) for inner, _ in stand_ins}
    pairs = [*stand_ins, *((leaf, leaf) for leaf in _leaves(outputs) if id(leaf) not in known)]
    inside, outside = zip(*pairs, strict=True)
    results = _Unscaled.apply(outputs, inside, scale, *outside)  # type: ignore[no-untyped-call]
    for place, result in zip(places, results, strict=True):
        leaves[place] = result
    return pytree.tree_unflatten(leaves, spec)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Unscaled(torch.autograd.Function):
    """Goes back through `outputs`, which have a graph of their own from `inputs`, to what stands for these outside."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], scale: Tensor, *_outside: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.outputs, ctx.inputs, ctx.scale = outputs, inputs, scale
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise KitsuneError(
                "create_graph does not reach through a scaled call: with enable_amp in float16 gradients cannot be "
                "differentiated; use amp_dtype=torch.bfloat16, or torch.autocast and a GradScaler in the loop"
            )
        pairs = [(output, one) for output, one in zip(ctx.outputs, gradients, strict=True) if one is not None]
        if not pairs:
            return (None,) * (3 + len(ctx.inputs))
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            ctx.inputs,
            [one for _, one in pairs],
            retain_graph=torch._C._autograd._get_current_graph_task_keep_graph(),  # as the pass that this is a part of
            allow_unused=True,
        )
        return (None, None, None, *(None if one is None else one / ctx.scale for one in found))


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those that a backward pass from `outputs` would accumulate gradients at."""
    found, seen, waiting = list[Tensor](), set[Any](), [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # accumulates
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
