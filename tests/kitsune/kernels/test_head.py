"""Classifier heads with cross-entropy against float64: in Triton's interpreter on the CPU, and compiled on a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitsune.kernels import head, linear
from tests.kitsune.kernels.interpreter import as_laid_out, error, interpreted, normal, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

SHAPE = (35, 10, 45)  # rows, classes, depth
FORMS = ((16, 16, 16, 1, 4, 2), (16, 16, 32, 2, 4, 2), (64, 32, 16, 4, 8, 1))
PRECISIONS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]


class Machine:
    """A device and the launcher of its kernel: the interpreter's on the CPU, else the compiled one."""

    def __init__(self, device: str, kernels: ModuleType) -> None:
        self.device, self.kernels = device, kernels

    def head(self, *tensors: Any, form: tuple[int, ...] | None = None, **options: Any) -> head.Outputs:
        outputs = head._empty_outputs(*tensors, **options)
        *operands, activation = tensors
        options = {"scale": None, "ignore_index": -100, "allow_tf32": False, **options}
        options.pop("dtype")
        form = form and self.kernels.Form(*form)
        self.kernels.cross_entropy_head(*operands, *outputs, activation=activation, form=form, **options)
        return outputs


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted("linear_triton", "head_triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if request.param == "cpu":
        module = request.getfixturevalue("kernels")
        patch_interpreter(monkeypatch)
        return Machine("cpu", module)
    return Machine("cuda", pytest.importorskip("kitsune.kernels.head_triton", reason="Triton is not installed"))


def operands(shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """Input, weight, bias and targets, of which the fourth is to be ignored."""
    num_rows, num_classes, num_deep = shape
    x = normal((num_rows, num_deep), dtype, device, 0)
    weight = normal((num_classes, num_deep), torch.float32, device, 1, 0.3)
    targets = torch.arange(num_rows, device=device) * 7 % num_classes
    targets[3:4] = -100
    return x, weight, normal((num_classes,), torch.float32, device, 2), targets


def exact_outputs(
    x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, saved: Tensor | None, activation: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """In float64, by autograd, of the operands that are rounded to the compute dtype."""
    wide = x.to(dtype).double().requires_grad_()
    logits = wide @ weight.to(dtype).double().t() + bias.to(dtype).double()
    logits.retain_grad()
    loss = functional.cross_entropy(logits, targets)
    loss.backward()
    assert wide.grad is not None
    grad_x = linear.backpropagate(wide.grad, saved, activation)
    assert logits.grad is not None
    return loss.detach(), logits.grad, grad_x


def saved_for(activation: str, x: Tensor) -> Tensor | None:
    if activation == "none":
        return None
    return linear.ACTIVATIONS[activation](x) if activation in linear.OF_OUTPUT else x


def assert_as_accurate(found: head.Outputs, exact: tuple[Tensor, ...], plain: head.Outputs, dtype: torch.dtype) -> None:
    """The loss is one number: a logit that rounds otherwise shows in it, though no error is larger."""
    units = (torch.finfo(dtype).eps, *[torch.finfo(torch.float32).eps] * 2)
    for one, other, same, unit in zip(found, exact, plain, units, strict=True):
        assert error(one, other) <= 2 * error(same, other) + unit


@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_as_accurate_as_torch(machine: Machine, activation: str, precision: tuple[torch.dtype, torch.dtype]) -> None:
    given = operands(SHAPE, precision[0], machine.device)
    saved, dtype = saved_for(activation, given[0]), precision[1]
    exact = exact_outputs(*given, saved, activation, dtype)
    plain = head._on_cpu(*given, saved, activation, dtype=dtype)
    found = machine.head(*given, saved, activation, dtype=dtype)
    assert_as_accurate(found, exact, plain, dtype)
    assert not found[1][3].any()


@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 1), (16, 16, 64), (5, 100, 70)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_computes_every_shape(machine: Machine, shape: tuple[int, int, int], form: tuple[int, ...]) -> None:
    given = operands(shape, torch.float32, machine.device)
    exact = exact_outputs(*given, given[0], "relu", torch.float32)
    found = machine.head(*given, given[0], "relu", dtype=torch.float32, form=form)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_the_scale_is_that_of_the_gradients_alone(machine: Machine) -> None:
    """Up to rounding, as kernels may be compiled differently: by units of the largest values, where terms cancel."""
    given = operands(SHAPE, torch.float32, machine.device)
    options = {"dtype": torch.float32, "form": FORMS[0]}  # another form sums the logits in another order
    plain = machine.head(*given, None, "none", **options)
    scale = torch.full((), 1024.0, device=machine.device)
    scaled = machine.head(*given, None, "none", **options, scale=scale)
    torch.testing.assert_close(scaled[0], plain[0], rtol=1e-6, atol=0)
    for one, other in zip(scaled[1:], plain[1:], strict=True):
        atol = 2 * torch.finfo(torch.float32).eps * other.abs().max().item()
        torch.testing.assert_close(one / 1024, other, rtol=1e-6, atol=atol)


def test_layouts_and_blocks_of_rows_do_not_change_a_bit(machine: Machine) -> None:
    x, weight, bias, targets = operands(SHAPE, torch.float32, machine.device)
    options = {"dtype": torch.bfloat16, "form": FORMS[1]}
    expected = machine.head(x, weight, bias, targets, x, "tanh", **options)
    for layout in ("transposed", "sliced"):
        x, weight = as_laid_out(x, layout), as_laid_out(weight, layout)
        bias, targets = as_laid_out(bias, "sliced"), as_laid_out(targets, "sliced")
        found = machine.head(x, weight, bias, targets, x, "tanh", **options)
        assert all(map(torch.equal, found, expected))
    for _ in range(2):
        assert all(map(torch.equal, machine.head(x, weight, bias, targets, x, "tanh", **options), expected))
    other = machine.head(x, weight, bias, targets, x, "tanh", **{**options, "form": FORMS[2]})
    torch.testing.assert_close(other[0], expected[0], rtol=1e-6, atol=0)


def test_every_target_ignored(machine: Machine) -> None:
    x, weight, _, targets = operands(SHAPE, torch.float32, machine.device)
    targets.fill_(7)
    loss, grad_logits, grad_x = machine.head(
        x, weight, None, targets, None, "none", dtype=torch.float32, ignore_index=7
    )
    assert loss.isnan()
    assert not grad_logits.any()
    assert not grad_x.any()


def test_no_rows(machine: Machine) -> None:
    x, weight, bias, targets = operands((0, 3, 4), torch.float32, machine.device)
    loss, grad_logits, grad_x = machine.head(x, weight, bias, targets, None, "none", dtype=torch.float32)
    assert loss.isnan()
    assert (grad_logits.shape, grad_x.shape) == ((0, 3), (0, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [3, 5])
def test_rows_that_are_not_finite(machine: Machine, bad: float, row: int) -> None:
    """The gradients are those of autograd, also where the row is ignored; the other rows keep theirs."""
    x, weight, bias, targets = operands((19, 4, 3), torch.float32, machine.device)
    x[row] = 0.0
    x[row, 1] = bad
    given = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    logits = functional.linear(*given)
    loss = functional.cross_entropy(logits, targets)
    grad_logits, grad_x = torch.autograd.grad(loss, [logits, given[0]])
    found = machine.head(x, weight, bias, targets, None, "none", dtype=torch.float32)
    for one, other in zip(found, (loss, grad_logits, grad_x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_large_logits_do_not_overflow(machine: Machine) -> None:
    x, weight, bias, targets = operands(SHAPE, torch.float32, machine.device)
    exact = exact_outputs(x * 1e3, weight, bias, targets, None, "none", torch.float32)
    found = machine.head(x * 1e3, weight, bias, targets, None, "none", dtype=torch.float32)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_a_target_out_of_range_is_an_error_on_the_cpu() -> None:
    x, weight, bias, targets = operands(SHAPE, torch.float32)
    targets[5] = 10
    with pytest.raises(IndexError):
        head.cross_entropy_head(x, weight, bias, targets, None, "none", dtype=torch.float32)


@pytest.mark.parametrize("shape", [(64, 256), (1, 1), (7, 3000), (100_000, 64)])
def test_forms_fit_the_shape(kernels: ModuleType, shape: tuple[int, int]) -> None:
    forms = kernels.forms(*shape)
    assert 1 <= len(forms) <= 12
    assert len(set(forms)) == len(forms)
    for form in forms:
        assert form.rows < max(32, 2 * shape[0])
        assert form.splits * form.cols < max(32, 2 * shape[1])


# The operator


def test_the_operator_is_well_formed() -> None:
    x, weight, bias, targets = operands(SHAPE, torch.bfloat16)
    arguments = (as_laid_out(x, "transposed"), weight, bias, targets, x, "gelu")
    options = {"dtype": torch.bfloat16, "scale": torch.tensor(8.0)}
    operator = torch.ops.kitsune.cross_entropy_head.default
    torch.library.opcheck(operator, arguments, options, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_the_operator_runs_the_kernel() -> None:
    given = operands((64, 10, 256), torch.bfloat16, "cuda")
    found = head.cross_entropy_head(*given, given[0], "relu", dtype=torch.bfloat16)
    plain = head._on_cpu(*given, given[0], "relu", dtype=torch.bfloat16)
    exact = exact_outputs(*given, given[0], "relu", torch.bfloat16)
    assert_as_accurate(found, exact, plain, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weight": torch.ones(129, 4), "bias": None}, "takes 1 to 128 classes: got 129"),
        ({"weight": torch.ones(0, 4), "bias": None}, "takes 1 to 128 classes: got 0"),
        ({"weight": torch.ones(5, 3)}, r"takes weight of shape \(5, 4\): got \(5, 3\)"),
        (
            {"targets": torch.zeros(3, dtype=torch.int32)},
            r"takes 3 targets of torch.int64 on cpu: got \(3,\) of torch.i",
        ),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"takes 3 targets of torch.int64 on cpu: got \(2,\)"),
        ({"saved": None}, "takes a saved tensor for each activation but none: got none for 'relu'"),
        ({"saved": torch.ones(3, 5)}, r"takes saved of shape \(3, 4\): got \(3, 5\)"),
        ({"scale": torch.ones(2)}, r"takes a float32 scalar on cpu as scale: got \(2,\) of torch.float32"),
        ({"dtype": torch.float64}, "computes in float32, bfloat16 or float16: got torch.float64"),
    ],
)
def test_what_the_operator_refuses(changes: dict[str, Any], problem: str) -> None:
    given = {"x": torch.ones(3, 4), "weight": torch.ones(5, 4), "bias": torch.ones(5), "saved": torch.ones(3, 4)}
    given["targets"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=problem):
        head._empty_outputs(**{**given, "activation": "relu", "dtype": torch.float32, **changes})
