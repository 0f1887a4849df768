"""Recurrent layers of torch train as in plain PyTorch, bit by bit, and what decides about them may change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tests.kitsune.training import FORMS, Batch, Training, adam, compare, sgd

STEPS = 8
WIDTH = 8


class Recurrent(nn.Module):
    """A recurrent layer, of whose last outputs classes are told."""

    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(4, WIDTH, **{"batch_first": True, **options})
        width = (options.get("proj_size") or WIDTH) * (2 if options.get("bidirectional") else 1)
        self.head, self.flattens, self.state = nn.Linear(width, 3), False, None

    def forward(self, x: Tensor) -> Tensor:
        if self.flattens:
            self.cells.flatten_parameters()
        outputs, _ = self.cells(x, self.state)
        found: Tensor = self.head(outputs[:, -1] if self.cells.batch_first else outputs[-1])
        return found


class Carrying(nn.Module):
    """Goes on with the state of the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(4, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)
        self.register_buffer("state", torch.zeros(1, 6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.cells(x, self.state.clone())
        self.state.copy_(state.detach())
        found: Tensor = self.head(outputs[:, -1])
        return found


class Packing(nn.Module):
    """Of sequences that it packs, or that come packed."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor | PackedSequence) -> Tensor:
        _, (hidden, _) = self.cells(packed(x) if isinstance(x, Tensor) else x)
        found: Tensor = self.head(hidden[-1])
        return found


def packed(x: Tensor) -> PackedSequence:
    return pack_padded_sequence(x, torch.tensor([5, 5, 4, 4, 3, 2]), batch_first=True)


def sequences(index: int, *, device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(6, 5, 4, generator=generator), torch.randint(3, (6,), generator=generator)
    return (x.to(device), y.to(device)), {}


def build(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(**options)
    return model, adam(model, lr=0.01)


KINDS: dict[str, dict[str, Any]] = {
    "lstm": {},
    "lstm, deep": {"num_layers": 2, "dropout": 0.4, "bidirectional": True},
    "lstm, projected": {"proj_size": 3},
    "lstm, without bias": {"bias": False, "batch_first": False},
    "gru": {"kind": "GRU"},
    "gru, deep": {"kind": "GRU", "num_layers": 2, "dropout": 0.4, "bidirectional": True},
    "rnn": {"kind": "RNN", "num_layers": 2},
    "rnn, relu": {"kind": "RNN", "nonlinearity": "relu"},
}


def transposed(index: int) -> Batch:
    (x, y), _ = sequences(index)
    return (x.transpose(0, 1).contiguous(), y), {}


@pytest.mark.support("Models", "recurrent layers (`nn.RNN`, `nn.GRU`, `nn.LSTM`) on a CPU", "replayed")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_layers(form: str, kind: str) -> None:
    options = KINDS[kind]
    batches = sequences if options.get("batch_first", True) else transposed
    compare(form, partial(build, Recurrent, **options), steps=STEPS, batches=batches)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_goes_on_from_call_to_call(form: str) -> None:
    compare(form, partial(build, Carrying), steps=STEPS, batches=sequences)


def replace_a_weight(training: Training) -> None:
    """In the same shape, so that only what holds it tells."""
    cells = training.model.cells
    with torch.no_grad():
        fresh = nn.Parameter(cells.weight_hh_l0 * 0.5)
    (group,) = training.plain.param_groups
    group["params"] = [fresh if param is cells.weight_hh_l0 else param for param in group["params"]]
    cells.weight_hh_l0 = fresh


def scale_a_weight(training: Training) -> None:
    training.model.cells.weight_ih_l0.data.mul_(0.5)


def freeze_a_weight(training: Training) -> None:
    training.model.cells.bias_hh_l0.requires_grad_(False)
    training.model.cells.bias_hh_l0.grad = None


def replace_the_layer(training: Training) -> None:
    state = training.model.cells.state_dict()
    fresh = nn.LSTM(4, WIDTH, batch_first=True)
    for name in list(state):
        setattr(fresh, name, getattr(training.model.cells, name))
    training.model.cells = fresh


def give_a_state(training: Training) -> None:
    training.model.state = (torch.ones(1, 6, WIDTH), torch.zeros(1, 6, WIDTH))


CHANGES: dict[str, Callable[[Training], object]] = {
    "a weight is replaced": replace_a_weight,
    "a weight is edited": scale_a_weight,
    "a weight is frozen": freeze_a_weight,
    "the layer is replaced": replace_the_layer,
    "a state is given": give_a_state,
    "the layer is put in evaluation mode": lambda training: training.model.eval(),
    "the order of dimensions": lambda training: setattr(training.model.cells, "batch_first", False),
    "weights are flattened": lambda training: setattr(training.model, "flattens", True),
    "torch is told to do without oneDNN": lambda training: torch.backends.mkldnn.set_flags(False),
    "weights are loaded": lambda training: training.model.load_state_dict(
        {name: tensor * 0.5 for name, tensor in training.model.state_dict().items()}
    ),
}


@pytest.fixture
def onednn_stays() -> Any:
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(before)


def square(index: int) -> Batch:
    """As long as they are many, so that the order of dimensions is a matter of taste."""
    generator = torch.Generator().manual_seed(index)
    return (torch.randn(6, 6, 4, generator=generator), torch.randint(3, (6,), generator=generator)), {}


@pytest.mark.usefixtures("onednn_stays")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
def test_what_decides_about_them_changes(form: str, change: str) -> None:
    def edit(training: Training, index: int) -> None:
        torch.backends.mkldnn.set_flags(True) if index == 0 else None
        if index == 4:
            CHANGES[change](training)

    compare(form, partial(build, Recurrent), steps=9, batches=square, edit=edit, replays=3)


@pytest.mark.parametrize("form", FORMS)
def test_dropout_between_layers_changes(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.cells.dropout = 0.5 if index < 4 else 0.0
        training.model.train(index not in (6, 7))

    options = {"num_layers": 2, "dropout": 0.5}
    compare(form, partial(build, Recurrent, **options), steps=12, batches=sequences, edit=edit, replays=5)


@pytest.mark.parametrize("form", FORMS)
def test_within_autocast(form: str) -> None:
    options = {"enable_amp": True, "amp_dtype": torch.bfloat16} if form == "train_step" else {}

    def loop(training: Training, x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = training.loss_fn(training.model(x), y)
        loss.backward()
        training.optimizer.step()
        return loss.detach()

    compare(form, partial(build, Recurrent), steps=STEPS, batches=sequences, loop=loop, **options)


@pytest.mark.support("Models", "packed sequences (`pack_padded_sequence`)", "plain PyTorch, with a reason")
@pytest.mark.parametrize("where", ["in the model", "outside"])
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences(form: str, where: str) -> None:
    def batches(index: int) -> Batch:
        (x, y), _ = sequences(index)
        return (x if where == "in the model" else packed(x), y), {}

    training = compare(form, partial(build, Packing), steps=STEPS, batches=batches, replays=0)
    status = training.status()
    assert status.mode == "eager"
    reason = "pack_padded_sequence() is called" if where == "in the model" else "rnn.py"
    assert reason in str(status.refusals)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_they_run_as_plain_pytorch(form: str) -> None:
    def on_gpu() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Recurrent().to("cuda")
        return model, sgd(model)

    batches = partial(sequences, device="cuda")
    training = compare(form, on_gpu, steps=STEPS, batches=batches, replays=0, rtol=1e-3, atol=1e-4)
    assert "a recurrent layer of torch is called on a GPU" in str(training.status().refusals)
