"""Which casts and counters are taken together, and what they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import models
from kitsune.capture.trace import trace
from kitsune.fusion import casts
from kitsune.plan import Fusion
from tests.kitsune.fusion.running import InAutocast, always, assert_alike, fuse, fused, never, operators, run
from tests.kitsune.steps import traced_step

TEMPLATES = (casts.parameters, casts.counters)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def weights(*shapes: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    return [torch.randn(shape, device=device) for shape in shapes]


def chain(x: Tensor, *factors: Tensor) -> list[Tensor]:
    """Each factor is cast where it is needed."""
    y = x.bfloat16()
    for factor in factors:
        y = y.sin() @ factor.bfloat16()
    return [y, y.float()]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_casts_of_inputs_become_one(device: str) -> None:
    inputs = weights((3, 4), (4, 5), (5, 4), (4, 2), device=device)
    inputs[2] = inputs[2].t().contiguous().t()
    module, new = fused(chain, inputs, TEMPLATES)
    assert operators(new) == {"cast_many": 1}
    assert operators(new, "aten")["_to_copy"] == 1  # of the result
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def test_each_pair_of_types_by_itself() -> None:
    def function(*inputs: Tensor) -> list[Tensor]:
        return [one.to(dtype) for one in inputs for dtype in (torch.bfloat16, torch.float16) if one.dtype != dtype]

    inputs = [*weights((3,), (4,)), torch.randn(5).half(), torch.randn(6).half()]
    module, new = fused(function, inputs, TEMPLATES)
    assert operators(new) == {"cast_many": 3}
    assert operators(new, "aten") == {}
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def single(x: Tensor, other: Tensor) -> list[Tensor]:
    return [x.bfloat16(), other.sin()]


def of_what_is_computed(x: Tensor, other: Tensor) -> list[Tensor]:
    return [x.sin().bfloat16(), other.sin().bfloat16()]


def of_what_is_written(x: Tensor, other: Tensor) -> list[Tensor]:
    first = x.bfloat16()
    other.mul_(2)
    return [first, other.bfloat16()]


def laid_out_anew(x: Tensor, other: Tensor) -> list[Tensor]:
    return [tensor.t().to(torch.bfloat16, memory_format=torch.contiguous_format) for tensor in (x, other)]


def to_other_types(x: Tensor, other: Tensor) -> list[Tensor]:
    return [x.double(), other.double(), x.int(), other.int()]


@pytest.mark.parametrize(
    "function",
    [single, of_what_is_computed, of_what_is_written, laid_out_anew, to_other_types],
    ids=lambda f: f.__name__,
)
def test_casts_that_stay(function: Callable[..., list[Tensor]]) -> None:
    inputs = weights((3, 4), (5, 4))
    module, new = fused(function, inputs, TEMPLATES)
    assert not operators(new)
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def test_inputs_with_gaps_are_cast_by_themselves() -> None:
    inputs = [torch.randn(3, 8)[:, :5], *weights((3, 5), (2, 2))]
    module, new = fused(lambda *tensors: [tensor.bfloat16() for tensor in tensors], inputs, TEMPLATES)
    assert operators(new) == {"cast_many": 1}
    assert operators(new, "aten") == {"_to_copy": 1}
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def halves(*shapes: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    return [one.bfloat16() for one in weights(*shapes, device=device)]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_casts_of_results_become_one_when_the_last_is_there(device: str) -> None:
    """As those of gradients, some of which are laid out otherwise."""

    def function(*inputs: Tensor) -> list[Tensor]:
        results, running = list[Tensor](), inputs[0].sum()
        for one in inputs:
            running = running + one.sum()
            results.append((one * running).float())
        return [running, *results]

    inputs = halves((3, 4), (4, 5), (2, 3, 4, 4), device=device)
    inputs[2] = inputs[2].contiguous(memory_format=torch.channels_last)
    module, new = fused(function, inputs, (casts.results,))
    assert operators(new) == {"cast_many": 1}
    assert operators(new, "aten")["_to_copy"] == 0
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def test_casts_of_results_that_others_wait_for_are_apart() -> None:
    """None is put off until what is computed from it is there: so the parts of a backward pass stay apart."""

    def function(*inputs: Tensor) -> list[Tensor]:
        first = [(one * 2).float() for one in inputs]
        between = (first[0] + first[1].sum()).bfloat16()
        return [*first, *((between * number).float() for number in range(3))]

    inputs = halves((3, 4), (4, 5))
    module, new = fused(function, inputs, (casts.results,))
    assert operators(new) == {"cast_many": 2}
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def one_alone(x: Tensor, other: Tensor) -> list[Tensor]:
    return [x.sin().float(), other.sin()]


def of_an_input(x: Tensor, other: Tensor) -> list[Tensor]:
    return [x.float(), other.float()]


def used_within(x: Tensor, other: Tensor) -> list[Tensor]:
    return [x.sin().float().sum(), other.sin().float().sum()]


def in_another_order(x: Tensor, other: Tensor) -> list[Tensor]:
    return [one.sin().t().to(torch.float32, memory_format=torch.contiguous_format) for one in (x, other)]


def of_many_elements(x: Tensor, other: Tensor) -> list[Tensor]:
    return [one.sum().expand(2**11, 2**11 + 1).clone().float() for one in (x, other)]


@pytest.mark.parametrize(
    "function", [one_alone, of_an_input, used_within, in_another_order, of_many_elements], ids=lambda f: f.__name__
)
def test_casts_of_results_that_stay(function: Callable[..., list[Tensor]]) -> None:
    inputs = halves((3, 4), (5, 4))
    module, new = fused(function, inputs, (casts.results,))
    assert not operators(new)
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def counts(*values: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> list[Tensor]:
    return [torch.tensor(value, dtype=dtype, device=device) for value in values]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_counters_become_one(device: str) -> None:
    def function(x: Tensor, *counters: Tensor) -> list[Tensor]:
        for counter in counters:
            counter.add_(1)
            x = x.sin()
        return [x]

    inputs = [*weights((3,), device=device), *counts(1, 5, 2**40, device=device)]
    module, new = fused(function, inputs, TEMPLATES)
    assert operators(new, "aten") == {"_foreach_add_": 1, "sin": 3}
    assert [tensor.item() for tensor in run(new, inputs)[-3:]] == [2, 6, 2**40 + 1]
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def test_counters_with_other_steps_and_types_by_themselves() -> None:
    def function(*counters: Tensor) -> list[Tensor]:
        for place, counter in enumerate(counters):
            counter.add_(2 if place < 2 else 1)
        return []

    inputs = [*counts(1, 2, 3, 4), *counts(5, 6, dtype=torch.int32)]
    module, new = fused(function, inputs, TEMPLATES)
    assert operators(new, "aten") == {"_foreach_add_": 3}
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_step_counts(device: str, dtype: torch.dtype) -> None:
    def function(x: Tensor, *steps: Tensor) -> list[Tensor]:
        torch._foreach_add_(steps, 1)
        return [x / steps[0], *(step.clone() for step in steps)]

    inputs = [*weights((3,), device=device), *counts(1, 5, 7, dtype=dtype, device=device)]
    module, new = fused(function, inputs, (casts.steps,))
    assert operators(new) == {"add_to_scalars_": 1}
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def test_counters_of_one_element_become_step_counts() -> None:
    def function(*counters: Tensor) -> list[Tensor]:
        for counter in counters:
            counter.add_(1)
        return []

    inputs = counts(1, 2)
    module, new = fused(function, inputs, (casts.counters, casts.steps))
    assert operators(new) == {"add_to_scalars_": 1}
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    "inputs",
    [
        [torch.zeros(2), torch.zeros(2)],
        [torch.zeros(()), torch.zeros((), dtype=torch.float64)],
        [torch.zeros((), dtype=torch.float16), torch.zeros((), dtype=torch.float16)],
    ],
    ids=["several elements", "several types", "another type"],
)
@pytest.mark.parametrize("number", [1, 0.5, 2**31])
def test_steps_that_stay(inputs: Sequence[Tensor], number: float) -> None:
    def function(*tensors: Tensor) -> list[Tensor]:
        torch._foreach_add_(tensors, number)
        return []

    _, new = fused(function, inputs, (casts.steps,))
    assert not operators(new)


def test_a_scalar_that_is_counted_twice() -> None:
    def function(one: Tensor, other: Tensor) -> list[Tensor]:
        torch._foreach_add_([one, other, one], 1)
        return []

    _, new = fused(function, [torch.zeros(()), torch.zeros(())], (casts.steps,))
    assert not operators(new)


def read_too(one: Tensor, other: Tensor) -> list[Tensor]:
    return [one.add_(1).sin(), other.add_(1).sin()]


def twice(one: Tensor, other: Tensor) -> list[Tensor]:
    one.add_(1), one.add_(1), other.add_(1)
    return []


def by_tensors(one: Tensor, other: Tensor, number: Tensor) -> list[Tensor]:
    one.add_(number), other.add_(number)
    return []


def scaled(one: Tensor, other: Tensor) -> list[Tensor]:
    one.add_(1, alpha=3), other.add_(1, alpha=3)
    return []


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (read_too, counts(1, 2)),
        (twice, counts(1, 2)),
        (by_tensors, counts(1, 2, 3)),
        (scaled, counts(1, 2)),
        (lambda one, other: [one.add_(1), other.add_(1)][:0], [torch.zeros(65, dtype=torch.int64) for _ in range(2)]),
        (lambda one, other: [one.add_(1), other.add_(1)][:0], [torch.zeros(()) for _ in range(2)]),
    ],
    ids=["read too", "twice", "by tensors", "scaled", "large", "floating point"],
)
def test_counters_that_stay(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> None:
    module, new = fused(function, inputs, TEMPLATES)
    assert operators(new, "aten")["_foreach_add_"] == 0
    assert_alike(run(new, inputs), run(module, inputs), rtol=0, atol=0)


def test_nothing_changes_unless_it_is_faster() -> None:
    inputs = weights((3, 4), (4, 5))
    new, fusions = fuse(trace(chain, inputs), TEMPLATES, never)
    assert not operators(new)
    assert [fusion.template for fusion in fusions] == ["casts of many inputs"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_resnet18_under_autocast(device: str) -> None:
    workload = models.build("resnet18", seed=0)
    module = InAutocast(workload.module.to(device, memory_format=torch.channels_last), torch.bfloat16)
    x, y = (tensor.to(device) for tensor in workload.batch(2, index=0))
    step = traced_step(module, nn.functional.cross_entropy, x, y)
    new, fusions = fuse(step.module, TEMPLATES, always)
    before, after = operators(step.module, "aten"), operators(new, "aten")
    assert operators(new)["cast_many"] == 1
    assert before["_to_copy"] - after["_to_copy"] == num_nodes(fusions, "casts of many inputs") >= 21
    assert num_nodes(fusions, "counters") == before["add_"] - after["add_"] == 20
    assert_alike(run(new, step.inputs), run(step.module, step.inputs), rtol=0, atol=0)


def num_nodes(fusions: Sequence[Fusion], template: str) -> int:
    return sum(len(fusion.operators) for fusion in fusions if fusion.template == template)
