"""Every optimizer of torch: those whose updates are replayed, and those that run their own `step()`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import kitsune
from tests.kitsune.test_scaling import compare_scaled
from tests.kitsune.training import FORMS, Batch, Net, Training, assert_same, batch, compare

Kind = type[torch.optim.Optimizer]
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]

OPTIONS: dict[Kind, dict[str, Any]] = {
    torch.optim.Adam: {"lr": 0.01},
    torch.optim.AdamW: {"lr": 0.01},
    torch.optim.SGD: {"lr": 0.05, "momentum": 0.9},
    torch.optim.NAdam: {"lr": 0.01, "momentum_decay": 0.1},
    torch.optim.RAdam: {"lr": 0.01},
    torch.optim.Adamax: {"lr": 0.01},
    torch.optim.Adagrad: {"lr": 0.05, "lr_decay": 0.1},
    torch.optim.Adadelta: {"lr": 1.0},
    torch.optim.RMSprop: {"lr": 0.01, "momentum": 0.9, "centered": True},
    torch.optim.Rprop: {"lr": 0.01},
    torch.optim.ASGD: {"lr": 0.05, "t0": 3.0},
}
COMPOSED = [kind for kind in OPTIONS if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)]
"""Those whose rules have the composed form only."""

HALF = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
"""Those that torch can fuse in half precision."""

ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


def builder(kind: Kind, dtype: torch.dtype = torch.float32, **more: Any) -> Build:
    """A network and its optimizer, with groups of different options."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().to(dtype)
        other = {"maximize": True} if kind is torch.optim.Rprop else {"weight_decay": 0.1}
        groups = [{"params": model.first.parameters()}, {"params": model.last.parameters(), "lr": 0.003, **other}]
        return model, kind(groups, **{**OPTIONS[kind], **more})  # type: ignore[call-arg]

    return build


@pytest.mark.support(
    "Optimizers",
    "SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD",
    "replayed",
)
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_the_whole_step_is_replayed(form: str, kind: Kind) -> None:
    """RAdam's denominator begins to count, and ASGD to average, while steps are replayed."""
    training = compare(form, builder(kind), steps=10, **ROUNDING)
    status = training.status()
    assert status.mode == "replay"
    assert "update" in status.covered
    assert not status.refusals


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPOSED)
@pytest.mark.parametrize("form", FORMS)
def test_in_double_precision(form: str, kind: Kind) -> None:
    compare(
        form,
        builder(kind, torch.float64),
        steps=8,
        batches=lambda index: batch(index, dtype=torch.float64),
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("kind", COMPOSED)
@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_is_loaded_in_mid_training(form: str, kind: Kind) -> None:
    """torch gives loaded scalars the dtype of their parameter."""

    def edit(training: Training, index: int) -> None:
        if index == 4:
            training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))

    compare(
        form,
        builder(kind, torch.float64),
        steps=9,
        batches=lambda index: batch(index, dtype=torch.float64),
        edit=edit,
        replays=5,
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.support("Optimizers", "checkpoints resumed with and without Kitsune", "replayed")
@pytest.mark.parametrize("kind", COMPOSED)
@pytest.mark.parametrize(
    "forms",
    [("eager", "train_step"), pytest.param(("train_step", "eager"), marks=pytest.mark.slow), ("drop_in", "eager")],
)
def test_a_training_goes_on_elsewhere(forms: tuple[str, str], kind: Kind) -> None:
    """The state of a replayed optimizer is what torch's own would be, in names, types and values."""
    torch.manual_seed(7)
    whole = Training("eager", *builder(kind)())
    whole.run(9)
    torch.manual_seed(7)
    first = Training(forms[0], *builder(kind)())
    first.run(5)
    model, optimizer = builder(kind)()
    model.load_state_dict(first.model.state_dict())
    second = Training(forms[1], model, optimizer)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.run(4, start=5)
    assert_same(second.observe(), whole.observe(), "at the end", gradients=False, **ROUNDING)
    found, wanted = second.optimizer.state_dict(), whole.optimizer.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    for place, state in wanted["state"].items():
        facts = {name: (value.dtype, value.device, value.shape) for name, value in state.items()}
        others = {name: (value.dtype, value.device, value.shape) for name, value in found["state"][place].items()}
        assert facts == others


@pytest.mark.support("Hyperparameters", "OneCycle and Cyclic, with momentum or betas", "replayed")
@pytest.mark.usefixtures("short_way")
@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax])
@pytest.mark.parametrize("form", FORMS)
def test_a_cycle_of_rate_and_momentum(form: str, kind: Kind) -> None:
    """It captures nothing anew.

    Rates this high multiply the last bits of RMSprop's first updates tenfold.
    """

    def edit(training: Training, index: int) -> None:
        if index == 0:
            training.memo["scheduler"] = lr_scheduler.OneCycleLR(training.optimizer, 0.02, total_steps=14)
        else:
            training.memo["scheduler"].step()

    compare(form, builder(kind), steps=12, edit=edit, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", COMPOSED)
@pytest.mark.parametrize("form", FORMS)
def test_a_scaler_skips_what_overflows(form: str, kind: Kind) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), **OPTIONS[kind])  # type: ignore[call-arg]

    compare_scaled(form, make=make, **ROUNDING)


@pytest.mark.parametrize("kind", OPTIONS)
def test_parameters_in_half_precision_run_eagerly(kind: Kind) -> None:
    training = compare(
        "train_step",
        builder(kind, torch.bfloat16),
        steps=4,
        batches=lambda index: batch(index, dtype=torch.bfloat16),
        replays=0,
    )
    assert "no captured update for parameters of torch.bfloat16" in training.status().reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("device", "kind", "fused"),
    [
        pytest.param(device, kind, fused, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device in ("cpu", "cuda")
        for kind in HALF
        for fused in (False, True)
    ],
)
def test_updates_in_half_precision_are_as_exact_as_the_optimizers(
    device: str, kind: Kind, dtype: torch.dtype, fused: bool
) -> None:
    """Given the same gradients. On a GPU they are fused whether the optimizer is or not, and rounded otherwise.

    On a CPU they are the optimizer's to the bit, even where those are wrong by far more than rounding: as torch's
    own fused SGD is there.
    """
    options = {**OPTIONS[kind], "weight_decay": 0.1, "fused": fused}
    if kind is not torch.optim.SGD:
        options["eps"] = 1e-3
    model = Net().to(device, dtype)
    params = list(model.parameters())
    by_itself = [param.detach().clone() for param in params]
    exact = [param.double() for param in by_itself]
    updates = [kind(by_itself, **options), kind(exact, **options)]  # type: ignore[call-arg]
    optimizer = kitsune.KitsuneOptimizer(kind(params, **options), model=model, mode="replay")  # type: ignore[call-arg]
    for index in range(12):
        (x, y), _ = batch(index, dtype=dtype, device=device)
        optimizer.zero_grad()
        functional.cross_entropy(model(x).float(), y).backward()
        for update, copies in zip(updates, (by_itself, exact), strict=True):
            for copied, param in zip(copies, params, strict=True):
                assert param.grad is not None
                copied.grad = param.grad.to(copied.dtype)
            update.step()
        optimizer.step()
    assert optimizer.status().mode == "replay"
    assert ("update" in optimizer.status().covered) == (fused or device == "cuda")
    for param, copied, wanted in zip(params, by_itself, exact, strict=True):
        if device == "cpu":
            assert torch.equal(param, copied)
            continue
        error, own = (torch.linalg.vector_norm(values.double() - wanted) for values in (param.detach(), copied))
        one_rounding = torch.finfo(dtype).eps * torch.linalg.vector_norm(wanted)
        assert error <= 2 * own + one_rounding
        assert error < 0.05 * torch.linalg.vector_norm(wanted)


# Those without a rule


class Weights(nn.Module):
    """Two matrices, which is all that some optimizers take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.last = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.embedding(words)


class Halving(torch.optim.Optimizer):
    """Somebody else's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * group["lr"] * 0.5)


class Wrapping(torch.optim.Optimizer):
    """Somebody else's, around another optimizer, without what the base class sets up."""

    def __init__(self, params: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(params, lr=lr)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


WITHOUT_A_RULE: list[Kind] = [torch.optim.Adafactor, torch.optim.Muon, Halving, Wrapping]


@pytest.mark.support("Optimizers", "Adafactor, Muon, and those of other libraries", "replayed, but for the update")
@pytest.mark.parametrize("kind", WITHOUT_A_RULE)
@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_without_a_rule_steps_by_itself(form: str, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """In the loop, forward and backward are replayed all the same, and nothing else is said."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Weights()
        return model, kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]

    training = compare(form, build, replays=0 if form == "train_step" else None)
    status = training.status()
    assert status.covered == (() if form == "train_step" else ("forward", "backward"))
    assert any(f"no update rule for {kind.__name__}" in refusal for refusal in status.refusals)
    part = "the training step" if form == "train_step" else "the update of the training loop"
    assert [text for text in caplog.messages if text.startswith(f"{part} runs as plain PyTorch: there is no update")]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_that_the_optimizer_has_twice_is_updated_twice(form: str, kind: Kind) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, kind([*model.parameters(), *model.last.parameters()], **OPTIONS[kind])  # type: ignore[call-arg]

    training = compare(form, build, replays=0 if form == "train_step" else None)
    assert any("a parameter more than once" in refusal for refusal in training.status().refusals)


@pytest.mark.support("Optimizers", "SparseAdam, and sparse gradients for others", "replayed, but for the update")
@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SparseAdam, {}), (torch.optim.Adagrad, {}), (torch.optim.SGD, {"momentum": 0.9})]
)
@pytest.mark.parametrize("form", FORMS)
def test_sparse_gradients(form: str, kind: Kind, options: dict[str, Any]) -> None:
    """With momentum the optimizer's state is sparse, too."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words()
        return model, kind(model.parameters(), lr=0.01, **options)  # type: ignore[call-arg]

    def words(index: int) -> Batch:
        (_, y), _ = batch(index)
        return (y, y), {}

    training = compare(form, build, batches=words, replays=0 if form == "train_step" else None)
    assert any("sparse" in refusal.lower() for refusal in training.status().refusals)
    assert training.status().covered == (() if form == "train_step" else ("forward", "backward"))
