"""Small convolutions and their gradients against ATen in float64: in Triton's interpreter, and compiled on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kitsune.kernels import pool
from kitsune.kernels import small_conv as operators
from kitsune.kernels.tuning import is_of_compiler
from tests.kitsune.kernels import offline
from tests.kitsune.kernels.interpreter import interpreted, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
MEMORY_FORMATS = {False: torch.contiguous_format, True: torch.channels_last}


class Case(NamedTuple):
    """Input (N, C, H, W), number of results' channels, and the windows."""

    shape: tuple[int, int, int, int]
    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)


LENET_2 = Case((2, 6, 9, 9), 16, (5, 5))
STRIDED = Case((1, 17, 9, 8), 3, (3, 2), (2, 1), (1, 0))
WIDE = Case((4, 64, 32, 32), 64, (3, 3), padding=(1, 1))  # coordinates that fit into 16 bits, and many taps
CASES = [
    Case((2, 1, 8, 11), 6, (5, 5), padding=(2, 2)),
    LENET_2,
    STRIDED,
    Case((3, 3, 4, 5), 5, (1, 1), (2, 2)),
    Case((1, 3, 9, 8), 20, (7, 7), (2, 2), (3, 3)),
    Case((1, 64, 4, 3), 33, (2, 2), padding=(1, 1)),
    Case((2, 2, 1, 3), 1, (1, 2), (1, 2), (2, 0)),
]


class Convolutions(NamedTuple):
    """A device, the three operators there, and the module of their kernels, if they run any."""

    device: str
    forward: Callable[..., Tensor]
    input_grad: Callable[..., Tensor]
    weight_grad: Callable[..., tuple[Tensor, Tensor]]
    module: ModuleType | None


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    module = interpreted("small_conv_triton")
    module._SUMS_A_PROGRAM = 256  # the interpreter takes its time for each program
    return module


@pytest.fixture(params=["reference", "cpu", GPU])
def conv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Convolutions:
    """The references, the kernels in the interpreter, and compiled in their first form, which saves time."""
    if request.param == "reference":
        return operators_on("cpu", None)
    if request.param == "cpu":
        patch_interpreter(monkeypatch)
        return interpreted_operators(request.getfixturevalue("kernels"))
    module = compiled()
    monkeypatch.setattr(module, "choose", lambda key, forms, run, device: forms[0])
    return operators_on("cuda", module)


def compiled() -> ModuleType:
    module: ModuleType = pytest.importorskip("kitsune.kernels.small_conv_triton", reason="Triton is not installed")
    return module


def operators_on(device: str, module: ModuleType | None) -> Convolutions:
    return Convolutions(
        device, operators.small_conv, operators.small_conv_input_grad, operators.small_conv_weight_grad, module
    )


def interpreted_operators(module: ModuleType) -> Convolutions:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *windows: Any, **options: Any) -> Tensor:
        result = operators._fake(x, weight, bias, *map(list, windows), **options)
        module.launch(x, weight, bias, result, *windows, **_taken(options, "relu", "allow_tf32"))
        return result

    def input_grad(grad: Tensor, weight: Tensor, activation: Tensor | None, *windows: Any, **options: Any) -> Tensor:
        result = operators._fake_input_grad(grad, weight, activation, *map(list, windows), **options)
        module.launch_input_grad(grad, weight, activation, result, *windows[1:], **_taken(options, "allow_tf32"))
        return result

    def weight_grad(grad: Tensor, x: Tensor, *windows: Any, **options: Any) -> tuple[Tensor, Tensor]:
        results = operators._fake_weight_grad(grad, x, *map(list, windows), **options)
        module.launch_weight_grad(grad, x, *results, *windows[1:], **_taken(options, "dtype", "allow_tf32"))
        return results

    return Convolutions("cpu", forward, input_grad, weight_grad, module)


def _taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names}


class Data(NamedTuple):
    """float32 tensors for a case: the input is a ReLU's output."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor


def data(case: Case, device: str, channels_last: bool = False) -> Data:
    sizes = operators.windows(case.shape[2:], case.kernel, case.stride, case.padding)
    x = torch.randn(case.shape).relu()
    weight = torch.randn(case.channels, case.shape[1], *case.kernel) / 4
    grad = torch.randn(case.shape[0], case.channels, *sizes)
    laid_out = (one.to(device).contiguous(memory_format=MEMORY_FORMATS[channels_last]) for one in (x, weight, grad))
    x, weight, grad = laid_out
    return Data(x, weight, torch.randn(case.channels).to(device), grad)


def by_aten(case: Case, given: Data, dtype: torch.dtype) -> dict[str, Tensor]:
    """The chain of ATen's operators in `dtype`, on the CPU."""
    x, weight, bias, grad = (one.detach().cpu().to(dtype) for one in given)
    leaves = [one.requires_grad_() for one in (x, weight, bias)]
    y = F.conv2d(*leaves, case.stride, case.padding)
    input_grad, weight_grad, bias_grad = torch.autograd.grad(y, leaves, grad)
    masked = input_grad.masked_fill(x <= 0, 0)
    return {"y": y.detach().relu(), "input_grad": masked, "weight_grad": weight_grad, "bias_grad": bias_grad}


def by_operators(
    conv: Convolutions, case: Case, given: Data, dtype: torch.dtype, channels_last: bool, **options: Any
) -> dict[str, Tensor]:
    options = {"dtype": dtype, "channels_last": channels_last, "allow_tf32": False, **options}
    windows = (case.stride, case.padding)
    y = conv.forward(given.x, given.weight, given.bias, *windows, relu=True, **options)
    input_grad = conv.input_grad(given.grad, given.weight, given.x, case.shape[2:], *windows, **options)
    weight_grad, bias_grad = conv.weight_grad(given.grad, given.x, case.kernel, *windows, result_dtype=dtype, **options)
    return {"y": y, "input_grad": input_grad, "weight_grad": weight_grad, "bias_grad": bias_grad}


def error(found: Tensor, exact: Tensor) -> float:
    """The root mean square error in units of the largest exact value."""
    return ((found.cpu().double() - exact).square().mean().sqrt() / exact.abs().max().clamp_min(1e-30)).item()


def check(
    conv: Convolutions, case: Case, given: Data, dtype: torch.dtype, channels_last: bool, **options: Any
) -> dict[str, Tensor]:
    found = by_operators(conv, case, given, dtype, channels_last, **options)
    exact, plain = by_aten(case, given, torch.float64), by_aten(case, given, dtype)
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (exact[name].shape, dtype, conv.device), name
        if tensor.dim() == 4:
            assert tensor.stride() == torch.empty(tensor.shape, memory_format=MEMORY_FORMATS[channels_last]).stride()
        assert error(tensor, exact[name]) <= 2 * error(plain[name], exact[name]) + torch.finfo(dtype).eps / 4, name
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_as_accurate_as_aten(conv: Convolutions, case: Case, channels_last: bool) -> None:
    check(conv, case, data(case, conv.device, channels_last), torch.float32, channels_last)


@pytest.mark.parametrize("case", [LENET_2, STRIDED], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounds_to_the_dtype_when_it_reads(conv: Convolutions, case: Case, dtype: torch.dtype) -> None:
    """float32 factors give what rounded ones give, and any mixture of the two."""
    given = data(case, conv.device, channels_last=True)
    found = check(conv, case, given, dtype, True)
    rounded = Data(*(one.to(dtype) for one in given))
    for mixed in (rounded, given._replace(x=rounded.x, bias=rounded.bias)):
        again = by_operators(conv, case, mixed, dtype, True)
        assert all(torch.equal(again[name], one) for name, one in found.items())


@pytest.mark.gpu
def test_a_measured_form_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compiled()
    monkeypatch.setattr(module, "_FORMS", module._FORMS[:2])
    monkeypatch.setattr(module, "_GRAD_TILES", module._GRAD_TILES[:1])
    given = data(LENET_2, "cuda")
    exact = by_aten(LENET_2, given, torch.float64)
    found = by_operators(operators_on("cuda", module), LENET_2, given, torch.float32, True, allow_tf32=True)
    for name, one in found.items():
        assert error(one, exact[name]) < 2.0**-9, name


@pytest.mark.parametrize("channels_last", [False, True])
def test_any_strides(conv: Convolutions, channels_last: bool) -> None:
    """Slices at odd addresses, expanded tensors, and inputs in the other layout."""
    given = data(STRIDED, conv.device, not channels_last)
    wide = F.pad(given.x, (1, 2, 1, 0, 1, 0))[:, 1:, 1:, 1:-2]
    transposed = given.weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    expanded = given.grad[:, :1, :, :1].expand_as(given.grad)
    check(conv, STRIDED, Data(wide, transposed, given.bias, expanded), torch.float32, channels_last)


def test_without_bias_relu_and_mask(conv: Convolutions) -> None:
    given = data(LENET_2, conv.device)
    options: dict[str, Any] = {"dtype": torch.float32, "channels_last": False, "allow_tf32": False}
    y = conv.forward(given.x, given.weight, None, LENET_2.stride, LENET_2.padding, relu=False, **options)
    exact = F.conv2d(given.x.double(), given.weight.double())
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=2e-5)
    found = conv.input_grad(
        given.grad, given.weight, None, LENET_2.shape[2:], LENET_2.stride, LENET_2.padding, **options
    )
    exact = F.conv_transpose2d(given.grad.double(), given.weight.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-5)


def test_weight_gradient_in_float32(conv: Convolutions) -> None:
    """It is at least as accurate as the rounded one."""
    given = data(LENET_2, conv.device)
    exact = by_aten(LENET_2, given, torch.float64)
    options: dict[str, Any] = {"dtype": torch.float16, "channels_last": True, "allow_tf32": False}
    windows = (LENET_2.kernel, LENET_2.stride, LENET_2.padding)
    found = conv.weight_grad(given.grad, given.x, *windows, result_dtype=torch.float32, **options)
    rounded = conv.weight_grad(given.grad, given.x, *windows, result_dtype=torch.float16, **options)
    for one, other, name in zip(found, rounded, ("weight_grad", "bias_grad"), strict=True):
        assert (one.dtype, other.dtype) == (torch.float32, torch.float16)
        assert torch.equal(one.half(), other)
        assert error(one, exact[name]) <= error(other, exact[name])


@pytest.mark.parametrize("conv", ["cpu", GPU], indirect=True)
def test_every_form(conv: Convolutions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also sums over several parts, one of them short."""
    case = STRIDED._replace(shape=(3, 2, 9, 8))
    given = data(case, conv.device, channels_last=True)
    assert conv.module is not None
    make = conv.module.GradForm
    grad_forms = [make(rows, taps, parts, 4) for rows, taps, parts in ((16, 16, 3), (32, 16, 2), (64, 32, 1))]
    for index, form in enumerate(conv.module._FORMS):
        grad_form = grad_forms[index % len(grad_forms)]
        monkeypatch.setattr(conv.module, "_forms", lambda *_, form=form: (form,))
        monkeypatch.setattr(conv.module, "_grad_forms", lambda *_, form=grad_form: (form,))
        check(conv, case, given, torch.float32, True)


@pytest.mark.parametrize("conv", [GPU], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_form_of_many_channels(conv: Convolutions, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = data(WIDE, conv.device)
    assert conv.module is not None
    tried = 0
    for form in conv.module._FORMS:
        monkeypatch.setattr(conv.module, "_forms", lambda *_, form=form: (form,))
        try:
            check(conv, WIDE, given, dtype, False)
        except Exception as error:
            if not is_of_compiler(error):
                raise
        else:
            tried += 1
    assert tried > 1


def launch_many_channels() -> None:
    module = compiled()
    module._FORMS, module._GRAD_TILES = module._FORMS[::3], module._GRAD_TILES[:1]
    by_operators(interpreted_operators(module), WIDE, data(WIDE, "cpu"), torch.bfloat16, False)


@pytest.mark.slow
def test_does_not_compute_in_pairs() -> None:
    """Of 16 bits, as LLVM would with these shapes; see `kitsune.kernels.images.ZERO`."""
    kernels = offline.compiled(launch_many_channels)
    assert kernels
    assert not [kernel.name for kernel in kernels if re.search(r"\.[su]16x2", kernel.ptx)]


def test_forms_fit(kernels: ModuleType) -> None:
    for num_rows, num_taps, channels in ((50176, 25, 6), (6400, 150, 16), (1, 1, 1), (10**6, 3136, 64)):
        assert 0 < len(kernels._forms(num_taps)) <= 12
        forms = kernels._grad_forms(num_rows, num_taps, channels * (num_taps + 1))
        assert 0 < len(forms) <= 12
        assert all(form.parts >= 1 for form in forms)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(conv: Convolutions, bad: float) -> None:
    """They reach the results that they take part in, and no others."""
    case = Case((2, 3, 6, 6), 4, (3, 3))
    given, clean = (data(case, conv.device) for _ in range(2))
    clean = Data(*(one.clone() for one in given))
    given.x[1, 2, 0, 0] = bad
    given.grad[0, 3, 3, 3] = bad
    found = by_operators(conv, case, given, torch.float32, False)
    before = by_operators(conv, case, clean, torch.float32, False)
    expected = by_aten(case, given, torch.float32)
    for name, one in found.items():
        assert torch.equal(one.isfinite().cpu(), expected[name].isfinite()), name
        assert torch.equal(one.isnan().cpu(), expected[name].isnan()), name
        assert torch.equal(one[one.isfinite()], before[name][one.isfinite()]), name


def test_nan_passes_relu_and_its_mask(conv: Convolutions) -> None:
    nan = float("nan")
    x = torch.tensor([nan, -1.0, 0.0, 2.0], device=conv.device).view(1, 1, 1, 4)
    one = torch.ones(1, 1, 1, 1, device=conv.device)
    options: dict[str, Any] = {"dtype": torch.float32, "channels_last": False, "allow_tf32": False}
    y = conv.forward(x, one, None, (1, 1), (0, 0), relu=True, **options)
    grad = conv.input_grad(torch.full_like(x, 3.0), one, x, (1, 4), (1, 1), (0, 0), **options)
    torch.testing.assert_close(y.flatten().tolist(), [nan, 0.0, 0.0, 2.0], equal_nan=True)
    assert grad.flatten().tolist() == [3.0, 0.0, 0.0, 3.0]


def test_nothing_to_do(conv: Convolutions) -> None:
    case = LENET_2._replace(shape=(0, 6, 9, 9))
    found = by_operators(conv, case, data(case, conv.device), torch.float32, True)
    assert found["y"].shape == (0, 16, 5, 5)
    assert found["input_grad"].shape == case.shape
    assert found["weight_grad"].shape == (16, 6, 5, 5)
    assert not found["weight_grad"].any()
    assert not found["bias_grad"].any()


@pytest.mark.parametrize("conv", ["reference", GPU], indirect=True)
def test_two_layers_with_pools_equal_autograd(conv: Convolutions) -> None:
    """LeNet's chain of convolution, ReLU and pooling, twice: the operators fit together."""
    pools, steps, pads = ((2, 2), (2, 2), (0, 0)), (1, 1), ((2, 2), (0, 0))
    x, first, second = torch.randn(2, 1, 14, 14), torch.randn(6, 1, 5, 5), torch.randn(16, 6, 3, 3) / 4
    biases = torch.randn(6), torch.randn(16)
    grad = torch.randn(2, 16, 2, 2)
    leaves = [one.double().requires_grad_() for one in (first, biases[0], second, biases[1])]
    hidden = F.max_pool2d(F.conv2d(x.double(), *leaves[:2], padding=2).relu(), 2)
    exact_y = F.max_pool2d(F.conv2d(hidden, *leaves[2:]).relu(), 2)
    exact = torch.autograd.grad(exact_y, leaves, grad.double())

    x, first, second, grad = (one.to(conv.device) for one in (x, first, second, grad))
    options: dict[str, Any] = {"dtype": torch.float32, "channels_last": True, "allow_tf32": False}
    y1 = conv.forward(x, first, biases[0].to(conv.device), steps, pads[0], relu=False, **options)
    h1, position1 = pool.max_pool(y1, *pools, relu=True, channels_last=True)
    y2 = conv.forward(h1, second, biases[1].to(conv.device), steps, pads[1], relu=False, **options)
    h2, position2 = pool.max_pool(y2, *pools, relu=True, channels_last=False)
    grad2 = pool.max_pool_backward(grad, position2, y2.shape[2:], *pools, channels_last=True)
    found = conv.weight_grad(grad2, h1, (3, 3), steps, pads[1], result_dtype=torch.float32, **options)
    grad1 = conv.input_grad(grad2, second, None, h1.shape[2:], steps, pads[1], **options)
    grad0 = pool.max_pool_backward(grad1, position1, y1.shape[2:], *pools, channels_last=True)
    found = (*conv.weight_grad(grad0, x, (5, 5), steps, pads[0], result_dtype=torch.float32, **options), *found)

    assert error(h2, exact_y.detach()) < 1e-6
    for one, other in zip(found, exact, strict=True):
        assert error(one, other) < 1e-6


# The operators


@pytest.mark.parametrize("channels_last", [False, True])
def test_schema_and_fakes(device: torch.device, channels_last: bool) -> None:
    if device.type == "cuda":
        pytest.importorskip("triton", reason="Triton is not installed")
    options = {"dtype": torch.bfloat16, "channels_last": channels_last, "allow_tf32": False}
    namespace = torch.ops.kitsune
    for case in (CASES[0], STRIDED, LENET_2._replace(shape=(0, 6, 9, 9))):
        x, weight, bias, grad = data(case, device.type, channels_last)
        windows = (list(case.stride), list(case.padding))
        for one in (bias, None):
            check_operator(namespace.small_conv.default, (x, weight, one, *windows), {**options, "relu": True})
        for one in (x, None):
            arguments = (grad, weight, one, list(case.shape[2:]), *windows)
            check_operator(namespace.small_conv_input_grad.default, arguments, options)
        arguments = (grad, x, list(case.kernel), *windows)
        grad_options = {**options, "result_dtype": torch.float32}
        check_operator(namespace.small_conv_weight_grad.default, arguments, grad_options)


def check_operator(operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    torch.library.opcheck(operator, arguments, options, test_utils=("test_schema", "test_faketensor"))


def given(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"x": given(3, 6, 6)}, r"x must have four dimensions .* got \(3, 6, 6\)"),
        ({"weight": given(4, 2, 3, 3)}, r"got \[4, 2, 3, 3\] for \[1, 3, 6, 6\]"),
        ({"weight": given(4, 3, 3)}, r"weights of shape \(O, C, kh, kw\)"),
        ({"weight": given(65, 3, 3, 3)}, r"1 to 64 channels .* got weights \[65, 3, 3, 3\]"),
        ({"weight": given(4, 3, 8, 3)}, r"kernels of 1 to 7: got weights \[4, 3, 8, 3\]"),
        ({"weight": given(4, 3, 3, 7)}, r"no kernel of \[3, 7\] with padding \[0, 0\]"),
        ({"bias": given(3)}, r"biases of shape \[4\]: got \[3\]"),
        ({"bias": given(4, dtype=torch.float16)}, "bias must be torch.float32"),
        ({"weight": given(4, 3, 3, 3, device="meta")}, "weight must be torch.float32.* on cpu: got .* on meta"),
        ({"dtype": torch.float64}, "computes in float32, bfloat16 or float16: got torch.float64"),
        ({"x": given(1, 3, 6, 6, dtype=torch.float64)}, "x must be .* got torch.float64"),
        ({"stride": [3, 1]}, r"strides of 1 or 2 and paddings from 0: got \[3, 1\]"),
        ({"padding": [0, -1]}, r"got \[1, 1\] and \[0, -1\]"),
        ({"x": given(1).expand(2**17, 3, 2**7, 2**7)}, r"takes 2\*\*30 pixels"),
        ({"x": given(1).expand(1, 3, 2**14, 2**13)}, "one image of a result"),
    ],
)
def test_what_the_forward_refuses(changes: dict[str, Any], problem: str) -> None:
    plain = {"x": given(1, 3, 6, 6), "weight": given(4, 3, 3, 3), "bias": given(4), "stride": [1, 1]}
    options = {"padding": [0, 0], "dtype": torch.float32, "relu": True, "channels_last": True, "allow_tf32": False}
    if "one image" in problem:
        changes = {**changes, "weight": given(64, 3, 3, 3), "bias": None}
    with pytest.raises(ValueError, match=problem):
        operators._fake(**{**plain, **options, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"grad": given(1, 4, 4, 5)}, r"has the shape \[1, 4, 4, 4\]: got \[1, 4, 4, 5\]"),
        ({"size": [7, 6]}, r"has the shape \[1, 4, 5, 4\]"),
        ({"activation": given(1, 3, 6, 5)}, r"shape of the result, \[1, 3, 6, 6\]: got \[1, 3, 6, 5\]"),
        ({"activation": given(1, 3, 6, 6, dtype=torch.float64)}, "activation must be"),
    ],
)
def test_what_the_input_gradient_refuses(changes: dict[str, Any], problem: str) -> None:
    plain = {"grad": given(1, 4, 4, 4), "weight": given(4, 3, 3, 3), "activation": None, "size": [6, 6]}
    options = {"stride": [1, 1], "padding": [0, 0], "dtype": torch.float32, "channels_last": True, "allow_tf32": False}
    with pytest.raises(ValueError, match=problem):
        operators._fake_input_grad(**{**plain, **options, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"grad": given(2, 4, 4, 4)}, r"has the shape \[1, 4, 4, 4\]: got \[2, 4, 4, 4\]"),
        ({"kernel": [3, 8]}, "kernels of 1 to 7"),
        ({"result_dtype": torch.float16}, "gives torch.float32 or torch.float32: asked for torch.float16"),
        ({"x": given(1, 3, 6, 6, dtype=torch.float64)}, "x must be"),
    ],
)
def test_what_the_weight_gradient_refuses(changes: dict[str, Any], problem: str) -> None:
    plain = {"grad": given(1, 4, 4, 4), "x": given(1, 3, 6, 6), "kernel": [3, 3], "stride": [1, 1], "padding": [0, 0]}
    dtypes = {"dtype": torch.float32, "result_dtype": torch.float32, "channels_last": True, "allow_tf32": False}
    with pytest.raises(ValueError, match=problem):
        operators._fake_weight_grad(**{**plain, **dtypes, **changes})
