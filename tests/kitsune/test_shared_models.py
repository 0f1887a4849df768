"""A model whose parts are trained by optimizers of their own, as a GAN that is one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kitsune

STEPS = 12


def net(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


class Gan(nn.Module):
    """Its call is the generator's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = net(4, 6), net(6, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def judge(self, x: Tensor) -> Tensor:
        return self.discriminator(x)

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters of the two optimizers."""
        return list(self.generator.parameters()), list(self.discriminator.parameters())


class Scaled(Gan):
    """Has a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z) * self.scale

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        generator, discriminator = super().parts()
        return [*generator, self.scale], discriminator


class Encoded(Gan):
    """The second optimizer trains two parts, of which one lies in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([net(6, 6), nn.Identity()])

    def judge(self, x: Tensor) -> Tensor:
        for head in self.heads:
            x = head(x)
        return self.discriminator(x)

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        generator, discriminator = super().parts()
        return generator, [*self.heads.parameters(), *discriminator]


class Whole(Gan):
    """Its call is of both parts, or of one."""

    def forward(self, z: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        return self.generator(z) if x is None else self.discriminator(x)

    def judge(self, x: Tensor) -> Tensor:
        return self(x=x)


KINDS = {"gan": Gan, "scaled": Scaled, "encoded": Encoded, "whole": Whole}


def bce(judged: Tensor, is_real: float) -> Tensor:
    return functional.binary_cross_entropy_with_logits(judged, torch.full_like(judged, is_real))


def toggle(trained: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    for param in (*trained, *others):
        param.requires_grad_(any(param is one for one in trained))


def train(
    kind: Callable[[], Gan],
    wrap: Callable[[torch.optim.Optimizer, int, Gan], torch.optim.Optimizer],
    *,
    order: str = "gd",
    toggles: bool = False,
    steps: int = STEPS,
) -> tuple[Gan, list[torch.optim.Optimizer], list[float]]:
    """The usual loop; `order` is of the generator's and the discriminator's updates."""
    torch.manual_seed(3)
    model = kind().double()
    parts = model.parts()
    optimizers = [wrap(torch.optim.Adam(part, lr=0.01, fused=True), place, model) for place, part in enumerate(parts)]
    losses = []
    for index in range(steps):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        z = torch.randn(5, 4, generator=generator, dtype=torch.float64)
        for which in order:
            place = "gd".index(which)
            if toggles:
                toggle(parts[place], parts[1 - place])
            optimizers[place].zero_grad()
            if which == "g":
                loss = bce(model.judge(model(z)), 1.0)
            else:
                loss = bce(model.judge(x), 1.0) + bce(model.judge(model(z).detach()), 0.0)
            loss.backward()
            optimizers[place].step()
            losses.append(loss.item())
    return model, optimizers, losses


def plain(optimizer: torch.optim.Optimizer, _place: int, _model: Gan) -> torch.optim.Optimizer:
    return optimizer


def wrapped(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda optimizer, _place, _model: kitsune.KitsuneOptimizer(optimizer, mode="replay", **options)


def statuses(optimizers: list[torch.optim.Optimizer]) -> list[kitsune.Status]:
    return [optimizer.status() for optimizer in optimizers if isinstance(optimizer, kitsune.KitsuneOptimizer)]


def same(kind: Callable[[], Gan], wrap: Callable[..., torch.optim.Optimizer], **options: Any) -> list[kitsune.Status]:
    """Compares with plain PyTorch."""
    model, optimizers, losses = train(kind, wrap, **options)
    reference, _, wanted = train(kind, plain, **options)
    torch.testing.assert_close(losses, wanted)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other, msg=lambda text, name=name: f"{name}: {text}")
    return statuses(optimizers)


@pytest.mark.support("Models", "a model whose parts have optimizers of their own, as a GAN", "replayed")
@pytest.mark.parametrize("toggles", [False, True])
@pytest.mark.parametrize("defer_loss", [False, True])
@pytest.mark.parametrize("order", ["gd", "dg"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loops_of_both_are_replayed(kind: str, order: str, defer_loss: bool, toggles: bool) -> None:
    found = same(KINDS[kind], wrapped(defer_loss=defer_loss), order=order, toggles=toggles)
    for status in found:
        assert status.mode == "replay", status
        assert status.covered[-1] == "update", status
        assert status.replays >= STEPS - 3


class Interleaved(Gan):
    """Weights belong to one optimizer, and biases to the other."""

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        params = list(self.parameters())
        return params[::2], params[1::2]


class Deep(Gan):
    """The parts of each optimizer are many."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12)))

    def judge(self, x: Tensor) -> Tensor:
        return self.discriminator(self.layers(x))

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(self.generator(z))

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        sides: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for index, layer in enumerate(self.layers):
            sides[index % 2].extend(layer.parameters())
        return [*self.generator.parameters(), *sides[0]], [*self.discriminator.parameters(), *sides[1]]


@pytest.mark.parametrize("kind", [Interleaved, Deep])
def test_what_cannot_be_parted_is_replayed_for_one_and_told(kind: Callable[[], Gan]) -> None:
    first, second = same(kind, wrapped())
    assert first.mode == "replay"
    assert second.mode == "eager"
    assert "answered for another KitsuneOptimizer" in second.reason
    if kind is Interleaved:
        assert "give one optimizer all parameters" in second.reason
    else:
        assert "name the parts of Deep that this optimizer trains: KitsuneOptimizer(..., model=)" in second.reason
        assert "discriminator" in second.reason


def test_parts_that_were_named_are_replayed() -> None:
    def wrap(optimizer: torch.optim.Optimizer, place: int, model: Gan) -> torch.optim.Optimizer:
        named = (model.generator, model.discriminator)[place]
        return kitsune.KitsuneOptimizer(optimizer, mode="replay", model=named)

    assert [status.mode for status in same(Deep, wrap)] == ["replay", "replay"]


class Unseen(Gan):
    """Computes with a part without calling it."""

    def forward(self, z: Tensor) -> Tensor:
        return self.generator.forward(z)

    def judge(self, x: Tensor) -> Tensor:
        return self.discriminator.forward(x)


def test_a_model_that_does_not_call_its_parts_is_replayed_as_a_whole() -> None:
    first, _ = same(Unseen, wrapped())
    assert (first.mode, first.covered) == ("replay", ("forward", "backward", "update"))


def test_an_optimizer_that_is_gone_has_no_part() -> None:
    model = Gan().double()
    wrapped()(torch.optim.Adam(model.discriminator.parameters()), 1, model)
    optimizer = kitsune.KitsuneOptimizer(torch.optim.Adam(model.generator.parameters()), mode="replay")
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
    assert optimizer.status().mode == "replay"
