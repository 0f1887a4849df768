"""Linear layers with their activations against float64: in Triton's interpreter on the CPU, and compiled on a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kitsune.kernels import linear
from tests.kitsune.kernels.interpreter import as_laid_out, error, interpreted, normal, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

SHAPES = ((19, 37, 45), (1, 1, 1), (16, 32, 64), (33, 5, 130))  # M, N, K
FORMS = ((16, 16, 16, 1, 4, 2), (32, 16, 16, 4, 4, 2), (16, 64, 32, 2, 8, 1), (8, 16, 16, 1, 2, 4, True))
PRECISIONS = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),  # the first layer under autocast
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32, torch.float16),
]


class Machine:
    """A device and the launchers of its kernels: the interpreter's on the CPU, else the compiled ones."""

    def __init__(self, device: str, kernels: ModuleType) -> None:
        self.device, self.kernels = device, kernels

    def linear(self, *tensors: Any, form: tuple[int, ...] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        outputs = linear._empty_outputs(*tensors, **options)
        x, weight, bias, activation = tensors
        self.kernels.linear(
            x, weight, bias, *outputs, activation=activation, allow_tf32=options.get("allow_tf32", False),
            form=form and self.kernels.Form(*form),
        )  # fmt: skip
        return outputs

    def input_gradient(self, *tensors: Any, form: tuple[int, ...] | None = None, **options: Any) -> Tensor:
        grad_x = linear._empty_input_gradient(*tensors, **options)
        *operands, activation = tensors
        form = form and self.kernels.Form(*form)
        self.kernels.input_gradient(*operands, grad_x, activation=activation, allow_tf32=False, form=form)
        return grad_x


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted("linear_triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if request.param == "cpu":
        module = request.getfixturevalue("kernels")
        patch_interpreter(monkeypatch)
        return Machine("cpu", module)
    return Machine("cuda", pytest.importorskip("kitsune.kernels.linear_triton", reason="Triton is not installed"))


def operands(
    shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Input (M, K), weight (N, K) and bias (N,)."""
    num_rows, num_cols, num_deep = shape
    x = normal((num_rows, num_deep), dtypes[0], device, 0)
    weight = normal((num_cols, num_deep), dtypes[1], device, 1, num_deep**-0.5)
    return x, weight, normal((num_cols,), dtypes[1], device, 2)


def exact_preactivation(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """In float64, of the operands that are rounded to the compute dtype."""
    product = x.to(dtype).double() @ weight.to(dtype).double().t()
    return product if bias is None else product + bias.to(dtype).double()


def exact_slope(saved: Tensor, activation: str) -> Tensor:
    """The derivative of the activation in float64, by autograd, from what is saved of it."""
    if activation == "none":
        return torch.ones_like(saved).double()
    if activation == "relu":
        return (saved > 0).double()
    if activation == "tanh":
        return 1 - saved.double() ** 2
    before = saved.double().requires_grad_()
    linear.ACTIVATIONS[activation](before).sum().backward()
    assert before.grad is not None
    return before.grad


@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_forward_is_as_accurate_as_torch(
    machine: Machine, activation: str, precision: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> None:
    x, weight, bias = operands(SHAPES[0], precision[:2], machine.device)
    keep, dtype = activation in linear.OF_PREACTIVATION, precision[2]
    exact = exact_preactivation(x, weight, bias, dtype)
    plain = linear._linear_on_cpu(x, weight, bias, activation, dtype=dtype, keep_preactivation=keep)
    output, before = machine.linear(x, weight, bias, activation, dtype=dtype, keep_preactivation=keep)
    unit = torch.finfo(torch.float32).eps
    exact_output = linear.ACTIVATIONS[activation](exact)
    assert error(output, exact_output) <= 2 * error(plain[0], exact_output) + unit
    assert before.shape == ((19, 37) if keep else (0,))
    if keep:
        assert error(before, exact) <= 2 * error(plain[1], exact) + unit


@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_input_gradient_is_as_accurate_as_torch(
    machine: Machine, activation: str, precision: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> None:
    num_rows, num_deep, num_cols = SHAPES[0]
    dtype = precision[2]
    grad = normal((num_rows, num_deep), precision[0], machine.device, 0)
    weight = normal((num_deep, num_cols), precision[1], machine.device, 1)
    before = normal((num_rows, num_cols), torch.float32, machine.device, 2)
    saved = None
    if activation != "none":
        saved = (linear.ACTIVATIONS[activation](before) if activation in linear.OF_OUTPUT else before).to(dtype)
    slope = 1 if saved is None else exact_slope(saved, activation)
    exact = (grad.to(dtype).double() @ weight.to(dtype).double()) * slope
    plain = linear._input_gradient_on_cpu(grad, weight, saved, activation, dtype=dtype)
    found = machine.input_gradient(grad, weight, saved, activation, dtype=dtype)
    assert error(found, exact) <= 2 * error(plain, exact) + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_computes_every_shape(
    machine: Machine, shape: tuple[int, int, int], form: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight, bias = operands(shape, (dtype, dtype), machine.device)
    exact = exact_preactivation(x, weight, bias, dtype).relu()
    output, _ = machine.linear(x, weight, bias, "relu", dtype=dtype, form=form)
    torch.testing.assert_close(output.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-6)
    grad = machine.input_gradient(x, weight.t(), output, "relu", dtype=dtype, form=form)
    exact_grad = (x.double() @ weight.t().double()) * (output > 0)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_layouts_do_not_change_a_bit(machine: Machine, layout: str) -> None:
    x, weight, bias = operands(SHAPES[0], (torch.bfloat16, torch.float32), machine.device)
    options = {"dtype": torch.bfloat16, "form": FORMS[1]}
    expected, _ = machine.linear(x, weight, bias, "gelu", **options)
    others = [as_laid_out(x, layout), as_laid_out(weight, layout), as_laid_out(bias, "sliced")]
    assert torch.equal(machine.linear(*others, "gelu", **options)[0], expected)
    grad_x = machine.input_gradient(expected, weight, x, "silu", **options)
    others = [as_laid_out(tensor, layout) for tensor in (expected, weight, x)]
    assert torch.equal(machine.input_gradient(*others, "silu", **options), grad_x)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty(machine: Machine, shape: tuple[int, int, int]) -> None:
    x, weight, bias = operands((*shape[:2], 1), (torch.float32, torch.float32), machine.device)
    x, weight = x[:, : shape[2]], weight[:, : shape[2]]
    output, _ = machine.linear(x, weight, bias, "none", dtype=torch.float32)
    assert torch.equal(output, x @ weight.t() + bias)
    grad_x = machine.input_gradient(output, weight, x, "tanh", dtype=torch.float32)
    torch.testing.assert_close(grad_x, (output @ weight) * (1 - x * x))


def test_without_a_bias(machine: Machine) -> None:
    x, weight, _ = operands(SHAPES[0], (torch.float32, torch.float32), machine.device)
    output, _ = machine.linear(x, weight, None, "none", dtype=torch.float32)
    torch.testing.assert_close(output.double(), x.double() @ weight.double().t(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
def test_extreme_values_are_those_of_torch(machine: Machine, activation: str) -> None:
    """NaN, infinities and large numbers, forward and backward. GELU in float32 on the CPU makes NaN of infinity."""
    values = [float("nan"), float("inf"), -float("inf"), 1e4, -1e4, 50.0, -50.0, 0.0, -0.0, 1e-6, -1e-6, 0.3]
    x = torch.tensor(values, device=machine.device)[:, None]
    one = torch.ones(1, 1, device=machine.device)
    output, _ = machine.linear(x, one, None, activation, dtype=torch.float32)
    expected = linear.ACTIVATIONS[activation](x.double()).float()
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-35, equal_nan=True)
    if activation == "none":
        return
    saved = expected if activation in linear.OF_OUTPUT else x
    for value in (1.0, float("nan")):
        grad = torch.full_like(x, value)
        found = machine.input_gradient(grad, one, saved, activation, dtype=torch.float32)
        exact = linear.backpropagate(grad.double(), saved, activation).float()
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7, equal_nan=True)


def test_tanh_is_precise_everywhere(machine: Machine) -> None:
    """Relative to the value, also where the formula by exponentials would cancel."""
    x = torch.cat([torch.logspace(-6, 1.5, 2000), torch.linspace(0.5, 0.6, 500)]).to(machine.device)[:, None]
    output, _ = machine.linear(x, torch.ones(1, 1, device=machine.device), None, "tanh", dtype=torch.float32)
    torch.testing.assert_close(output.double(), x.double().tanh(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("allow_tf32", "precision"), [(False, "ieee"), (True, "tf32")])
def test_tf32_is_used_only_on_request(kernels: ModuleType, allow_tf32: bool, precision: str) -> None:
    form = kernels.Form(*FORMS[0])
    assert kernels.compile_options(form, torch.float32, allow_tf32)["precision"] == precision
    assert kernels.compile_options(form, torch.bfloat16, allow_tf32)["precision"] == "ieee"


@pytest.mark.parametrize("shape", [(64, 512, 784), (64, 10, 256), (3, 5, 7), (16384, 4096, 1024), (70000, 70000, 32)])
def test_forms_fit_the_shape(kernels: ModuleType, shape: tuple[int, int, int]) -> None:
    forms = kernels.forms(*shape)
    assert 1 <= len(forms) <= 12
    assert len(set(forms)) == len(forms)
    for form in forms:
        assert form.depth * form.slices < max(32, 2 * shape[2])
        assert form.rows < max(32, 2 * shape[0])
        assert form.cols < max(32, 2 * shape[1])


def test_of_large_products_several_forms_are_tried(kernels: ModuleType) -> None:
    """The largest ones take more shared memory than some devices have."""
    assert kernels.forms(70000, 70000, 4096) == kernels._FORMS[-3:]


@pytest.mark.parametrize(
    ("dtype", "allow_tf32", "layout", "wanted"),
    [
        (torch.float32, False, "dense", True),
        (torch.float32, True, "dense", False),
        (torch.bfloat16, False, "dense", False),
        (torch.float32, False, "transposed", False),
    ],
)
def test_where_products_are_summed_by_lanes(
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    allow_tf32: bool,
    layout: str,
    wanted: bool,
) -> None:
    tried: list[Any] = []

    def note(_key: str, forms: tuple[Any, ...], _run: object, _device: object) -> Any:
        tried.extend(forms)
        return kernels.Form(*FORMS[0])

    monkeypatch.setattr(kernels, "choose", note)
    patch_interpreter(monkeypatch)
    x, weight, bias = operands(SHAPES[0], (dtype, dtype))
    if layout == "transposed":
        x = as_laid_out(x, "transposed")
    Machine("cpu", kernels).linear(x, weight, bias, "relu", dtype=dtype, allow_tf32=allow_tf32)
    assert any(form.by_lanes for form in tried) == wanted
    assert not all(form.by_lanes for form in tried)


# The operators


def test_the_operators_are_well_formed() -> None:
    x, weight, bias = operands(SHAPES[0], (torch.bfloat16, torch.float32))
    checks = ("test_schema", "test_faketensor")
    arguments = (x.t().contiguous().t(), weight, bias, "gelu")
    options = {"dtype": torch.bfloat16, "keep_preactivation": True}
    torch.library.opcheck(torch.ops.kitsune.linear_activation.default, arguments, options, test_utils=checks)
    gradient = torch.ops.kitsune.linear_input_gradient.default
    arguments = (normal((19, 37), torch.float32, "cpu", 3), weight, x, "tanh")
    torch.library.opcheck(gradient, arguments, {"dtype": torch.bfloat16}, test_utils=checks)


def test_the_operators_are_single_nodes_of_a_graph() -> None:
    x, weight, bias = operands(SHAPES[0], (torch.float32, torch.float32))

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        output, _ = linear.linear_activation(x, weight, bias, "relu", dtype=torch.float32)
        return linear.linear_input_gradient(output, weight, x, "relu", dtype=torch.float32)

    module = make_fx(layer, tracing_mode="fake")(x, weight, bias)
    targets = [node.target for node in module.graph.nodes if "kitsune" in str(node.target)]
    assert targets == [
        torch.ops.kitsune.linear_activation.default,
        torch.ops.kitsune.linear_input_gradient.default,
    ]
    assert torch.equal(module(x, weight, bias), layer(x, weight, bias))


@pytest.mark.gpu
def test_the_operators_run_the_kernels() -> None:
    x, weight, bias = operands((64, 96, 128), (torch.bfloat16, torch.float32), "cuda")
    output, before = linear.linear_activation(x, weight, bias, "silu", dtype=torch.bfloat16, keep_preactivation=True)
    exact = exact_preactivation(x, weight, bias, torch.bfloat16)
    torch.testing.assert_close(before.double(), exact, rtol=2**-7, atol=1e-5)
    grad = linear.linear_input_gradient(output, weight, x, "silu", dtype=torch.bfloat16)
    exact = (output.double() @ weight.bfloat16().double()) * exact_slope(x, "silu")
    torch.testing.assert_close(grad.double(), exact, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"x": torch.ones(3)}, "takes a matrix as x: got 1 dimensions"),
        ({"weight": torch.ones(5, 3)}, r"takes weight of shape \(5, 4\): got \(5, 3\)"),
        ({"bias": torch.ones(4)}, r"takes bias of shape \(5,\): got \(4,\)"),
        ({"bias": torch.ones(5, device="meta")}, "one device: bias is on meta, not on cpu"),
        ({"x": torch.ones(3, 4, dtype=torch.float16)}, "in torch.bfloat16 takes x of that dtype or float32"),
        ({"dtype": torch.float64}, "computes in float32, bfloat16 or float16: got torch.float64"),
        ({"activation": "elu"}, "knows the activations none, relu, .*: got 'elu'"),
        ({"activation": "relu", "keep_preactivation": True}, "keeps the pre-activation for gelu, .*: got 'relu'"),
    ],
)
def test_what_the_forward_refuses(changes: dict[str, Any], problem: str) -> None:
    given = {"x": torch.ones(3, 4), "weight": torch.ones(5, 4), "bias": torch.ones(5), "activation": "gelu"}
    with pytest.raises(ValueError, match=problem):
        linear._empty_outputs(**{**given, "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"grad_output": torch.ones(3, 4, 5)}, "takes a matrix as grad_output: got 3 dimensions"),
        ({"weight": torch.ones(5, 3)}, r"takes weight of shape \(4, 3\): got \(5, 3\)"),
        ({"saved": torch.ones(3, 4)}, r"takes saved of shape \(3, 6\): got \(3, 4\)"),
        ({"saved": None}, "takes a saved tensor for each activation but none"),
        ({"activation": "none"}, "takes a saved tensor for each activation but none"),
        ({"activation": "elu"}, "knows the activations none, relu, .*: got 'elu'"),
    ],
)
def test_what_the_backward_refuses(changes: dict[str, Any], problem: str) -> None:
    given = {"grad_output": torch.ones(3, 4), "weight": torch.ones(4, 6), "saved": torch.ones(3, 6)}
    with pytest.raises(ValueError, match=problem):
        linear._empty_input_gradient(**{**given, "activation": "relu", "dtype": torch.float32, **changes})
