"""Whether a run with Kitsune has done what the run by hand has done.

Forward passes, losses, backward passes, gradients, buffers and random numbers come from the same operators and must be
equal bit by bit. So must parameters and optimizer state, unless Kitsune's update rounds in another way. Then each is
held against what the update would be in float64, given the state and the gradients that it found: such a run starts
each iteration from where the run by hand is, or rounding would grow from step to step.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import assume
from torch import Tensor

from tests.kitsune import static_memory
from tests.kitsune.differential.loop import Run, Seen
from tests.kitsune.differential.programs import Program
from tests.kitsune.training import Observation

UNITS = 4
_ROUNDING = 1e-5
_LEAST_SCALE = torch.finfo(torch.float32).tiny / 1e-8  # what optimizers make of subnormal numbers, by their eps


def run_both(program: Program, form: str, kind: type[Run] = Run, device: str = "cpu") -> tuple[list[str], Run]:
    """Runs a program by hand and in `form` on a device.

    Returns:
        What differs, in the first iteration where anything does; and the run in `form`, which is of that `kind`.
    """
    with pytest.MonkeyPatch.context() as patch:
        if program.static_memory and device == "cpu":
            static_memory.install(patch)
        return _run_both(program, form, kind, device)


def _run_both(program: Program, form: str, kind: type[Run], device: str) -> tuple[list[str], Run]:
    eager = Run(program, "eager", device)
    wanted = list(eager.iterations())
    assume(not (eager.skipped_first and program.options.get("fused")))  # torch's SGD then goes on from memory as it was
    run = kind(program, form, device)
    rounds = program.rounds_differently(form, device)
    for index, (seen, other) in enumerate(zip(run.iterations(), wanted, strict=True)):
        differences = disagreements(seen.observed, other, rounds=rounds, ignored=_ignored(run, other))
        if differences:
            return [f"iteration {index}: {line}" for line in differences], run
        if rounds:
            run.set({name: other.observed[name] for name in other.exact})
    alike = _almost_equal if rounds and program.writes_gradients() else _equal
    kept = zip(run.kept, eager.kept, strict=True)
    return [f"kept tensor {index}" for index, (one, two) in enumerate(kept) if not alike(one, two)], run


def disagreements(found: Observation, wanted: Seen, *, rounds: bool, ignored: set[str]) -> list[str]:
    """What is not as it should be: see the top of this module."""
    if found.keys() != wanted.observed.keys():
        return [f"present: {sorted(found.keys() ^ wanted.observed.keys())}"]
    differing = [
        name for name, value in wanted.observed.items() if name not in ignored and not _equal(found[name], value)
    ]
    allowed = tolerances(wanted) if rounds else {}
    result = []
    for name in differing:
        one, two = found[name], wanted.observed[name]
        if one is None or two is None:
            result.append(f"{name} is {_brief(one)}, not {_brief(two)}")
            continue
        if name not in allowed:
            result.append(f"{name} is off by {_distance(one, two):.3g}")
            continue
        if not torch.equal(one.isfinite().cpu(), two.isfinite().cpu()):
            result.append(f"{name} is not finite in other places")
            continue
        error = _error(one, wanted.exact[name].value, two)
        if not error <= allowed[name]:
            result.append(f"{name} is off by {error:.3g}, {allowed[name]:.3g} is allowed")
    return result


def tolerances(wanted: Seen) -> dict[str, float]:
    """Of gradients, parameters and optimizer state: twice the error of the update by hand, and a few last places.

    Errors are relative to a tensor's largest element. That by hand is taken to be its largest among all tensors of the
    kind (parameters, first moments, ...), as tensors of few elements may be right by chance. So may the norm of all
    gradients, by which they are clipped: hence more than one unit. Of subnormal numbers a rounding is a large part.
    """
    errors: dict[str, float] = defaultdict(float)
    scales = {name: max(exact.scale, _LEAST_SCALE) for name, exact in wanted.exact.items()}
    for name, exact in wanted.exact.items():
        value = wanted.observed[name]
        assert value is not None
        errors[_kind(name)] = max(errors[_kind(name)], _error(value, exact.value, value) / scales[name])
    least = UNITS * torch.finfo(torch.float32).eps
    return {name: (2 * errors[_kind(name)] + least) * scale for name, scale in scales.items()}


def _kind(name: str) -> str:
    kind = name.rpartition(".")[2]
    return "parameter" if kind in ("weight", "bias") else kind


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.allclose(one.double().cpu(), other.double().cpu(), rtol=0, atol=0, equal_nan=True)
    )


def _almost_equal(one: Tensor, other: Tensor) -> bool:
    finite = other.isfinite()
    scale = max(1.0, other[finite].abs().max().item()) if finite.any() else 1.0
    return torch.allclose(one, other, rtol=0, atol=_ROUNDING * scale, equal_nan=True)


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.double().cpu() - other.double().cpu()).abs().max().item() if one.shape == other.shape else float("inf")


def _error(found: Tensor, exact: Tensor, by_hand: Tensor) -> float:
    """The distance from what is exact, where the run by hand is finite."""
    finite = by_hand.isfinite().cpu()
    return _distance(found.cpu()[finite], exact.cpu()[finite]) if finite.any() else 0.0


def _brief(value: Tensor | None) -> str:
    return "None" if value is None else f"of shape {tuple(value.shape)}"


def _ignored(run: Run, wanted: Seen) -> set[str]:
    """Gradients of parameters that the optimizer does not own: `TrainStep` makes none.

    And those of an update that is skipped, where that was to unscale them: fused optimizers do so in their kernels, and
    then leave them as they are; but not with Kitsune, where the scaler always does.
    """
    if run.skipped and run.program.scales_in_update():
        return {name for name in wanted.observed if name.endswith(".grad")}
    if run.training.train_step is None:
        return set()
    owned = {id(param) for group in run.training.plain.param_groups for param in group["params"]}
    return {f"{name}.grad" for name, param in run.training.model.named_parameters() if id(param) not in owned}
