"""Which updates take the gradients of linear layers in, which lose their casts, and what they become."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import kitsune
import models
from kitsune.capture.trace import trace
from kitsune.fusion import linear, update
from kitsune.fusion.judge import Verdict
from kitsune.fusion.match import Alone
from kitsune.graph import dataflow
from kitsune.graph.values import mode_of
from kitsune.kernels.adam import adam_
from tests.kitsune.fusion.running import Function, always, assert_alike, fuse, never, operators, run
from tests.kitsune.steps import traced_step
from tests.kitsune.training import Net

LINEAR = (update.linear,)
BOTH = (update.without_casts, update.linear)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
BATCH = 6
TWO_LAYERS = ((5, 4), (5,), (3, 5), (3,), ())  # weights, biases, and a factor

Loss = Callable[..., Tensor]
Update = Callable[..., None]


# Optimizers, called with parameters, gradients, two lists of state, the step count and the learning rate


def kitsune_adam(params: Any, grads: Any, first: Any, second: Any, count: Tensor, lr: Tensor, **options: Any) -> None:
    defaults = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6, "decoupled": True, "maximize": False}
    adam_(params, grads, first, second, [], [count] * len(params), lr=lr, **{**defaults, **options})


def torch_adam(
    params: Any, grads: Any, first: Any, second: Any, count: Tensor, lr: Tensor, *, decoupled: bool, **options: Any
) -> None:
    function = torch._fused_adamw_ if decoupled else torch._fused_adam_
    defaults = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6, "maximize": False, "amsgrad": False}
    function(params, grads, first, second, [], [count] * len(params), lr=lr, **{**defaults, **options})


def amsgrad(params: Any, grads: Any, first: Any, second: Any, count: Tensor, lr: Tensor) -> None:
    numbers = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-6, "maximize": True, "amsgrad": True}
    largest = [torch.zeros_like(param) for param in params]
    torch._fused_adam_(params, grads, first, second, largest, [count] * len(params), lr=lr, **numbers)


def sgd(params: Any, grads: Any, first: Any, _second: Any, _count: Tensor, lr: Tensor, **options: Any) -> None:
    defaults = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "maximize": False}
    torch._fused_sgd_(params, grads, first, lr=lr, **{**defaults, "is_first_step": False, **options})


def plain_sgd(params: Any, grads: Any, _first: Any, _second: Any, count: Tensor, lr: Tensor) -> None:
    sgd(params, grads, [], [], count, lr, momentum=0.0, nesterov=False, weight_decay=0.0)


def adam_and_adamw(decoupled: bool) -> Update:
    return lambda *tensors: torch_adam(*tensors, decoupled=decoupled)


OPTIMIZERS: dict[str, tuple[Update, str, str]] = {
    "kitsune.adam_": (kitsune_adam, "linear_adam_", "adam_"),
    "Adam": (adam_and_adamw(False), "linear_adam_", "_fused_adam_"),
    "AdamW": (adam_and_adamw(True), "linear_adam_", "_fused_adamw_"),
    "AMSGrad": (amsgrad, "linear_adam_", "_fused_adam_"),
    "SGD": (sgd, "linear_sgd_", "_fused_sgd_"),
    "SGD without momentum": (plain_sgd, "linear_sgd_", "_fused_sgd_"),
}


# Steps


def two_layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, factor: Tensor) -> Tensor:
    return (F.linear(torch.relu(F.linear(x, w1, b1)), w2, b2).float() * factor).square().mean()


def autocast(loss: Loss) -> Loss:
    def function(x: Tensor, *params: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return loss(x, *params)

    return function


def step_of(
    loss: Loss,
    optimizer: Update = kitsune_adam,
    results: Callable[[list[Tensor]], Sequence[Tensor]] = lambda grads: [],
    prepare: Callable[[list[Tensor]], list[Tensor]] = lambda grads: grads,
) -> Function:
    """A training step. `prepare` is applied to the gradients; `results` makes the results from what it returns."""

    def function(x: Tensor, lr: Tensor, count: Tensor, *tensors: Tensor) -> list[Tensor]:
        each = len(tensors) // 3
        params, first, second = ([*tensors[start : start + each]] for start in (0, each, 2 * each))
        leaves = [param.detach().requires_grad_() for param in params]
        grads = prepare([grad.detach() for grad in torch.autograd.grad(loss(x, *leaves), leaves)])
        count.add_(1)
        optimizer(params, grads, first, second, count, lr)
        return list(results(grads))

    return function


def inputs(
    shapes: Sequence[Sequence[int]] = TWO_LAYERS, width: int = 4, device: str = "cpu", dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Of a step: the batch (`BATCH`, `width`), the learning rate, the step count, parameters, and twice their state."""
    torch.manual_seed(3)
    params = [torch.randn(tuple(shape)) for shape in shapes]
    state = [torch.rand(tuple(shape)) for _ in range(2) for shape in shapes]
    tensors = [torch.randn(BATCH, width), torch.tensor(0.01), torch.tensor(4.0), *params, *state]
    return [tensor.to(device, dtype if tensor.dim() else None) for tensor in tensors]


def compare(
    function: Function, tensors: Sequence[Tensor], templates: Any = LINEAR, **tolerance: float
) -> fx.GraphModule:
    """The fused graph of `function`, after seeing that it does the same."""
    module = trace(function, tensors)
    new, _ = fuse(module, templates)
    assert_alike(run(new, tensors), run(module, tensors), **tolerance)
    return new


def is_left_alone(function: Function, tensors: Sequence[Tensor], templates: Any = LINEAR) -> bool:
    module = trace(function, tensors)
    new, fusions = fuse(module, templates)
    assert_alike(run(new, tensors), run(module, tensors), rtol=0, atol=0)
    return fusions == ()


def calls(module: fx.GraphModule, name: str) -> list[fx.Node]:
    packets = [(node, getattr(node.target, "overloadpacket", None)) for node in module.graph.nodes]
    return [node for node, packet in packets if packet is not None and packet.__name__ == name]


# Gradients of linear layers


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_fused_computes_the_same(name: str, amp: bool) -> None:
    optimizer, fused, rest = OPTIMIZERS[name]
    new = compare(step_of(autocast(two_layers) if amp else two_layers, optimizer), inputs())
    (node,) = calls(new, fused)
    (other,) = calls(new, rest)
    assert [len(list(node.args[place])) for place in (0, 2, 3)] == [2, 4, 4]  # type: ignore[arg-type]
    assert [param.meta["val"].dim() for param in other.args[0]] == [0]  # type: ignore[union-attr]
    assert not [node for node in calls(new, "sum") if node.args[1:] == ([0], True)]
    assert len(calls(new, "mm")) == 1  # the gradient of the second layer's input


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", ["kitsune.adam_", "SGD"])
def test_what_is_fused_computes_the_same_on_a_gpu(name: str, amp: bool) -> None:
    optimizer, fused, _ = OPTIMIZERS[name]
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if amp else {"rtol": 1e-4, "atol": 1e-5}
    function = step_of(autocast(two_layers) if amp else two_layers, optimizer)
    new = compare(function, inputs(device="cuda"), BOTH, **tolerance)
    assert operators(new)[fused] == 1


def test_nothing_changes_where_nothing_is_faster() -> None:
    module = trace(step_of(two_layers), inputs())
    new, fusions = fuse(module, LINEAR, never)
    assert operators(new) == {"adam_": 1}
    assert {fusion.refusal for fusion in fusions} == {"it is not faster"}


def test_large_layers_keep_their_gradients_where_that_is_faster() -> None:
    def loss(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor) -> Tensor:
        return F.linear(F.linear(F.linear(x, w1, b1).relu(), w2, b2).relu(), w3).square().mean()

    shapes = ((16, 64), (16,), (8, 16), (8,), (2, 8))
    module = trace(step_of(loss), inputs(shapes, width=64))
    tried = []

    def refusing_some(alone: Alone) -> Verdict:
        (node,) = calls(alone.after, "linear_adam_")
        tried.append([tuple(param.meta["val"].shape) for param in node.args[3]])  # type: ignore[union-attr]
        return never(alone) if len(tried) < 3 else always(alone)

    new, _ = fuse(module, LINEAR, refusing_some)
    assert tried == [list(shapes), list(shapes[1:]), [(16,), (8,), (2, 8)]]
    (rest,) = calls(new, "adam_")
    assert [tuple(param.meta["val"].shape) for param in rest.args[0]] == [(16, 64), (8, 16)]  # type: ignore[union-attr]
    tensors = inputs(shapes, width=64)
    assert_alike(run(new, tensors), run(module, tensors))


def test_all_ways_are_compared_where_layers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "_LARGE", 100)

    def loss(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.linear(x, w1, b1).relu(), w2, b2).square().mean()

    shapes = ((16, 64), (16,), (4, 16), (4,))
    times = {2: 3.0, 3: 2.0, 4: 2.5}

    def judge(alone: Alone) -> Verdict:
        (node,) = calls(alone.after, "linear_adam_")
        return Verdict(None, 5.0, times[len(node.args[3])])  # type: ignore[arg-type]

    new, fusions = fuse(trace(step_of(loss), inputs(shapes, width=64)), LINEAR, judge)
    assert [(fusion.refusal, fusion.after_us) for fusion in fusions] == [
        ("another way saves more", 2.5),
        (None, 2.0),
        ("another way saves more", 3.0),
    ]
    (node,) = calls(new, "linear_adam_")
    assert len(node.args[3]) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("times", "taken"), [((4.0, 1.5), torch.bfloat16), ((2.0, 1.5), torch.float32)])
def test_large_inputs_are_cast_by_the_kernel_only_where_that_saves_more(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], taken: torch.dtype
) -> None:
    monkeypatch.setattr(update, "_LARGE_CAST", 0)
    before = {torch.float32: 5.0, torch.bfloat16: 4.0}
    after = dict(zip(before, times, strict=True))

    def judge(alone: Alone) -> Verdict:
        if not calls(alone.after, "linear_adam_"):
            return Verdict(None, 2.0, 1.0)  # the first layer, which the cast goes into: another is for its gradient
        dtype = dtype_of_input(alone.after)
        return Verdict(None, before[dtype], after[dtype])

    module = trace(step_of(autocast(two_layers)), inputs())
    new, fusions = fuse(module, (linear.forward, update.linear), judge)
    assert sorted(fusion.after_us for fusion in fusions if "gradients" in fusion.template) == sorted(times)  # type: ignore[type-var]
    assert dtype_of_input(new) == taken
    assert_alike(run(new, inputs()), run(module, inputs()), rtol=0.02, atol=0.02)


def dtype_of_input(module: fx.GraphModule) -> torch.dtype:
    """Of what the kernel for the gradients reads as the first layer's input."""
    (node,) = calls(module, "linear_adam_")
    (dtype,) = {x.meta["val"].dtype for x in node.args[1] if x.meta["val"].shape == (BATCH, 4)}  # type: ignore[union-attr]
    assert isinstance(dtype, torch.dtype)
    return dtype


def test_small_inputs_are_cast_by_the_kernel() -> None:
    module = trace(step_of(autocast(two_layers)), inputs())
    new, fusions = fuse(module, (linear.forward, update.linear))
    assert sum("gradients" in fusion.template for fusion in fusions) == 1
    assert dtype_of_input(new) == torch.float32


def test_half_precision_gradients_are_updated_from_as_they_are() -> None:
    """Casts go first, so that a library's products are compared without them; the kernel takes what is left of them."""

    def loss(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, factor: Tensor) -> Tensor:
        return autocast(two_layers)(x, w1, b1, w2, b2, factor)

    module = trace(step_of(loss), inputs())
    for judge, wanted in ((always, {"linear_adam_": 1, "adam_": 1}), (never_linear, {"adam_": 2})):
        new, _ = fuse(module, BOTH, judge)
        found = operators(new)
        assert {name: found[name] for name in ("linear_adam_", "adam_") if found[name]} == wanted
        assert_alike(run(new, inputs()), run(module, inputs()))


def never_linear(alone: Alone) -> Verdict:
    return never(alone) if calls(alone.after, "linear_adam_") else always(alone)


def test_layers_without_bias_with_inputs_of_more_dimensions_and_one_column() -> None:
    def loss(x: Tensor, w1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.linear(x.view(2, 3, 4), w1).tanh(), w2, b2).square().mean()

    new = compare(step_of(loss), inputs(((5, 4), (1, 5), (1,))))
    assert operators(new) == {"linear_adam_": 1}


@pytest.mark.parametrize("amp", [False, True])
def test_weights_with_inputs_in_rows(amp: bool) -> None:
    """As in GPT-2, whose weights are (inputs, outputs): the operands change places."""

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight).float().square().mean()

    new = compare(step_of(autocast(loss) if amp else loss), inputs(((4, 5), (5,))))
    (node,) = calls(new, "linear_adam_")
    grad_outputs, xs, layers = node.args[:3]
    assert layers == [0, 1]
    assert xs == [grad_outputs[1]] * 2  # type: ignore[index]


def test_layers_whose_outputs_are_added() -> None:
    """They share a gradient, of which there is one transposed view."""

    def loss(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
        return (F.linear(x, w1, bias) + F.linear(x.sin(), w2)).square().mean()

    new = compare(step_of(loss), inputs(((5, 4), (5, 4), (5,))))
    (node,) = calls(new, "linear_adam_")
    assert node.args[2] == [0, 1, 0]
    assert len(calls(new, "t")) == 2  # of the weights


def test_one_gradient_of_two_parameters() -> None:
    def function(x: Tensor, lr: Tensor, count: Tensor, *state: Tensor) -> list[Tensor]:
        grad = x.t() @ x
        kitsune_adam(state[:2], [grad, grad], state[2:4], state[4:], count, lr)
        return []

    assert operators(compare(function, inputs(((4, 4), (4, 4))))) == {"linear_adam_": 1}


def test_a_transposed_gradient_that_is_used_elsewhere() -> None:
    def function(x: Tensor, lr: Tensor, count: Tensor, grad: Tensor, *state: Tensor) -> list[Tensor]:
        turned = grad.t()
        kitsune_adam([state[0]], [turned @ x], [state[1]], [state[2]], count, lr)
        return [turned.sin()]

    x, lr, count, *state = inputs(((5, 4),))
    new = compare(function, [x, lr, count, torch.randn(BATCH, 5), *state])
    assert operators(new) == {"linear_adam_": 1}


def test_inputs_in_float32_that_only_weights_read_in_bfloat16() -> None:
    def function(x: Tensor, lr: Tensor, count: Tensor, *state: Tensor) -> list[Tensor]:
        grad = (x[:, :3] * 2).bfloat16()
        kitsune_adam([state[0]], [(grad.t() @ x.bfloat16()).float()], [state[1]], [state[2]], count, lr)
        return []

    new = compare(function, inputs(((3, 4),)))
    (node,) = calls(new, "linear_adam_")
    assert node.args[1] == new.graph.find_nodes(op="placeholder")[:1]
    assert len(calls(new, "_to_copy")) == 1  # that of the gradient


@pytest.fixture(params=["ieee", "tf32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


def test_tf32_only_where_torch_may_use_it(precision: str) -> None:
    (node,) = calls(compare(step_of(two_layers), inputs()), "linear_adam_")
    assert node.kwargs["allow_tf32"] == (precision == "tf32")


# Gradients that are used elsewhere


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("optimizer", [kitsune_adam, sgd])
def test_gradients_that_are_kept(optimizer: Update, amp: bool) -> None:
    loss = autocast(two_layers) if amp else two_layers
    new = compare(step_of(loss, optimizer, results=lambda grads: [grads[0], grads[3]]), inputs())
    (node,) = calls(new, "linear_adam_") or calls(new, "linear_sgd_")
    written = [list(found) for found in node.args if isinstance(found, (list, tuple)) and list(found)]
    assert {*dataflow.outputs(new.graph)} <= {leaf for found in written for leaf in found}


def test_a_half_precision_gradient_that_is_kept_leaves_the_others_to_the_kernel() -> None:
    halves: list[Tensor] = []

    def prepare(grads: list[Tensor]) -> list[Tensor]:
        halves[:] = [grad.bfloat16() for grad in grads]
        return [half.float() for half in halves]

    function = step_of(two_layers, results=lambda grads: [halves[3].abs().amax()], prepare=prepare)
    new = compare(function, inputs(), BOTH, rtol=0.02, atol=0.02)
    (node,) = calls(new, "linear_adam_")
    assert len(node.args[3]) == 3, "two weights and a bias"  # type: ignore[arg-type]


def test_a_norm_of_the_gradients_after_the_update() -> None:
    new = compare(step_of(two_layers, results=lambda grads: [torch.linalg.vector_norm(grads[0])]), inputs())
    assert operators(new) == {"linear_adam_": 1, "adam_": 1}


def test_a_norm_of_the_gradients_before_the_step_count_moves() -> None:
    """The update would have to come before the count that it reads."""
    norms: list[Tensor] = []

    def prepare(grads: list[Tensor]) -> list[Tensor]:
        norms[:] = [torch.linalg.vector_norm(grad) for grad in grads[:4]]
        return grads

    function = step_of(two_layers, results=lambda grads: norms, prepare=prepare)
    assert is_left_alone(function, inputs())


def test_kept_gradients_of_steps_that_may_be_skipped() -> None:
    def skipping(*tensors: Any) -> None:
        kitsune_adam(*tensors, found_inf=torch.zeros((), device=tensors[-1].device))

    assert operators(compare(step_of(two_layers, skipping), inputs()))["linear_adam_"] == 1
    assert is_left_alone(step_of(two_layers, skipping, results=lambda grads: grads), inputs())


def test_half_precision_gradients_that_are_used_elsewhere() -> None:
    """The parameter whose gradient it is stays in an update of its own."""

    def function(x: Tensor, lr: Tensor, count: Tensor, *tensors: Tensor) -> list[Tensor]:
        params, first, second = tensors[0:2], tensors[2:4], tensors[4:6]
        halves = [x.bfloat16().t() @ x.bfloat16() for _ in params]
        kitsune_adam(params, [half.float() for half in halves], first, second, count, lr)
        return [halves[0]]

    new = compare(function, inputs(((4, 4), (4, 4))))
    assert [
        len(node.args[place]) for name, place in (("linear_adam_", 3), ("adam_", 0)) for node in calls(new, name)
    ] == [1, 1]  # type: ignore[arg-type]


# Near misses


def test_gradients_that_are_scaled_in_place() -> None:
    def prepare(grads: list[Tensor]) -> list[Tensor]:
        torch._foreach_mul_(grads, 0.5)
        return grads

    assert is_left_alone(step_of(two_layers, prepare=prepare), inputs())


def test_a_weight_that_is_used_twice() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.linear(x, weight).relu(), weight).square().mean()

    assert is_left_alone(step_of(loss), inputs(((4, 4),)))


def test_an_input_that_the_update_overwrites() -> None:
    """The kernel would read it while it writes it."""

    def loss(x: Tensor, prompt: Tensor, weight: Tensor) -> Tensor:
        return (
            F.linear(prompt.tanh(), weight).mean() + F.linear(prompt, weight.detach().sin()).square().mean() + x.sum()
        )

    def direct(x: Tensor, prompt: Tensor, weight: Tensor) -> Tensor:
        return F.linear(prompt, weight).square().mean() + x.sum()

    shapes = ((6, 4), (5, 4))
    assert operators(compare(step_of(loss), inputs(shapes)))["linear_adam_"] == 1
    assert is_left_alone(step_of(direct), inputs(shapes))


def test_a_cast_of_what_the_update_overwrites() -> None:
    """The cast stays: it is made before."""

    def function(x: Tensor, lr: Tensor, count: Tensor, *state: Tensor) -> list[Tensor]:
        grad = x.bfloat16().t() @ state[0].bfloat16()
        kitsune_adam(state[:2], [state[0].sin(), grad.float()], state[2:4], state[4:], count, lr)
        return []

    new = compare(function, inputs(((BATCH, 3), (4, 3))))
    (node,) = calls(new, "linear_adam_")
    assert [x.meta["val"].dtype for x in node.args[1]] == [torch.bfloat16]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda *tensors: sgd(*tensors, is_first_step=True),
        lambda *tensors: torch_adam(*tensors, decoupled=False, grad_scale=torch.ones(())),
    ],
    ids=["first step", "scaled gradients"],
)
def test_an_update_of_another_kind(optimizer: Update) -> None:
    assert is_left_alone(step_of(two_layers, optimizer), inputs())


def test_parameters_in_float64() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).square().mean()

    tensors = inputs(((5, 4),), dtype=torch.float64)
    assert is_left_alone(step_of(loss, adam_and_adamw(False)), tensors)


def test_a_parameter_that_is_not_contiguous() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).square().mean()

    tensors = inputs(((5, 4),))
    tensors[3:] = [tensor.t().contiguous().t() for tensor in tensors[3:]]
    assert is_left_alone(step_of(loss), tensors)


def test_a_gradient_of_expanded_rows() -> None:
    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias).sum()

    assert is_left_alone(step_of(loss), inputs(((5, 4), (5,))))


def test_a_product_that_is_not_of_a_transposed_matrix() -> None:
    def function(x: Tensor, lr: Tensor, count: Tensor, *state: Tensor) -> list[Tensor]:
        kitsune_adam([state[0]], [x @ x[:4]], [state[1]], [state[2]], count, lr)
        return []

    assert is_left_alone(function, inputs(((6, 4),)))


@pytest.mark.parametrize("options", [{"dim": 1}, {"dim": (0, 1)}, {"dim": 0, "dtype": torch.float32}], ids=str)
def test_another_sum(options: dict[str, Any]) -> None:
    def function(x: Tensor, lr: Tensor, count: Tensor, *state: Tensor) -> list[Tensor]:
        summed = x.bfloat16().sum(**options).float()
        kitsune_adam([state[0]], [summed], [state[1]], [state[2]], count, lr)
        return []

    shape = {1: (BATCH,), (0, 1): (), 0: (4,)}[options["dim"]]
    assert is_left_alone(function, inputs((shape,)))


# Captured steps, as they would be on CUDA


def as_on_cuda(module: fx.GraphModule) -> fx.GraphModule:
    """With the learning rate in float32, and Adam by Kitsune's operator."""
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        name = str(node.target)
        if not name.startswith("aten._fused_"):
            continue
        options = dict(node.kwargs)
        with mode_of(graph):
            options["lr"].meta["val"] = torch.zeros(())
        if name.startswith("aten._fused_adam"):
            for known, value in {"amsgrad": False, "grad_scale": None}.items():
                assert options.pop(known, value) == value
            options["decoupled"] = "adamw" in name
            with graph.inserting_before(node):
                graph.call_function(torch.ops.kitsune.adam_.default, node.args, options)
            graph.erase_node(node)
    return fx.GraphModule(module, graph)


def random_inputs(module: fx.GraphModule) -> list[Tensor]:
    """Not negative, as second moments must be; classes and counts are 0."""
    torch.manual_seed(8)
    found = []
    for node in dataflow.placeholders(module.graph):
        value = node.meta["val"]
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).zero_()
        found.append(made.copy_(torch.rand(value.size())) if value.dtype.is_floating_point else made)
    return found


def fused_as_on_cuda(module: fx.GraphModule) -> fx.GraphModule:
    module = as_on_cuda(module)
    new, _ = fuse(module, BOTH)
    tensors = random_inputs(module)
    assert_alike(run(new, tensors), run(module, tensors), rtol=1e-4, atol=1e-6)
    return new


class InBfloat16(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            result: Tensor = self.module(x)
        return result.float()


@pytest.mark.parametrize("amp", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("name", "num_fused", "num_others"), [("mlp", 6, 0), ("lenet", 6, 4)])
def test_models(name: str, num_fused: int, num_others: int, amp: bool) -> None:
    workload = models.build(name)
    module = InBfloat16(workload.module) if amp else workload.module
    step = traced_step(module, workload.loss_fn, *workload.batch(2), keep_grads=False)
    new = fused_as_on_cuda(step.module)
    (node,) = calls(new, "linear_adam_")
    assert len(node.args[3]) == num_fused  # type: ignore[arg-type]
    others = [grad for rest in calls(new, "adam_") for grad in rest.args[1]]  # type: ignore[union-attr]
    assert [grad.meta["val"].dtype for grad in others] == [torch.bfloat16 if amp else torch.float32] * num_others


def captured(optimizer: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> fx.GraphModule:
    """The graph of a `kitsune.TrainStep` of two linear layers."""
    model = Net()
    step = kitsune.TrainStep(
        model, F.cross_entropy, optimizer(model.parameters(), lr=0.01, fused=True), mode="replay", **options
    )
    for _ in range(2 * options.get("accumulate", 1) + 2):
        step(torch.randn(BATCH, 4), torch.randint(3, (BATCH,)))
    assert step.status().mode == "replay"
    program = step._loop._latest._program  # type: ignore[union-attr]
    assert program is not None
    return program.module


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_train_step(optimizer: type[torch.optim.Optimizer], keep_grads: bool, amp: bool) -> None:
    new = fused_as_on_cuda(captured(optimizer, keep_grads=keep_grads, enable_amp=amp))
    fused = "linear_sgd_" if optimizer is torch.optim.SGD else "linear_adam_"
    assert operators(new) == {fused: 1}
    assert not operators(new, "aten").keys() & {"_fused_sgd_", "sum"}


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 0.1},
        {"clip_grad_norm": 0.1, "keep_grads": True},
        {"grad_scaler": torch.amp.GradScaler("cpu")},
        {"accumulate": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_a_train_step_that_does_something_with_the_gradients(options: dict[str, Any]) -> None:
    """They must all be there before the first is used, or are sums over several calls."""
    new = fused_as_on_cuda(captured(**options))
    assert operators(new) == {"adam_": 1}


# Casts


def test_casts_before_the_update_go() -> None:
    """The rest has one gradient of another type, hence two updates."""
    new = compare(step_of(autocast(two_layers)), inputs(), (update.without_casts,))
    updates = calls(new, "adam_")
    types = [{grad.meta["val"].dtype for grad in node.args[1]} for node in updates]  # type: ignore[union-attr]
    assert types == [{torch.bfloat16}, {torch.float32}]
    assert len(updates[0].args[0]) == 4  # type: ignore[arg-type]


@pytest.mark.gpu
def test_casts_before_the_update_go_on_a_gpu() -> None:
    new = compare(step_of(autocast(two_layers)), inputs(device="cuda"), (update.without_casts,), rtol=1e-5, atol=1e-6)
    assert operators(new) == {"adam_": 2}


def test_without_casts_the_update_is_the_same_to_the_bit() -> None:
    compare(step_of(autocast(two_layers)), inputs(), (update.without_casts,), rtol=0, atol=0)


def cast_step(
    make: Callable[[Tensor], Tensor], results: Callable[[Tensor], list[Tensor]] = lambda grad: []
) -> Function:
    """The update of a matrix, by what `make` makes of the batch."""

    def function(x: Tensor, lr: Tensor, count: Tensor, *state: Tensor) -> list[Tensor]:
        grad = make(x)
        kitsune_adam([state[0]], [grad], [state[1]], [state[2]], count, lr)
        return results(grad)

    return function


@pytest.mark.parametrize(
    "step",
    [
        cast_step(lambda x: x.bfloat16().float(), lambda grad: [grad]),
        cast_step(lambda x: x.double().float()),
        cast_step(lambda x: x.t().contiguous().bfloat16().t().to(torch.float32, memory_format=torch.contiguous_format)),
        cast_step(lambda x: x.sin()),
    ],
    ids=["used elsewhere", "from float64", "to another layout", "no cast"],
)
def test_casts_that_stay(step: Function) -> None:
    assert is_left_alone(step, inputs(((BATCH, 4),)), (update.without_casts,))


def test_other_updates_keep_their_casts() -> None:
    assert is_left_alone(step_of(autocast(two_layers), sgd), inputs(), (update.without_casts,))


def test_a_cast_in_float16() -> None:
    new = compare(cast_step(lambda x: (x * math.pi).half().float()), inputs(((BATCH, 4),)), (update.without_casts,))
    assert [node.kwargs["dtype"] for node in calls(new, "_to_copy")] == [torch.float16]
    assert operators(new) == {"adam_": 1}
