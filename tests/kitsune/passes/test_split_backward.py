"""Split backward operators compute what the combined ones do, each part once."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from kitsune.capture.trace import gradients, trace
from kitsune.graph import dataflow
from kitsune.graph.verify import source_line
from kitsune.passes.pipeline import problem
from kitsune.passes.split_backward import split_backward
from kitsune.plan import task_graph
from tests.kitsune.passes.running import calls, names, results, values_are_right
from tests.kitsune.steps import model_step

CONVOLUTION = torch.ops.aten.convolution_backward.default
LAYER_NORM = torch.ops.aten.native_layer_norm_backward.default

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 5, 5)),
    "conv without bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), (2, 3, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 4, 3, groups=2, stride=2), (2, 4, 7, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 5, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, dilation=2), (2, 3, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    "channels last": (lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last), (2, 8, 6, 6)),
    "double": (lambda: nn.Conv2d(3, 4, 3).double(), (2, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 5, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), (4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
}

WANTED = {"all": (0, 1, 2), "input": (0,), "weight": (1,), "bias": (2,), "parameters": (1, 2), "none": ()}


def backward(module: nn.Module, shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[fx.GraphModule, list[Tensor]]:
    """The gradients of input, weight and bias; those that are not wanted are computed, but not returned."""
    state = dict(module.named_parameters())
    x = torch.randn(shape, dtype=next(iter(state.values())).dtype)

    def function(x: Tensor, *params: Tensor) -> list[Tensor | None]:
        values = [x, *params]
        y = torch.func.functional_call(module, dict(zip(state, params, strict=True)), (x,))
        found = gradients([y], values, [torch.ones_like(y)])
        return [found[place] for place in wanted if place < len(found)] + [y.detach()]

    inputs = [x.requires_grad_(), *(param.detach().requires_grad_() for param in state.values())]
    return trace(function, inputs), [tensor.detach() for tensor in inputs]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_the_same_bits(name: str, wanted: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(2)
    module, inputs = backward(make(), shape, WANTED[wanted])
    split = split_backward(module)
    assert problem(module.graph, split.graph) is None
    assert results(split, inputs) == results(module, inputs)
    assert values_are_right(split, inputs)


def masks(module: fx.GraphModule, target: object) -> list[list[bool]]:
    return [list(node.args[-1]) for node in calls(module, target)]


@pytest.mark.parametrize(
    ("name", "wanted", "target", "expected"),
    [
        ("conv", "all", CONVOLUTION, [[True, False, False], [False, True, True]]),
        ("conv", "parameters", CONVOLUTION, [[False, True, True]]),
        ("conv", "weight", CONVOLUTION, [[False, True, False]]),
        ("conv", "none", CONVOLUTION, []),
        ("conv without bias", "all", CONVOLUTION, [[True, False, False], [False, True, False]]),
        ("layer norm", "all", LAYER_NORM, [[True, False, False], [False, True, True]]),
        ("layer norm", "bias", LAYER_NORM, [[False, False, True]]),
        ("layer norm without bias", "all", LAYER_NORM, [[True, False, False], [False, True, False]]),
        ("group norm", "all", torch.ops.aten.native_group_norm_backward.default, [[True, True, True]]),
    ],
)
def test_parts_on_the_cpu(name: str, wanted: str, target: object, expected: list[list[bool]]) -> None:
    make, shape = MODULES[name]
    module, _ = backward(make(), shape, WANTED[wanted])
    assert masks(split_backward(module), target) == expected


def on_cuda(wanted: tuple[int, ...]) -> fx.GraphModule:
    """A convolution's backward pass with values as on a GPU; the graph itself runs anywhere."""
    with FakeTensorMode():
        given = [torch.empty(shape, device="cuda") for shape in ((2, 4, 5, 5), (2, 3, 5, 5), (4, 3, 3, 3))]
        made = [torch.empty(shape, device="cuda") for shape in ((2, 3, 5, 5), (4, 3, 3, 3), (4,))]
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("grad", "x", "weight")]
    for node, value in zip(inputs, given, strict=True):
        node.meta["val"] = value
    options = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    combined = graph.call_function(CONVOLUTION, (*inputs, *options))
    combined.meta |= {"val": tuple(made), "stack_trace": 'File "model.py", line 3\n  y = conv(x)'}
    parts = [graph.call_function(operator.getitem, (combined, place)) for place in range(3)]
    for node, value in zip(parts, made, strict=True):
        node.meta["val"] = value
    graph.output([parts[place] for place in wanted])
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (2, 0), (1,)])
def test_parts_on_a_gpu(wanted: tuple[int, ...]) -> None:
    module = on_cuda(wanted)
    split = split_backward(module)
    expected = [[place == part for place in range(3)] for part in sorted(wanted)]
    assert masks(split, CONVOLUTION) == expected
    for node, mask in zip(calls(split, CONVOLUTION), expected, strict=True):
        assert [value is not None for value in node.meta["val"]] == mask
        assert source_line(node) == 'File "model.py", line 3: y = conv(x)'
    inputs = [torch.randn(shape) for shape in ((2, 4, 5, 5), (2, 3, 5, 5), (4, 3, 3, 3))]
    assert results(split, inputs) == results(module, inputs)
    tasks = task_graph(split.graph)
    assert [task.after for task in tasks.tasks] == [()] * len(wanted)


def test_the_module_stays_as_it_is() -> None:
    module = on_cuda((0, 1))
    before = module.print_readable(print_output=False)
    split = split_backward(module)
    assert module.print_readable(print_output=False) == before
    again = split_backward(split)
    assert names(again) == names(split)


def test_linear_layers_are_separate_already() -> None:
    """Each gradient of a linear layer is an operator of its own, and none of its operators needs another's."""
    step = model_step("mlp")
    split = split_backward(step.module)
    assert names(split) == names(step.module)
    tasks = task_graph(split.graph).tasks
    by_name = {name: task for task in tasks for name in task.nodes}
    gradients = [by_name[node.name] for node in dataflow.outputs(split.graph)[1:] if node is not None]
    assert len({task.index for task in gradients}) == 6
    assert {task.operator for task in gradients} == {"aten.mm.default", "aten.sum.dim_IntList"}
    made = {task.index for task in gradients}
    assert all(made.isdisjoint(dependency.task for dependency in task.after) for task in gradients)


@pytest.mark.parametrize("name", ["lenet", "resnet18"])
def test_whole_steps_are_the_same_bits(name: str) -> None:
    step = model_step(name)
    split = split_backward(step.module)
    assert problem(step.module.graph, split.graph) is None
    assert len(calls(split, CONVOLUTION)) == 2 * len(calls(step.module, CONVOLUTION)) - 1
    assert results(split, step.fresh_inputs()) == results(step.module, step.fresh_inputs())
