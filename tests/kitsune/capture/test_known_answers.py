"""What Python asks of tensors: answered where there is one answer, and nowhere else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.errors import RefusedError
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import FORMS, Batch, Training, adam, batch, compare, sgd

STEPS = 8


class LayerDrop(nn.Module):
    """Layers that are left out at times, as those of BART, with dropout that draws random numbers as well."""

    def __init__(self, layerdrop: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop, self.layerdrop = nn.Dropout(0.3), layerdrop

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            to_drop = False
            if self.training:
                probability = torch.rand([])
                if probability < self.layerdrop:
                    to_drop = True
            if not to_drop:
                x = self.drop(torch.tanh(layer(x)))
        found: Tensor = self.last(x)
        return found


class LayerDropInOneLine(LayerDrop):
    """As those of wav2vec 2.0."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            probability = torch.rand([])
            skip_the_layer = self.training and probability < self.layerdrop
            if not skip_the_layer:
                x = self.drop(torch.tanh(layer(x)))
        found: Tensor = self.last(x)
        return found


def build(kind: type[LayerDrop]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = kind()
    return model, adam(model, lr=0.01)


@pytest.mark.support("Models", "layer drop (`torch.rand([]) < self.layerdrop`) with a probability of 0", "replayed")
@pytest.mark.parametrize("kind", [LayerDrop, LayerDropInOneLine])
@pytest.mark.parametrize("form", FORMS)
def test_layers_that_are_never_left_out(form: str, kind: type[LayerDrop]) -> None:
    """The numbers are drawn as ever, so that those of dropout are the same."""
    compare(form, partial(build, kind), steps=STEPS)


@pytest.mark.support("Models", "layer drop with another probability", "plain PyTorch, with a reason")
@pytest.mark.parametrize("form", FORMS)
def test_the_probability_becomes_another_one(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.layerdrop = 0.5 if index in (4, 5) else 0.0

    training = compare(form, partial(build, LayerDrop), steps=12, edit=edit, replays=4)
    assert any("branching" in refusal and "layerdrop" in refusal for refusal in training.status().refusals)


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_draws_nothing(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.train(index not in (3, 4))

    compare(form, partial(build, LayerDrop), steps=STEPS, edit=edit, replays=3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [LayerDrop, LayerDropInOneLine])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_numbers_are_drawn_on_the_host(form: str, kind: type[LayerDrop]) -> None:
    def on_gpu() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = kind().to("cuda")
        model.drop = nn.Identity()  # eager and replays would draw other numbers there
        return model, sgd(model)

    compare(form, on_gpu, steps=STEPS, batches=partial(batch, device="cuda"), rtol=1e-3, atol=1e-4)


def draws_after(function: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> Tensor:
    torch.manual_seed(0)
    for _ in range(calls):
        function(x)
    return torch.rand(3)


def test_numbers_are_drawn_on_the_host_beside_a_graph_that_is_elsewhere() -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 if torch.rand([]) >= 0 and not torch.rand(1, dtype=torch.double) < 0.0 else x

    x = torch.ones(2, device="meta")
    call, runner = guarded(function)
    assert torch.equal(draws_after(call, x, 3), draws_after(function, x, 3))
    assert len(runner.graphs) == 3
    assert not any(node.target is torch.rand for node in runner.graphs[0].graph.nodes)


KNOWN: dict[str, Callable[[Tensor], bool | Tensor]] = {
    "below": lambda x: torch.rand([]) < 0,
    "below a negative number": lambda x: torch.rand(1) < -0.5,
    "not below": lambda x: torch.rand(()) >= 0.0,
    "the other way round": lambda x: operator.gt(0.0, torch.rand([])),
    "the other way round, not below": lambda x: operator.le(-1, torch.rand([])),
    "any of a mask": lambda x: (torch.ones(3, len(x)) > 1).any().item(),
    "any of a mask, as a tensor": lambda x: (torch.ones(3, len(x)) > 1).any(),
    "all of what was set": lambda x: _set(torch.zeros(3)).all(),
    "a number": lambda x: torch.arange(4).sum().item() == 6,
    "written to": lambda x: torch.zeros(2).add_(1).sum() > 1,
    "in place": lambda x: _added(torch.zeros(2)).sum() > 1,
}

UNKNOWN: dict[str, Callable[[Tensor], bool | Tensor]] = {
    "of the input": lambda x: x.sum() > 0,
    "below 1": lambda x: torch.rand([]) < 1,
    "below a small number": lambda x: torch.rand([]) < 1e-9,
    "not above": lambda x: torch.rand([]) <= 0,
    "normal": lambda x: torch.randn([]) < 0,
    "shifted": lambda x: torch.rand([]) - 1 < 0,
    "shifted in place": lambda x: torch.rand([]).sub_(1) < 0,
    "shifted before": lambda x: _shifted(torch.rand([])) < 0,
    "shifted past autograd": lambda x: _shifted(torch.rand([]).data) < 0,
    "the answer is turned": lambda x: (torch.rand([]) < 0).logical_not_(),
    "the answer is turned before": lambda x: _turned(torch.rand([]) < 0),
    "with a tensor": lambda x: torch.rand([]) < torch.zeros(()),
    "a mask of random numbers": lambda x: (torch.rand(3) < 0.5).any(),
    "a mask that the input is set in": lambda x: _set(torch.zeros(1), x.sum()).any(),
    "a mask that is written to past autograd": lambda x: _filled_past_autograd(torch.zeros(3)).any(),
}


def _set(mask: Tensor, value: float | Tensor = 1.0) -> Tensor:
    mask[:] = value
    return mask


def _added(mask: Tensor) -> Tensor:
    mask += 1
    return mask


def _shifted(drawn: Tensor) -> Tensor:
    drawn.sub_(1)
    return drawn


def _turned(answer: Tensor) -> Tensor:
    answer.logical_not_()
    return answer


def _filled_past_autograd(mask: Tensor) -> Tensor:
    mask.data.fill_(1)
    return mask


def asking(question: Callable[[Tensor], bool | Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x + 1 if question(x) else x * 3


@pytest.mark.parametrize("name", KNOWN)
def test_there_is_one_answer(name: str) -> None:
    function = asking(KNOWN[name])
    x = torch.full((2,), 5.0)
    call, runner = guarded(function)
    assert torch.equal(draws_after(call, x, 3), draws_after(function, x, 3))
    assert torch.equal(call(x), function(x))
    assert len(runner.graphs) == 4


@pytest.mark.parametrize("name", UNKNOWN)
def test_there_are_two_answers(name: str) -> None:
    call, runner = guarded(asking(UNKNOWN[name]))
    with pytest.raises(RefusedError):
        call(torch.full((2,), 5.0))
    assert not runner.graphs


def test_a_tensor_that_is_left_by_a_jump_stays_one() -> None:
    """`and` gives what it looked at."""

    def function(x: Tensor) -> Tensor:
        answer: Any = (torch.rand([]) < 0) and 3
        return x * answer

    call, _ = guarded(function)
    try:
        found = call(torch.ones(2))
    except RefusedError:
        return
    assert torch.equal(found, function(torch.ones(2)))


def test_sizes_in_tensors() -> None:
    """As Longformer computes them."""

    def function(x: Tensor) -> Tensor:
        num_chunks = torch.div(x.size(0), 2, rounding_mode="trunc")
        chunks = x.view(num_chunks, 2)
        return torch.cat([chunks, x.new_zeros((num_chunks - 1, 2))]).as_strided(size=(num_chunks, 2), stride=(2, 1))

    call, runner = guarded(function)
    for size in (6, 6):
        assert torch.equal(call(torch.arange(float(size))), function(torch.arange(float(size))))
    with pytest.raises(RefusedError):
        call(torch.arange(8.0))
    assert len(runner.graphs) == 2


def test_a_number_that_the_call_depends_on_is_guarded() -> None:
    model: Any = nn.Module()
    model.bound = 0.0
    call, _ = guarded(lambda x: x * 2 if torch.rand([]) < model.bound else x)
    x = torch.ones(2)
    assert torch.equal(call(x), x)
    model.bound = 0.5
    with pytest.raises(RefusedError, match=r"bound was 0\.0, is 0\.5"):
        call(x)


class Chunks(nn.Module):
    """Looks for padding in a mask that it makes itself, or is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.window = nn.Linear(4, 3), 2

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = torch.ones(len(x), device=x.device)
        mask = (1.0 - mask) * -10.0
        if (mask < 0).any().item():
            x = x * mask[:, None]
        chunks = x.view(torch.div(len(x), self.window, rounding_mode="trunc"), self.window, 4)
        found: Tensor = self.layer(chunks.reshape(-1, 4))
        return found


def build_chunks() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Chunks()
    return model, adam(model)


@pytest.mark.support(
    "Models", "questions about masks that the model makes of sizes (`mask.any()`, `.item()`)", "replayed"
)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_the_model_makes(form: str) -> None:
    def edit(training: Training, index: int) -> None:
        training.model.window = 3 if index >= 5 else 2

    compare(form, build_chunks, steps=10, edit=edit, replays=6)


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_that_is_given(form: str) -> None:
    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x, (torch.arange(6) < 4 + index % 3).float(), y), {}

    training = compare(form, build_chunks, batches=batches, replays=0)
    assert "depends on the values of a tensor" in str(training.status().refusals)
