"""Where tensors and numbers are, and how they come back there."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kitsune.loop.places import Places, containers


class Owner:
    def __init__(self) -> None:
        self.number = 1
        self.history = [1, 2]
        self.seen = {"a", "b"}
        self.groups = [{"lr": 0.1, "params": [1]}]
        self.state: dict[str, Any] = defaultdict(dict)
        self.state["first"]["step"] = 3
        self.kinds = {1: "x", 2: "y"}


CHANGES: dict[str, Callable[[Owner], Any]] = {
    "an attribute": lambda owner: setattr(owner, "number", 2),
    "a new attribute": lambda owner: setattr(owner, "other", 2),
    "an attribute that goes": lambda owner: delattr(owner, "number"),
    "a longer list": lambda owner: owner.history.append(3),
    "a shorter list": lambda owner: owner.history.pop(0),
    "another list": lambda owner: setattr(owner, "history", []),
    "a larger set": lambda owner: owner.seen.add("c"),
    "a smaller set": lambda owner: owner.seen.discard("a"),
    "a dict in a list": lambda owner: owner.groups[0].update(lr=0.2, other=1),
    "a list in a dict in a list": lambda owner: owner.groups[0]["params"].append(2),
    "a dict in a dict": lambda owner: owner.state["first"].update(step=4),
    "a dict by default": lambda owner: owner.state["second"],
    "an entry that goes": lambda owner: owner.kinds.pop(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_object_holds_is_put_back(change: str) -> None:
    owner = Owner()
    before, parts = copy.deepcopy(vars(owner)), dict(vars(owner))
    places = Places([], [owner], [])
    CHANGES[change](owner)
    assert vars(owner) != before
    places.restore(copies=False)
    assert vars(owner) == before
    assert all(vars(owner)[name] is part for name, part in parts.items())


def test_gradients_are_put_back_and_lent_as_copies() -> None:
    param, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    grad = param.grad = torch.ones(2)
    places = Places([], [], [param, without])
    places.restore(copies=True)
    assert param.grad is not None
    param.grad += 1
    without.grad = torch.ones(2)
    places.restore(copies=False)
    assert param.grad is grad
    assert grad.tolist() == [1.0, 1.0]
    assert without.grad is None


def test_buffers_are_put_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    norm = model[0]
    mean = norm.running_mean
    places = Places([model], [], [])
    norm.running_mean = torch.ones(2)
    norm.register_buffer("other", torch.ones(1))
    places.restore(copies=False)
    assert norm.running_mean is mean
    assert list(norm._buffers) == ["running_mean", "running_var", "num_batches_tracked"]


def test_containers_have_names_and_come_once() -> None:
    owner = Owner()
    owner.state["itself"] = owner.state
    owner.state["same"] = owner.history
    found = [(name, id(container)) for name, container in containers(owner)]
    assert len({key for _, key in found}) == len(found)
    names = [name for name, _ in found]
    assert sorted(names) == sorted(["", "history", "seen", "groups", "groups", "params", "state", "first", "kinds"])
