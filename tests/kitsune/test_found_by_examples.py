"""What training scripts have shown: several optimizers over one model, and outputs that are made of one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune


class LogitsAndLoss(nn.Module):
    """What nanoGPT returns, and the models of transformers for a call with `labels`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x)
        return logits, functional.cross_entropy(logits, targets)


def test_a_model_that_returns_logits_and_loss_is_replayed() -> None:
    model = LogitsAndLoss()
    optimizer = kitsune.KitsuneOptimizer(torch.optim.AdamW(model.parameters()), mode="replay")
    for _ in range(4):
        optimizer.zero_grad()
        _, loss = model(torch.randn(8, 4), torch.randint(3, (8,)))
        loss.backward()
        optimizer.step()
    assert optimizer.status().mode == "replay"
    assert optimizer.status().covered == ("forward", "backward", "update")


def test_two_optimizers_of_one_model_each_replay_their_part() -> None:
    def train(*, wrapped: bool) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        both: list[torch.optim.Optimizer] = [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.AdamW(model[2].parameters()),
        ]
        if wrapped:
            both = [kitsune.KitsuneOptimizer(one, mode="replay") for one in both]
        for _ in range(4):
            for one in both:
                one.zero_grad()
            functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
            for one in both:
                one.step()
        return model, both

    model, both = train(wrapped=True)
    assert [kitsune.status(one).mode for one in both] == ["replay", "replay"]
    for found, expected in zip(model.parameters(), train(wrapped=False)[0].parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_earlier_optimizer_leaves_the_model_to_one_of_its_head() -> None:
    """The autocast of the earlier optimizer changes the numbers, and the later one never finds the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    earlier = kitsune.KitsuneOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mode="replay", enable_amp=True)
    x, targets = torch.randn(8, 4), torch.randint(3, (8,))

    def loss_of_a_step(optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        loss_of_a_step(earlier)
    later = kitsune.KitsuneOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), mode="replay")
    for _ in range(3):
        hidden = functional.relu(functional.linear(x, model[0].weight, model[0].bias))
        expected = functional.cross_entropy(functional.linear(hidden, model[2].weight, model[2].bias), targets)
        assert loss_of_a_step(later) == pytest.approx(expected.item(), rel=1e-6)
    assert later.status().mode == "replay"
    assert earlier.status().replays == 1
