"""Variants in their steady state go on from a given state as eager PyTorch does."""

import pytest
import torch
from torch import Tensor

import models
from harness import variants
from harness.continuation import Continuation
from harness.continuation_recording import continuation
from harness.variants.building import start
from harness.variants.training import Ingredients, LoopTraining, Training, ingredients

CPU = torch.device("cpu")
FORMS = ["eager_fp32", "kitsune_dropin_fp32", "kitsune_deferred_fp32", "kitsune_trainstep_fp32"]


def made(variant: str, model: str = "policy_value") -> Ingredients:
    return ingredients(variants.get(variant), models.build(model, tiny=True), 8, CPU)


def went_on(training: Training, variant: str, model: str = "policy_value", steps: int = 5) -> Continuation | str:
    return continuation(training, made(variant, model), steps)


@pytest.mark.parametrize("model", ["policy_value", "vae"])
@pytest.mark.parametrize("variant", FORMS)
def test_from_the_same_state_every_variant_has_eager_s_losses(
    variant: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KITSUNE_MODE", "replay")
    training = start(variants.get(variant), made(variant, model))
    training.run(12)
    found = went_on(training, variant, model)
    assert isinstance(found, Continuation)
    assert found.gap < 1e-4
    assert found.noise == 0
    assert found.agrees
    assert len(found.losses) == len(found.eager) == 5
    assert found.num_replays == (0 if variant == "eager_fp32" else 5)
    initial = models.build(model, tiny=True)
    x, y = initial.batch(8, index=12 % 8)
    assert found.eager[0] == pytest.approx(initial.loss_fn(initial.module(x), y).item(), rel=1e-4)


class Wrong(torch.optim.Adam):
    """It updates, but not as Adam does."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1.02)


def test_a_wrong_update_is_seen() -> None:
    own = made("eager_fp32")
    training = LoopTraining(own, own.model, Wrong(own.model.parameters(), lr=own.learning_rate))
    training.run(3)
    found = went_on(training, "eager_fp32", steps=20)
    assert isinstance(found, Continuation)
    assert found.noise == 0
    assert not found.agrees


def test_what_is_raised_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    training = start(variants.get("eager_fp32"), made("eager_fp32"))

    def run(steps: int) -> Tensor:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(training, "run", run)
    assert went_on(training, "eager_fp32") == "it could not go on from a given state: RuntimeError: out of luck"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [name for name in variants.names() if name.startswith("handcaptured_compile")])
def test_what_is_captured_goes_on_too(variant: str) -> None:
    device = torch.device("cuda")
    entry = variants.get(variant)
    own, untrained = (ingredients(entry, models.build("policy_value", tiny=True), 8, device) for _ in range(2))
    training = start(entry, own)
    training.run(8)
    found = continuation(training, untrained, 20)
    assert isinstance(found, Continuation)
    assert found.agrees
