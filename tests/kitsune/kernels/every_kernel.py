"""Runs every kernel in every form that the tuner would try, and compares what it does with its reference on the CPU.

It is for NVIDIA's Compute Sanitizer, with which the tests would take hours. The first run compiles, on all processors,
and those after it find the kernels in Triton's cache:

    run="python -m tests.kitsune.kernels.every_kernel"
    $run --compile-only
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # else what lies behind a tensor is memory that was allocated with it
    compute-sanitizer --tool memcheck --padding 1024 --error-exitcode 99 $run
    compute-sanitizer --tool racecheck --error-exitcode 99 $run
    compute-sanitizer --tool initcheck --error-exitcode 99 $run

`--only NAME` takes the operators whose names contain NAME, `--limit-s` ends a run early, `--list` tells the operators.
It exits with 0 only if all that was asked for has been run and is right. Without a GPU, Triton's interpreter runs the
first form of each kernel.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kitsune import kernels
from kitsune.kernels import compile_client, tuning
from tests.kitsune.kernels.calls import Call, all_calls, overload
from tests.kitsune.kernels.interpreter import patch_interpreter

C = TypeVar("C")

LARGEST_ERRORS: Mapping[torch.dtype, float] = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Of a value beside itself and the root mean square of its tensor, by the least precise type in a call."""
LARGEST_ERROR_IN_TF32 = 2**-8

_ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class Forms:
    """Stands for `kitsune.kernels.tuning.choose`: takes the forms of each kernel in turn.

    Args:
        most: how many of them; None for all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._place, self._num_forms = 0, 1

    def in_turn(self) -> Iterator[int]:
        """Numbers the times that a call is to be made until each form has had its turn."""
        self._num_forms = 1
        for self._place in itertools.count():
            yield self._place
            if self._place + 1 >= min(self._num_forms, self._most or self._num_forms):
                return

    def choose(self, key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> C:
        """One of the forms, which it tries as the tuner does: that must not change anything."""
        self._num_forms = max(self._num_forms, len(forms))
        form = forms[self._place % len(forms)]
        run(form)
        return form


def choose_all(key: str, forms: Sequence[C], run: Callable[[C], object], device: torch.device) -> C:
    """Stands for `kitsune.kernels.tuning.choose`, too: tries all forms, and returns the last one that works."""
    from triton.runtime.errors import OutOfResources

    working = []
    for form in forms:
        with suppress(OutOfResources):
            run(form)
            working.append(form)
    return working[-1]


@contextmanager
def chosen_by(choose: Callable[..., Any]) -> Iterator[None]:
    """Within, kernels have their forms chosen by another function than `kitsune.kernels.tuning.choose`."""
    names = [one.name for one in pkgutil.iter_modules(kernels.__path__, "kitsune.kernels.")]
    modules = [importlib.import_module(name) for name in names if name.endswith("_triton")]
    with ExitStack() as patches:
        for module in modules:
            if getattr(module, "choose", None) is tuning.choose:
                patches.enter_context(patch.object(module, "choose", choose))
        yield


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, kernels take tensors on the CPU, and the interpreter runs them; there must have been none before."""
    with pytest.MonkeyPatch.context() as scope:
        scope.setenv("TRITON_INTERPRET", "1")
        scope.setattr(torch.cuda, "device", lambda _: nullcontext())
        patch_interpreter(scope)
        yield


def launch(call: Call) -> Any:
    """What a call gives where kernels run, whichever device its tensors are on."""
    return overload(call.operator).redispatch(_ON_CUDA, *call.arguments, **call.options)


def placed(call: Call, device: str) -> Call:
    """The same call of tensors on a device, each in memory of its own that ends with its last element."""
    places: dict[int, Tensor] = {}

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in places:
            places[id(value)] = _placed(value, device)
        return places[id(value)]

    return call._replace(arguments=pytree.tree_map(place, call.arguments), options=pytree.tree_map(place, call.options))


def _placed(tensor: Tensor, device: str) -> Tensor:
    """With the largest number, or NaN, wherever there is none of its elements."""
    span = _span(tensor)
    outside = math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    memory = torch.full((span,), outside, dtype=tensor.dtype)
    positions = torch.arange(span).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() if span else 0)
    memory[positions.flatten()] = tensor.flatten()
    return memory.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), int(positions.min()) if span else 0)


def _span(tensor: Tensor) -> int:
    """How many elements of its memory come before the end of its last one."""
    if not tensor.numel():
        return 0
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() + 1 + sum(steps)


def errors_of(call: Call, device: str) -> dict[str, float]:
    """How far a call where kernels run is from its reference: for each result, and for all memory of each argument."""
    expected, found = placed(call, "cpu"), placed(call, device)
    returned = overload(call.operator)(*expected.arguments, **expected.options)
    wanted, given = _tensors(expected, returned), _tensors(found, launch(found))
    return {name: error_of(given[name].cpu(), one) for name, one in wanted.items()}


def _tensors(call: Call, results: Any) -> dict[str, Tensor]:
    named = {f"result {n}": one for n, one in enumerate(pytree.tree_leaves(results)) if one is not None}
    arguments = enumerate(pytree.tree_leaves((call.arguments, call.options)))
    return named | {
        f"argument {n}": one.as_strided((_span(one),), (1,), 0) for n, one in arguments if isinstance(one, Tensor)
    }


def largest_error(call: Call) -> float:
    """What rounding explains."""
    leaves = pytree.tree_leaves((call.arguments, call.options))
    dtypes = {one.dtype if isinstance(one, Tensor) else one for one in leaves}
    error = max((error for dtype, error in LARGEST_ERRORS.items() if dtype in dtypes), default=0.0)
    return max(error, LARGEST_ERROR_IN_TF32) if call.options.get("allow_tf32") else error


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest difference, beside the value that is expected there and their root mean square.

    Infinite where the tensors are not of one kind, or one is not finite where the other is something else.
    """
    if (found.dtype, found.shape, found.stride()) != (expected.dtype, expected.shape, expected.stride()):
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    finite = expected.isfinite()
    if not torch.equal(found.isfinite(), finite) or not torch.equal(
        found[~finite].nan_to_num(), expected[~finite].nan_to_num()
    ):
        return math.inf
    wanted = expected[finite].double()
    difference = (found[finite].double() - wanted).abs()
    scale = wanted.abs() + wanted.square().mean().sqrt()
    return float(torch.where(difference == 0, 0.0, difference / scale).max()) if wanted.numel() else 0.0


class Report(NamedTuple):
    num_calls: int
    largest_error: float
    problems: list[str]


def check(calls: Sequence[Call], forms: Forms, device: str) -> Report:
    """Makes calls in all forms."""
    from triton.runtime.errors import OutOfResources

    num_calls, worst, problems = 0, 0.0, list[str]()
    for call in calls:
        allowed, made = largest_error(call), list[dict[str, float]]()
        for place in forms.in_turn():
            try:
                made.append(errors_of(call, device))
            except OutOfResources:  # the tuner passes such forms over
                continue
            wrong = {name: error for name, error in made[-1].items() if not error <= allowed}
            problems += [f"form {place}, {name}: off by {error:.2g}, {call}" for name, error in wrong.items()]
            worst = max(worst, *made[-1].values())
        num_calls += len(made)
        if not made:
            problems.append(f"no form works: {call}")
    return Report(num_calls, worst, problems)


def compile_all(calls: Sequence[Call], device: str) -> None:
    """Lets all processors compile what the calls launch."""

    def compile(call: Call) -> None:
        with compile_client.elsewhere():
            launch(placed(call, device))

    compile_client.start()
    with chosen_by(choose_all), ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(compile, calls):
            pass


def run(calls: Sequence[Call], device: str, forms: Forms, limit_s: float) -> int:
    """Checks calls and tells about it, operator by operator; returns the exit code."""
    start, reports, left = time.perf_counter(), list[Report](), list[str]()
    with chosen_by(forms.choose):
        for operator, of_operator in itertools.groupby(calls, lambda call: call.operator):
            if time.perf_counter() - start > limit_s:
                left.append(operator)
                continue
            print(f"{operator}: ", end="", flush=True)  # what ends the process is told after its name
            report = check(list(of_operator), forms, device)
            print(f"{report.num_calls} calls, at most {report.largest_error:.1g} off", flush=True)
            for problem in report.problems:
                print(f"    {problem}")
            reports.append(report)
    num_calls, num_problems = sum(one.num_calls for one in reports), sum(len(one.problems) for one in reports)
    print(
        f"{num_calls} calls of {len(reports)} operators in {time.perf_counter() - start:.0f} s: {num_problems} problems"
    )
    if left:
        print(f"left out after {limit_s:g} s: {', '.join(left)}")
    return int(num_problems > 0 or bool(left))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kitsune.kernels.every_kernel", description=__doc__)
    parser.add_argument("--list", action="store_true", help="tell the operators, and run nothing")
    parser.add_argument("--only", default="", metavar="NAME", help="operators whose names contain this")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no operator after so many seconds")
    parser.add_argument("--compile-only", action="store_true", help="compile what a run on this GPU launches")
    options = parser.parse_args(arguments)
    calls = [call for call in all_calls() if options.only in call.operator]
    if not calls:
        parser.error(f"there is no operator with {options.only!r} in its name; --list tells them")
    if options.list:
        print(*dict.fromkeys(call.operator for call in calls), sep="\n")
        return 0
    if torch.cuda.is_available():
        if options.compile_only:
            compile_all(calls, "cuda")
            return 0
        return run(calls, "cuda", Forms(), options.limit_s)
    if options.compile_only:
        parser.error("there is no GPU to compile for")
    with interpreted():
        return run(calls, "cpu", Forms(most=1), options.limit_s)


if __name__ == "__main__":
    sys.exit(main())
