"""Convolutions in half precision against ATen in float64: references, Triton's interpreter, and compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kitsune.device import refuse_bulk_copies
from kitsune.kernels import conv as operators
from kitsune.kernels.conv_forms import (
    Form,
    GradForm,
    Images,
    Tile,
    forms,
    grad_forms,
    has_exact_tiles,
    num_tiles,
    run_of_pixels,
    tiling,
)
from tests.kitsune.kernels.interpreter import error, interpreted, normal, patch_interpreter

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

HALF = (
    pytest.param(torch.bfloat16, id="bf16"),
    pytest.param(torch.float16, id="fp16", marks=pytest.mark.slow),
)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
EPS, MOMENTUM = 1e-3, 0.3
OUTPUTS = {
    "conv": "_output",
    "conv_input_grad": "_output_input_grad",
    "conv_weight_grad": "_output_weight_grad",
    "conv_batch_norm": "_outputs_batch_norm",
    "conv_input_grad_batch_norm_backward": "_outputs_batch_norm_backward",
}
MODULES = (
    "batch_norm_forward_triton",
    "batch_norm_backward_triton",
    "batch_norm_triton",
    "implicit_gemm_triton",
    "conv_triton",
)


class Case(NamedTuple):
    """Input (N, C, H, W), number of results' channels, and the kernel."""

    shape: tuple[int, int, int, int]
    channels: int
    kernel: tuple[int, int] = (3, 3)
    padding: tuple[int, int] = (1, 1)


SQUARE = Case((2, 64, 8, 8), 64)  # whole tiles
SMALL = Case((8, 72, 4, 4), 40)  # whole tiles of several images, and channels that fill no block
POINTS = Case((2, 64, 8, 8), 136, (1, 1), (0, 0))  # all pixels in a row
CASES = [
    SQUARE,
    SMALL,
    POINTS,
    Case((1, 32, 1, 1), 32),
    Case((3, 40, 7, 5), 136),
    Case((1, 32, 9, 6), 48, (5, 2), (2, 0)),
    Case((2, 32, 3, 3), 32, (1, 1), (1, 2)),
    Case((3, 48, 5, 3), 32, (1, 1), (0, 0)),
    Case((1, 32, 3, 8), 32, (3, 3), (0, 1)),  # of one image one row
    Case((1, 32, 1, 8), 32, (1, 1), (1, 0)),
]
FILLED = [SQUARE, SMALL, POINTS]
"""Those with tiles that fill the images, of pixels that follow one another."""


class Machine:
    """A device, and the operators as they run there."""

    def __init__(self, device: str, launches: ModuleType | None) -> None:
        self.device, self.launches = device, launches
        self.is_reference = launches is None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if self.launches is None or self.device == "cuda":
            return getattr(torch.ops.kitsune, name)  # type: ignore[no-any-return]

        def run(*arguments: Any, **options: Any) -> Any:
            outputs = getattr(operators, OUTPUTS[name])(*arguments, **options)
            for one in [outputs] if isinstance(outputs, Tensor) else outputs:
                one.fill_(torch.nan)
            getattr(self.launches, name)(outputs, *launched(name, arguments), **options)
            return outputs

        return run


def launched(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a launch takes of an operator's arguments: it knows sizes by its result."""
    return (*arguments[:2], *arguments[3:]) if name in ("conv_input_grad", "conv_weight_grad") else arguments


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted(*MODULES)


@pytest.fixture(params=["interpreted", "reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if request.param == "cuda":
        refusal = refuse_bulk_copies(torch.device("cuda"))
        if refusal is not None:
            pytest.skip(str(refusal))
        launches = pytest.importorskip("kitsune.kernels.conv_triton", reason="Triton is not installed")
        monkeypatch.setattr(launches, "choose", lambda key, forms, run, device: forms[0])
        yield Machine("cuda", launches)
    elif request.param == "interpreted":
        launches = request.getfixturevalue("kernels")
        patch_interpreter(monkeypatch)
        yield Machine("cpu", launches)
    else:
        yield Machine("cpu", None)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


class Data:
    """Random operands of a case; of a gradient's convolution, the case tells what it is a gradient of."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str) -> None:
        def images(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
            return channels_last(normal(shape, dtype, device, seed, scale))

        (num, channels, *size), (kernel, padding) = case.shape, case[2:]
        self.padding, self.kernel, self.size = list(padding), list(kernel), size
        to = [length + 2 * pad - side + 1 for length, pad, side in zip(size, padding, kernel, strict=True)]
        self.x = images(0, *case.shape)
        self.weight = images(1, case.channels, channels, *kernel, scale=0.1)
        self.bias = normal((case.channels,), dtype, device, 2)
        self.grad = images(3, num, case.channels, *to)
        self.residual, self.added = images(4, *self.grad.shape), images(5, *case.shape)
        self.of_channels = [normal((case.channels,), torch.float32, device, seed).abs() + 0.1 for seed in range(6, 10)]
        self.before = [normal((channels,), torch.float32, device, seed).abs() + 0.1 for seed in range(10, 14)]

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution without bias, and the gradients of input and weight, in float64."""
        x, weight = (one.double().cpu().requires_grad_() for one in (self.x, self.weight))
        y = torch.nn.functional.conv2d(x, weight, padding=self.padding)
        return (y.detach(), *torch.autograd.grad(y, [x, weight], self.grad.double().cpu()))


def assert_rounded(machine: Machine, found: Tensor, exact: Tensor, times: float = 1.0) -> None:
    """No further from float64 than by rounding once, in root mean square; `times` allows for more roundings.

    On some CPUs a library rounds more than once.
    """
    times *= 3 if machine.is_reference else 1
    assert error(found.cpu(), exact) <= times * ROUNDING[found.dtype] / 2


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolution_and_gradients(machine: Machine, case: Case, dtype: torch.dtype) -> None:
    data = Data(case, dtype, machine.device)
    y, grad_x, grad_weight = data.exact()
    assert_rounded(machine, machine.conv(data.x, data.weight, None, data.padding, relu=False), y)
    biased = machine.conv(data.x, data.weight, data.bias, data.padding, relu=True)
    assert_rounded(machine, biased, (y + data.bias.double().cpu()[:, None, None]).relu())
    found = machine.conv_input_grad(data.grad, data.weight, data.size, data.padding)
    assert_rounded(machine, found, grad_x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    if case in FILLED:
        assert_rounded(machine, machine.conv_weight_grad(data.grad, data.x, data.kernel, data.padding), grad_weight)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", FILLED, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_batch_norm_of_a_convolution(machine: Machine, case: Case, dtype: torch.dtype, with_residual: bool) -> None:
    data = Data(case, dtype, machine.device)
    residual = data.residual if with_residual else None
    weight, bias, mean, var = data.of_channels
    running = mean.clone(), var.clone()
    conv, y, save_mean, save_invstd = machine.conv_batch_norm(
        data.x, data.weight, data.padding, residual, weight, bias, *running,
        momentum=MOMENTUM, eps=EPS, relu=True,
    )  # fmt: skip
    assert_rounded(machine, conv, data.exact()[0])
    exact = (one.double().cpu() for one in (conv, weight, bias, mean, var))
    _, weight64, bias64, mean64, var64 = exact
    wanted, wanted_mean, wanted_invstd = torch.ops.aten.native_batch_norm(
        conv.double().cpu(), weight64, bias64, mean64, var64, True, MOMENTUM, EPS
    )
    if residual is not None:
        wanted = wanted + residual.double().cpu()
    assert_rounded(machine, y, wanted.relu())
    for one, other in zip((save_mean, save_invstd, *running), (wanted_mean, wanted_invstd, mean64, var64), strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", FILLED, ids=str)
@pytest.mark.parametrize("kind", ["plain", "computed mask", "mask", "sum"])
def test_batch_norm_before_a_convolution(machine: Machine, case: Case, dtype: torch.dtype, kind: str) -> None:
    data = Data(case, dtype, machine.device)
    weight, bias, _, _ = data.before
    relu, added = kind != "plain", data.added if kind == "sum" else None
    before = data.x  # what was normalized to make the convolution's input
    mean = before.float().mean((0, 2, 3))
    invstd = (before.float().var((0, 2, 3), unbiased=False) + EPS).rsqrt()
    made = (before.float() - mean[:, None, None]) * (invstd * weight)[:, None, None] + bias[:, None, None]
    y = channels_last(made.to(dtype).relu()) if kind in ("mask", "sum") else None
    grad_x, grad_residual, grad_weight, grad_bias = machine.conv_input_grad_batch_norm_backward(
        data.grad, data.weight, data.padding, before, y, weight, bias, mean, invstd,
        relu=relu, added_grad_y=added,
    )  # fmt: skip
    grad_y = data.exact()[1].to(dtype).double()
    if added is not None:
        grad_y = (grad_y + added.double().cpu()).to(dtype).double()
    if relu:
        grad_y = grad_y * (made.to(dtype).cpu() > 0)
    assert_rounded(machine, grad_residual, grad_y, times=4)
    # What follows is compared from there: where a sum rounds otherwise, a gradient is another one.
    exact = grad_residual.double().cpu()
    wanted = torch.ops.aten.native_batch_norm_backward(
        exact, before.double().cpu(), weight.double().cpu(), None, None, mean.double().cpu(), invstd.double().cpu(),
        True, EPS, [True, True, True],
    )  # fmt: skip
    assert_rounded(machine, grad_x, wanted[0], times=2)
    for one, other in zip((grad_weight, grad_bias), wanted[1:], strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-3, atol=1e-3)


def test_many_tiles_are_merged(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((5, 32, 8, 8), 32)
    if not machine.is_reference:
        monkeypatch.setattr(machine.launches, "forms", lambda *_: (Form(64, 64, 4, 3),))
        monkeypatch.setattr(machine.launches, "_MERGED_AT_ONCE", 16)
    data = Data(case, torch.bfloat16, machine.device)
    weight, bias, mean, var = data.of_channels
    conv, _, save_mean, save_invstd = machine.conv_batch_norm(
        data.x, data.weight, data.padding, None, weight, bias, mean, var, momentum=MOMENTUM, eps=EPS, relu=False
    )
    exact = conv.double().cpu()
    torch.testing.assert_close(save_mean.double().cpu(), exact.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    invstd = (exact.var((0, 2, 3), unbiased=False) + EPS).rsqrt()
    torch.testing.assert_close(save_invstd.double().cpu(), invstd, rtol=1e-4, atol=1e-5)


def test_statistics_of_one_row(machine: Machine) -> None:
    data = Data(Case((1, 32, 3, 64), 32, (3, 3), (0, 1)), torch.bfloat16, machine.device)
    weight, bias, mean, var = data.of_channels
    conv, _, save_mean, _ = machine.conv_batch_norm(
        data.x, data.weight, data.padding, None, weight, bias, mean, var, momentum=MOMENTUM, eps=EPS, relu=False
    )
    assert_rounded(machine, conv, data.exact()[0])
    torch.testing.assert_close(save_mean.double().cpu(), conv.double().cpu().mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_weight_gradients_of_several_parts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    if not machine.is_reference:
        forms_of_parts = (GradForm(64, 64, 64, 4, 3, parts=3),)
        monkeypatch.setattr(machine.launches, "grad_forms", lambda *_: forms_of_parts)
    data = Data(Case((7, 40, 8, 8), 72), torch.bfloat16, machine.device)
    found = machine.conv_weight_grad(data.grad, data.x, data.kernel, data.padding)
    assert_rounded(machine, found, data.exact()[2])


def test_forms_that_fill_images_are_chosen_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from kitsune.kernels import conv_triton

    keys = []

    def choose(key: str, forms: tuple[Form, ...], run: object, device: torch.device) -> Form:
        keys.append((key, forms))
        return forms[0]

    monkeypatch.setattr(conv_triton, "choose", choose)
    monkeypatch.setattr(conv_triton, "_num_processors", lambda _: 132)
    for size in ((8, 8), (32, 32)):
        x = channels_last(torch.zeros(5, 256, *size, dtype=torch.bfloat16))
        weight = channels_last(torch.zeros(256, 256, 3, 3, dtype=torch.bfloat16))
        geometry = conv_triton._Geometry.of(x, x, weight, [1, 1])
        for exact in (False, True):
            geometry.choose("conv", lambda _: None, exact=exact)
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] != keys[1][1]
    assert keys[2] == keys[3]


def test_parts_of_channels_and_addresses_off_the_grid(machine: Machine) -> None:
    data = Data(SQUARE, torch.bfloat16, machine.device)
    y, grad_x, _ = data.exact()
    wide = channels_last(torch.randn(2, 104, 8, 8).to(machine.device, torch.bfloat16))
    wide[:, 16:80] = data.x
    assert_rounded(machine, machine.conv(wide[:, 16:80], data.weight, None, data.padding, relu=False), y)
    flat = torch.empty(data.grad.numel() + 1, dtype=torch.bfloat16, device=machine.device)
    odd = flat[1:].view(2, 8, 8, 64).permute(0, 3, 1, 2).copy_(data.grad)
    assert_rounded(machine, machine.conv_input_grad(odd, data.weight, data.size, data.padding), grad_x)


def test_not_a_number_stays(machine: Machine) -> None:
    data = Data(SQUARE, torch.bfloat16, machine.device)
    data.x[0, 3, 2, 2] = torch.nan
    data.x[1, 5, 6, 6] = torch.inf
    y = machine.conv(data.x, data.weight, None, data.padding, relu=True)
    near = torch.zeros(2, 8, 8, dtype=torch.bool)
    near[0, 1:4, 1:4] = True
    assert y[0].isnan().all(0).cpu().equal(near[0])
    assert (
        y[1]
        .isinf()
        .any(0)
        .cpu()
        .equal(
            torch.zeros(8, 8, dtype=torch.bool).index_put_(
                (torch.tensor([5, 5, 5, 6, 6, 6, 7, 7, 7]), torch.tensor([5, 6, 7] * 3)), torch.tensor(True)
            )
        )
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: {"x": data.x.float()}, "one dtype, bfloat16 or float16"),
        (lambda data: {"weight": data.weight.half()}, "one dtype, bfloat16 or float16"),
        (lambda data: {"x": data.x.contiguous()}, "channels last"),
        (lambda data: {"x": data.x[:1].expand(2, -1, -1, -1)}, "channels last"),
        (lambda data: {"weight": data.weight.contiguous()}, "channels last"),
        (lambda data: {"x": channels_last(data.x[:, :30])}, "multiple of 8"),
        (lambda data: {"x": channels_last(data.x[:, :32])}, "as many channels"),
        (lambda data: {"padding": [-1, 0]}, "paddings from 0"),
        (lambda data: {"weight": channels_last(data.weight.repeat(1, 1, 5, 5))}, "fits into images"),
        (lambda data: {"bias": data.bias.float()}, "biases"),
        (lambda data: {"x": data.x[:0]}, "multiple of 8"),
    ],
)
def test_refused_operands(change: Callable[[Data], dict[str, Any]], message: str) -> None:
    data = Data(SQUARE, torch.bfloat16, "cpu")
    given = {"x": data.x, "weight": data.weight, "bias": data.bias, "padding": data.padding, **change(data)}
    with pytest.raises(ValueError, match=message):
        operators.conv(**given, relu=False)


def test_refused_gradients() -> None:
    data = Data(SQUARE, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="has the shape"):
        operators.conv_input_grad(data.grad, data.weight, [9, 8], data.padding)
    with pytest.raises(ValueError, match="width is 1 or 3"):
        operators.conv_weight_grad(data.grad, data.x, [5, 5], [2, 2])
    narrow = Data(Case((2, 32, 7, 7), 32), torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="follow one another"):
        operators.conv_weight_grad(narrow.grad, narrow.x, narrow.kernel, narrow.padding)
    odd = Data(Case((3, 32, 7, 7), 32), torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="fill images"):
        operators.conv_batch_norm(
            odd.x, odd.weight, odd.padding, None, None, None, None, None, momentum=0.1, eps=EPS, relu=False
        )


def test_tiles_cover_images() -> None:
    for size in ((32, 32), (7, 7), (56, 56), (1, 500), (4, 4)):
        for pixels in (64, 128, 256):
            tile = tiling(Images(12, size), pixels, exact=False)
            assert tile is not None
            assert tile.images * tile.rows * tile.columns == pixels
            exact = tiling(Images(12, size), pixels, exact=True)
            if exact is not None:
                assert num_tiles(Images(12, size), exact) * pixels == 12 * size[0] * size[1]
    assert tiling(Images(128, (32, 32)), 128, exact=True) == Tile(1, 8, 16)
    assert tiling(Images(3, (7, 7)), 64, exact=True) is None
    assert has_exact_tiles(Images(32, (14, 14)))
    assert not has_exact_tiles(Images(3, (7, 7)))


def test_runs_of_pixels_follow_one_another() -> None:
    assert run_of_pixels(Images(2, (32, 32)), 128) == Tile(1, 4, 32)
    assert run_of_pixels(Images(2, (4, 4)), 64) == Tile(4, 4, 4)
    assert run_of_pixels(Images(1, (1, 70)), 64) == Tile(1, 1, 64)
    assert run_of_pixels(Images(2, (6, 8)), 64) is None  # a tile would end in the middle of an image
    assert run_of_pixels(Images(2, (8, 7)), 64) is None


def test_forms_fit_what_there_is() -> None:
    sizes = {(32, 32): 64, (16, 16): 128, (8, 8): 256, (4, 4): 512, (56, 56): 64, (1, 1): 2048}
    for size, channels in sizes.items():
        for num_images in (1, 32, 128):
            found = forms(Images(num_images, size), channels, 132, False)
            assert found
            assert all(form.block_out == 64 for form in found if channels <= 64)
            if has_exact_tiles(Images(num_images, size)):
                exact = forms(Images(num_images, size), channels, 132, True)
                assert exact
                assert all(tiling(Images(num_images, size), form.pixels, True) is not None for form in exact)
    assert (
        forms(Images(128, (32, 32)), 64, 132, False)[0].loads_ahead
        < forms(Images(8, (4, 4)), 512, 132, True)[0].loads_ahead
    )
    for channels_of_both in ((64, 64), (512, 32)):
        gradient_forms = grad_forms(Images(128, (16, 16)), channels_of_both, 3, 132)
        assert gradient_forms
        assert all(form.block_in - channels_of_both[1] < 64 for form in gradient_forms)


def test_operations_are_counted_as_pytorch_counts_those_of_its_convolutions() -> None:
    data = Data(SQUARE, torch.bfloat16, "cpu")
    with FlopCounterMode(display=False) as wanted:
        torch.nn.functional.conv2d(data.x, data.weight, padding=data.padding)
    mean, invstd, *_ = data.before
    for run in (
        lambda: operators.conv(data.x, data.weight, None, data.padding, relu=True),
        lambda: operators.conv_input_grad(data.grad, data.weight, data.size, data.padding),
        lambda: operators.conv_weight_grad(data.grad, data.x, data.kernel, data.padding),
        lambda: operators.conv_batch_norm(
            data.x, data.weight, data.padding, None, None, None, None, None, momentum=0.1, eps=EPS, relu=True
        ),
        lambda: operators.conv_input_grad_batch_norm_backward(
            data.grad, data.weight, data.padding, data.x, None, None, None, mean, invstd, relu=True
        ),
    ):
        with FlopCounterMode(display=False) as found:
            run()
        assert found.get_total_flops() == wanted.get_total_flops() > 0
