"""Hooks of all modules' calls: Kitsune's own, which look for models, are in the way of no training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import kitsune
from kitsune.capture.global_hooks import global_hook_facts, look_at_calls, refuse_global_hooks, without_own
from kitsune.native.build import facts_type
from tests.kitsune.training import FORMS, Net, Training, adam, compare, net_and_adam


def nothing(*_args: object) -> None:
    """A hook."""


pytestmark = pytest.mark.usefixtures("nobody_else_looks")


@pytest.fixture
def seen() -> Iterator[list[nn.Module]]:
    """The modules that are called while Kitsune looks."""
    modules = list[nn.Module]()
    stop = look_at_calls(lambda module, _args: modules.append(module))
    yield modules
    stop()
    assert not hooks()


def hooks() -> dict[int, object]:
    return dict(torch_module._global_forward_pre_hooks)


MODEL = nn.Linear(2, 2)


def call() -> None:
    MODEL(torch.zeros(1, 2))


def test_several_look(seen: list[nn.Module]) -> None:
    others = list[nn.Module]()
    stop = look_at_calls(lambda module, _args: others.append(module))
    call()
    stop()
    stop()
    call()
    assert (seen, others) == ([MODEL] * 2, [MODEL])
    assert len(hooks()) == 1


def test_own_hooks_are_not_refused(seen: list[nn.Module]) -> None:
    assert refuse_global_hooks() is None
    user = register_module_forward_hook(nothing)
    assert "global module hooks" in str(refuse_global_hooks())
    user.remove()
    assert refuse_global_hooks() is None


def test_facts_change_with_the_users_hooks(seen: list[nn.Module]) -> None:
    facts = facts_type()(global_hook_facts())
    assert facts.hold()
    user = register_module_forward_pre_hook(nothing)
    assert not facts.hold()
    user.remove()
    assert facts.hold()


def test_own_hooks_are_away_for_a_while(seen: list[nn.Module]) -> None:
    user = register_module_forward_pre_hook(nothing)
    with without_own(), without_own():
        assert hooks().keys() == {user.id}
        call()
    assert len(hooks()) == 2
    call()
    user.remove()
    assert seen == [MODEL]


def test_who_begins_or_ends_to_look_meanwhile_changes_nothing_till_the_end(seen: list[nn.Module]) -> None:
    """In whichever thread: Dynamo goes through the hooks at that time."""

    def begin() -> None:
        stops.append(look_at_calls(lambda module, _args: others.append(module)))

    stops, others = list[Callable[[], None]](), list[nn.Module]()
    begin()
    with without_own():
        stops.pop()()
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        assert not hooks()
    call()
    stops.pop()()
    assert (seen, others) == ([MODEL], [MODEL])


def test_captures_in_several_threads() -> None:
    """Models are found meanwhile, and none of the captures meets another one's search."""

    def train(_number: int) -> list[kitsune.Status]:
        trainings = [Training("drop_in", *net_and_adam()) for _ in range(3)]
        for training in trainings:
            training.run(12)
        return [training.status() for training in trainings]

    with ThreadPoolExecutor(4) as pool:
        found = [status for some in pool.map(train, range(4)) for status in some]
    refusals = {refusal for status in found for refusal in status.refusals}
    assert not [one for one in refusals if "hook" in one or "KeyError" in one or "dictionary changed" in one], refusals


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
