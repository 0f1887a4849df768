"""Loops of models that `torch.compile` has compiled as a whole: the models themselves are captured and replayed."""

from __future__ import annotations

import copy
import gc
import shutil
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import kitsune
from kitsune.fallback import Chooser
from tests.kitsune.training import FORMS, Batch, Net, Training, adam, assert_same, batch, compare


class Layer(nn.Module):
    """In a file of the user's: torch compiles none of its own modules in place."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Compiler:
    """Compiles models, in one of the ways, to what they are.

    Attributes:
        num_plain: how many iterations of a loop run as they are, before its model is replayed.
        graphs: how many were compiled.
        calls: of these; one in each of these iterations.
    """

    def __init__(self, how: str) -> None:
        self.how, self.graphs, self.calls = how, 0, 0
        self.num_plain = 2 if how.endswith("part") else 1

    def __call__(self, model: Net) -> Any:
        model.first = Layer(model.first)
        if self.how == "wrapped":
            return torch.compile(model, backend=self._backend)
        if self.how == "wrapped part":
            model.first = torch.compile(model.first, backend=self._backend)  # type: ignore[assignment]
        else:
            (model if self.how == "in place" else model.first).compile(backend=self._backend)
        return model

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self(Net(dropout=0.5))
        return model, adam(model)

    def _backend(self, graph: fx.GraphModule, _examples: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def call(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return call


@pytest.fixture(params=["wrapped", "in place", "wrapped part", "in place part"])
def compiler(request: pytest.FixtureRequest, nobody_else_looks: None) -> Compiler:
    torch._dynamo.reset()
    return Compiler(request.param)


@pytest.mark.support("Models", "compiled by torch.compile, wrapped or in place, as a whole or in parts", "replayed")
@pytest.mark.parametrize("form", ["train_step", "drop_in", "deferred"])
def test_it_is_replayed(form: str, compiler: Compiler) -> None:
    options = {"defer_loss": True} if form == "deferred" else {}
    num_plain = 1 if form == "train_step" else compiler.num_plain
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        training = compare(
            "train_step" if form == "train_step" else "drop_in",
            compiler.build,
            steps=8,
            replays=8 - num_plain,
            **options,
        )
    assert not warned
    assert training.status().mode == "replay"
    assert compiler.graphs <= 2, "at most once in each of the two runs"
    assert compiler.calls == 8 + num_plain


def test_the_loop_may_compile_it_after_it_has_made_its_optimizer(compiler: Compiler) -> None:
    model, (x, y) = Net(), batch(0)[0]
    optimizer = kitsune.KitsuneOptimizer(adam(model), mode="replay")
    compiled = compiler(model)
    for _ in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(compiled(x), y).backward()
        optimizer.step()
    assert optimizer.status().replays == 4


def test_of_several_wrappers_the_one_is_found_that_the_loop_calls() -> None:
    model, compiler, (x, y) = Net(), Compiler("wrapped"), batch(0)[0]
    _earlier, called, _later = (torch.compile(model, backend=compiler._backend) for _ in range(3))
    optimizer = kitsune.KitsuneOptimizer(adam(model), mode="replay")
    for _ in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(called(x), y).backward()
        optimizer.step()
    assert optimizer.status().replays == 4


@pytest.mark.parametrize("fullgraph", [False, True])
def test_wrapped_after_it_was_replayed_it_runs_as_compiled(fullgraph: bool) -> None:
    """Dynamo sees the model, and nothing of what stands in for its calls."""
    torch._dynamo.reset()
    compiler = Compiler("wrapped")

    def train(model: nn.Module, optimizer: Any) -> list[float]:
        losses, called = [], model
        for index in range(12):
            if index == 6:
                called = torch.compile(model, backend=compiler._backend, fullgraph=fullgraph)
            (x, y), _ = batch(index)
            optimizer.zero_grad()
            loss = functional.cross_entropy(called(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(5)
    model = Net()
    twin = copy.deepcopy(model)
    expected = train(twin, adam(twin))
    assert train(model, kitsune.KitsuneOptimizer(adam(model), mode="replay")) == expected
    assert compiler.graphs <= 2
    assert compiler.calls == 2 * 6


def test_nothing_is_replayed_while_something_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    training, (x, y) = Training("drop_in", model, adam(model)), batch(0)[0]
    training.run(6)
    replays = training.status().replays
    assert replays == 4
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        training.step(x, y)
    assert training.status().replays == replays
    training.step(x, y)
    assert training.status().replays == replays + 1


def test_it_may_be_named(compiler: Compiler) -> None:
    model = Net()
    compiled = compiler(model)
    for named in (model, compiled):
        optimizer, (x, y) = kitsune.KitsuneOptimizer(adam(model), mode="replay", model=named), batch(0)[0]
        for _ in range(4):
            optimizer.zero_grad()
            functional.cross_entropy(compiled(x), y).backward()
            optimizer.step()
        assert optimizer.status().replays >= 2


def test_what_is_not_replayed_runs_as_it_was_compiled(compiler: Compiler) -> None:
    training = Training("drop_in", *compiler.build())
    training.run(4)
    (x, _), _ = batch(0)
    before = compiler.calls
    with torch.no_grad():
        training.model(x)
    assert compiler.calls == before + 1
    training.run(1, lambda index: batch(index, size=3))  # the first of its shape
    assert compiler.calls == before + 2
    replays = training.status().replays
    training.run(2)
    assert (training.status().replays, compiler.calls) == (replays + 2, before + 2)


def test_what_it_was_compiled_to_is_what_replays_are_measured_against(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    begin = Chooser.__init__

    def watched(chooser: Chooser, *args: Any, **options: Any) -> None:
        made.append(options["is_compiled"]())
        begin(chooser, *args, **options)

    monkeypatch.setattr(Chooser, "__init__", watched)
    training = Training("drop_in", *compiler.build(), mode="auto")
    training.run(4)
    assert made == [True]
    assert compiler.calls == 4
    assert training.status().mode == "measuring"


def test_hooks_run(compiler: Compiler) -> None:
    seen: list[torch.Size] = []

    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.model.register_forward_hook(lambda module, args, output: seen.append(output.shape))

    compare("drop_in", compiler.build, steps=8, replays=4 - compiler.num_plain, edit=edit)
    assert len(seen) == 2 * 4


@pytest.mark.parametrize("form", FORMS)
def test_it_is_replayed_again_when_hooks_of_a_wrapper_are_gone(form: str, taken: list[bool]) -> None:
    compiler = Compiler("wrapped part")

    def edit(training: Training, index: int) -> None:
        if index == 6:
            training.memo["hook"] = training.model.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        if index == 8:
            if training.form != "eager":
                assert "hooks of the wrapper" in training.status().reason
            training.memo["hook"].remove()

    training = compare(form, compiler.build, steps=12, replays=0, edit=edit)
    assert training.status().replays == 12 - 2 - (1 if form == "train_step" else 2)
    assert any(taken) == (form == "train_step")


def test_under_amp_it_computes_what_it_does_by_itself(compiler: Compiler) -> None:
    def trained(model: nn.Module) -> tuple[Training, list[float]]:
        training = Training("drop_in", model, adam(model), enable_amp=True)
        return training, training.run(6)

    torch.manual_seed(3)
    model = Net()
    twin = copy.deepcopy(model)
    (training, losses), (plain, expected) = trained(compiler(model)), trained(twin)
    assert training.status().replays == 6 - compiler.num_plain
    assert plain.status().replays == 4
    assert losses == pytest.approx(expected, rel=2e-2)


def test_replays_are_verified_against_the_model_itself(compiler: Compiler) -> None:
    compare("drop_in", compiler.build, steps=6, replays=0, verify=2, reference={})
    training = Training("drop_in", *compiler.build())
    training.run(4)
    calls, (x, y) = compiler.calls, batch(0)[0]
    found = kitsune.verify(lambda: training.step(x, y), optimizer=training.optimizer)
    assert found.agrees, found
    assert compiler.calls == calls


def test_it_is_given_back(compiler: Compiler) -> None:
    model, plain = compiler.build()
    training = Training("drop_in", model, plain)
    training.run(4)
    before, replays = compiler.calls, training.status().replays
    assert replays > 0
    reference = weakref.ref(training.optimizer)
    del training
    gc.collect()
    assert reference() is None
    (x, _), _ = batch(0)
    model(x)
    assert compiler.calls == before + 1
    later = Training("drop_in", model, plain)
    later.run(4)
    assert later.status().replays >= 2


def test_a_newer_optimizer_takes_it_over(compiler: Compiler) -> None:
    model, plain = compiler.build()
    older, newer = Training("drop_in", model, plain), Training("drop_in", model, adam(model))
    for training in (older, newer, newer, newer):
        training.run(3)
    replays = older.status().replays
    newer.run(3)
    assert older.status().replays == replays
    assert newer.status().replays >= 3


def test_a_model_and_its_copy_are_trained_apart(compiler: Compiler) -> None:
    model = compiler(Net())
    training = Training("drop_in", model, adam(model))
    training.run(4)
    before = training.observe()
    twin = copy.deepcopy(model)
    other = Training("drop_in", twin, adam(twin))
    other.run(4)
    assert_same(training.observe(), before, "the first", gradients=False)
    replays = training.status().replays
    training.run(2)
    assert training.status().replays == replays + 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("form", FORMS)
def test_it_takes_turns_with_what_inductor_has_made(form: str, mode: str, device: torch.device) -> None:
    """Whose graphs have memory of their own, and give their outputs for one step."""
    if device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = torch.compile(Net().to(device), mode=mode)
        return model, adam(model)

    def batches(index: int) -> Batch:
        return batch(index, size=6 if index % 5 else 4, device=device.type)

    compare(form, build, steps=40, batches=batches, replays=34, rtol=1e-4, atol=1e-5, reference={})
