"""What must be equal for a call to be answered by a graph that an earlier call led to.

Kitsune looks here before it asks Dynamo's guards: a signature not seen before runs eagerly and is
captured only when it comes back. What the signature leaves out (attributes of modules, closures,
globals) is guarded by Dynamo; what Dynamo does not see (hooks, identities, storages) is in
`state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from kitsune.capture.ambient import ambient
from kitsune.errors import Refusal

MARKED = Refusal(
    "a dimension of an argument is marked as dynamic, and what is captured has one shape",
    remedy="pass tensors without torch._dynamo.mark_dynamic and its like",
)


def call_signature(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], module: torch.nn.Module, device: torch.device
) -> Hashable:
    """The signature of calling `module` (or a step around it) with these arguments in the present state of torch."""
    return (
        tuple(map(_describe, args)),
        tuple((name, _describe(value)) for name, value in kwargs.items()) if kwargs else (),
        module.training,
        ambient(device),
    )


def refuse_arguments(inputs: Sequence[torch.Tensor]) -> Refusal | None:
    """None if a replay can take over copies of these arguments of a call."""
    for tensor in inputs:
        refusal = _refuse_kind(tensor)
        if refusal is not None:
            return refusal
        if torch._debug_has_internal_overlap(tensor) == 1:
            shape = tuple(tensor.shape)
            return Refusal(f"an argument of shape {shape} overlaps itself in memory", remedy="pass a contiguous copy")
    return None


def _refuse_kind(tensor: torch.Tensor | torch.SymInt | int) -> Refusal | None:
    if isinstance(tensor, int):  # a size that Dynamo makes an argument of its own
        return MARKED
    if isinstance(tensor, torch.SymInt):  # the size of a jagged one, which Dynamo makes an argument of its own
        return Refusal("an argument is a nested tensor", remedy="pass its values() and offsets()")
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return Refusal(f"an argument is a {type(tensor).__name__}, a tensor subclass")
    if tensor.is_nested or tensor.layout is not torch.strided:
        return Refusal(f"an argument is not a dense tensor ({'nested' if tensor.is_nested else tensor.layout})")
    if tensor.is_conj() or tensor.is_neg():
        return Refusal(
            "an argument is a lazily conjugated or negated view", remedy="pass x.resolve_conj().resolve_neg()"
        )
    return None


def _describe(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        common = (type(value), value.layout, value.dtype, value.device, value.requires_grad, value.is_leaf)
        return common if _refuse_kind(value) is not None else (*common, value.shape, value.stride())
    if isinstance(value, float):
        return (float, value, math.copysign(1.0, value))  # 0.0 == -0.0, and yet they are different inputs
    if value is None or isinstance(value, (bool, int, complex, str, bytes, torch.dtype, torch.device)):
        return (type(value), value)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_describe, value))
    if isinstance(value, Mapping):
        return (type(value), *((name, _describe(item)) for name, item in value.items()))
    return ("an object of", type(value))
