"""The Adam kernel against `torch.optim` in float64: in Triton's interpreter on the CPU, and compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kitsune.graph import dataflow
from kitsune.graph.verify import refuse_graph
from kitsune.kernels import adam
from tests.kitsune.kernels.interpreter import interpreted, patch_interpreter

# What the interpreter computes in numpy may warn of what is meant to be so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

SIZES = (1, 3, 1023, 1024, 1025, 0, 2500)
STEPS = 4

Launch = Callable[..., None]
Lists = tuple[list[Tensor], ...]


def adam_triton() -> ModuleType:
    return pytest.importorskip("kitsune.kernels.adam_triton", reason="Triton is not installed")


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    module = interpreted("adam_triton")
    module.TENSORS_A_LAUNCH, module.FEW_TENSORS = 4, 2  # the interpreter takes its time for each
    return module


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Launch]:
    """A device, and what runs the kernel there: the launcher in the interpreter, or the operator."""
    if request.param == "cpu":
        patch_interpreter(monkeypatch)
        return "cpu", request.getfixturevalue("kernel").launch
    adam_triton()
    return "cuda", adam.adam_


def numbers(sizes: tuple[int, ...], device: str, seed: int, scale: float = 1.0) -> list[Tensor]:
    """Normally distributed, of very different sizes from tensor to tensor."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, generator=generator) * scale * 10.0 ** (i % 5 - 2)).to(device)
        for i, size in enumerate(sizes)
    ]


def zeros(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def gradients(sizes: tuple[int, ...], device: str, step: int) -> list[Tensor]:
    return numbers(sizes, device, 100 + step)


class Run:
    """Parameters and state, stepped by the kernel."""

    def __init__(self, machine: tuple[str, Launch], sizes: tuple[int, ...], **options: Any) -> None:
        self.device, self._launch = machine
        self.params = numbers(sizes, self.device, seed=0)
        self.state = {name: zeros(self.params) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
        if not options.pop("amsgrad", False):
            self.state["max_exp_avg_sq"] = []
        beta1, beta2 = options.pop("betas", (0.9, 0.999))
        self.lr = torch.tensor(options.pop("lr", 1e-2), device=self.device)
        self.step_count = torch.zeros((), device=self.device)
        defaults = {"weight_decay": 0.0, "eps": 1e-8, "decoupled": False, "maximize": False}
        self.options = {**defaults, **options, "beta1": beta1, "beta2": beta2}

    def step(self, grads: list[Tensor], found_inf: Tensor | None = None) -> None:
        self.step_count += 1
        steps = [self.step_count] * len(self.params)
        self._launch(self.params, grads, *self.state.values(), steps, lr=self.lr, found_inf=found_inf, **self.options)

    def values(self) -> dict[str, list[Tensor]]:
        return {"param": self.params, **{name: tensors for name, tensors in self.state.items() if tensors}}


def by_torch(
    sizes: tuple[int, ...], device: str, dtype: torch.dtype, kind: type[torch.optim.Optimizer], **options: Any
) -> dict[str, list[Tensor]]:
    params = [nn.Parameter(value.to(dtype)) for value in numbers(sizes, device, seed=0)]
    optimizer = kind(params, foreach=True, **{"lr": 1e-2, **options})
    for step in range(STEPS):
        for param, grad in zip(params, gradients(sizes, device, step), strict=True):
            param.grad = grad.to(dtype)
        optimizer.step()
    names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options.get("amsgrad") else ()))
    state = {name: [optimizer.state[param][name] for param in params] for name in names}
    return {"param": [param.detach() for param in params], **state}


def by_kernel(machine: tuple[str, Launch], sizes: tuple[int, ...], **options: Any) -> dict[str, list[Tensor]]:
    run = Run(machine, sizes, **options)
    for step in range(STEPS):
        run.step(gradients(sizes, run.device, step))
    return run.values()


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The root mean square error over all elements, in units of the last place of each tensor's largest value."""
    pairs = [(one.double(), other) for one, other in zip(found, exact, strict=True) if other.numel()]
    errors = torch.cat([(one - other) / other.abs().max() for one, other in pairs])
    return errors.square().mean().sqrt().item() / torch.finfo(torch.float32).eps


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"amsgrad": True, "maximize": True},
        {"weight_decay": 0.1, "maximize": True, "eps": 1e-3, "lr": 0.1},
        {"betas": (0.0, 0.5)},
        {"betas": (0.4, 0.0), "amsgrad": True, "weight_decay": 0.01},
    ],
    ids=str,
)
def test_as_accurate_as_foreach(
    machine: tuple[str, Launch], kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    exact = by_torch(SIZES, machine[0], torch.float64, kind, **options)
    eager = by_torch(SIZES, machine[0], torch.float32, kind, **options)
    found = by_kernel(
        machine, SIZES, decoupled=kind is torch.optim.AdamW, **{"weight_decay": 0.0, **defaults(kind), **options}
    )
    assert found.keys() == exact.keys()
    for name, tensors in exact.items():
        assert error(found[name], tensors) <= 2 * error(eager[name], tensors), name


def defaults(kind: type[torch.optim.Optimizer]) -> dict[str, float]:
    return {"weight_decay": 0.01} if kind is torch.optim.AdamW else {}


@pytest.mark.parametrize(("launches", "more"), [(0, 1), (1, 0), (1, 1), (3, 0)])
def test_many_tensors(machine: tuple[str, Launch], kernel: ModuleType, launches: int, more: int) -> None:
    width = kernel.TENSORS_A_LAUNCH if machine[0] == "cpu" else adam_triton().TENSORS_A_LAUNCH
    sizes = tuple(200 + 37 * index % 500 for index in range(launches * width + more))
    exact = by_torch(sizes, machine[0], torch.float64, torch.optim.Adam)
    found = by_kernel(machine, sizes)
    for name, tensors in exact.items():
        assert error(found[name], tensors) < 1, name


def test_no_tensors(machine: tuple[str, Launch]) -> None:
    for sizes in ((), (0, 0)):
        assert all(tensor.numel() == 0 for tensor in by_kernel(machine, sizes)["param"])


def test_second_moments_keep_their_precision(machine: tuple[str, Launch]) -> None:
    """What torch's fused operator misses on CUDA: it computes `1 - beta2` in float32, 5e-5 off."""
    run = Run(machine, (5,))
    run.step([torch.full((5,), 2.0, device=run.device)])
    torch.testing.assert_close(run.state["exp_avg_sq"][0].cpu(), torch.full((5,), 4e-3), rtol=2e-7, atol=0)


@pytest.mark.parametrize("count", [1, 2, 1000, 10_000_000])
def test_bias_corrections(machine: tuple[str, Launch], count: int) -> None:
    run = Run(machine, (4,), lr=1.0, eps=0.0)
    run.params[0].zero_()
    run.step_count.fill_(count - 1)
    run.step([torch.full((4,), 3.0, device=run.device)])
    change = -(0.1 * 3 / (1 - 0.9**count)) / (0.001 * 9 / (1 - 0.999**count)) ** 0.5
    torch.testing.assert_close(run.params[0].double().cpu(), torch.full((4,), change).double(), rtol=4e-7, atol=0)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_averages_of_all_magnitudes(machine: tuple[str, Launch], eps: float) -> None:
    """Those of parameters without gradients fall below what float32 divides and takes roots of by its usual means."""
    values = torch.tensor([0.0, 1e-44, 3e-39, 2e-31, 1e-20, 0.7, 1.0, 3e17, 1e30, 3e38, float("inf"), float("nan")])
    averages, squares = torch.cartesian_prod(values, values).unbind(1)
    run = Run(machine, (len(averages),), lr=0.5, eps=eps)
    run.params[0].zero_()
    run.state["exp_avg"][0].copy_(averages)
    run.state["exp_avg_sq"][0].copy_(squares)
    run.step([torch.zeros_like(run.params[0])])
    average, square = (run.state[name][0].cpu() for name in ("exp_avg", "exp_avg_sq"))
    size, root = torch.tensor(0.5) / torch.tensor(1 - 0.9), torch.tensor(1 - 0.999).sqrt()
    expected = -size * (average / (square.sqrt() / root + eps))
    torch.testing.assert_close(run.params[0].cpu(), expected, rtol=4e-7, atol=1e-44, equal_nan=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite(machine: tuple[str, Launch], bad: float) -> None:
    """They reach the elements to which they belong, as in torch, and no others."""
    run, clean = Run(machine, (1025, 3), amsgrad=True), Run(machine, (1025, 3), amsgrad=True)
    grads = gradients((1025, 3), run.device, 0)
    clean.step(grads)
    broken = [grad.clone() for grad in grads]
    broken[0][[7, 1024]] = bad
    run.step(broken)
    for name, tensors in clean.values().items():
        found = run.values()[name]
        good = torch.ones(1025, dtype=torch.bool, device=run.device)
        good[[7, 1024]] = False
        assert torch.equal(found[0][good], tensors[0][good]), name
        assert torch.equal(found[1], tensors[1]), name
        assert not torch.isfinite(found[0][~good]).any(), name


def test_found_inf(machine: tuple[str, Launch]) -> None:
    run, plain = Run(machine, SIZES), Run(machine, SIZES)
    grads = gradients(SIZES, run.device, 0)
    before = [tensor.clone() for tensors in run.values().values() for tensor in tensors]
    run.step(grads, found_inf=torch.ones((), device=run.device))
    assert all(map(torch.equal, before, [tensor for tensors in run.values().values() for tensor in tensors]))
    run.step_count.zero_()
    run.step(grads, found_inf=torch.zeros((), device=run.device))
    plain.step(grads)
    for name, tensors in plain.values().items():
        assert all(map(torch.equal, run.values()[name], tensors)), name


def test_each_parameter_has_its_own_step(machine: tuple[str, Launch]) -> None:
    both = Run(machine, (3, 3))
    grads = gradients((3, 3), both.device, 0)
    steps = [torch.tensor(float(count), device=both.device) for count in (1, 7)]
    machine[1](both.params, grads, *both.state.values(), steps, lr=both.lr, **both.options)
    for index, count in enumerate((1, 7)):
        alone = Run(machine, (3, 3))
        alone.step_count.fill_(count - 1)
        alone.step(grads)
        assert torch.equal(both.params[index], alone.params[index])


def test_tensors_at_odd_addresses_and_in_other_orders(machine: tuple[str, Launch]) -> None:
    run, aligned = Run(machine, (2048, 24)), Run(machine, (2048, 24))
    grads = gradients((2048, 24), run.device, 0)

    def shift(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(1), tensor])[1:]

    run.params[0] = shift(run.params[0])
    tensors = [run.params, run.state["exp_avg"], run.state["exp_avg_sq"]]
    for one in tensors:
        one[1] = one[1].view(2, 3, 4).permute(2, 0, 1)
    run.step([grads[0], grads[1].view(2, 3, 4).permute(2, 0, 1)])
    aligned.step(grads)
    assert torch.equal(run.params[0], aligned.params[0])
    assert torch.equal(run.params[1].permute(1, 2, 0).reshape(-1), aligned.params[1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shifted", [False, True])
def test_gradients_in_half_precision(machine: tuple[str, Launch], dtype: torch.dtype, shifted: bool) -> None:
    """As if they were cast first, to the bit, also at addresses that are no multiples of 16 bytes."""
    run, cast = Run(machine, SIZES, amsgrad=True, maximize=True), Run(machine, SIZES, amsgrad=True, maximize=True)
    for step in range(STEPS):
        grads = [grad.to(dtype) for grad in gradients(SIZES, run.device, step)]
        if shifted:
            grads = [torch.cat([grad.new_zeros(1), grad])[1:] for grad in grads]
        run.step(grads)
        cast.step([grad.float() for grad in grads])
    for name, tensors in cast.values().items():
        assert all(map(torch.equal, run.values()[name], tensors)), name


# The operator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "amsgrad": True}, {"weight_decay": 0.1, "decoupled": True}], ids=str
)
def test_the_operator_on_the_cpu(
    kernel: ModuleType, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does what the kernel does."""
    patch_interpreter(monkeypatch)
    run, interpreted_run = (Run(("cpu", launch), SIZES, **options) for launch in (adam.adam_, kernel.launch))
    for step in range(STEPS):
        grads = [grad.to(dtype) for grad in gradients(SIZES, "cpu", step)]
        run.step(grads)
        interpreted_run.step(grads)
    for name, tensors in interpreted_run.values().items():
        assert error(run.values()[name], [tensor.double() for tensor in tensors]) < 1, name
    before = [tensor.clone() for tensors in run.values().values() for tensor in tensors]
    run.step(gradients(SIZES, "cpu", STEPS), found_inf=torch.ones(()))
    assert all(map(torch.equal, before, [tensor for tensors in run.values().values() for tensor in tensors]))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_operator_takes_float64_on_the_cpu(kind: type[torch.optim.Optimizer]) -> None:
    """Also where it is traced."""
    run = Run(("cpu", adam.adam_), SIZES, decoupled=kind is torch.optim.AdamW, **defaults(kind))
    run.params = numbers(SIZES, "cpu", seed=0)
    run.params, *state = ([one.double() for one in tensors] for tensors in (run.params, *run.state.values()))
    run.state = dict(zip(run.state, state, strict=True))
    run.lr, run.step_count = torch.tensor(1e-2, dtype=torch.float64), run.step_count.double()
    for step in range(STEPS):
        run.step([grad.double() for grad in gradients(SIZES, "cpu", step)])
    for name, tensors in by_torch(SIZES, "cpu", torch.float64, kind).items():
        assert error(run.values()[name], tensors) < 1e-6, name
    with FakeTensorMode(allow_non_fake_inputs=True):
        run.step([one.double() for one in gradients(SIZES, "cpu", 0)])


def arguments(**changes: Any) -> tuple[Lists, dict[str, Any]]:
    params = [torch.ones(3, 2), torch.ones(4)]
    lists: dict[str, list[Tensor]] = {
        name: zeros(params) for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    }
    lists["steps"] = [torch.ones(())] * 2
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "decoupled": True, "maximize": False}
    scalars = {"lr": torch.tensor(0.1), "found_inf": torch.zeros(())}
    merged = {**lists, **scalars, **options, **changes}
    return tuple(merged.pop(name) for name in lists), merged


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_operator_is_one_node_of_a_legal_graph(amsgrad: bool) -> None:
    lists, options = arguments(**({} if amsgrad else {"max_exp_avg_sqs": []}))
    flat = [tensor for tensors in lists[:5] for tensor in tensors] + [lists[5][0], options["lr"], options["found_inf"]]

    def update(*inputs: Tensor) -> list[Tensor]:
        given = iter(inputs)
        parts = [[next(given) for _ in tensors] for tensors in lists[:5]]
        step, lr, found_inf = given
        adam.adam_(*parts, [step, step], **{**options, "lr": lr, "found_inf": found_inf})  # type: ignore[misc]
        return []

    graph = make_fx(update, tracing_mode="fake")(*flat).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.kitsune.adam_.default]
    assert refuse_graph(graph) is None
    written = set(dataflow.written_inputs(graph))
    assert written == {0, 1, 4, 5, 6, 7, *((8, 9) if amsgrad else ())}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"grads": [torch.ones(3, 2)]}, "one tensor of grads a parameter: got 1 for 2"),
        ({"steps": [torch.ones(())]}, "one tensor of steps a parameter: got 1 for 2"),
        ({"grads": [torch.ones(3, 2), torch.ones(4).double()]}, "float32 tensors of one device.*got torch.float64"),
        ({"grads": [torch.ones(3, 2).half(), torch.ones(4).bfloat16()]}, "all bfloat16 or all float16.: got torch.bfl"),
        ({"grads": [torch.ones(3, 2), torch.ones(4).half()]}, "all bfloat16 or all float16.: got torch.float16"),
        (
            {"params": [torch.ones(3, 2).half(), torch.ones(4).half()]},
            "float32 tensors of one device.*got torch.float16",
        ),
        ({"lr": torch.tensor(0.1, dtype=torch.float64)}, "got torch.float64 on cpu"),
        ({"params": [torch.ones(3, 2).double(), torch.ones(4).double()]}, "got torch.float32 on cpu"),
        ({"exp_avgs": [torch.ones(3, 2, device="meta"), torch.ones(4)]}, "got torch.float32 on meta"),
        ({"exp_avgs": [torch.ones(2, 3), torch.ones(4)]}, r"exp_avgs laid out like the parameters: got \(2, 3\)"),
        ({"exp_avg_sqs": [torch.ones(2, 3).t(), torch.ones(4)]}, r"strides \(1, 3\) for \(3, 2\)"),
    ],
)
def test_what_the_operator_refuses(changes: dict[str, Any], problem: str) -> None:
    lists, options = arguments(**changes)
    with pytest.raises(ValueError, match=problem):
        adam._check(*lists, **options)
