"""Sums of gradients between updates."""

from __future__ import annotations

import torch
from torch import nn

from kitsune.capture.step_program import StepSpec
from kitsune.loop.accumulation import Accumulators


def spec_of(model: nn.Module, accumulate: int) -> StepSpec:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return StepSpec(model, lambda args, kwargs: model(*args).sum(), optimizer, accumulate=accumulate)


def test_the_phases_of_an_update() -> None:
    accumulators = Accumulators(spec_of(nn.Linear(2, 2), 3))
    phases = []
    for _ in range(7):
        phases.append(accumulators.phase())
        accumulators.advance()
    assert phases == ["accumulate", "accumulate", "last"] * 2 + ["accumulate"]
    assert Accumulators(spec_of(nn.Linear(2, 2), 1)).phase() == "whole"


def test_nothing_is_summed_without_accumulation() -> None:
    accumulators = Accumulators(spec_of(nn.Linear(2, 2), 1))
    accumulators.phase()
    assert accumulators.sums == {}


def test_autograd_adds_to_the_sums() -> None:
    model = nn.Linear(2, 2)
    accumulators = Accumulators(spec_of(model, 4))
    for count in (1, 2, 3):
        accumulators.phase()
        accumulators.attach()
        model(torch.ones(1, 2)).sum().backward()
        accumulators.detach()
        assert all(param.grad is None for param in model.parameters())
        for param in model.parameters():
            assert torch.equal(accumulators.sums[id(param)], torch.full_like(param, count))
        accumulators.advance()


def test_a_parameter_without_a_gradient_stays_without() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    accumulators = Accumulators(spec_of(model, 2))
    accumulators.phase()
    accumulators.attach()
    model[0](torch.ones(1, 2)).sum().backward()
    accumulators.detach()
    accumulators.advance()
    accumulators.phase()
    accumulators.attach()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None
    assert accumulators.covered_by(model[0].parameters())
    assert not accumulators.covered_by(model[1].parameters())


def test_parameters_that_come_later_or_change() -> None:
    model = nn.Linear(2, 2)
    spec = spec_of(model, 2)
    accumulators = Accumulators(spec)
    accumulators.phase()
    accumulators.advance()
    late = nn.Parameter(torch.ones(3))
    spec.optimizer.add_param_group({"params": [late]})
    model.double()
    accumulators.phase()
    assert accumulators.sums[id(late)].shape == (3,)
    assert accumulators.sums[id(model.weight)].dtype is torch.float64


def test_clearing_and_a_new_update() -> None:
    model = nn.Linear(2, 2)
    accumulators = Accumulators(spec_of(model, 2))
    for _ in range(2):
        accumulators.phase()
        accumulators.attach()
        model(torch.ones(1, 2)).sum().backward()
        accumulators.detach()
        accumulators.advance()
    accumulators.clear()
    assert accumulators.covered_by([])
    assert not any(total.any() for total in accumulators.sums.values())
