"""Whether modules were compiled is found out without a look at all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

import kitsune
from kitsune.capture.compilations import Compilations
from kitsune.loop import alive, interception


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """As at the beginning of a process."""
    for kind, name in ((OptimizedModule, "__init__"), (nn.Module, "compile")):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # and taken back at the end
    return Compilations()


def nothing() -> Iterator[nn.Module]:
    pytest.fail("modules are looked at again")


def test_modules_that_were_compiled_before(compilations: Compilations) -> None:
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    assert compilations.any_among(lambda: [nn.Linear(2, 2), compiled])
    assert compilations.any_among(nothing)


@pytest.mark.parametrize("in_place", [False, True])
def test_modules_that_are_compiled_later(compilations: Compilations, in_place: bool) -> None:
    model = nn.Linear(2, 2)
    assert not compilations.any_among(lambda: [model])
    assert not compilations.any_among(nothing)
    if in_place:
        model.compile(backend="eager")
    else:
        wrapper = torch.compile(model, backend="eager")
        assert torch.equal(wrapper(torch.ones(2)), model(torch.ones(2)))
    assert compilations.any_among(nothing)


def test_many_optimizers_look_at_all_objects_once(compilations: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    """As federated averaging, cross-validation and searches make them."""
    looks: list[int] = []
    get_objects = gc.get_objects

    def counted() -> list[object]:
        looks.append(1)
        return get_objects()

    monkeypatch.setattr(interception, "compilations", compilations)
    compilations.any_among(list)  # none is compiled, whatever other tests have left
    monkeypatch.setattr(alive.gc, "get_objects", counted)
    for _ in range(5):
        model = nn.Linear(2, 2)
        optimizer = kitsune.KitsuneOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert not looks
    wrapper = torch.compile(nn.Linear(2, 2), backend="eager")
    kitsune.KitsuneOptimizer(torch.optim.SGD, wrapper.parameters(), lr=0.1)  # type: ignore[attr-defined]
    assert looks
