"""Mixtures of experts: what each expert gets is another number of rows at every step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models import transformers_loading
from tests.kitsune.training import FORMS, Batch, Training, adam, batch, compare

needs_transformers = pytest.mark.skipif(
    transformers_loading.missing() is not None, reason="transformers is not installed"
)
NUM_EXPERTS, WIDTH, WORDS = 4, 16, 32


class Experts(nn.Module):
    """One expert for each row, by products of groups of rows."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(width, 3)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.weights = nn.Parameter(torch.randn(NUM_EXPERTS, width, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        share, expert = self.router(x).softmax(-1).max(-1)
        expert, order = expert.sort()
        counts = torch.histc(expert.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = functional.grouped_mm(x[order], self.weights.transpose(-2, -1), offs=ends)
        rows = torch.empty_like(rows).index_copy(0, order, rows)
        found: Tensor = self.last(rows * share[:, None])
        return found


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Experts(width)
    return model, adam(model, lr=0.02)


@pytest.mark.parametrize("width", [WIDTH, WIDTH + 4])
@pytest.mark.parametrize("form", FORMS)
def test_products_of_groups(form: str, width: int) -> None:
    compare(form, partial(build, width), batches=partial(batch, size=12), steps=8)


def mixtral() -> tuple[nn.Module, torch.optim.Optimizer]:
    transformers: Any = transformers_loading.import_transformers()
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.MixtralConfig(
        vocab_size=WORDS, num_key_value_heads=2, num_local_experts=NUM_EXPERTS, num_experts_per_tok=2, **sizes
    )
    model: nn.Module = transformers.MixtralForCausalLM(config)
    return model, adam(model, lr=1e-3)


def words(index: int) -> Batch:
    return (torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(index)),), {}


def loop(training: Training, tokens: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss: Tensor = training.model(tokens, labels=tokens).loss
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, labels=tokens).loss
    return loss


@needs_transformers
@pytest.mark.support("Libraries", "mixtures of experts of transformers on a CPU", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_experts_of_transformers(form: str) -> None:
    """By the operators of plain PyTorch, and not by those that are called where a model is compiled."""

    def edit(training: Training, index: int) -> None:
        implementations = ("grouped_mm", "batched_mm", "grouped_mm")
        training.model.set_experts_implementation(implementations[index // 4])

    step = {"step": {"forward": loss_of}} if form == "train_step" else {}
    training = compare(
        form, mixtral, steps=12, batches=words, loop=loop, edit=edit, replays=5, rtol=1e-6, atol=1e-7, **step
    )
    assert training.status().mode == "replay"
