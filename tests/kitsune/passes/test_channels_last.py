"""Steps in channels_last: what is copied for it, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import models
from kitsune.capture.trace import trace
from kitsune.graph import dataflow
from kitsune.graph.verify import source_line
from kitsune.passes import pipeline
from kitsune.passes.channels_last import channels_last
from tests.kitsune.fusion.running import InAutocast, assert_alike, run
from tests.kitsune.passes.running import InFloat64, calls
from tests.kitsune.steps import TracedStep, traced_step

aten = torch.ops.aten
Function = Callable[..., Sequence[Tensor | None]]


def convolution(channels: int, features: int, size: int = 3, **options: int) -> list[nn.Module]:
    """With batch norm and ReLU."""
    options = {"padding": size // 2, **options}
    layers = nn.Conv2d(channels, features, size, bias=False, **options), nn.BatchNorm2d(features)  # type: ignore[arg-type]
    return [*layers, nn.ReLU(inplace=True)]


class UNet(nn.Module):
    """Skips a connection over pooling and `up`, which makes images four times as large; logits for each pixel."""

    def __init__(self, up: nn.Module) -> None:
        super().__init__()
        self.down = nn.Sequential(*convolution(3, 8))
        deep = nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.Mish()
        self.deep = nn.Sequential(nn.MaxPool2d(2), *deep, up)
        self.head = nn.Sequential(*convolution(24, 8), nn.Conv2d(8, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(x)
        logits: Tensor = self.head(torch.cat([self.deep(skipped), skipped], 1))
        return logits


class Mobile(nn.Module):
    """Inverted residuals with depthwise convolutions, one with an attention to channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*convolution(3, 8, stride=2))
        self.first = self.block(8, 8)
        attention = nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 1), nn.Sigmoid()
        self.attention = nn.Sequential(*attention)
        self.second = self.block(8, 16, stride=2)
        self.last = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 5))

    @staticmethod
    def block(channels: int, features: int, stride: int = 1) -> nn.Module:
        wide = 4 * channels
        depthwise = convolution(wide, wide, stride=stride, groups=wide)[:-1]
        project = nn.Conv2d(wide, features, 1, bias=False), nn.BatchNorm2d(features)
        return nn.Sequential(*convolution(channels, wide, 1)[:-1], nn.ReLU6(), *depthwise, nn.Hardswish(), *project)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.first(x)
        x = self.second(x * self.attention(x))
        logits: Tensor = self.last(F.adaptive_avg_pool2d(x, 1))
        return logits


class ConvNext(nn.Module):
    """A depthwise convolution, then layer norm and linear layers over channels that come last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.pointwise(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        logits: Tensor = self.last(x.mean((2, 3)))
        return logits


class Patches(nn.Module):
    """Images cut into patches, which are a sequence then."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.norm(self.stem(x).flatten(2).transpose(1, 2)).mean(1))
        return logits


def with_dropout() -> nn.Module:
    plain = nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.Dropout2d(0.5)
    grouped = nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.PReLU(), nn.Conv2d(8, 5, 3)
    return nn.Sequential(*plain, *grouped, nn.AdaptiveAvgPool2d(1), nn.Flatten())


NETS: dict[str, Callable[[], nn.Module]] = {
    "u-net nearest": lambda: UNet(nn.Upsample(scale_factor=4)),
    "u-net bilinear": lambda: UNet(nn.Upsample(scale_factor=4, mode="bilinear")),
    "u-net transposed": lambda: UNet(nn.ConvTranspose2d(16, 16, 4, stride=4)),
    "mobile": Mobile,
    "convnext": ConvNext,
    "patches": Patches,
    "dropout": with_dropout,
}
MODELS = ("lenet", "resnet18")
LARGEST = pytest.param("resnet18", marks=pytest.mark.slow)
HALF = [pytest.param(False, id="float32"), pytest.param(True, id="autocast", marks=pytest.mark.slow)]

# Where channels end: at the logits of pixels and their gradient; at linear layers; at the gradient of a mean.
BETWEEN = {
    "lenet": 2,
    "resnet18": 1,
    "u-net nearest": 2,
    "u-net bilinear": 2,
    "u-net transposed": 2,
    "mobile": 2,
    "convnext": 1,
    "patches": 0,
}


@cache
def step(name: str, *, half: bool = False, device: str = "cpu") -> TracedStep:
    """Cleared of what is in the way; under autocast if `half`."""
    torch.manual_seed(0)
    if name in MODELS:
        workload = models.build(name, seed=0)
        module, (x, y) = workload.module, workload.batch(2, index=0)
    else:
        module, x = NETS[name](), torch.randn(2, 3, 16, 16)
        y = torch.randint(5, (2, 16, 16) if name.startswith("u-net") else (2,))
    module = InAutocast(module.to(device), torch.bfloat16 if half else torch.float32)
    traced = traced_step(module, F.cross_entropy, x.to(device), y.to(device))
    return TracedStep(pipeline.run(traced.module, pipeline.CLEARING), traced.inputs)


def converted(module: fx.GraphModule) -> fx.GraphModule:
    return pipeline.run(module, (("channels last", channels_last),), verify=True)


def copies(before: fx.GraphModule, after: fx.GraphModule) -> list[fx.Node]:
    """What writes another format in `after` only."""
    names = {node.name for node in before.graph.nodes}
    return [node for node in after.graph.nodes if node.name not in names and "memory_format" in node.kwargs]


def is_between(copy: fx.Node) -> bool:
    """Whether neither an input is copied nor a gradient for the optimizer, cast or not."""
    (source,) = copy.all_input_nodes
    users = [last for user in copy.users for last in (user.users if user.target is aten._to_copy.default else [user])]
    is_gradient = all(user.op == "output" or any(dataflow.written(user)) for user in users)
    return source.op != "placeholder" and not is_gradient


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("name", [*(name for name in BETWEEN if name != "resnet18"), LARGEST])
def test_copies_remain_at_the_borders_only(name: str, half: bool) -> None:
    before = step(name, half=half).module
    after = converted(before)
    added = copies(before, after)
    assert len([copy for copy in added if is_between(copy)]) == BETWEEN[name]
    sources = [(copy.args[0], copy.kwargs["memory_format"]) for copy in added]
    assert len(set(sources)) == len(sources)
    if half:
        assert all(copy.meta["val"].dtype == torch.bfloat16 for copy in added if not is_between(copy))
    for node in calls(after, aten.convolution.default):
        assert node.meta["val"].is_contiguous(memory_format=torch.channels_last)
        for argument in node.args[:2]:
            assert argument.meta["val"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["lenet", LARGEST, *NETS])
def test_values_are_laid_out_as_the_graph_says(name: str, device: str) -> None:
    traced = step(name, device=device)
    assert_laid_out(converted(traced.module), traced.fresh_inputs())


def assert_laid_out(module: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """As the values in the graph, but for the strides of dimensions of one element, which libraries choose."""

    class Watching(fx.Interpreter):
        def run_node(self, node: fx.Node) -> object:
            made = super().run_node(node)
            if isinstance(made, Tensor):
                value = node.meta["val"]
                assert (made.size(), made.dtype, layout(made)) == (value.size(), value.dtype, layout(value)), node.name
            return made

    with torch.no_grad():
        Watching(module).run(*inputs)


def layout(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1]


def error(found: Tensor, exact: Tensor) -> float:
    return float(torch.linalg.vector_norm(found.detach().double() - exact.detach().double()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("name", ["lenet", LARGEST, *NETS])
def test_results_are_as_exact(name: str, half: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32 for autocast, else against float64; cuDNN rounds to TF32 in one layout and not in the other."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    traced, single = step(name, half=half, device=device), step(name, device=device)
    dtype = torch.float32 if half else torch.float64
    inputs = [one.to(dtype) if one.is_floating_point() else one for one in single.inputs]
    found, wanted = seeded(converted(traced.module), traced.inputs), seeded(traced.module, traced.inputs)
    exact = seeded(single.module if half else InFloat64(single.module).run, inputs)
    lowest = torch.finfo(torch.bfloat16 if half else torch.float32).eps
    for one, other, true in zip(found, wanted, exact, strict=True):
        assert (one.size(), one.stride(), one.dtype) == (other.size(), other.stride(), other.dtype)
        norm = float(torch.linalg.vector_norm(true.detach().double()))
        assert error(one, true) <= 2 * error(other, true) + 8 * lowest * norm + 1e-6


def seeded(module: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    return run(module, inputs)


def test_source_lines_stay() -> None:
    before = step("mobile").module
    after = converted(before)
    lines = {node.name: source_line(node) for node in before.graph.nodes}
    for node in after.graph.nodes:
        if node.name in lines:
            assert source_line(node) == lines[node.name]
    added = copies(before, after)
    assert added
    for node in added:
        assert source_line(node) in {source_line(user) for user in node.users}


@pytest.mark.parametrize("name", ["lenet", "u-net nearest"])
def test_what_is_converted_already_comes_back(name: str) -> None:
    after = converted(step(name).module)
    assert channels_last(after) is after


def test_a_step_in_channels_last_comes_back() -> None:
    workload = models.build("resnet18", seed=0)
    x, y = workload.batch(2, index=0)
    module = workload.module.to(memory_format=torch.channels_last)
    before = traced_step(module, F.cross_entropy, x.to(memory_format=torch.channels_last), y).module
    assert channels_last(before) is before


def test_a_step_without_images_comes_back() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))
    before = traced_step(module, F.cross_entropy, torch.randn(2, 3, 8), torch.randint(5, (2,))).module
    assert channels_last(before) is before


def looked_at_in_memory(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [F.conv2d(x, weight).as_strided((2, 3), (3, 1))]


def written_through_a_copy(x: Tensor, weight: Tensor) -> list[Tensor]:
    y = F.conv2d(x, weight)
    y.view(2, -1).mul_(2)
    return [y]


def drawn_in_memory(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [F.conv2d(x, weight).bernoulli_(0.5)]


def returned_in_a_layout_of_its_own(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [F.conv2d(x, weight)[:, ::2]]


@pytest.mark.parametrize(
    "function", [looked_at_in_memory, written_through_a_copy, drawn_in_memory, returned_in_a_layout_of_its_own]
)
def test_what_relies_on_memory_comes_back(function: Function) -> None:
    before = trace(function, inputs())
    assert channels_last(before) is before


def inputs() -> list[Tensor]:
    return [torch.randn(2, 3, 7, 6), torch.randn(4, 3, 3, 3)]


def written_between(x: Tensor, weight: Tensor) -> list[Tensor]:
    first = F.conv2d(x, weight)
    weight.mul_(2)
    x.relu_()
    return [first, F.conv2d(x, weight)]


def cast_before_a_write(x: Tensor, weight: Tensor) -> list[Tensor]:
    cast = weight.double()
    weight.zero_()
    return [F.conv2d(x.double(), cast)]


def cast_and_written(x: Tensor, weight: Tensor) -> list[Tensor]:
    cast = weight.double()
    cast.mul_(2)
    return [F.conv2d(x.double(), cast)]


def added_to(x: Tensor, weight: Tensor) -> list[Tensor]:
    y = F.conv2d(x, weight, padding=1)
    x.add_(y[:, :3])
    y += x.mean(1, keepdim=True)
    return [y.sin().flatten(1), x.sum()]


def unscaled(x: Tensor, weight: Tensor, found_inf: Tensor, inverse: Tensor) -> list[Tensor]:
    leaf = weight.detach().requires_grad_()
    grads = list(torch.autograd.grad(F.conv2d(x, leaf).square().sum(), [leaf]))
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
    weight -= grads[0]
    return grads


WRITING: dict[Function, list[Tensor]] = {
    written_between: [],
    cast_before_a_write: [],
    cast_and_written: [],
    added_to: [],
    unscaled: [torch.zeros(1), torch.full((), 0.5)],
}


@pytest.mark.parametrize("function", WRITING)
def test_copies_are_of_what_is_there_at_the_time(function: Function) -> None:
    given = [torch.randn(2, 3, 7, 6), torch.randn(3 if function is added_to else 4, 3, 3, 3), *WRITING[function]]
    before = trace(function, given)
    after = converted(before)
    assert after is not before
    assert copies(before, after)
    assert_laid_out(after, [tensor.clone() for tensor in given])
    assert_alike(run(after, given), run(before, given), rtol=1e-4, atol=1e-4)
