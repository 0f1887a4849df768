"""Hooks of all modules' calls: Kitsune's own, which look for models, are in the way of no training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

import kitsune
from kitsune.capture.global_hooks import (
    global_hook_facts,
    note_own,
    num_own,
    refuse_global_hooks,
    remove_own,
    without_own,
)
from kitsune.native.build import facts_type
from tests.kitsune.training import FORMS, Net, Training, adam, compare


def nothing(*_args: object) -> None:
    """A hook."""


@pytest.fixture
def own() -> Iterator[RemovableHandle]:
    handle = register_module_forward_pre_hook(nothing)
    note_own(handle)
    yield handle
    remove_own(handle)


def hooks() -> dict[int, object]:
    return dict(torch_module._global_forward_pre_hooks)


def test_own_hooks_are_not_refused(own: RemovableHandle) -> None:
    assert refuse_global_hooks() is None
    user = register_module_forward_hook(nothing)
    assert "global module hooks" in str(refuse_global_hooks())
    user.remove()
    assert refuse_global_hooks() is None


def test_facts_change_with_every_hook(own: RemovableHandle) -> None:
    facts = facts_type()(global_hook_facts())
    assert facts.hold()
    user = register_module_forward_pre_hook(nothing)
    assert not facts.hold()
    user.remove()
    assert facts.hold()


def test_own_hooks_are_away_for_a_while(own: RemovableHandle) -> None:
    user = register_module_forward_pre_hook(nothing)
    with without_own():
        assert hooks().keys() == {user.id}
    assert hooks().keys() == {own.id, user.id}
    user.remove()


def test_own_hooks_that_are_removed_meanwhile_do_not_come_back() -> None:
    handle, before = register_module_forward_pre_hook(nothing), num_own()
    note_own(handle)
    with without_own():
        remove_own(handle)
    assert handle.id not in hooks()
    assert num_own() == before


@pytest.mark.parametrize("form", FORMS)
def test_another_optimizer_begins_and_ends_its_search(form: str) -> None:
    """Before the capture of a step, and in the midst of its replays; it finds its model for all that."""

    def edit(training: Training, index: int) -> None:
        if index in (0, 4):
            other = Net()
            searching = kitsune.KitsuneOptimizer(adam(other), mode="replay")
            training.memo["other"] = other, searching
        if index in (3, 6):
            other, searching = training.memo["other"]
            for _ in range(4):
                searching.zero_grad()
                other(torch.randn(6, 4)).sum().backward()
                searching.step()
            assert searching.status().replays == 2

    training = compare(form, steps=10, edit=edit)
    assert training.status().refusals == ()
