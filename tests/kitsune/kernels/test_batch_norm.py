"""Batch norm's operators against float64: the references, the kernels in Triton's interpreter, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kitsune.graph import dataflow
from kitsune.graph.verify import refuse_graph
from kitsune.kernels import batch_norm, batch_norm_forms
from kitsune.kernels.batch_norm import Layout
from kitsune.kernels.batch_norm_forms import Form, forms, split
from tests.kitsune.kernels.interpreter import interpreted, patch_interpreter
from tests.kitsune.kernels.offline import compiled

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = [
    # shape, channels last, form
    ((5, 3), False, Form(8, 4, 4, 1)),
    ((11, 9), False, Form(4, 8, 4, 2, 3)),
    ((2, 1, 3, 3), True, Form(8, 1, 4, 2)),
    ((3, 6, 5, 4), True, Form(16, 8, 4, 2, 3)),
    ((3, 6, 5, 4), True, Form(32, 4, 4, 1, 3)),
    ((2, 5, 3, 3), False, Form(8, 4, 4, 2, 2)),
    ((2, 3, 4, 4), False, Form(8, 4, 4, 1)),
    ((2, 3, 2, 3, 2), True, Form(8, 4, 4, 2)),
    ((4, 5, 3), False, Form(16, 8, 4, 1)),
]
SPLIT, IN_ONE, CONTIGUOUS = CASES[3:6]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES_IN_PRECISIONS = [(case, DTYPES[index % 3]) for index, case in enumerate(CASES)]  # each case, and each pair of
CASES_IN_PRECISIONS += [(SPLIT, torch.bfloat16), (SPLIT, torch.float16), (IN_ONE, torch.float32)]  # form and precision
FEW_CASES = [(SPLIT, torch.float16), (SPLIT, torch.bfloat16), (IN_ONE, torch.float32), (CONTIGUOUS, torch.float16)]
EPS, MOMENTUM = 1e-3, 0.3

Operator = Callable[..., tuple[Tensor, ...]]
Case = tuple[tuple[int, ...], bool, Form]


class Machine:
    """A device, and the five operators as they run there; the kernels in a form that may be set."""

    def __init__(self, device: str, launches: ModuleType | None, patch: pytest.MonkeyPatch) -> None:
        self.device, self._launches, self._patch = device, launches, patch

    def use(self, form: Form) -> None:
        if self._launches is not None:
            self._patch.setattr(self._launches, "forms", lambda *_: (form,))

    def __getattr__(self, name: str) -> Operator:
        if self._launches is None or self.device == "cuda":
            return getattr(batch_norm, name)

        def interpreted(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
            outputs = getattr(batch_norm, f"outputs_of_{name}")(*arguments, **options)
            getattr(self._launches, name)(outputs, *arguments, **options)
            return outputs

        return interpreted


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted("batch_norm_forward_triton", "batch_norm_backward_triton", "batch_norm_triton")


@pytest.fixture(params=["reference", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if request.param == "reference":
        yield Machine("cpu", None, monkeypatch)
    elif request.param == "interpreted":
        launches = request.getfixturevalue("kernels")
        patch_interpreter(monkeypatch)
        yield Machine("cpu", launches, monkeypatch)
    else:
        launches = pytest.importorskip("kitsune.kernels.batch_norm_triton", reason="Triton is not installed")
        yield Machine("cuda", launches, monkeypatch)


def laid_out(x: Tensor, channels_last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x.contiguous()


class Norm:
    """A normalization of random values, whose channels are of different means and sizes."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str, seed: int = 0, affine: bool = True) -> None:
        shape, channels_last, _ = case
        generator = torch.Generator().manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        of_channels = (shape[1], *[1] * (len(shape) - 2))
        x = normal(*shape) * (normal(*of_channels).abs() + 0.5) + 3 * normal(*of_channels)
        self.x = laid_out(x, channels_last).to(device, dtype)
        self.residual = laid_out(normal(*shape), channels_last).to(device, dtype)
        self.grad_y = laid_out(normal(*shape), channels_last).to(device, dtype)
        weight, bias, self.running_mean, running_var = (normal(shape[1]).to(device) for _ in range(4))
        self.weight, self.bias = (weight, bias) if affine else (None, None)
        self.running_var = running_var.abs()

    def affine(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        return tuple(None if one is None else one.to(dtype) for one in (self.weight, self.bias))  # type: ignore[return-value]

    def running(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Copies, to be changed."""
        return self.running_mean.to(dtype, copy=True), self.running_var.to(dtype, copy=True)

    def by_aten(self, dtype: torch.dtype, statistics: torch.dtype) -> dict[str, Tensor]:
        """The normalization in a precision for images and one for channels."""
        mean, var = self.running(statistics)
        weight, bias = self.affine(statistics)
        y, save_mean, save_invstd = torch.ops.aten.native_batch_norm(
            self.x.to(dtype), weight, bias, mean, var, True, MOMENTUM, EPS
        )
        return {"y": y, "save_mean": save_mean, "save_invstd": save_invstd, "running_mean": mean, "running_var": var}

    def gradients_by_aten(self, grad: Tensor, dtype: torch.dtype, statistics: torch.dtype) -> dict[str, Tensor]:
        found = self.by_aten(dtype, statistics)
        weight = self.affine(statistics)[0]
        if weight is None:  # the operator's gradient of the weight is there all the same
            weight = torch.ones_like(found["save_mean"])
        grads = torch.ops.aten.native_batch_norm_backward(
            grad.to(dtype), self.x.to(dtype), weight, found["running_mean"], found["running_var"],
            found["save_mean"], found["save_invstd"], True, EPS, [True] * 3,
        )  # fmt: skip
        return dict(zip(("grad_x", "grad_weight", "grad_bias"), grads, strict=True))


def assert_as_accurate(
    found: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], prefix: str = ""
) -> None:
    """Errors are at most twice those of eager and one unit in the last place of the largest value."""
    for name, values in exact.items():
        unit = torch.finfo(found[name].dtype).eps * values.abs().max()
        error, allowed = (found[name].double() - values).abs().max(), (eager[name].double() - values).abs().max()
        assert error <= 2 * allowed + unit, f"{prefix}{name}: {error} where eager has {allowed}, one unit {unit}"


def with_relu(values: dict[str, Tensor], added: Tensor | None, relu: bool) -> dict[str, Tensor]:
    y = values["y"] if added is None else values["y"] + added
    return {**values, "y": y.relu() if relu else y}


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Up to the order of sums, which on a GPU is a matter of how a kernel is compiled."""
    for one, other in zip(found, expected, strict=True):
        tolerance = 16 * torch.finfo(one.dtype).eps if one.is_cuda else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * other.abs().max().item())


PRECISE = (torch.float64, torch.float64)


@pytest.mark.parametrize(("case", "dtype"), CASES_IN_PRECISIONS)
def test_forward(machine: Machine, case: Case, dtype: torch.dtype) -> None:
    machine.use(case[2])
    norm = Norm(case, dtype, machine.device)
    for relu in (False, True):
        for residual in (None, norm.residual):
            mean, var = norm.running()
            options = {"momentum": MOMENTUM, "eps": EPS, "relu": relu}
            y, save_mean, save_invstd = machine.batch_norm(
                norm.x, residual, norm.weight, norm.bias, mean, var, **options
            )
            found = {"y": y, "save_mean": save_mean, "save_invstd": save_invstd}
            found |= {"running_mean": mean, "running_var": var}
            exact = with_relu(norm.by_aten(*PRECISE), None if residual is None else residual.double(), relu)
            eager = with_relu(norm.by_aten(dtype, torch.float32), residual, relu)
            assert_as_accurate(found, eager, exact)


@pytest.mark.parametrize(("case", "dtype"), CASES_IN_PRECISIONS)
@pytest.mark.parametrize("relu", [False, True])
def test_backward(machine: Machine, case: Case, dtype: torch.dtype, relu: bool) -> None:
    machine.use(case[2])
    norm = Norm(case, dtype, machine.device)
    values = norm.by_aten(dtype, torch.float32)
    y = values["y"].relu() if relu else None
    grads = machine.batch_norm_backward(
        norm.grad_y, norm.x, y, norm.weight, norm.bias, values["save_mean"], values["save_invstd"], relu=relu
    )
    masked = norm.grad_y if y is None else torch.where(y > 0, norm.grad_y, 0)
    exact = norm.gradients_by_aten(masked, *PRECISE)
    found = dict(zip(exact, grads, strict=True))
    assert_as_accurate(found, norm.gradients_by_aten(masked, dtype, torch.float32), exact)


@pytest.mark.parametrize(("case", "dtype"), FEW_CASES)
def test_backward_with_residual(machine: Machine, case: Case, dtype: torch.dtype) -> None:
    """It is the backward without one of the masked gradient, which is also the residual's."""
    machine.use(case[2])
    norm = Norm(case, dtype, machine.device)
    y = norm.residual.relu()
    values = norm.by_aten(dtype, torch.float32)
    statistics = values["save_mean"], values["save_invstd"]
    grad_x, grad_residual, grad_weight, grad_bias = machine.batch_norm_residual_backward(
        norm.grad_y, norm.x, y, norm.weight, *statistics
    )
    masked = torch.where(y > 0, norm.grad_y, torch.zeros_like(y))
    assert torch.equal(grad_residual, masked)
    plain = machine.batch_norm_backward(masked, norm.x, None, norm.weight, None, *statistics, relu=False)
    assert_same((grad_x, grad_weight, grad_bias), plain)


def joined(
    machine: Machine, a: Norm, b: Norm, running_a: Any = (None, None), running_b: Any = (None, None)
) -> tuple[Tensor, ...]:
    options = {"momentum_a": MOMENTUM, "eps_a": EPS, "momentum_b": MOMENTUM, "eps_b": EPS}
    of_a = a.x, a.weight, a.bias, *running_a
    of_b = b.x, b.weight, b.bias, *running_b
    return machine.batch_norm_join(*of_a, *of_b, **options)


@pytest.mark.parametrize(("case", "dtype"), CASES_IN_PRECISIONS)
def test_join(machine: Machine, case: Case, dtype: torch.dtype) -> None:
    machine.use(case[2])
    a, b = Norm(case, dtype, machine.device), Norm(case, dtype, machine.device, seed=1)
    running_a, running_b = a.running(), b.running()
    y, *statistics = joined(machine, a, b, running_a, running_b)
    names = ("y", "save_mean", "save_invstd", "running_mean", "running_var")
    for norm, other, found in (
        (a, b, (y, *statistics[:2], *running_a)),
        (b, a, (y, *statistics[2:], *running_b)),
    ):
        exact = with_relu(norm.by_aten(*PRECISE), other.by_aten(*PRECISE)["y"], True)
        eager = with_relu(norm.by_aten(dtype, torch.float32), other.by_aten(dtype, torch.float32)["y"], True)
        assert_as_accurate(dict(zip(names, found, strict=True)), eager, exact, "a " if norm is a else "b ")


@pytest.mark.parametrize(("case", "dtype"), CASES_IN_PRECISIONS)
def test_join_backward(machine: Machine, case: Case, dtype: torch.dtype) -> None:
    """It is the backward of either branch."""
    machine.use(case[2])
    a, b = Norm(case, dtype, machine.device), Norm(case, dtype, machine.device, seed=1)
    y, *statistics = joined(machine, a, b)
    of_a, of_b = (a.x, a.weight, a.bias, *statistics[:2]), (b.x, b.weight, b.bias, *statistics[2:])
    grads = machine.batch_norm_join_backward(a.grad_y, y, *of_a, *of_b)
    masked = torch.where(y > 0, a.grad_y, torch.zeros_like(y))
    exact_a, exact_b = (norm.gradients_by_aten(masked, *PRECISE) for norm in (a, b))
    eager_a, eager_b = (norm.gradients_by_aten(masked, dtype, torch.float32) for norm in (a, b))
    assert_as_accurate(dict(zip(exact_a, grads[:3], strict=True)), eager_a, exact_a, "a ")
    assert_as_accurate(dict(zip(exact_b, grads[3:], strict=True)), eager_b, exact_b, "b ")


@pytest.mark.parametrize(("case", "dtype"), FEW_CASES)
def test_masks_that_are_computed_are_those_of_the_outputs(machine: Machine, case: Case, dtype: torch.dtype) -> None:
    machine.use(case[2])
    a, b = Norm(case, dtype, machine.device), Norm(case, dtype, machine.device, seed=1)
    if dtype == torch.float16:  # what is rounded to 0 counts as 0
        assert a.weight is not None
        assert a.bias is not None
        a.weight.mul_(1e-7)
        a.bias.mul_(1e-7)
    ones = torch.ones_like(a.x)  # the gradients of the biases count
    y, *statistics = machine.batch_norm(a.x, None, a.weight, a.bias, None, None, momentum=MOMENTUM, eps=EPS, relu=True)
    *_, count = machine.batch_norm_backward(ones, a.x, None, a.weight, a.bias, *statistics, relu=True)
    assert torch.equal(count, (y > 0).transpose(0, 1).flatten(1).sum(1).float())
    y, *statistics = joined(machine, a, b)
    of_a, of_b = (a.x, a.weight, a.bias, *statistics[:2]), (b.x, b.weight, b.bias, *statistics[2:])
    read, computed = (machine.batch_norm_join_backward(a.grad_y, given, *of_a, *of_b) for given in (y, None))
    assert_same(computed, read)
    _, _, count_a, _, _, count_b = machine.batch_norm_join_backward(ones, None, *of_a, *of_b)
    assert torch.equal(count_a, (y > 0).transpose(0, 1).flatten(1).sum(1).float())
    assert torch.equal(count_a, count_b)


@pytest.mark.parametrize("case", [SPLIT, IN_ONE], ids=["split", "in one"])
def test_without_weights_and_running_statistics(machine: Machine, case: Case) -> None:
    machine.use(case[2])
    norm = Norm(case, torch.float32, machine.device, affine=False)
    y, save_mean, save_invstd = machine.batch_norm(
        norm.x, None, None, None, None, None, momentum=MOMENTUM, eps=EPS, relu=False
    )
    found = {"y": y, "save_mean": save_mean, "save_invstd": save_invstd}
    exact = {name: values for name, values in norm.by_aten(*PRECISE).items() if name in found}
    assert_as_accurate(found, norm.by_aten(torch.float32, torch.float32), exact)
    grads = machine.batch_norm_backward(norm.grad_y, norm.x, None, None, None, save_mean, save_invstd, relu=False)
    exact = norm.gradients_by_aten(norm.grad_y, *PRECISE)
    eager = norm.gradients_by_aten(norm.grad_y, torch.float32, torch.float32)
    assert_as_accurate(dict(zip(exact, grads, strict=True)), eager, exact)


@pytest.mark.parametrize("case", [SPLIT, IN_ONE], ids=["split", "in one"])
@pytest.mark.parametrize("mean", [1e3, 1e5])
def test_variances_far_from_zero(machine: Machine, case: Case, mean: float) -> None:
    """With sums of squares, nothing would be left of a variance of 1 beside a mean of 1e5."""
    machine.use(case[2])
    norm = Norm(case, torch.float32, machine.device)
    norm.x += mean
    _, save_mean, save_invstd = machine.batch_norm(
        norm.x, None, None, None, None, None, momentum=MOMENTUM, eps=EPS, relu=False
    )
    exact = norm.by_aten(*PRECISE)
    torch.testing.assert_close(save_mean.double(), exact["save_mean"], rtol=5e-7, atol=0)
    rounding = (torch.finfo(torch.float32).eps * mean) ** 2  # of the mean, squared, beside a variance of about 1
    torch.testing.assert_close(save_invstd.double(), exact["save_invstd"], rtol=2e-6 + 10 * rounding, atol=0)


@pytest.mark.parametrize("case", [SPLIT, IN_ONE], ids=["split", "in one"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(machine: Machine, case: Case, bad: float) -> None:
    """It reaches its channel, as in torch, and no other."""
    machine.use(case[2])
    norm = Norm(case, torch.float32, machine.device)
    options = {"momentum": MOMENTUM, "eps": EPS, "relu": True}

    def outcome() -> tuple[Tensor, ...]:
        running = norm.running()
        y, *statistics = machine.batch_norm(norm.x, None, norm.weight, norm.bias, *running, **options)
        grad_x, grad_weight, _ = machine.batch_norm_backward(
            norm.grad_y, norm.x, y, norm.weight, None, *statistics, relu=True
        )
        return y, *statistics, *running, grad_x, grad_weight

    clean = outcome()
    norm.x[1, 2, 3, 3] = bad
    for found, before in zip(outcome(), clean, strict=True):
        channels = (found, before) if found.dim() == 1 else (found.movedim(1, 0), before.movedim(1, 0))
        good = torch.arange(len(channels[0]), device=found.device) != 2
        assert torch.equal(channels[0][good], channels[1][good])
        assert not channels[0][2].isfinite().any()
    eager = norm.by_aten(torch.float32, torch.float32)
    assert torch.equal(outcome()[0].isnan(), eager["y"].relu().isnan())


@pytest.mark.parametrize("case", [SPLIT, IN_ONE], ids=["split", "in one"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(machine: Machine, case: Case, bad: float) -> None:
    machine.use(case[2])
    norm = Norm(case, torch.float32, machine.device)
    values = norm.by_aten(torch.float32, torch.float32)
    norm.grad_y[0, 1, 0, 0] = bad
    grads = machine.batch_norm_backward(
        norm.grad_y, norm.x, None, norm.weight, None, values["save_mean"], values["save_invstd"], relu=False
    )
    eager = norm.gradients_by_aten(norm.grad_y, torch.float32, torch.float32)
    for found, expected in zip(grads, eager.values(), strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.mark.parametrize("case", [SPLIT, IN_ONE, CONTIGUOUS], ids=["split", "in one", "contiguous"])
def test_at_odd_addresses(machine: Machine, case: Case) -> None:
    machine.use(case[2])
    norm = Norm(case, torch.float32, machine.device)

    def shifted(tensor: Tensor) -> Tensor:
        memory = tensor.new_zeros(tensor.numel() + 1)[1:]
        return memory.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)

    def outcome(move: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        assert norm.weight is not None
        x, residual, weight = move(norm.x), move(norm.residual), move(norm.weight)
        y, *statistics = machine.batch_norm(
            x, residual, weight, None, None, None, momentum=MOMENTUM, eps=EPS, relu=True
        )
        grads = machine.batch_norm_residual_backward(move(norm.grad_y), x, move(y), weight, *statistics)
        return y, *statistics, *grads

    assert_same(outcome(shifted), outcome(lambda tensor: tensor))


@pytest.mark.parametrize("case", [SPLIT, IN_ONE, CONTIGUOUS], ids=["split", "in one", "contiguous"])
def test_channels_of_one_value(machine: Machine, case: Case) -> None:
    """No rounding makes a variance of 0 negative."""
    machine.use(case[2])
    norm = Norm(case, torch.float32, machine.device)
    norm.x.fill_(1.1e6 / 3)
    mean, var = norm.running()
    _, _, save_invstd = machine.batch_norm(norm.x, None, None, None, mean, var, momentum=1.0, eps=1e-12, relu=False)
    assert (var >= 0).all()
    assert save_invstd.isfinite().all()


# Sums of two gradients


def backwards(machine: Machine, case: Case, dtype: torch.dtype) -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    """Each backward, as a function of `grad_y` and options; with the mask read and computed."""
    a, b = Norm(case, dtype, machine.device), Norm(case, dtype, machine.device, seed=1)
    y, *of_both = joined(machine, a, b)
    join = (a.x, a.weight, a.bias, *of_both[:2], b.x, b.weight, b.bias, *of_both[2:])
    known = a.weight, a.bias, *of_both[:2]
    return {
        "plain": lambda grad, **given: machine.batch_norm_backward(grad, a.x, None, *known, relu=False, **given),
        "relu": lambda grad, **given: machine.batch_norm_backward(grad, a.x, y, *known, relu=True, **given),
        "relu anew": lambda grad, **given: machine.batch_norm_backward(grad, a.x, None, *known, relu=True, **given),
        "residual": lambda grad, **given: machine.batch_norm_residual_backward(
            grad, a.x, y, a.weight, *of_both[:2], **given
        ),
        "join": lambda grad, **given: machine.batch_norm_join_backward(grad, y, *join, **given),
        "join anew": lambda grad, **given: machine.batch_norm_join_backward(grad, None, *join, **given),
    }


@pytest.mark.parametrize(("case", "dtype"), [*FEW_CASES, (SPLIT, torch.float32), (IN_ONE, torch.bfloat16)])
def test_a_second_gradient_is_added_as_before_the_operator(machine: Machine, case: Case, dtype: torch.dtype) -> None:
    machine.use(case[2])
    one, other = (Norm(case, dtype, machine.device, seed).grad_y for seed in (2, 3))
    other = other * 2**0.5  # sums are rounded
    other[1, 1, 0, 0] = float("nan")
    other[0, 2, 0, 0] = float("inf")
    for backward in backwards(machine, case, dtype).values():
        found, wanted = backward(one, added_grad_y=other), backward(one + other)
        for mine, theirs in zip(found, wanted, strict=True):
            tolerance = 16 * torch.finfo(dtype).eps * theirs[theirs.isfinite()].abs().max().item()
            atol = tolerance if mine.is_cuda else 0.0
            torch.testing.assert_close(mine, theirs, rtol=0, atol=atol, equal_nan=True)


# Which program is the last

MANY_PARTS = ((2, 3, 4, 4), True, Form(4, 2, 4, 8))  # 8 of them, for 2 blocks of channels


def pair(machine: Machine, case: Case) -> tuple[Norm, Norm]:
    machine.use(case[2])
    return Norm(case, torch.float32, machine.device), Norm(case, torch.float32, machine.device, seed=1)


def no_counters(_branches: int) -> None:
    return None


def counted(
    machine: Machine, a: Norm, b: Norm, given: Callable[[int], Tensor | None] = no_counters
) -> dict[str, tuple[Tensor, ...]]:
    """The results of each operator, with counters `given` for a number of normalizations at once."""
    running = [*a.running(), *a.running(), *b.running()]
    options = {"momentum": MOMENTUM, "eps": EPS}
    y, *of_a = machine.batch_norm(
        a.x, a.residual, a.weight, a.bias, *running[:2], **options, relu=True, counters=given(1)
    )
    join = {f"{name}_{branch}": value for name, value in options.items() for branch in "ab"}
    operands = (a.x, a.weight, a.bias, *running[2:4], b.x, b.weight, b.bias, *running[4:])
    both = machine.batch_norm_join(*operands, **join, counters=given(2))
    known = (a.x, a.weight, a.bias, *both[1:3], b.x, b.weight, b.bias, *both[3:])
    return {
        "forward": (y, *of_a, *running[:2]),
        "backward": machine.batch_norm_backward(
            a.grad_y, a.x, y, a.weight, None, *of_a, relu=True, counters=given(1), added_grad_y=b.grad_y
        ),
        "residual backward": machine.batch_norm_residual_backward(
            a.grad_y, a.x, y, a.weight, *of_a, counters=given(1), added_grad_y=b.grad_y
        ),
        "join": (*both, *running[2:]),
        "join backward": machine.batch_norm_join_backward(a.grad_y, None, *known, counters=given(1)),
    }


@pytest.mark.parametrize(
    "case", [pytest.param(MANY_PARTS, id="split", marks=pytest.mark.slow), pytest.param(IN_ONE, id="in one")]
)
def test_counters_are_zero_again(machine: Machine, case: Case) -> None:
    """So that an operator may be run again with the same ones."""
    norms = pair(machine, case)
    held: list[Tensor] = []

    def given(branches: int) -> Tensor:
        number = batch_norm.num_counters(case[0][1], branches)
        held.append(torch.zeros(number, dtype=torch.int32, device=machine.device))
        return held[-1]

    wanted, found = counted(machine, *norms), counted(machine, *norms, given)
    again = iter(tuple(held))
    repeated = counted(machine, *norms, lambda _: next(again))
    for name, results in wanted.items():
        assert all(map(torch.equal, found[name], results)), name
        assert all(map(torch.equal, repeated[name], results)), name
    assert len(held) == 5
    assert not any(one.any() for one in held)


@pytest.mark.slow
@pytest.mark.parametrize("merged_at_once", [4, 2**10])
def test_it_does_not_matter_which_program_is_the_last(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, merged_at_once: int
) -> None:
    """Results have the same bits, and are right however many partial results are merged at once."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    patch_interpreter(monkeypatch)
    monkeypatch.setattr(batch_norm_forms, "_MERGED_AT_ONCE", merged_at_once)
    machine = Machine("cpu", kernels, monkeypatch)
    norms = pair(machine, MANY_PARTS)
    in_order = counted(machine, *norms)
    builder = interpreter.InterpreterBuilder
    place = builder.set_grid_idx
    for step in (-1, 3):  # the numbers of programs along the first axis are 8 and 2

        def elsewhere(self: Any, x: int, y: int, z: int, step: int = step) -> None:
            place(self, step * x % self.grid_dim[0], y, z)

        monkeypatch.setattr(builder, "set_grid_idx", elsewhere)
        for name, results in counted(machine, *norms).items():
            assert all(map(torch.equal, results, in_order[name])), name
    monkeypatch.setattr(builder, "set_grid_idx", place)
    wanted = counted(Machine("cpu", None, monkeypatch), *norms)
    for name, results in in_order.items():
        for one, other in zip(results, wanted[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023 - raised at once


@pytest.mark.parametrize("merged_at_once", [4, 8, 2**10])
def test_statistics_of_many_parts_far_from_zero(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, merged_at_once: int
) -> None:
    """The parts' means are far from each other and from zero."""
    monkeypatch.setattr(batch_norm_forms, "_MERGED_AT_ONCE", merged_at_once)
    machine.use(MANY_PARTS[2])
    norm = Norm(MANY_PARTS, torch.float32, machine.device)
    norm.x += 1e4
    norm.x[0] -= 3e3
    _, save_mean, save_invstd = machine.batch_norm(
        norm.x, None, None, None, None, None, momentum=MOMENTUM, eps=EPS, relu=False
    )
    exact = norm.by_aten(*PRECISE)
    torch.testing.assert_close(save_mean.double(), exact["save_mean"], rtol=5e-7, atol=0)
    torch.testing.assert_close(save_invstd.double(), exact["save_invstd"], rtol=2e-6, atol=0)


class Launches:
    """Notes the launches of a kernel."""

    def __init__(self, kernel: Any, names: list[str]) -> None:
        self._kernel, self._names = kernel, names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        self._names.append(self._kernel.__name__)
        return self._kernel[grid]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", [MANY_PARTS, IN_ONE], ids=["split", "in one"])
def test_sums_are_finished_without_a_launch(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    patch_interpreter(monkeypatch)
    names: list[str] = []
    for name in ("partial_statistics", "apply", "forward_in_one", "partial_sums", "apply_gradients", "backward_in_one"):
        monkeypatch.setattr(kernels, name, Launches(getattr(kernels, name), names))
    machine = Machine("cpu", kernels, monkeypatch)
    counted(machine, *pair(machine, case))
    forward, backward = ["partial_statistics", "apply"], ["partial_sums", "apply_gradients"]
    if case is IN_ONE:
        forward, backward = ["forward_in_one"], ["backward_in_one"]
    assert names == [*forward, *forward, *backward, *backward, *backward]  # `counted` joins before it goes back


def launch_sums_of_gradients() -> None:
    from kitsune.kernels import batch_norm_triton

    with pytest.MonkeyPatch.context() as patch:
        machine = Machine("cpu", batch_norm_triton, patch)
        for case in (((8, 64, 16, 16), True, Form(32, 64, 4, 64, 3)), IN_ONE, CONTIGUOUS):
            machine.use(case[2])
            one, other = (Norm(case, torch.bfloat16, "cpu", seed).grad_y for seed in (2, 3))
            for backward in backwards(machine, case, torch.bfloat16).values():
                backward(one, added_grad_y=other)


@pytest.mark.slow
def test_what_the_last_program_reads_is_what_others_have_stored() -> None:
    """Counting orders the memory of a whole GPU, and the last one reads past its own cache."""
    pytest.importorskip("triton", reason="Triton is not installed")
    found = [one for one in compiled(launch_sums_of_gradients) if one.name in ("partial_statistics", "partial_sums")]
    assert len({one.name for one in found}) == 2
    for one in found:
        lines = one.ptx.splitlines()
        (count,) = [place for place, line in enumerate(lines) if "atom." in line]
        assert "atom.global.gpu.acq_rel.add" in lines[count]
        around = [place for place, line in enumerate(lines) if "bar.sync" in line]
        stored = [place for place, line in enumerate(lines) if "st.global" in line and place < count]
        read = [place for place, line in enumerate(lines) if "ld.global.cg" in line]
        assert any(max(stored) < place < count for place in around)
        assert read
        assert any(count < place < min(read) for place in around)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 64, 56, 56), (128, 512, 7, 7), (33, 40, 17, 19)])
def test_the_last_program_misses_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, again and again, with the same counters; on two streams at once with counters of their own."""
    launches = pytest.importorskip("kitsune.kernels.batch_norm_triton", reason="Triton is not installed")
    machine = Machine("cuda", launches, monkeypatch)
    norms = pair(machine, (shape, True, IN_ONE[2]))
    for form in (Form(32, 64, 4, 1024), Form(64, 32, 4, 264, 3), Form(32, 32, 4, 40, 3)):
        machine.use(form)
        zeros = [torch.zeros(2 * shape[1], dtype=torch.int32, device="cuda") for _ in range(2)]
        wanted = counted(machine, *norms)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for _ in range(50):
            found = []
            for stream, counters in zip(streams, zeros, strict=True):
                with torch.cuda.stream(stream):
                    found.append(counted(machine, *norms, lambda _, one=counters: one))  # type: ignore[misc]
            torch.cuda.synchronize()
            for outcome in found:
                for name, results in outcome.items():
                    assert all(map(torch.equal, results, wanted[name])), f"{form} {name}"
        assert not any(counters.any() for counters in zeros)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_all_forms_work_and_trials_change_nothing(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running statistics count one batch, however many forms were tried."""
    launches = pytest.importorskip("kitsune.kernels.batch_norm_triton", reason="Triton is not installed")
    case = ((8, 80, 14, 14), channels_last, IN_ONE[2])
    norm = Norm(case, torch.bfloat16, "cuda")
    exact = with_relu(norm.by_aten(*PRECISE), norm.residual.double(), True)
    eager = with_relu(norm.by_aten(torch.bfloat16, torch.float32), norm.residual, True)
    layout = batch_norm.layout_of(norm.x)
    for given in [forms(layout, 132), *((form,) for form in forms(layout, 132))]:
        monkeypatch.setattr(launches, "forms", lambda *_, given=given: given)
        running = norm.running()
        results = batch_norm.batch_norm(
            norm.x, norm.residual, norm.weight, norm.bias, *running, momentum=MOMENTUM, eps=EPS, relu=True
        )
        assert_as_accurate(dict(zip(exact, (*results, *running), strict=True)), eager, exact, f"{given} ")


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_more_elements_than_32_bits_count(channels_last: bool) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GB of device memory")
    x = torch.empty((2, 64, 4100, 4100), dtype=torch.bfloat16, device="cuda")
    x = x.as_strided(x.shape, (x[0].numel(), 1, 64 * 4100, 64)) if channels_last else x
    x.normal_()
    y, save_mean, save_invstd = batch_norm.batch_norm(
        x, None, None, None, None, None, momentum=MOMENTUM, eps=EPS, relu=False
    )
    last = (x[1, 63, -2:].double() - save_mean[63].double()) * save_invstd[63].double()
    torch.testing.assert_close(y[1, 63, -2:].double(), last, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(save_mean[63], x[:, 63].float().mean(), rtol=0, atol=1e-5)


# The forms


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("rows", "channels"), [(2, 1), (64, 256), (6272, 512), (25088, 256), (128 * 112 * 112, 64), (1000, 65535), (7, 3)]
)
def test_forms(rows: int, channels: int, channels_last: bool) -> None:
    layout = Layout(rows, channels, 1, channels_last)
    found = forms(layout, 132)
    assert 1 <= len(found) <= 12
    assert len(set(found)) == len(found)
    for form in found:
        assert form.block_rows & (form.block_rows - 1) == 0
        assert form.block_channels & (form.block_channels - 1) == 0
        parts = split(form, layout)
        assert parts.num_partials <= form.num_partials <= 1024
        assert (parts.num_partials - 1) * parts.rows_a_partial < rows <= parts.num_partials * parts.rows_a_partial
        assert parts.rows_a_partial % form.block_rows == parts.rows_a_program % form.block_rows == 0
        assert (parts.num_row_programs - 1) * parts.rows_a_program < rows
        assert rows <= parts.num_row_programs * parts.rows_a_program
        assert parts.block_partials & (parts.block_partials - 1) == 0
        assert parts.block_partials * form.block_channels <= 32 * 32 * form.num_warps, "32 registers a thread"
        assert -(-channels // form.block_channels) <= batch_norm.num_counters(channels)


# The operators


def calls(
    dtype: torch.dtype = torch.float32, channels_last: bool = True, *, optional: bool = False
) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Arguments for each operator; `optional`: with counters and second gradients."""
    norm = Norm(((2, 3, 4, 5), channels_last, IN_ONE[2]), dtype, "cpu")
    x, weight, mean = norm.x, norm.weight, norm.running_mean
    trained = [weight, norm.bias, *norm.running()]
    known = [weight, norm.bias, mean, norm.running_var]
    join = {"momentum_a": MOMENTUM, "eps_a": EPS, "momentum_b": MOMENTUM, "eps_b": EPS}
    given = {"counters": torch.zeros(6, dtype=torch.int32)} if optional else {}
    added = {"added_grad_y": norm.residual.neg(), **given} if optional else {}
    return {
        "batch_norm": ([x, norm.residual, *trained], {"momentum": MOMENTUM, "eps": EPS, "relu": True, **given}),
        "batch_norm_backward": ([norm.grad_y, x, norm.residual, *known], {"relu": True, **added}),
        "batch_norm_residual_backward": ([norm.grad_y, x, norm.residual, weight, *known[2:]], added),
        "batch_norm_join": (
            [x, *trained, norm.residual, *(one.clone() for one in trained if one is not None)],
            {**join, **given},
        ),
        "batch_norm_join_backward": ([norm.grad_y, None, x, *known, norm.residual, *known], added),
    }


NAMES = tuple(calls())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("channels_last", "optional"), [(False, True), (True, False)])
def test_operators_are_what_they_declare(name: str, channels_last: bool, optional: bool) -> None:
    arguments, options = calls(torch.bfloat16, channels_last, optional=optional)[name]
    operator = getattr(torch.ops.kitsune, name).default
    torch.library.opcheck(operator, tuple(arguments), options, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_fakes_are_laid_out_like_results(name: str, channels_last: bool) -> None:
    arguments, options = calls(torch.float16, channels_last)[name]
    real = getattr(batch_norm, name)(*arguments, **options)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in arguments]
        fake = getattr(batch_norm, name)(*faked, **options)
    assert len(fake) == len(real)
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("batch_norm", {4, 5}),
        ("batch_norm_backward", set()),
        ("batch_norm_residual_backward", set()),
        ("batch_norm_join", {3, 4, 8, 9}),
        ("batch_norm_join_backward", set()),
    ],
)
def test_each_operator_is_one_node_of_a_legal_graph(name: str, written: set[int]) -> None:
    arguments, options = calls()[name]
    places = [index for index, one in enumerate(arguments) if isinstance(one, Tensor)]

    def call(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(places, tensors, strict=True))
        return list(getattr(batch_norm, name)(*(given.get(index) for index in range(len(arguments))), **options))

    graph = make_fx(call, tracing_mode="fake")(*(arguments[index] for index in places)).graph
    operators = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert operators == [getattr(torch.ops.kitsune, name).default]
    assert refuse_graph(graph) is None
    assert set(dataflow.written_inputs(graph)) == {places.index(place) for place in written}


IMAGE = torch.randn(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({0: IMAGE.double()}, r"float32, bfloat16 or float16: got \(2, 3, 4, 5\) of torch.float64"),
        ({0: torch.ones(3)}, r"takes \(N, C, \*spatial\)"),
        ({0: IMAGE[:, :, :, :4]}, "dense in memory, channels last or contiguous: got"),
        ({0: torch.ones(1, 3, 1, 1)}, r"2 to \d+ values in each of 1 to \d+ channels: got \(1, 3, 1, 1\)"),
        ({0: torch.ones(0, 3, 4, 5)}, r"got \(0, 3, 4, 5\)"),
        ({0: torch.ones(5, 0)}, r"got \(5, 0\)"),
        ({1: IMAGE[:1]}, r"residual like its input, \(2, 3, 4, 5\) .* got \(1, 3, 4, 5\)"),
        ({1: IMAGE.half()}, "residual like its input.*got .* of torch.float16"),
        ({1: laid_out(IMAGE, True)}, r"residual laid out like its input, with strides \(60, 20, 5, 1\)"),
        ({2: torch.ones(4)}, r"weight in float32 of shape \(3,\) on cpu: got torch.float32 of shape \(4,\)"),
        ({3: torch.ones(3).half()}, "bias in float32 .* got torch.float16"),
        ({4: torch.ones(6)[::2]}, "running_mean dense in memory: got stride 2"),
        ({5: None}, "both running_mean and running_var or none"),
    ],
)
def test_what_the_forward_refuses(changes: dict[int, Tensor | None], problem: str) -> None:
    arguments = [IMAGE, IMAGE, *(torch.ones(3) for _ in range(4))]
    for index, value in changes.items():
        arguments[index] = value  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=problem):
        batch_norm.batch_norm(*arguments, momentum=MOMENTUM, eps=EPS, relu=True)  # type: ignore[misc, arg-type]


def test_what_the_others_refuse() -> None:
    arguments, _ = calls()["batch_norm_backward"]
    with pytest.raises(ValueError, match="takes y for ReLU's mask only"):
        batch_norm.batch_norm_backward(*arguments, relu=False)  # type: ignore[misc]
    arguments[0] = arguments[0].contiguous()
    with pytest.raises(ValueError, match="takes grad_y laid out like its input"):
        batch_norm.batch_norm_backward(*arguments, relu=True)  # type: ignore[misc]
    arguments, options = calls()["batch_norm_join"]
    arguments[9] = None
    with pytest.raises(ValueError, match="both running_mean and running_var or none"):
        batch_norm.batch_norm_join(*arguments, **options)
    arguments[5] = arguments[5].half()
    with pytest.raises(ValueError, match="takes b like its input"):
        batch_norm.batch_norm_join(*arguments, **options)


@pytest.mark.parametrize(
    ("counters", "problem"),
    [
        (torch.zeros(6), r"counters in int32 of shape \(6,\) or more on cpu: got torch.float32"),
        (torch.zeros(5, dtype=torch.int32), r"got torch.int32 of shape \(5,\)"),
        (torch.zeros(6, 1, dtype=torch.int32), r"got torch.int32 of shape \(6, 1\)"),
        (torch.zeros(12, dtype=torch.int32)[::2], "counters dense in memory: got stride 2"),
    ],
)
def test_which_counters_are_refused(counters: Tensor, problem: str) -> None:
    arguments, options = calls()["batch_norm_join"]
    with pytest.raises(ValueError, match=problem):
        batch_norm.batch_norm_join(*arguments, **options, counters=counters)


def test_second_gradients_are_like_the_first() -> None:
    for name in NAMES:
        if not name.endswith("backward"):
            continue
        arguments, options = calls(optional=True)[name]
        options["added_grad_y"] = options["added_grad_y"].contiguous()
        with pytest.raises(ValueError, match="takes added_grad_y laid out like its input"):
            getattr(batch_norm, name)(*arguments, **options)
