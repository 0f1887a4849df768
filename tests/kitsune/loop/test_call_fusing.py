"""Calls whose operators are fused, between a forward and a backward pass of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune
import models
from kitsune.capture.split_program import SplitProgram, trace_split
from kitsune.engine import planning, rewriting
from kitsune.errors import Refusal, RefusedError
from kitsune.fallback import Chooser
from kitsune.graph import dataflow
from kitsune.loop import call_fusing, split_step
from kitsune.loop.call_fusing import fused_call
from tests.kitsune import static_memory
from tests.kitsune.capture.graphs import flat_graph
from tests.kitsune.passes.running import OPERATORS
from tests.kitsune.test_fusion import Judge, always, never
from tests.kitsune.test_streams import costs_of_a_gpu
from tests.kitsune.training import Build, Net, Training, batch, compare, sgd

STEPS = 40
EAGER = 11  # before the first capture, and again after the rewriting

PLACES = ["in order", "static memory", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _a_device_that_fuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KITSUNE_ENABLE_FUSION")
    for module in ("split_step", "drop_in"):
        monkeypatch.setattr(f"kitsune.loop.{module}.refuse_fusion", lambda device: None)
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Judge(always))
    monkeypatch.setattr(rewriting, "INDUCTOR", OPERATORS)
    monkeypatch.setattr(planning, "measured_costs", costs_of_a_gpu)


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "static memory":
        static_memory.install(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


def build(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net(batch_norm=True).to(device)
    return model, sgd(model)


def train(device: str = "cpu", make: Build | None = None, **options: Any) -> Training:
    options = {"mode": "auto", "steps": STEPS, "rtol": 1e-4, "atol": 1e-5, **options}
    return compare("drop_in", make or partial(build, device), batches=partial(batch, device=device), **options)


@pytest.mark.usefixtures("replay_is_faster")
def test_a_loop_is_fused(device: str) -> None:
    status = train(device, replays=STEPS - EAGER).status()
    assert status.fused
    assert "operators fused" in str(status)
    assert status.not_in_effect == ()


class Words(nn.Module):
    """Looks up what numbers are rounded to, for which the table gets a sparse gradient; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(7, 4, 0, sparse=True), Net(batch_norm=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.table(x.round().int().clamp(-3, 3) + 3).mean(1))


@pytest.mark.usefixtures("replay_is_faster")
def test_sparse_gradients(device: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words().to(device)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    status = train(device, make, replays=STEPS // 2).status()
    assert status.fused
    assert status.covered == ("forward", "backward")


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("options", [{"enable_fusion": False}, {"mode": "replay"}])
def test_without_fusion_nothing_is_tried(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_step, "call_fusing", lambda *_: pytest.fail("fused"))
    training = train(replays=STEPS - 6, rtol=0, atol=0, **options)
    assert not training.status().fused


@pytest.mark.usefixtures("replay_is_faster")
def test_where_nothing_is_worth_fusing_the_call_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "Measured", lambda *_, **__: Judge(never))
    training = train(rtol=0, atol=0, replays=STEPS - 6)
    assert not training.status().fused


@pytest.mark.usefixtures("replay_is_faster")
def test_what_costs_more_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def dear(*args: Any, **options: Any) -> tuple[planning.Planned, ...]:
        found = others(*args, **options)
        return tuple(replace(one, plan=replace(one.plan, predicted_us=1e9)) for one in found)

    others = planning.others
    monkeypatch.setattr(planning, "others", dear)
    training = train(rtol=0, atol=0, replays=STEPS - 6)
    assert not training.status().fused


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize(
    "error",
    [
        RefusedError(Refusal("there is too little device memory to capture the step")),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_call_that_cannot_be_recorded_when_it_is_fused_stays(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = split_step.SplitStep._recorded

    def refuse(step: Any, program: SplitProgram, *args: Any, **options: Any) -> Any:
        if program.is_rewritten:
            raise error
        return recorded(step, program, *args, **options)

    monkeypatch.setattr(split_step.SplitStep, "_recorded", refuse)
    status = train(rtol=0, atol=0, replays=STEPS - EAGER).status()
    assert not status.fused
    assert any("too little device memory" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
def test_whatever_a_compiler_raises_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class CompilationError(Exception):
        pass

    def fail(*_: object) -> None:
        raise CompilationError("no such instruction")

    monkeypatch.setattr(split_step, "fused_call", fail)
    status = train(rtol=0, atol=0, replays=STEPS - 6).status()
    assert any("not fused (CompilationError: no such instruction)" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
def test_an_interrupt_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return fused_call(*args)

    monkeypatch.setattr(split_step, "fused_call", interrupted)
    training = Training("drop_in", *build(), mode="auto")
    with pytest.raises(KeyboardInterrupt):
        training.run(STEPS)
    training.run(STEPS)
    assert len(calls) == 2
    assert training.status().fused


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize(
    ("name", "lr"), [("mlp", 0.01), ("lenet", 0.05), pytest.param("resnet18", 1e-4, marks=pytest.mark.slow)]
)
def test_whole_models_train_as_they_do_eagerly(name: str, lr: float, amp: bool, device: str) -> None:
    """ResNet-18 at a rate at which it is not chaotic: in batches of four, at 0.01, weights that differ by 1e-7 lead to
    losses that differ by 0.02 seven steps later, and plain float32 is as far from float64.
    """
    workload = models.build(name, seed=0)
    model = workload.module.to(device)
    snapshot = copy.deepcopy(model.state_dict())
    before = [param.detach().clone() for param in model.parameters()]
    found, changes = [], []
    for mode in ("auto", "eager"):
        model.load_state_dict(snapshot)
        plain = torch.optim.SGD(model.parameters(), lr=lr)
        optimizer = kitsune.KitsuneOptimizer(plain, mode=mode, enable_amp=amp)
        losses = []
        for index in range(16):
            x, y = (tensor.to(device) for tensor in workload.batch(4, index=index))
            optimizer.zero_grad()
            loss = workload.loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found.append(torch.stack(losses))
        changes.append([param.detach() - one for param, one in zip(model.parameters(), before, strict=True)])
        assert optimizer.status().fused == (mode == "auto")
    tolerance = 0.05 if amp else 1e-3
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)
    for change, wanted in zip(*changes, strict=True):
        assert (change - wanted).norm() <= (0.9 if amp else 0.3) * wanted.norm()


class Several(nn.Module):
    """Buffers are written, and the tanh is an output that no gradient comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.first(x)).relu()
        self.count.add_(1)
        return self.last(hidden), hidden.detach().tanh()


def improved(program: SplitProgram, flat: list[Tensor]) -> SplitProgram | None:
    under_way = call_fusing.call_fusing(program, flat)
    if under_way is None:
        return None
    assert under_way.advance()
    return fused_call(program, under_way, flat, lambda refusal: pytest.fail(str(refusal)))


def program_of(model: nn.Module, *args: Tensor) -> tuple[SplitProgram, list[Tensor]]:
    """The programs of a call."""
    graph, flat = flat_graph(model, *args)
    return trace_split(graph, flat), flat


def test_no_part_of_the_forward_pass_is_left_to_the_backward_pass() -> None:
    program, flat = program_of(Several(), batch(0)[0][0])
    fused = improved(program, flat)
    assert fused is not None
    assert fused.is_rewritten
    (before,), (part,) = program.parts, fused.parts
    targets = [node.target for module in (fused.forward, part.backward) for node in module.graph.nodes]
    assert call_fusing._after not in targets
    for one, other in ((program.forward, fused.forward), (before.backward, part.backward)):
        assert len(one.graph.nodes) > len(other.graph.nodes)
    written = [dataflow.written_inputs(one.forward.graph).keys() for one in (program, fused)]
    assert written[0] == written[1] != set()
    assert not dataflow.written_inputs(part.backward.graph)


@pytest.mark.parametrize("relu", [False, True])
def test_a_gradient_that_an_operator_would_write_to_is_copied(relu: bool) -> None:
    """What autograd passes in may be somebody else's."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y.relu() if relu else y

    program, _ = program_of(Last(), batch(0)[0][0])
    joint = call_fusing._ordered(program)
    assert joint is not None
    back = call_fusing._unordered(joint)
    names = [node.name for node in back.graph.nodes]
    assert names == [node.name for node in program.joint.graph.nodes]
    joint = call_fusing._ordered(program)
    assert joint is not None
    (after,) = (node for node in joint.graph.nodes if node.target is call_fusing._after)
    with joint.graph.inserting_after(after):
        zeroed = joint.graph.call_function(torch.ops.aten.zero_.default, (after,))
        zeroed.meta["val"] = after.meta["val"]
    kept = call_fusing._unordered(joint)
    assert any(node.target is torch.ops.aten.clone.default for node in kept.graph.nodes)


def test_several_gradients_are_left_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.trunk(x).relu()
            return self.left(hidden).relu(), self.right(hidden).relu()

    program, flat = program_of(Two(), batch(0)[0][0])
    assert improved(program, flat) is None


class WithLoss(nn.Module):
    """Logits, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(batch_norm=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(x)
        return functional.cross_entropy(logits.relu(), y), logits


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("way", ["loss", "both", "hook"])
def test_an_output_computed_from_another(way: str, device: str) -> None:
    """What goes back from the loss and what goes back from the logits stay apart."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = WithLoss().to(device)
        return model, sgd(model)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss, logits = training.model(x, y)
        if way == "hook":
            logits.register_hook(lambda grad: grad / 2)
        (loss + logits.square().mean() if way == "both" else loss).backward()
        training.optimizer.step()
        return loss.detach()

    assert train(device, make, loop=loop, replays=STEPS - EAGER).status().fused


class LanguageModel(nn.Module):
    """The loss of a vocabulary, of which a GPU's kernel would leave the gradient in the place of the logits."""

    def __init__(self, size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(size, 8), nn.Linear(8, size, bias=False)
        self.dtype = dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            logits = self.last(self.embedding(x).tanh())
            return functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def tokens(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(size, (3, 5), generator=generator) for _ in range(2))
    return x, y


@pytest.mark.parametrize(("size", "dtype"), [(11, None), (11, torch.bfloat16), (2500, torch.bfloat16)], ids=str)
def test_a_loss_of_a_vocabulary_may_go_back_twice(size: int, dtype: torch.dtype | None) -> None:
    """In the last case the rows of logits are padded."""
    torch.manual_seed(0)
    program, flat = program_of(LanguageModel(size, dtype), *tokens(size))
    fused = improved(program, flat)
    assert fused is not None
    (before,), (part,) = program.parts, fused.parts
    inputs = [tensor.detach() for tensor in flat]
    names = [str(node.target) for module in (fused.forward, part.backward) for node in module.graph.nodes]
    assert "kitsune.cross_entropy.default" in names
    with torch.no_grad():
        found, wanted = fused.forward(*inputs), program.forward(*inputs)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-2 if dtype else 1e-6, atol=0)
        tangent = torch.ones(())
        grads = before.backward(*(wanted[1:][index] for index in before.saved), tangent)
        for _ in range(2):
            again = part.backward(*(found[1:][index] for index in part.saved), tangent)
            for one, other in zip(again, grads, strict=True):
                torch.testing.assert_close(one, other, rtol=3e-2 if dtype else 1e-5, atol=1e-3 if dtype else 1e-7)
    assert any(name.startswith("kitsune.cross_entropy_backward_.") for name in names) == (size == 2500)


def test_parts_of_a_backward_pass_stay_apart() -> None:
    (x, y), _ = batch(0)
    program, flat = program_of(WithLoss(), x, y)
    fused = improved(program, flat)
    assert fused is not None
    assert [part.roots for part in fused.parts] == [part.roots for part in program.parts] == [(0,), (1,)]
    for one, other in zip(program.parts, fused.parts, strict=True):
        assert len(dataflow.outputs(one.backward.graph)) == len(dataflow.outputs(other.backward.graph))
        assert call_fusing._after not in [node.target for node in other.backward.graph.nodes]
    assert len(program.parts[1].backward.graph.nodes) > len(fused.parts[1].backward.graph.nodes)


@pytest.mark.usefixtures("replay_is_faster")
def test_a_backward_pass_in_mid_air_is_not_disturbed(device: str) -> None:
    """The graphs are exchanged at a call; an earlier one may have its backward pass yet to come."""

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x), y)
        held = training.memo.pop("held", None)
        if held is not None:
            held.backward()  # in one of the steps, after the call that has exchanged the graphs
        if training.memo["count"] % 3 == 0:
            training.memo["held"] = loss
        else:
            loss.backward()
            training.optimizer.step()
        return loss.detach()

    def without_norm() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Net().to(device)
        return model, sgd(model)

    training = train(device, steps=4 * STEPS, loop=loop, make=without_norm, replays=10)
    assert training.status().fused  # long enough for a pending call's own graphs, too


def edit_bias(training: Training) -> None:
    """Of the batch norm: without Kitsune the backward pass does not read it."""
    training.model.norm.bias.data.add_(1.0)


def edit_weight(training: Training) -> None:
    """The backward pass reads this one, and `.data` counts no versions."""
    training.model.last.weight.data.mul_(1.1)


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("edit", [edit_bias, edit_weight])
def test_what_the_backward_pass_reads_is_what_eager_s_reads(edit: Callable[[Training], None], device: str) -> None:
    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x), y)
        before = [param.detach().clone() for param in training.model.parameters()]
        edit(training)
        loss.backward()
        for param, value in zip(training.model.parameters(), before, strict=True):
            param.data.copy_(value)
        training.optimizer.step()
        return loss.detach()

    assert train(device, loop=loop, replays=STEPS - EAGER).status().fused


@pytest.mark.usefixtures("replay_is_faster")
@pytest.mark.parametrize("name", ["norm.weight", "norm.bias", "last.weight"])
def test_what_may_not_be_edited_is_what_eager_checks(name: str, device: str) -> None:
    """Nor anything else: eager's backward pass does not need the bias of a batch norm."""
    raised: dict[str, list[int]] = {"eager": [], "drop_in": []}

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        count = training.memo["count"] = training.memo.get("count", 0) + 1
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x), y)
        if count > 20:
            with torch.no_grad():
                training.model.state_dict(keep_vars=True)[name].mul_(1.0)
        try:
            loss.backward()
        except RuntimeError:
            raised[training.form].append(count)
            training.optimizer.zero_grad()  # of what had its gradient before the error
        training.optimizer.step()
        return loss.detach()

    train(device, loop=loop, replays=10)
    assert raised["drop_in"] == raised["eager"] == ([] if name == "norm.bias" else list(range(21, STEPS + 1)))


@pytest.mark.usefixtures("replay_is_faster")
def test_gradients_keep_their_strides(device: str) -> None:
    """A convolution of one channel in channels_last; strides of a dimension of one element are free."""
    strides: dict[str, list[object]] = {"eager": [], "drop_in": []}

    def strides_of(grad: Tensor | None) -> list[int]:
        assert grad is not None
        return [stride for size, stride in zip(grad.shape, grad.stride(), strict=True) if size > 1]

    def convolutional() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))
        model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, sgd(model)

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = functional.cross_entropy(training.model(x.view(-1, 1, 2, 2)), y)
        loss.backward()
        strides[training.form].append([strides_of(param.grad) for param in training.model.parameters()])
        training.optimizer.step()
        return loss.detach()

    status = train(device, loop=loop, make=convolutional, replays=STEPS - EAGER).status()
    assert status.fused
    assert strides["eager"] == strides["drop_in"]
    assert "update" in status.covered


def test_a_fused_call_that_is_slower_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not be slower than eager for that."""

    def settle(chooser: Chooser) -> None:
        chooser._rounds = [(3.0, 1.0 if chooser._rival is None else 2.0)]
        original(chooser)

    original = Chooser._settle
    monkeypatch.setattr(Chooser, "_settle", settle)
    monkeypatch.setattr(Chooser, "_is_clear", lambda chooser: True)
    status = train(replays=STEPS - EAGER).status()
    assert (status.mode, status.fused, status.replay_seconds) == ("replay", False, 1.0)
    assert any("no faster when it is fused" in refusal for refusal in status.refusals)


@pytest.mark.usefixtures("replay_is_faster")
def test_what_was_captured_again_is_fused_after_enough_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_step, "_REPLAYS_BEFORE_MORE_TRIALS", 30)
    training = Training("drop_in", *build(), mode="auto")
    training.run(STEPS)
    assert training.status().fused
    training.model.gain = 2.0
    training.run(20, start=STEPS)
    assert not training.status().fused
    training.run(STEPS, start=60)
    assert training.status().fused
