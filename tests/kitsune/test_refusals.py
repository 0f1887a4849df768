"""What cannot be captured runs eagerly, trains right, and says why; what only looks difficult is captured."""

from __future__ import annotations

import builtins
import functools
import logging
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

import kitsune
from kitsune.loop import cache
from kitsune.loop.interception import PATIENCE_STEPS
from tests.kitsune.training import FORMS, Batch, Build, Net, Training, adam, batch, compare, net_and_adam


def building(kind: Callable[[], nn.Module]) -> Build:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = kind()
        return model, adam(model)

    return build


class Printing(Net):
    def forward(self, x: Tensor) -> Tensor:
        print("training")
        return super().forward(x)


class Reading(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + x.abs().max().item())


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return super().forward(x)
        return super().forward(-x)


class Selecting(Net):
    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        return super().forward(x) + super().forward(x[mask]).mean()


class Counting(Net):
    """Changes an attribute at every call, so that no graph holds twice."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class HostRandom(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def of_a_library(code: types.CodeType, name: str) -> types.FunctionType:
    """A function of a module of a library, where captures look for it."""
    module = sys.modules.setdefault(name, types.ModuleType(name))
    vars(module).update(torch=torch, __builtins__=vars(builtins))
    return types.FunctionType(code, vars(module))


is_compiling_in_a_library = of_a_library(
    (lambda: torch.compiler.is_compiling()).__code__.replace(co_name="is_compiling"), "transformers.kitsune_tests"
)


class Compiled(Net):
    """Computes something else where it is told that it is being compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if torch.compiler.is_compiling() else 1.0)


class CompiledByWayOfALibrary(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if is_compiling_in_a_library() else 1.0)


@functools.lru_cache
def kept_noise(size: int) -> Tensor:
    return torch.randn(size)


@functools.lru_cache
def kept_width(size: int) -> int:
    return size * 2


class Keeping(Net):
    """What is drawn in the first step is there in all others."""

    def __init__(self) -> None:
        super().__init__()
        kept_noise.cache_clear()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * kept_noise(3)


class KeepingAConstant(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * kept_width(3)


class Rounding(Net):
    """Asks NumPy for a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / float(np.sqrt(x.shape[1]))


class Selected(Net):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > 0)
        return super().forward(x) * (1.0 if rows.numel() == 0 else 2.0)


class Routed(Net):
    """Asks how many rows there are for a part of it, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        (rows,) = torch.where(x[:, 0] > 0)
        output = torch.zeros(len(x), 3)
        if len(rows):
            output.index_add_(0, rows, super().forward(x[rows]))
        return output + super().forward(x)


class Energy(Net):
    """Returns the gradient of its sum, as models of forces do."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        return energy + force[:, :3]


class Seeding(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super().forward(x) + torch.rand(3)


class Generating(Net):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(3, generator=self.generator)


SCRIPTED: Any = None
"""A module that is no part of the model that calls it; each case sets it."""


class CallingScripted(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(SCRIPTED(x))


def calling(convert: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        global SCRIPTED
        SCRIPTED = convert(nn.Tanh())
        return CallingScripted()

    return build


class Variables(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.autograd.Variable(x))


class Connectionist(Net):
    """A loss over alignments, whose table of them is as wide as the longest target."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        likely = output.log_softmax(-1).unsqueeze(1)
        targets, lengths = torch.ones(1, 2, dtype=torch.long), torch.full((1,), 2)
        return output + functional.ctc_loss(likely, targets, torch.full((1,), len(x)), lengths)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.unsqueeze(1), torch.ones(len(x)), batch_first=True)
        _, (hidden, _) = self.cells(packed)
        return self.head(hidden[-1])


class CumulativeNorm(nn.Module):
    """Batch norm with momentum None reads its count of batches on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.layer(x))))


OWN_FOLDER = str(Path(kitsune.__file__).parent)

# The model, and what the status must name: a line of its source, or a word of the reason.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "print": (Printing, 'print("training")'),
    "item": (Reading, "x.abs().max().item()"),
    "branch": (Branching, "if x.sum() > 0"),
    "mask": (Selecting, "x[mask]"),
    "counter": (Counting, "would have to be captured again"),
    "packed sequences": (Recurrent, "pack_padded_sequence() is called"),
    "numpy": (Rounding, "use math or torch"),
    "seed": (Seeding, "torch.random.manual_seed() is called"),
    "generator": (Generating, "as a torch.Generator"),
    "size": (Selected, "depends on the values of a tensor"),
    "length": (Routed, "if len(rows)"),
    "gradients in the call": (Energy, "gradients are computed in the call"),
    "compiled": (Compiled, "torch.compiler.is_compiling()"),
    "compiled, asked by a library": (CompiledByWayOfALibrary, "whether it is being compiled"),
    "cumulative batch norm": (CumulativeNorm, "batchnorm.py"),
    "a function that keeps a tensor": (Keeping, "kept_noise() keeps tensors"),
    "torch.jit": (lambda: torch.jit.script(Net()), "the model is a module of torch.jit.script"),
    "torch.jit.trace": (
        lambda: torch.jit.trace(Net(), torch.ones(2, 4)),
        "the model is a module of torch.jit.script or torch.jit.trace",
    ),
    "torch.jit, called": (calling(torch.jit.script), "a module of torch.jit.script is called"),
    "torch.jit.trace, called": (
        calling(lambda module: torch.jit.trace(module, torch.ones(2, 4))),
        "a module of torch.jit.trace is called",
    ),
    "variable": (Variables, "torch.autograd.Variable() is called"),
    "connectionist": (Connectionist, "a result of aten._ctc_loss.Tensor has a size that depends on data"),
}


@pytest.mark.support(
    "Models",
    "data-dependent control flow, .item(), print in the model",
    "plain PyTorch, with a reason",
)
@pytest.mark.filterwarnings("error:Dynamo", "ignore:`torch.jit")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_cannot_be_captured_trains_eagerly(
    form: str, name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, words = REFUSED[name]
    with caplog.at_level(logging.INFO, logger="kitsune"):
        training = compare(form, building(kind), steps=30 if kind is Counting else 14, replays=0)
    status = training.status()
    assert status.mode == "eager"
    assert words in status.reason
    assert OWN_FOLDER not in status.reason, "a line of the user's"
    assert status.graphs == 0
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if words in text]) == 1, "the reason is logged once"
    if name == "print":
        assert capsys.readouterr().out.count("training\n") == 2 * 14


@pytest.mark.parametrize("form", FORMS)
def test_libraries_may_ask_whether_they_are_compiled(form: str) -> None:
    """torch and others look for shortcuts; what they compute is the same."""
    code = (lambda x: torch.relu(x) if torch.compiler.is_compiling() else x.clamp(min=0)).__code__
    relu = of_a_library(code, "transformers.kitsune_tests")

    class Asking(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(relu(x))

    compare(form, building(Asking))


@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("form", FORMS)
def test_randomness_of_the_host(form: str) -> None:
    """The reason is told in a refusal, and no warning asks the user to file an issue with PyTorch."""

    def edit(_training: Training, index: int) -> None:
        random.seed(index)

    training = compare(form, building(HostRandom), steps=10, edit=edit, replays=0)
    assert "Random.random() is called, which is not written in Python [" in training.status().reason


OWN_GENERATOR = random.Random(3)


class OwnGenerator(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OWN_GENERATOR.random()


class NumpyRandom(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(np.random.rand())


@pytest.mark.parametrize("kind", [OwnGenerator, NumpyRandom])
@pytest.mark.parametrize("form", FORMS)
def test_other_randomness_of_the_host(form: str, kind: type[nn.Module]) -> None:
    def edit(_training: Training, index: int) -> None:
        OWN_GENERATOR.seed(index)
        np.random.seed(index)

    compare(form, building(kind), steps=8, edit=edit, replays=0)


class Asserting(Net):
    def forward(self, x: Tensor) -> Tensor:
        assert (x.abs() < 100).all(), "an input is too large"
        return super().forward(x)


@pytest.mark.parametrize("form", FORMS)
def test_an_assertion_about_data_keeps_its_kind(form: str) -> None:
    training = Training(form, *building(Asserting)())
    training.run(4)
    (x, y), _ = batch(4)
    with pytest.raises(AssertionError, match="an input is too large"):
        training.step(x * 1000, y)
    training.run(2, start=5)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


@pytest.mark.parametrize("form", FORMS)
def test_sparse_gradients(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Sparse()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def batches(index: int) -> Batch:
        (_, y), _ = batch(index)
        return (y, y), {}

    training = compare(form, build, batches=batches, replays=0 if form == "train_step" else None)
    assert any("a gradient of shape (5, 4) is sparse" in refusal for refusal in training.status().refusals)
    assert ("sparse=False" in training.status().reason) == (form == "train_step")


@pytest.mark.support("Optimizers", "sparse gradients, with the other modules as model=", "replayed, but for the update")
def test_a_part_of_a_model_without_its_sparse_gradients() -> None:
    """What the refusal recommends: calls of the part are replayed, and the update of what is sparse runs eagerly."""
    torch.manual_seed(0)
    model, other = Sparse(), Sparse()
    other.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), mode="replay", model=other.head)
    for index in range(5):
        (_, y), _ = batch(index)
        for trained, one in ((model, plain), (other, optimizer)):
            one.zero_grad()
            functional.cross_entropy(trained(y), y).backward()
            one.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    status = optimizer.status()
    assert status.replays == 3
    assert status.covered == ("forward", "backward")
    assert status.refusals == ("a gradient of shape (5, 4) is sparse, so the update runs eagerly",)


@torch.library.custom_op("kitsune_tests::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return x * 3


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, grad: grad * 3)


class Custom(Net):
    def forward(self, x: Tensor) -> Tensor:
        return triple(super().forward(x))


@pytest.mark.parametrize("form", FORMS)
def test_a_custom_operator(form: str) -> None:
    training = compare(form, building(Custom), replays=0)
    assert "kitsune_tests.triple" in training.status().reason


def test_an_optimizer_that_is_differentiable() -> None:
    model = Net()
    training = Training("train_step", model, torch.optim.SGD(model.parameters(), lr=0.1))
    training.plain.param_groups[0]["differentiable"] = True
    training.run(3)
    assert "differentiable" in training.status().reason


def test_betas_that_are_tensors() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        betas = (torch.tensor(0.8), torch.tensor(0.9))
        return model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05), betas=betas, foreach=False)

    training = compare("train_step", build, replays=0)
    assert "beta1 is a Tensor" in training.status().reason


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_parameters(form: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().bfloat16()
        return model, adam(model)

    compare(form, build, batches=lambda index: batch(index, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "call", [lambda model: torch.compile(lambda x: model(x), backend="eager"), lambda model: model.forward]
)
def test_a_model_whose_calls_nobody_sees(call: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
    """Nothing is told until it is clear."""
    model = nn.Linear(4, 3)
    optimizer = kitsune.KitsuneOptimizer(adam(model), mode="replay")
    called = call(model)
    modes = []
    for index in range(PATIENCE_STEPS):
        modes.append(optimizer.status().mode)
        (x, y), _ = batch(index)
        optimizer.zero_grad()
        functional.cross_entropy(called(x), y).backward()
        optimizer.step()
    assert modes == ["idle"] * PATIENCE_STEPS
    status = optimizer.status()
    assert status.mode == "eager"
    assert "no module that owns the optimizer's parameters was called" in status.reason
    assert status.refusals == (status.reason,)


@pytest.mark.parametrize("form", FORMS)
def test_an_average_of_the_weights_that_takes_other_memory_each_time(form: str) -> None:
    """As a teacher's, which learns slowly from the student. The reason says of what."""

    class Taught(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(4, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) - self.teacher(x)

    def average(training: Training, _index: int) -> None:
        weight = training.model.teacher.weight
        weight.data = 0.9 * weight.data + 0.01

    training = compare(form, building(Taught), steps=16, edit=average, replays=4)
    reason = training.status().reason
    assert "would have to be captured again" in reason
    assert "the memory of teacher.weight" in reason


def test_parameters_of_no_module() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.Adam([weight]), mode="replay")
    for _ in range(PATIENCE_STEPS):
        assert optimizer.status().mode == "idle"
        optimizer.zero_grad()
        weight.exp().sum().backward()
        optimizer.step()
    status = optimizer.status()
    assert status.mode == "eager"
    assert "parts of no module" in status.reason
    assert status.refusals == (status.reason,)


def test_parameters_that_a_later_optimizer_has_too() -> None:
    """As of a generator that is trained against a discriminator, and then together with it."""
    model, plain = net_and_adam()
    first, last = (kitsune.KitsuneOptimizer(one, mode="replay") for one in (plain, adam(model)))
    for index in range(3):
        for optimizer in (first, last):
            (x, y), _ = batch(index)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert last.status().replays > 0
    status = first.status()
    assert (status.mode, status.replays) == ("eager", 0)
    assert "made later" in status.reason
    assert status.refusals == (status.reason,)


class SharpnessAware(torch.optim.Optimizer):
    """Has two steps of its own in place of `step()`, and calls that of another optimizer in the second one."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside, self.before = inside, list[Tensor]()

    @torch.no_grad()
    def first_step(self) -> None:
        params = self.param_groups[0]["params"]
        self.before = [param.clone() for param in params]
        for param in params:
            param.add_(param.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for param, before in zip(self.param_groups[0]["params"], self.before, strict=True):
            param.copy_(before)
        self.inside.step()


def train_sharpness_aware(model: nn.Module, optimizer: Any, steps: int) -> None:
    for index in range(steps):
        (x, y), _ = batch(index)
        for step in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            step()


@pytest.mark.parametrize("mode", ["auto", "replay"])
def test_an_optimizer_of_which_step_is_never_called(mode: str) -> None:
    model, plain = net_and_adam()
    optimizer = kitsune.KitsuneOptimizer(SharpnessAware(plain), mode=mode)
    train_sharpness_aware(model, optimizer, 5)
    assert "was not called" not in optimizer.status().reason
    train_sharpness_aware(model, optimizer, 10)
    status = optimizer.status()
    assert (status.mode, status.replays) == ("eager", 0)
    assert "step() of the KitsuneOptimizer was not called in 29 calls of the model" in status.reason
    assert "wrap the optimizer whose step() is called" in status.reason


def test_an_optimizer_inside_of_another_one() -> None:
    torch.manual_seed(0)
    model, plain = net_and_adam()
    other, wrapped = net_and_adam()
    other.load_state_dict(model.state_dict())
    train_sharpness_aware(model, SharpnessAware(plain), 8)
    optimizer = kitsune.KitsuneOptimizer(wrapped, mode="replay")
    train_sharpness_aware(other, SharpnessAware(optimizer), 8)
    assert optimizer.status().replays == 14
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_of_another_kind(form: str) -> None:
    class Special(nn.Parameter):
        pass

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        model.last.bias = Special(model.last.bias.detach())
        return model, adam(model)

    training = compare(form, build, replays=0)
    assert "'last.bias' is a Special" in training.status().reason


# Memory


@pytest.mark.support("Failure", "more memory than max_memory would be needed", "plain PyTorch, with a reason")
@pytest.mark.parametrize("form", FORMS)
def test_max_memory(form: str) -> None:
    training = compare(form, max_memory=64, replays=0)
    status = training.status()
    assert status.mode == "eager"
    assert "max_memory" in status.reason
    assert "raise max_memory or lower the batch size" in status.reason
    assert compare(form, max_memory="1MB").status().mode == "replay"


def test_max_memory_grows_with_the_batch() -> None:
    """Small batches fit and are replayed, large ones are not, and both train right."""
    training = compare(
        "train_step",
        max_memory="64KB",
        steps=12,
        batches=lambda index: batch(index, size=6 if index % 2 else 900),
        replays=5,
    )
    assert training.status().graphs == 1
    assert any("max_memory" in refusal for refusal in training.status().refusals)


# What is captured


class TwoCalls(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(-x)


class Scalar(Net):
    """Scalar tensors on the CPU and numbers made in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(0.5) + torch.arange(3) / x.shape[0]


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden[:, 0] = 1
        hidden[:, 1] += hidden[:, 2]
        return self.last(hidden.mul_(0.5).relu_())


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x)) * torch.rand(())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.unsqueeze(0)).squeeze(0))


class Lookup(nn.Module):
    """Gradients through gathers, masks, maxima and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x.argmax(1))
        best = rows.max(1, keepdim=True).values
        chosen = rows.gather(1, x.argmin(1, keepdim=True))
        hidden = torch.where(rows > 0, rows, rows * 0.1) + best + chosen + rows[[0] * len(rows)]
        return self.head(hidden.masked_fill(x.sum(1, keepdim=True) > 1, 0.5))


class Double(torch.autograd.Function):
    """A user's own backward that writes into memory of its own through a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result = torch.zeros(grad.shape)
        result[:, 0].add_(grad[:, 0])
        result[:, 1:].add_(grad[:, 1:])
        return result.mul_(2)


class OwnBackward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Double.apply(torch.relu(self.first(x))))


class Unscaled(torch.autograd.Function):
    """Returns memory that it writes, without another operation on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result = torch.zeros(grad.shape)
        result[:].add_(grad, alpha=2)
        return result


class ViewedBackward(nn.Module):
    """The parameter's gradient is memory that is written through a view only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ Unscaled.apply(self.weight)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        return self.last(torch.relu(hidden))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(1))


class Tallying(Net):
    """Assigns buffers that it has written in place: the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("square", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = self.mean.lerp_(x.mean(0), 0.1)
        self.square = torch.add(self.square, x.square().mean(0), out=self.square)
        return super().forward((x - self.mean) / (1 + self.square / self.count).sqrt())


class MaxNorm(Net):
    """Assigns a parameter that it has written without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight /= self.first.weight.norm(dim=1, keepdim=True).clamp(min=1)
        return super().forward(x)


CAPTURED = {
    "two calls": TwoCalls,
    "scalars": Scalar,
    "in place": InPlace,
    "noise": Noisy,
    "attention": Attention,
    "lookups": Lookup,
    "own backward": OwnBackward,
    "gradient through a view": ViewedBackward,
    "checkpoint": Checkpointed,
    "convolution": Convolutional,
    "channels last": lambda: Convolutional().to(memory_format=torch.channels_last),
    "a function that keeps a constant": KeepingAConstant,
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 3)),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Linear(8, 3)),
    "buffers that are assigned": Tallying,
    "a parameter that is assigned": MaxNorm,
}


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_looks_difficult(form: str, name: str) -> None:
    training = compare(form, building(CAPTURED[name]), steps=5, rtol=1e-6, atol=1e-7)
    assert training.status().mode == "replay"


@pytest.mark.parametrize("name", ["own backward", "gradient through a view", "lookups", "in place"])
def test_a_backward_pass_twice(name: str) -> None:
    """What a backward pass writes must not be what its next run starts from."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", building(CAPTURED[name]), loop=loop, steps=5, rtol=1e-6, atol=1e-7)


class Variational(nn.Module):
    """Returns the halves of what a layer gives, and what is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


@pytest.mark.parametrize("options", [{}, {"defer_loss": True}], ids=str)
def test_outputs_that_are_views_of_one_tensor(options: dict[str, bool]) -> None:
    def loss_fn(outputs: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
        logits, mean, log_variance = outputs
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return functional.cross_entropy(logits, y) + divergence

    compare("drop_in", building(Variational), loss_fn=loss_fn, steps=8, rtol=1e-6, atol=1e-7, **options)


class Predicting(nn.Module):
    """Returns a distribution, which is an object of its own class."""

    def __init__(self, distribution: Callable[[Tensor, Tensor], Distribution]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.distribution = distribution

    def forward(self, x: Tensor) -> Distribution:
        location, scale = self.layer(x).chunk(2, 1)
        return self.distribution(location, scale.exp())


@pytest.mark.parametrize("options", [{}, {"defer_loss": True}], ids=str)
@pytest.mark.parametrize(
    "distribution",
    [
        Normal,
        lambda location, _: Normal(location, 1.0),
        lambda location, scale: Independent(Normal(location, scale[:, :1]), 1),
        lambda location, scale: MultivariateNormal(location, scale_tril=torch.diag_embed(scale)),
    ],
    ids=["normal", "number as scale", "one scale for all", "multivariate"],
)
def test_a_distribution_as_output(
    distribution: Callable[[Tensor, Tensor], Distribution], options: dict[str, bool]
) -> None:
    def loss_fn(output: Distribution, y: Tensor) -> Tensor:
        return -output.log_prob(functional.one_hot(y, 3).float()).mean()

    build = building(lambda: Predicting(distribution))
    training = compare("drop_in", build, loss_fn=loss_fn, steps=8, rtol=1e-6, atol=1e-7, **options)
    assert training.status().mode == "replay"


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_kept_by_the_model(form: str) -> None:
    class Keeping(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = torch.relu(self.first(x))
            return self.last(self.hidden)

    hidden: dict[str, list[Tensor]] = {"eager": [], form: []}

    def edit(training: Training, index: int) -> None:
        if index:
            hidden[training.form].append(training.model.hidden.detach().clone())

    compare(form, building(Keeping), edit=edit, replays=0)
    assert all(torch.equal(*pair) for pair in zip(hidden[form], hidden["eager"], strict=True))


def test_an_auxiliary_loss_kept_by_the_model() -> None:
    """As in mixtures of experts: the loop reads it from the module after the call."""

    class Penalized(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x))
            self.penalty = hidden.square().mean()
            return self.last(hidden)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = training.loss_fn(training.model(x), y) + training.model.penalty
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare("drop_in", building(Penalized), loop=loop, replays=0)


def test_a_forward_that_collects_an_auxiliary_loss() -> None:
    class Penalized(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x))
            self.penalty = hidden.square().mean()
            return self.last(hidden)

    def forward(model: Penalized, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y) + model.penalty

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = forward(training.model, x, y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = compare(
        "train_step", building(Penalized), step={"forward": forward}, reference={"loop": loop}, replays=0
    )
    assert "self.penalty = hidden.square().mean()" in training.status().reason


def test_grad_mode_off_in_the_callers_context() -> None:
    """A loop that disables gradients fails at backward, with and without Kitsune."""
    model = Net()
    optimizer = kitsune.KitsuneOptimizer(adam(model), mode="replay")
    Training("eager", model, optimizer).run(4)
    with torch.no_grad():
        output = model(batch(0)[0][0])
    assert not output.requires_grad
    with torch.inference_mode():
        assert model(batch(0)[0][0]).is_inference()


class Scaled(Net):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return super().forward(x) * factor


@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_differs_at_each_call(form: str) -> None:
    """Each makes a signature of its own: the status says so once there are many."""

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x, 1 + index / 10, y), {}

    step = {"forward": lambda model, x, factor, y: functional.cross_entropy(model(x, factor), y)}
    training = compare(form, building(Scaled), step=step, batches=batches, steps=cache._MANY_SIGNATURES - 1, replays=0)
    assert training.status().refusals == ()
    training.run(2, batches, start=cache._MANY_SIGNATURES - 1)  # a loop looks for the model in its first
    (refusal,) = training.status().refusals
    assert "hardly any of them twice" in refusal
    assert "pass numbers that change as tensors" in refusal


def test_a_loop_that_ceases_to_call_the_model() -> None:
    class Density(Net):
        def log_prob(self, x: Tensor) -> Tensor:
            return -super().forward(x).square().sum(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.log_prob(x)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        index = training.memo["index"] = training.memo.get("index", -1) + 1
        loss = -(training.model(x) if index < 6 else training.model.log_prob(x)).mean()
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    training = Training("drop_in", *building(Density)(), loop=loop)
    training.run(1)
    assert "was found in its first call" in training.status().reason
    training = compare("drop_in", building(Density), loop=loop, steps=6)
    assert training.status().mode == "replay"
    training = compare("drop_in", building(Density), loop=loop, steps=10, replays=4)
    status = training.status()
    assert (status.mode, status.covered) == ("eager", ())
    assert "its methods cannot" in status.reason
