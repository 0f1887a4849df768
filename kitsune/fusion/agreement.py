"""Whether a part of a graph and its replacement compute the same, on random values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kitsune.fusion.examples import examples
from kitsune.fusion.match import Alone
from kitsune.graph import dataflow
from kitsune.graph.values import mode_of

# Both round differently. Of the norm of a difference, relative to that of the result: a rounding of the lowest
# precision costs a quarter of its epsilon, and the order of a sum matters to float32.
_ROUNDINGS = 1.5
_SUMS = 1e-4

# A slice of a tensor may differ by more than the whole, and by so many elements of the usual size: rounding decides on
# which side of a ReLU's zero they are.
_TIMES_IN_SLICES = 3.0
_STRAYS = 4.0

# What is float32 may have twice the error of the original, but for so many units in the last place; without a float64
# run, so many between the two.
_TIMES = 2.0
_UNITS = 8.0
_UNITS_BETWEEN = 32.0

_EPSILON = torch.finfo(torch.float32).eps

_Run = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Results of a part, and its inputs afterwards."""


class _Outcome(NamedTuple):
    """What a part returns, and by how much it changes its inputs."""

    results: Sequence[torch.Tensor]
    changes: Sequence[torch.Tensor]

    @property
    def values(self) -> list[torch.Tensor]:
        return [*self.results, *self.changes]


def agree(alone: Alone, device: torch.device) -> bool:
    """Whether the results are the same but for rounding, and so is what is written to the inputs.

    Libraries may round more than once: in Winograd's convolutions, or to TF32. So what differs may agree with the same
    operators in float64 instead. What is float32 must be as close to these as the original is, or nearly so: TF32
    would pass for the rounding of sums, and what bfloat16 rounds nowhere for its rounding.

    Raises:
        RuntimeError: one of the runs fails; that in float64 only where the others leave the matter open.
    """
    floats = [tensor.dtype for node in alone.before.graph.nodes for tensor in dataflow.tensors(node)]
    lowest = max((torch.finfo(dtype).eps for dtype in floats if dtype.is_floating_point), default=0.0)
    tolerance = max(_ROUNDINGS * lowest, _SUMS)
    written = sorted({*dataflow.written_inputs(alone.before.graph), *dataflow.written_inputs(alone.after.graph)})

    def outcome(run: Callable[[Sequence[torch.Tensor]], _Run]) -> _Outcome:
        initial, inputs = examples(alone, device), examples(alone, device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            results, inputs = run(inputs)
        return _Outcome(results, [inputs[place].double() - initial[place].double() for place in written])

    before, after = (outcome(partial(_as_it_is, module)) for module in (alone.before, alone.after))
    if [_kind(one) for one in before.results] != [_kind(one) for one in after.results]:
        return False
    inputs = [node.meta["val"].dtype for node in dataflow.placeholders(alone.before.graph)]
    dtypes = [*(one.dtype for one in before.results), *(inputs[place] for place in written)]
    is_close, is_single = _are_close(before, after, tolerance), lowest <= _EPSILON
    judged = [is_single or dtype in (torch.float32, torch.float64) for dtype in dtypes]
    if is_close and not any(judged):
        return True
    if not _takes_float64(alone.before):
        return is_close and (not is_single or _are_alike(before, after))
    try:
        exact = outcome(partial(_in_float64, alone.before))
    except (RuntimeError, TypeError, ValueError) as error:
        if is_close and (not is_single or _are_alike(before, after)):
            return True
        if isinstance(error, (NotImplementedError, TypeError, ValueError)):  # some operators do not take it
            return False
        raise
    chances = [
        _chance(one, lowest) if is_judged else math.inf for one, is_judged in zip(exact.values, judged, strict=True)
    ]
    return _is_as_exact(exact, before, after, chances) and (is_close or _are_close(exact, after, tolerance))


def _as_it_is(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> _Run:
    return module.forward(*inputs), inputs


def _in_float64(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> _Run:
    wide = _widened(inputs)
    return _InFloat64(module).run(*wide), wide


def _takes_float64(module: fx.GraphModule) -> bool:
    """Whether the checks of all operators take it. It asks fake tensors: a library may search for long how to compute
    large operators, only for a later one to refuse."""
    with mode_of(module.graph), torch.no_grad():
        try:
            _InFloat64(module).run(*_widened([node.meta["val"] for node in dataflow.placeholders(module.graph)]))
        except (NotImplementedError, TypeError, ValueError):
            return False
        except RuntimeError:  # what depends on values, or has no fake
            return True
    return True


class _InFloat64(fx.Interpreter):
    """Computes in float64 throughout."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.dtype, _wide, (args, kwargs))
        is_own = isinstance(target, torch._ops.OpOverload) and target.namespace == "kitsune"
        call = _on_cpu if is_own else super().call_function
        return _widened(call(target, args, kwargs))


def _on_cpu(target: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
    """Kitsune's own operators have no kernels for float64: references, on the CPU, stand in for them."""
    parameters = target._schema.arguments
    given = {**dict(zip((one.name for one in parameters), args, strict=False)), **kwargs}
    copies = pytree.tree_map_only(torch.Tensor, lambda one: one.cpu(), given)
    made = target(**copies)
    for name in [one.name for one in parameters if one.alias_info is not None and one.alias_info.is_write]:
        pairs = zip(pytree.tree_leaves(given[name]), pytree.tree_leaves(copies[name]), strict=True)
        for one, copy in pairs:
            if one is not None:
                one.copy_(copy)
    device = next(leaf.device for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))
    return pytree.tree_map_only(torch.Tensor, lambda one: one.to(device), made)


def _widened(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda one: one.to(_wide(one.dtype)), values)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.size()


def _are_close(wanted: _Outcome, found: _Outcome, tolerance: float) -> bool:
    results = zip(wanted.results, found.results, strict=True)
    changes = zip(wanted.changes, found.changes, strict=True)
    return all(_is_close(one, other, tolerance) for one, other in results) and all(
        _is_close(one, other, tolerance + _SUMS) for one, other in changes
    )


def _are_alike(wanted: _Outcome, found: _Outcome) -> bool:
    """Whether they differ by a few units in the last place of float32."""
    return all(error <= _UNITS_BETWEEN * _EPSILON for error in _errors(wanted, found))


def _is_as_exact(exact: _Outcome, before: _Outcome, after: _Outcome, chances: Sequence[float]) -> bool:
    """Whether no error is much larger than it was, but for what is given for each result and change."""
    errors = zip(_errors(exact, before), _errors(exact, after), chances, strict=True)
    return all(found <= _TIMES * own + _UNITS * _EPSILON + chance for own, found, chance in errors)


def _chance(value: torch.Tensor, epsilon: float) -> float:
    """By how much the errors of few numbers may differ because one of them was rounded luckily."""
    return epsilon / (2 * math.sqrt(max(value.numel(), 1)))


def _errors(wanted: _Outcome, found: _Outcome) -> list[float]:
    return [_error(one, other) for one, other in zip(wanted.values, found.values, strict=True)]


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of `other`, relative to `one`, where they are not equal or both no numbers.

    Infinite where only one is no number, and where there are none but such.
    """
    if one.numel() == 0:
        return 0.0
    if one.is_floating_point() and bool(one.isnan().all()):
        return float("inf")
    difference, finite = _compared(one, other)
    error = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(finite).clamp_min(1e-30))
    return error if error == error else float("inf")


def _is_close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether the error of `other` is small, and that of each of its slices.

    A slice has one place in a dimension, or one place in each of the first dimensions.
    """
    if _error(one, other) > tolerance:
        return False
    difference, finite = _compared(one, other)
    dims = range(one.dim())
    slices = {*((dim,) for dim in dims), *(tuple(dims[:dim]) for dim in dims[1:])}
    others = [[dim for dim in dims if dim not in kept] for kept in sorted(slices)]
    return all(_are_slices_close(difference, finite, across, tolerance) for across in others if across)


def _are_slices_close(difference: torch.Tensor, finite: torch.Tensor, across: list[int], tolerance: float) -> bool:
    """Of slices that extend in the dimensions `across`; small values count like those of the usual size."""
    usual = finite.square().mean().sqrt()
    count = math.prod(finite.size(dim) for dim in across)
    size = torch.hypot(torch.linalg.vector_norm(finite, dim=across), math.sqrt(count) * usual)
    allowed = _TIMES_IN_SLICES * tolerance * size + _STRAYS * usual
    return not bool((torch.linalg.vector_norm(difference, dim=across) > allowed).any())


def _compared(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The difference where they are not equal or both no numbers, and the finite values of `one`."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0, one - other), torch.where(one.isfinite(), one, 0)
