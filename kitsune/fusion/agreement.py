"""Whether a part of a graph and its replacement compute the same, on random values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.fusion.match import Alone
from kitsune.graph import dataflow

# Both round differently. Of the norm of a difference, relative to that of the result: a rounding of the lowest
# precision costs a quarter of its epsilon, and the order of a sum matters to float32.
_ROUNDINGS = 1.5
_SUMS = 1e-4

# In float32 the replacement's error may be twice that of the original, but for so many units in the last place.
_TIMES = 2.0
_UNITS = 8.0

_Run = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Results of a part, and its inputs afterwards."""


class _Outcome(NamedTuple):
    """What a part returns, and by how much it changes its inputs."""

    results: Sequence[torch.Tensor]
    changes: Sequence[torch.Tensor]


def agree(alone: Alone, device: torch.device) -> bool:
    """Whether the results are the same but for rounding, and so is what is written to the inputs.

    Libraries may round more than once: in Winograd's convolutions, or to TF32. So what differs may agree with the same
    operators in float64 instead. What computes in float32 throughout must be as close to these as the original is, or
    nearly so: TF32 would pass for the rounding of sums.
    """
    floats = [tensor.dtype for node in alone.before.graph.nodes for tensor in dataflow.tensors(node)]
    lowest = max((torch.finfo(dtype).eps for dtype in floats if dtype.is_floating_point), default=0.0)
    tolerance = max(_ROUNDINGS * lowest, _SUMS)
    written = sorted({*dataflow.written_inputs(alone.before.graph), *dataflow.written_inputs(alone.after.graph)})

    def outcome(run: Callable[[Sequence[torch.Tensor]], _Run]) -> _Outcome:
        initial, inputs = examples(alone.given, device), examples(alone.given, device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            results, inputs = run(inputs)
        return _Outcome(results, [inputs[place].double() - initial[place].double() for place in written])

    before, after = (outcome(partial(_as_it_is, module)) for module in (alone.before, alone.after))
    if [_kind(one) for one in before.results] != [_kind(one) for one in after.results]:
        return False
    is_close, is_single = _are_close(before, after, tolerance), lowest <= torch.finfo(torch.float32).eps
    if is_close and not is_single:
        return True
    try:
        exact = outcome(partial(_in_float64, alone.before))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):  # some operators do not take it
        return is_close
    if is_single and not _is_as_exact(exact, before, after):
        return False
    return is_close or _are_close(exact, after, tolerance)


def examples(given: fx.GraphModule, device: torch.device) -> Sequence[torch.Tensor]:
    """Inputs, equal at each call: of normal numbers, but for positive ones in scalars and vectors.

    Integers are 0, which is a valid class, index and count; half of the Booleans are true.
    """
    generator = torch.Generator(device).manual_seed(0)
    free = [_example(node.meta["val"], generator) for node in dataflow.placeholders(given.graph)]
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        made: Sequence[torch.Tensor] = given.forward(*free)
    return made


def _example(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    size = [1 if stride == 0 else size for size, stride in zip(value.size(), value.stride(), strict=True)]
    made = torch.empty_strided(size, value.stride(), dtype=value.dtype, device=device)
    if value.dtype == torch.bool:
        made.copy_(torch.rand(size, generator=generator, device=device) < 0.5)
    elif not value.dtype.is_floating_point:
        made.zero_()
    else:
        draw = torch.rand if value.dim() < 2 else torch.randn
        made.copy_(draw(size, generator=generator, device=device))
    return made.expand(value.size())


def _as_it_is(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> _Run:
    return module.forward(*inputs), inputs


def _in_float64(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> _Run:
    wide = _widened(inputs)
    return _InFloat64(module).run(*wide), wide


class _InFloat64(fx.Interpreter):
    """Computes in float64, but for casts, which round as ever."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.aten._to_copy.default:
            args, kwargs = pytree.tree_map_only(torch.dtype, _wide, (args, kwargs))
        return _widened(super().call_function(target, args, kwargs))


def _widened(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda one: one.to(_wide(one.dtype)), values)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.size()


def _are_close(wanted: _Outcome, found: _Outcome, tolerance: float) -> bool:
    same = all(error <= tolerance for error in _errors(wanted, found))
    changes = zip(wanted.changes, found.changes, strict=True)
    return same and all(_error(one, other) <= tolerance + _SUMS for one, other in changes)


def _is_as_exact(exact: _Outcome, before: _Outcome, after: _Outcome) -> bool:
    allowed = [_TIMES * error + _UNITS * torch.finfo(torch.float32).eps for error in _errors(exact, before)]
    return all(map(operator.le, _errors(exact, after), allowed))


def _errors(wanted: _Outcome, found: _Outcome) -> list[float]:
    return [_error(one, other) for one, other in zip(wanted.results, found.results, strict=True)]


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of `other`, relative to `one`, where they are not equal or both no numbers.

    Infinite where only one is no number, and where there are none but such.
    """
    if one.numel() == 0:
        return 0.0
    if one.is_floating_point() and bool(one.isnan().all()):
        return float("inf")
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    finite = torch.where(one.isfinite(), one, 0)
    difference = torch.linalg.vector_norm(torch.where(same, 0, one - other))
    error = float(difference / torch.linalg.vector_norm(finite).clamp_min(1e-30))
    return error if error == error else float("inf")
