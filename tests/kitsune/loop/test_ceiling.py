"""Captures of one model have a ceiling."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from kitsune.errors import RefusedError
from kitsune.loop import ceiling
from kitsune.loop.ceiling import spend_capture
from tests.kitsune.training import FORMS, Training, adam, batch, net_and_adam


def test_replays_earn_further_captures() -> None:
    module = nn.Linear(1, 1)
    for _ in range(256):
        spend_capture(module, 0)
    with pytest.raises(RefusedError, match="256 captures of the model were made"):
        spend_capture(module, 999)
    spend_capture(module, 1)
    with pytest.raises(RefusedError) as caught:
        spend_capture(module, 0)
    assert not caught.value.passing
    spend_capture(nn.Linear(1, 1), 0)


def test_models_that_are_gone_are_not_counted() -> None:
    before = len(ceiling._spent)
    module = nn.Linear(1, 1)
    spend_capture(module, 0)
    assert len(ceiling._spent) == before + 1
    del module
    gc.collect()
    assert len(ceiling._spent) == before


@pytest.mark.support(
    "Shapes and modes", "new shapes that come back, after 256 captures", "plain PyTorch, with a reason"
)
@pytest.mark.parametrize("form", FORMS)
def test_shapes_beyond_the_ceiling_run_as_plain_pytorch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "_MOST_CAPTURES", 3)

    def train(form: str) -> tuple[list[float], Training]:
        torch.manual_seed(0)
        model, _ = net_and_adam()
        training = Training(form, model, adam(model))
        losses = [training.step(*batch(index, size=2 + index // 3)[0]).item() for index in range(18)]
        return losses, training

    losses, training = train(form)
    assert losses == train("eager")[0]
    status = training.status()
    assert status.replays == {"train_step": 6, "drop_in": 5}[form]  # the module is found in the first call
    assert status.mode == "eager"
    assert "captures of the model were made" in status.reason
    assert len(status.refusals) == 1
