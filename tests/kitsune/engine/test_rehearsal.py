"""Two graphs of a step are told apart where one would train otherwise, and nothing is trained by that."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.engine import rehearsal
from kitsune.engine.rehearsal import difference
from kitsune.engine.rounding import off_by
from tests.kitsune.fusion.running import InAutocast
from tests.kitsune.steps import TracedStep, dropout_step, traced_step
from tests.kitsune.training import Net

aten = torch.ops.aten
Change = Callable[[fx.Graph], None]


def step(amp: bool = False) -> TracedStep:
    torch.manual_seed(0)
    model = InAutocast(Net(batch_norm=True), torch.bfloat16 if amp else torch.float32)
    return traced_step(model, loss_in_float32, torch.randn(64, 4), torch.randint(3, (64,)), keep_grads=False)


def loss_in_float32(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output.float(), y)


def changed(module: fx.GraphModule, change: Change) -> fx.GraphModule:
    graph = copy.deepcopy(module.graph)
    change(graph)
    return fx.GraphModule(module, graph)


def first(graph: fx.Graph, target: object) -> fx.Node:
    return next(node for node in graph.nodes if node.target == target)


def times(factor: float, target: object) -> Change:
    """The first result of `target`, times `factor`."""

    def change(graph: fx.Graph) -> None:
        node = first(graph, target)
        with graph.inserting_after(node):
            scaled = graph.call_function(aten.mul.Tensor, (node, factor))
        scaled.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    return change


def plus(amount: float, place: int) -> Change:
    """`amount` is added to a result of the step."""

    def change(graph: fx.Graph) -> None:
        output = graph.output_node()
        results = list(output.args[0])
        with graph.inserting_before(output):
            results[place] = graph.call_function(aten.add.Tensor, (results[place], amount))
        results[place].meta["val"] = output.args[0][place].meta["val"]
        output.args = (results,)

    return change


def with_argument(target: object, place: int, value: object) -> Change:
    def change(graph: fx.Graph) -> None:
        first(graph, target).update_arg(place, value)

    return change


def without(target: object) -> Change:
    def change(graph: fx.Graph) -> None:
        graph.erase_node(first(graph, target))

    return change


@pytest.mark.parametrize(
    "change",
    [
        times(1.001, aten.threshold_backward.default),
        times(1.001, aten.relu.default),
        with_argument(aten.native_batch_norm.default, 6, 0.101),
        with_argument(aten.threshold_backward.default, 2, 0.1),
        without(aten.add_.Tensor),
        without(aten._fused_adam_.tensor_lr),
    ],
    ids=["gradient", "activation", "running statistics", "mask", "counter", "update"],
)
def test_another_step_is_noticed(change: Change) -> None:
    traced = step()
    assert difference(traced.module, changed(traced.module, change), traced.inputs) is not None


@pytest.mark.parametrize("amp", [False, True])
def test_a_step_that_rounds_otherwise_is_no_other(amp: bool) -> None:
    traced = step(amp)
    other = changed(traced.module, times(1 + 2.0**-23 * (2**15 if amp else 1), aten.threshold_backward.default))
    assert difference(traced.module, other, traced.inputs) is None


def test_in_autocast_another_step_is_noticed_too() -> None:
    traced = step(amp=True)
    other = changed(traced.module, times(1.5, aten.threshold_backward.default))
    assert difference(traced.module, other, traced.inputs) is not None


def test_random_numbers_are_the_same_for_both() -> None:
    traced = dropout_step()
    assert difference(traced.module, changed(traced.module, lambda graph: None), traced.inputs) is None


def test_nothing_is_changed() -> None:
    traced = step()
    before, state = copy.deepcopy(traced.inputs), torch.get_rng_state()
    assert difference(traced.module, traced.module, traced.inputs) is None
    assert all(map(torch.equal, traced.inputs, before))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_not_finite_is_not_alike() -> None:
    traced = step()
    broken = changed(traced.module, times(float("nan"), aten.threshold_backward.default))
    assert difference(traced.module, broken, traced.inputs) is not None


def test_a_difference_is_named() -> None:
    traced = step()
    without_update = changed(traced.module, without(aten._fused_adam_.tensor_lr))
    found = difference(traced.module, without_update, traced.inputs)
    assert found is not None
    assert found.startswith("what aten._fused_adam_.tensor_lr changes of a tensor of (8, 4) is off by ")
    found = difference(traced.module, changed(traced.module, plus(0.1, 0)), traced.inputs)
    assert found is not None
    assert found.startswith("result 0 is off by ")


def test_a_loss_of_zero_is_off_by_what_numbers_of_about_one_are() -> None:
    model = nn.Linear(4, 3)
    traced = traced_step(model, lambda output, y: (output - 100).relu().sum(), torch.randn(8, 4), torch.zeros(8))
    assert difference(traced.module, changed(traced.module, plus(1e-7, 0)), traced.inputs) is None
    assert difference(traced.module, changed(traced.module, plus(1e-5, 0)), traced.inputs) is not None


def test_outputs_that_are_all_alike_are_rounded_to_the_same_side() -> None:
    """In autocast PyTorch takes the logarithms of a cross-entropy in the lower precision."""

    def loss_fn(output: Tensor, y: Tensor) -> Tensor:
        return functional.nll_loss(functional.log_softmax(output.bfloat16(), 1).float(), y)

    model = nn.Linear(4, 1000)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    traced = traced_step(model, loss_fn, torch.randn(8, 4), torch.randint(1000, (8,)), optimizer)
    unrounded = math.log(1000) - float(loss_fn(torch.zeros(1, 1000), torch.tensor([0])))
    assert abs(unrounded) > 1e-3
    assert difference(traced.module, changed(traced.module, plus(unrounded, 0)), traced.inputs) is None
    assert difference(traced.module, changed(traced.module, plus(0.1, 0)), traced.inputs) is not None


@pytest.mark.parametrize("seed", range(6))
def test_a_unit_that_is_about_to_open_may_do_so(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the draws some open it and others do not; so did one of the two graphs."""
    torch.manual_seed(seed)
    model = nn.Linear(8, 1)
    with torch.no_grad():
        x = torch.randn(1, 8)
        model.bias += 1e-5 - model(x)[0, 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    traced = traced_step(model, lambda output, y: output.relu().sum(), x, torch.zeros(1), optimizer)
    shut = changed(traced.module, with_argument(aten.threshold_backward.default, 2, 1e-3))
    monkeypatch.setattr(rehearsal, "rounding", lambda graph: 2.0**-7)
    assert difference(traced.module, shut, traced.inputs) is None


def test_draws_that_overflow_explain_nothing() -> None:
    model = nn.Linear(4, 3)
    traced = traced_step(model, lambda output, y: output.square().sum(), torch.randn(8, 4), torch.zeros(8))
    other = changed(traced.module, plus(1e6, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "off_by", lambda eps, tensor, generator: tensor * 1e30)
        assert difference(traced.module, other, traced.inputs) is not None


class _Layouts(TorchDispatchMode):
    """Notes how the operands of each operator of a kind lie."""

    def __init__(self, kind: object) -> None:
        super().__init__()
        self.found: list[list[tuple[int, ...]]] = []
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._kind:
            self.found.append([one.stride() for one in args if isinstance(one, Tensor)])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_operators_get_what_lies_as_in_the_step(memory_format: torch.memory_format) -> None:
    """A convolution of one point takes the layout of its result from strides that say nothing of where elements are."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv2d(8, 24, 1)

        def forward(self, x: Tensor) -> Tensor:
            images, _, height, width = x.shape
            mixed = self.mix(x.sin().contiguous())
            q, k, v = mixed.reshape(images, 3, 2, 4, height * width).transpose(-1, -2).unbind(1)
            return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).flatten(1)

    model = Heads().to(memory_format=memory_format)
    x = torch.randn(2, 8, 3, 3).to(memory_format=memory_format)
    traced = traced_step(model, lambda output, y: (output.square().mean(1) - y).square().mean(), x, torch.zeros(2))
    for operator in (aten.convolution.default, aten.convolution_backward.default):
        with _Layouts(operator) as step:
            traced.module(*traced.fresh_inputs())
        with _Layouts(operator) as rehearsed:
            assert difference(traced.module, traced.module, traced.inputs) is None
        (wanted,) = step.found
        assert len(rehearsed.found) > 3
        assert all(found == wanted for found in rehearsed.found)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "a filter of one point in channels_last": lambda x: x.reshape(6, 4, 1, 1).as_strided((6, 4, 1, 1), (4, 1, 4, 4)),
    "transposed": lambda x: x.t(),
    "a part": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:1].expand(5, 4),
    "windows": lambda x: x.reshape(-1).unfold(0, 6, 2),
    "empty": lambda x: x[:0],
    "one number": lambda x: x[0, 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_are_put_off_where_they_lie(name: str, dtype: torch.dtype) -> None:
    tensor = LAYOUTS[name]((torch.rand(6, 4) + 1).to(dtype))
    before = tensor.clone()
    found = off_by(0.25, tensor, torch.Generator().manual_seed(0))
    assert (found.size(), found.stride(), found.dtype) == (tensor.size(), tensor.stride(), tensor.dtype)
    assert torch.equal(tensor, before)
    assert tensor.numel() < 2 or not torch.equal(found, tensor)
    assert ((found - tensor).abs() <= 0.26 * tensor.abs()).all()
    if name == "expanded":
        assert torch.equal(found, found[:1].expand_as(found)), "elements that share memory are one number"


def test_integers_stay_as_they_are() -> None:
    indices = torch.randint(5, (3, 4))
    assert off_by(0.25, indices, torch.Generator()) is indices
