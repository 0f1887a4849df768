"""Layer norm and RMS norm against float64: the references, the kernels in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from kitsune.kernels import layer_norm
from kitsune.kernels.rows import row_stride
from tests.kitsune.kernels.interpreter import as_laid_out, interpreted, normal, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EPS = 1e-3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    # shape, form of the forward, form of the backward
    ((7, 20), (2, 32, 1), (2, 32, 1, 3)),
    ((2, 3, 64), (4, 64, 2), (1, 64, 2, 1)),
    ((3, 70), (1, 32, 1), (1, 32, 1, 2)),  # rows in blocks
    ((1, 33), (1, 64, 1), (1, 64, 1, 1)),
    ((3, 1), (4, 1, 1), (4, 1, 1, 1)),
    ((9,), (1, 16, 1), (1, 16, 1, 1)),
]
WHOLE, LONG = CASES[0], CASES[2]
BOTH = pytest.mark.parametrize("case", [WHOLE, LONG], ids=["whole", "long"])

Case = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
Outputs = tuple[Tensor, ...]


class Machine:
    """A device, and the operators as they run there; the kernels in the forms of a case."""

    def __init__(self, device: str, launches: ModuleType | None) -> None:
        self.device, self._launches = device, launches
        self._forms: dict[bool, Any] = {}

    def use(self, case: Case) -> None:
        if self._launches is not None:
            self._forms = {False: self._launches.Form(*case[1]), True: self._launches.Form(*case[2])}

    def __getattr__(self, name: str) -> Callable[..., Outputs]:
        if self._launches is None:
            return getattr(layer_norm, name)

        def launch(*arguments: Any, **options: Any) -> Outputs:
            outputs = getattr(layer_norm, f"_outputs_of_{name}")(*arguments, **options)
            form = self._forms.get(name.endswith("backward"))
            getattr(self._launches, name)(outputs, *arguments, **options, form=form)
            return outputs

        return launch


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted("linear_triton", "layer_norm_triton")


@pytest.fixture(params=["reference", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if request.param == "reference":
        return Machine("cpu", None)
    if request.param == "interpreted":
        module = request.getfixturevalue("kernels")
        patch_interpreter(monkeypatch)
        return Machine("cpu", module)
    return Machine("cuda", pytest.importorskip("kitsune.kernels.layer_norm_triton", reason="Triton is not installed"))


class Norm:
    """A normalization of random rows of different means and sizes; RMS norm where `mean` is False."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str, mean: bool = True, affine: bool = True
    ) -> None:
        self.mean = mean
        scale = normal((*shape[:-1], 1), torch.float32, "cpu", 0).abs() + 0.5
        shift = 3 * normal((*shape[:-1], 1), torch.float32, "cpu", 1)
        self.x = (normal(shape, torch.float32, "cpu", 2) * scale + shift).to(device, dtype)
        self.residual = normal(shape, dtype, device, 3)
        self.grad_y = normal(shape, dtype, device, 4)
        self.grad_total = normal(shape, dtype, device, 5)
        self.weight = normal(shape[-1:], torch.float32, device, 6) if affine else None
        self.bias = normal(shape[-1:], torch.float32, device, 7) if affine and mean else None

    def forward(self, machine: Machine, residual: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        options = {"eps": EPS, "dtype": dtype}
        if self.mean:
            *outputs, copy = machine.layer_norm(self.x, residual, self.weight, self.bias, **options)
            found = dict(zip(("y", "total", "mean", "rstd"), outputs, strict=True))
        else:
            *outputs, copy = machine.rms_norm(self.x, residual, self.weight, **options)
            found = dict(zip(("y", "total", "rstd"), outputs, strict=True))
        assert copy.shape == (0,)
        return found

    def backward(self, machine: Machine, grad_total: Tensor | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Of the normalization of `x`, with the statistics of float32; the sums over rows are of `dtype`."""
        statistics = self.exact_statistics()
        of_rows = [one.float() for one in statistics]
        if self.mean:
            *grads, copy = machine.layer_norm_backward(
                self.grad_y, grad_total, self.x, *of_rows, self.weight, weight_dtype=dtype, bias_dtype=dtype
            )
            found = dict(zip(("grad_x", "grad_weight", "grad_bias"), grads, strict=True))
        else:
            of_weight = {"weight_dtype": dtype}
            *grads, copy = machine.rms_norm_backward(
                self.grad_y, grad_total, self.x, *of_rows, self.weight, **of_weight
            )
            found = dict(zip(("grad_x", "grad_weight"), grads, strict=True))
        assert copy.shape == (0,)
        return found

    def exact_statistics(self) -> list[Tensor]:
        return list(self.by_torch(self.x, torch.float64, torch.float64).values())[1:]

    def by_torch(self, total: Tensor, compute: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
        """The normalization and its statistics, in a precision, and rounded where `y` is stored."""
        wide = total.to(compute)
        weight, bias = (None if one is None else one.to(compute) for one in (self.weight, self.bias))
        if self.mean:
            y = functional.layer_norm(wide, wide.shape[-1:], weight, bias, EPS)
            mean = wide.mean(-1, keepdim=True)
            variance = (wide - mean).square().mean(-1, keepdim=True)
            return {"y": y.to(dtype), "mean": mean, "rstd": (variance + EPS).rsqrt()}
        y = functional.rms_norm(wide, wide.shape[-1:], weight, EPS)
        return {"y": y.to(dtype), "rstd": (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()}

    def gradients_by_torch(self, grad_total: Tensor | None, compute: torch.dtype) -> dict[str, Tensor]:
        """By autograd, and with the other gradient added."""
        x = self.x.to(compute).detach().requires_grad_()
        ones = torch.ones(self.x.shape[-1], device=self.x.device)
        weight = (ones if self.weight is None else self.weight).to(compute).detach().requires_grad_()
        bias = torch.zeros_like(ones).to(compute).requires_grad_()
        if self.mean:
            y = functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        else:
            y = functional.rms_norm(x, x.shape[-1:], weight, EPS)
        inputs = [x, weight, bias] if self.mean else [x, weight]
        grads = list(torch.autograd.grad(y, inputs, self.grad_y.to(compute)))
        if grad_total is not None:
            grads[0] = grads[0] + grad_total.to(compute)
        return dict(zip(("grad_x", "grad_weight", "grad_bias"), grads, strict=False))

    def largest_terms(self) -> dict[str, Tensor]:
        """The largest of what gradients are differences of, for those that may cancel: with one column, all do."""
        scaled = self.grad_y if self.weight is None else self.grad_y * self.weight
        return {"grad_x": (scaled * self.exact_statistics()[-1]).abs().max()}


def rms_norm_by_definition(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def assert_as_accurate(
    found: dict[str, Tensor],
    eager: dict[str, Tensor],
    exact: dict[str, Tensor],
    prefix: object = "",
    terms: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Errors are at most twice those of eager and one unit in the last place of the largest value.

    Where a value is a difference, rounding leaves that much of its `terms`, even of those that cancel.
    """
    for name, values in exact.items():
        largest = values.abs().max()
        unit = torch.finfo(found[name].dtype).eps * torch.maximum(largest, terms.get(name, largest))
        error, allowed = (found[name].double() - values).abs().max(), (eager[name].double() - values).abs().max()
        assert error <= 2 * allowed + unit, f"{prefix} {name}: {error} where eager has {allowed}, one unit {unit}"


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Up to the order of sums, which on a GPU is a matter of how a kernel is compiled."""
    for one, other in zip(found, expected, strict=True):
        tolerance = 16 * torch.finfo(one.dtype).eps if one.is_cuda else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("mean", [True, False], ids=["layer norm", "RMS norm"])
def test_forward(machine: Machine, case: Case, mean: bool) -> None:
    machine.use(case)
    for x_dtype, dtype in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float16,) * 2):
        norm = Norm(case[0], x_dtype, machine.device, mean)
        for residual in (None, norm.residual):
            found = norm.forward(machine, residual, dtype)
            total = norm.x if residual is None else norm.x + residual
            assert torch.equal(found.pop("total"), total if residual is not None else total.new_empty(0))
            exact = norm.by_torch(total, torch.float64, torch.float64)
            eager = norm.by_torch(total, torch.float32, dtype)
            assert_as_accurate(found, eager, exact, (x_dtype, dtype, residual is None))
            assert found["y"].dtype == dtype
            assert found["rstd"].shape == (*case[0][:-1], 1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("mean", [True, False], ids=["layer norm", "RMS norm"])
def test_backward(machine: Machine, case: Case, mean: bool) -> None:
    machine.use(case)
    for dtype in DTYPES:
        norm = Norm(case[0], dtype, machine.device, mean)
        for grad_total in (None, norm.grad_total):
            found = norm.backward(machine, grad_total, dtype)
            exact = norm.gradients_by_torch(grad_total, torch.float64)
            eager = norm.gradients_by_torch(grad_total, torch.float32)
            eager = {name: values.to(dtype) for name, values in eager.items()}
            assert {values.dtype for values in found.values()} == {dtype}
            assert_as_accurate(found, eager, exact, (dtype, grad_total is None), norm.largest_terms())


@BOTH
@pytest.mark.parametrize("mean", [True, False], ids=["layer norm", "RMS norm"])
def test_without_weights_and_their_gradients(machine: Machine, case: Case, mean: bool) -> None:
    machine.use(case)
    norm = Norm(case[0], torch.float32, machine.device, mean, affine=False)
    found = norm.forward(machine, None, torch.float32)
    exact, eager = (norm.by_torch(norm.x, dtype, dtype) for dtype in (torch.float64, torch.float32))
    assert_as_accurate(found, eager, exact)
    exact, eager = (norm.gradients_by_torch(None, dtype) for dtype in (torch.float64, torch.float32))
    assert_as_accurate(norm.backward(machine, None, torch.float32), eager, exact)
    grad_x, *sums = norm.backward(machine, None, None).values()
    assert_as_accurate({"grad_x": grad_x}, eager, {"grad_x": exact["grad_x"]})
    assert all(one.shape == (0,) for one in sums)


@BOTH
def test_one_gradient_without_the_other(machine: Machine, case: Case) -> None:
    machine.use(case)
    norm = Norm(case[0], torch.float32, machine.device)
    operands = norm.grad_y, None, norm.x, *(one.float() for one in norm.exact_statistics()), norm.weight
    both = machine.layer_norm_backward(*operands, weight_dtype=torch.float32, bias_dtype=torch.float32)
    only_weight = machine.layer_norm_backward(*operands, weight_dtype=torch.float32, bias_dtype=None)
    only_bias = machine.layer_norm_backward(*operands, weight_dtype=None, bias_dtype=torch.float32)
    assert (only_weight[2].numel(), only_bias[1].numel()) == (0, 0)
    assert_same((only_weight[1], only_bias[2]), both[1:3])


@BOTH
def test_dtypes_may_differ(machine: Machine, case: Case) -> None:
    """As under autocast: a float32 stream, to which what was computed in bfloat16 is added."""
    machine.use(case)
    norm = Norm(case[0], torch.float32, machine.device)
    norm.residual, norm.grad_y = norm.residual.bfloat16(), norm.grad_y.half()
    assert norm.bias is not None
    norm.bias = norm.bias.bfloat16()
    found = norm.forward(machine, norm.residual, torch.bfloat16)
    total = norm.x + norm.residual
    assert torch.equal(found.pop("total"), total)
    exact = norm.by_torch(total, torch.float64, torch.float64)
    assert_as_accurate(found, norm.by_torch(total, torch.float32, torch.bfloat16), exact)
    exact, eager = (norm.gradients_by_torch(None, dtype) for dtype in (torch.float64, torch.float32))
    assert_as_accurate(norm.backward(machine, None, torch.float32), eager, exact)


@BOTH
def test_rows_that_are_slices_and_results_that_repeat(machine: Machine, case: Case) -> None:
    machine.use(case)
    norm = Norm(case[0], torch.bfloat16, machine.device)

    def outcome() -> list[Tensor]:
        found = norm.forward(machine, norm.residual, torch.bfloat16)
        return [*found.values(), *norm.backward(machine, norm.grad_total, torch.float32).values()]

    expected = outcome()
    assert all(map(torch.equal, outcome(), expected))
    for name in ("x", "residual", "grad_y", "grad_total"):
        setattr(norm, name, as_laid_out(getattr(norm, name), "sliced"))
    found = outcome()
    assert all(one.is_contiguous() for one in found)
    assert_same(found, expected)


@BOTH
@pytest.mark.parametrize("mean", [True, False], ids=["layer norm", "RMS norm"])
def test_results_in_two_precisions(machine: Machine, case: Case, mean: bool) -> None:
    """The copy is what the result is cast to; it has the rounding of one step where that is of a low precision too."""
    machine.use(case)
    norm = Norm(case[0], torch.float32, machine.device, mean)
    of_x = ("layer_norm", (norm.weight, norm.bias)) if mean else ("rms_norm", (norm.weight,))
    statistics = [one.float() for one in norm.exact_statistics()]
    dtypes = {"weight_dtype": torch.float32, **({"bias_dtype": torch.float32} if mean else {})}
    for copy_dtype in (torch.bfloat16, torch.float16):
        options = {"eps": EPS, "dtype": torch.float32, "copy_dtype": copy_dtype}
        y, *_, copy = getattr(machine, of_x[0])(norm.x, norm.residual, *of_x[1], **options)
        assert torch.equal(copy, y.to(copy_dtype))
        operands = norm.grad_y, norm.grad_total, norm.x, *statistics, norm.weight
        backward = getattr(machine, f"{of_x[0]}_backward")
        grad_x, *_, copy = backward(*operands, **dtypes, copy_dtype=copy_dtype)
        assert torch.equal(copy, grad_x.to(copy_dtype))
        assert copy.is_contiguous()


@BOTH
def test_variances_far_from_zero(machine: Machine, case: Case) -> None:
    """With sums of squares, nothing would be left of a variance of 1 beside a mean of 1e4."""
    machine.use(case)
    norm = Norm(case[0], torch.float32, machine.device)
    norm.x += 1e4
    mean, rstd = norm.exact_statistics()
    found = norm.forward(machine, None, torch.float32)
    torch.testing.assert_close(found["mean"].double(), mean, rtol=5e-7, atol=0)
    torch.testing.assert_close(found["rstd"].double(), rstd, rtol=2e-5, atol=0)


@BOTH
@pytest.mark.parametrize("mean", [True, False], ids=["layer norm", "RMS norm"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(
    machine: Machine, case: Case, mean: bool, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches its row as in torch, and no other.

    Torch has several kernels for RMS norm, one of which makes NaN of an infinity's whole row, by way of a mean that
    the definition does not have. It runs on GPUs, for numbers of columns that are no multiples of 4.
    """
    machine.use(case)
    norm = Norm(case[0], torch.float32, machine.device, mean)
    clean = norm.forward(machine, None, torch.float32)["y"]
    norm.x[1, 2] = bad
    y = norm.forward(machine, None, torch.float32)["y"]
    good = torch.arange(len(y), device=y.device) != 1
    assert torch.equal(y[good], clean[good])
    monkeypatch.setattr(functional, "rms_norm", rms_norm_by_definition)
    assert torch.equal(y.isnan(), norm.by_torch(norm.x, torch.float32, torch.float32)["y"].isnan())
    eager = norm.gradients_by_torch(None, torch.float32)
    for name, found in norm.backward(machine, None, torch.float32).items():
        assert torch.equal(found.isnan(), eager[name].isnan()), name


@pytest.mark.parametrize("mean", [True, False], ids=["layer norm", "RMS norm"])
def test_no_rows(machine: Machine, mean: bool) -> None:
    norm = Norm((2, 0, 5), torch.float32, machine.device, mean)
    found = norm.forward(machine, norm.residual, torch.bfloat16)
    assert (found["y"].shape, found["total"].shape, found["rstd"].shape) == ((2, 0, 5), (2, 0, 5), (2, 0, 1))
    grad_x, *sums = norm.backward(machine, None, torch.float32).values()
    assert grad_x.shape == (2, 0, 5)
    assert all(torch.equal(one, torch.zeros_like(one)) for one in sums)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(333, 768), (40, 8192), (3, 16384), (5, 20001), (4099, 64)], ids=str)
def test_all_forms_work(shape: tuple[int, int]) -> None:
    launches = pytest.importorskip("kitsune.kernels.layer_norm_triton", reason="Triton is not installed")
    norm = Norm(shape, torch.bfloat16, "cuda")
    exact = norm.by_torch(norm.x, torch.float64, torch.float64)
    eager = norm.by_torch(norm.x, torch.float32, torch.bfloat16)
    exact_grads = norm.gradients_by_torch(norm.grad_total, torch.float64)
    eager_grads = norm.gradients_by_torch(norm.grad_total, torch.float32)
    machine = Machine("cuda", launches)
    for form in launches.forms(*shape):
        machine.use((shape, form, form))
        assert_as_accurate(norm.forward(machine, None, torch.bfloat16), eager, exact, form)
    for form in launches.backward_forms(*shape):
        machine.use((shape, form, form))
        found = norm.backward(machine, norm.grad_total, torch.float32)
        assert_as_accurate(found, eager_grads, exact_grads, form)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB of device memory")
    x = torch.empty((2**31 // 1024 + 8, 1024), dtype=torch.bfloat16, device="cuda").normal_()
    y, _, mean, rstd, _ = layer_norm.layer_norm(x, None, None, None, eps=EPS, dtype=torch.bfloat16)
    exact = functional.layer_norm(x[-2:].double(), (1024,), eps=EPS)
    torch.testing.assert_close(y[-2:].double(), exact, rtol=2**-8, atol=1e-6)
    options = {"weight_dtype": torch.float32, "bias_dtype": torch.float32}
    grad_x, _, grad_bias, _ = layer_norm.layer_norm_backward(y, None, x, mean, rstd, None, **options)
    assert grad_x[-2:].abs().max() < 0.1  # what is normalized has no gradient along itself
    torch.testing.assert_close(grad_bias, y.sum(0, dtype=torch.float32), rtol=1e-3, atol=1.0)


# The forms


@pytest.mark.parametrize("num_rows", [1, 7, 4096, 10**6])
@pytest.mark.parametrize("num_cols", [1, 64, 768, 1000, 8192, 16384, 16385, 10**6])
def test_forms(kernels: ModuleType, num_rows: int, num_cols: int) -> None:
    for found, most_whole in (
        (kernels.forms(num_rows, num_cols), kernels.MOST_WHOLE),
        (kernels.backward_forms(num_rows, num_cols), kernels.MOST_WHOLE_BACKWARD),
    ):
        assert 1 <= len(found) <= 12
        assert len(set(found)) == len(found)
        for form in found:
            assert (form.block_cols >= num_cols) == (num_cols <= most_whole)
            assert form.block_cols >= num_cols or form.block_rows == 1
            assert form.block_rows < 2 * num_rows
            assert 1 <= form.num_partials <= num_rows
            for number in form[:3]:
                assert number & (number - 1) == 0


# The operators


def calls(dtype: torch.dtype = torch.float32) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Arguments for each operator."""
    norm = Norm((2, 3, 8), dtype, "cpu")
    mean, rstd = (one.float() for one in norm.exact_statistics())
    x, residual = as_laid_out(norm.x, "sliced"), norm.residual
    grads, copied = {"weight_dtype": torch.float32, "bias_dtype": dtype}, {"copy_dtype": torch.bfloat16}
    return {
        "layer_norm": ([x, residual.float(), norm.weight, norm.bias], {"eps": EPS, "dtype": dtype, **copied}),
        "layer_norm_backward": ([norm.grad_y, norm.grad_total, x, mean, rstd, norm.weight], {**grads, **copied}),
        "rms_norm": ([x, None, norm.weight], {"eps": EPS, "dtype": dtype}),
        "rms_norm_backward": ([norm.grad_y, None, x, rstd, norm.weight], {"weight_dtype": None}),
    }


NAMES = tuple(calls())


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_what_they_declare(name: str) -> None:
    arguments, options = calls(torch.bfloat16)[name]
    operator = getattr(torch.ops.kitsune, name).default
    torch.library.opcheck(operator, tuple(arguments), options, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", NAMES)
def test_fakes_are_laid_out_like_results(name: str) -> None:
    arguments, options = calls(torch.float16)[name]
    real = getattr(layer_norm, name)(*arguments, **options)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in arguments]
        fake = getattr(layer_norm, name)(*faked, **options)
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_operators_run_the_kernels(name: str) -> None:
    arguments, options = calls()[name]
    expected = getattr(layer_norm, name)(*arguments, **options)
    on_device = [one.cuda() if isinstance(one, Tensor) else one for one in arguments]
    for one, other in zip(getattr(layer_norm, name)(*on_device, **options), expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


X = torch.ones(2, 3, 8)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"x": X.double()}, "takes x in float32, bfloat16 or float16: got torch.float64"),
        ({"x": torch.ones(())}, r"takes x of at most .* columns: got \(\)"),
        ({"x": torch.ones(3, 0)}, r"takes x of at most .* rows of 1 to .* columns: got \(3, 0\)"),
        ({"x": X.transpose(1, 2)}, r"takes x with contiguous, evenly spaced rows: got \(2, 8, 3\) with strides"),
        ({"x": torch.ones(2, 4, 8)[:, 1:]}, r"evenly spaced rows: got \(2, 3, 8\) with strides \(32, 8, 1\)"),
        ({"residual": X[:1]}, r"takes residual of shape \(2, 3, 8\) on cpu: got \(1, 3, 8\)"),
        ({"residual": X[:1].expand(2, 3, 8)}, "takes residual with contiguous, evenly spaced rows"),
        ({"weight": torch.ones(7)}, r"takes weight of shape \(8,\) in torch.float32 or .* got \(7,\)"),
        ({"weight": torch.ones(16)[::2]}, r"takes weight dense in memory: got strides \(2,\)"),
        ({"bias": torch.ones(8).double()}, "takes bias of shape .* in torch.float64"),
        ({"dtype": torch.float64}, "gives results in float32, bfloat16 or float16: got torch.float64"),
        ({"copy_dtype": torch.int8}, "gives results in float32, bfloat16 or float16: got torch.int8"),
    ],
)
def test_what_the_forward_refuses(changes: dict[str, Any], problem: str) -> None:
    given = {"x": X, "residual": None, "weight": torch.ones(8), "bias": None, "eps": EPS, "dtype": torch.float32}
    with pytest.raises(ValueError, match=problem):
        layer_norm.layer_norm(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"grad_y": X[:, :2]}, r"takes grad_y of shape \(2, 3, 8\) on cpu: got \(2, 2, 8\)"),
        ({"grad_total": X.long()}, "takes grad_total in float32, bfloat16 or float16: got torch.int64"),
        ({"mean": torch.ones(2, 3)}, r"takes mean of shape \(2, 3, 1\) in torch.float32 on cpu: got \(2, 3\)"),
        ({"rstd": torch.ones(2, 3, 1).half()}, "takes rstd of shape .* in torch.float16"),
        ({"weight": torch.ones(8, 1)}, "takes weight of shape"),
        ({"bias_dtype": torch.float64}, "gives results in float32"),
        ({"copy_dtype": torch.float64}, "gives results in float32"),
    ],
)
def test_what_the_backward_refuses(changes: dict[str, Any], problem: str) -> None:
    of_rows = torch.ones(2, 3, 1)
    given = {"grad_y": X, "grad_total": None, "total": X, "mean": of_rows, "rstd": of_rows, "weight": None}
    options = {"weight_dtype": torch.float32, "bias_dtype": torch.float32}
    with pytest.raises(ValueError, match=f"layer_norm_backward {problem}"):
        layer_norm.layer_norm_backward(**{**given, **options, **changes})


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.ones(5, 4), 4),
        (torch.ones(5, 4)[::2], 8),
        (torch.ones(2, 3, 9)[..., 1:5], 9),
        (torch.ones(2, 3, 4)[:, 1], 12),
        (torch.ones(1, 4).expand(3, 4), 0),
        (torch.ones(7), 0),
        (torch.ones(3, 1).t().contiguous().t(), 1),
        (torch.ones(2, 0, 4), 4),
    ],
)
def test_the_distance_of_rows(tensor: Tensor, stride: int) -> None:
    assert row_stride("a test", "a tensor", tensor) == stride
