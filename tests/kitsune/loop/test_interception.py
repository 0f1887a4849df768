"""Finding the modules of a loop and taking over their calls."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.capture.global_hooks import without_own
from kitsune.capture.watch import interceptor_in
from kitsune.loop.interception import PATIENCE_STEPS, ModuleFinder, TakenOver, call_module
from tests.kitsune.training import Net, num_looking


class Taker:
    """Notes what it is told, and answers calls with twice their result."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.calls = 0

    def found(self, module: nn.Module, *, is_running: bool) -> None:
        assert is_running
        self.modules.append(module)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.calls += 1
        return call_module(module, args, kwargs) * 2


@pytest.fixture(autouse=True)
def _no_hook_left_behind() -> Iterator[None]:
    before = num_looking()
    yield
    assert num_looking() == before


X = torch.ones(2, 4)


def test_the_outermost_module_is_found_at_its_first_call() -> None:
    model, taker, before = nn.Sequential(Net()), Taker(), num_looking()
    finder = ModuleFinder(model[0].last.parameters(), taker)
    assert num_looking() == before + 1
    nn.Linear(4, 4)(X)
    assert taker.modules == []
    model(X)
    model(X)
    assert taker.modules == [model]
    assert num_looking() == before, "the search ends when everything is found"
    finder.stop()


class Transparent(nn.Module):
    """What is set of it is set of the module inside as well, as wrappers of libraries do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "inner" and "inner" in self._modules:
            setattr(self.inner, name, value)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def test_a_wrapper_that_passes_attributes_on_is_taken_over_alone() -> None:
    model, taker = Transparent(nn.Linear(4, 3)), Taker()
    taken = TakenOver(model, taker)
    torch.testing.assert_close(model(X), model.inner(X) * 2)
    assert taker.calls == 1
    model.inner.compile(backend="eager")
    compiled = model.inner._compiled_call_impl
    taken.give_back()
    assert model._compiled_call_impl is None
    assert model.inner._compiled_call_impl is compiled


def test_several_modules_are_found_one_by_one() -> None:
    first, second, taker = nn.Linear(4, 4), nn.Linear(4, 3), Taker()
    finder = ModuleFinder([*first.parameters(), *second.parameters()], taker)
    first(X)
    assert taker.modules == [first]
    second(X)
    assert taker.modules == [first, second]
    finder.stop()


def test_a_part_called_first_and_the_whole_later() -> None:
    model, taker = Net(), Taker()
    finder = ModuleFinder(model.parameters(), taker)
    model.first(X)
    model(X)
    assert taker.modules == [model.first, model]
    finder.stop()


def test_a_module_without_any_of_the_parameters_is_passed_over() -> None:
    taker = Taker()
    finder = ModuleFinder([nn.Parameter(torch.ones(1))], taker)
    Net()(X)
    assert taker.modules == []
    finder.stop()
    finder.stop()


def test_a_module_whose_parameters_others_stand_in_for_at_first() -> None:
    model, taker = Net(), Taker()
    finder = ModuleFinder(model.parameters(), taker)
    others = {name: param.detach() * 2 for name, param in model.named_parameters()}
    torch.func.functional_call(model, others, (X,))
    assert taker.modules == []
    model(X)
    assert taker.modules == [model]
    finder.stop()


def test_the_search_waits_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are passed over then, as if Dynamo looked at them."""
    model, taker = Net(), Taker()
    finder = ModuleFinder(model.parameters(), taker)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for _ in range(100):
        model(torch.randn(2, 4))
        finder.count_step()
    assert taker.modules == []
    monkeypatch.undo()
    model(torch.randn(2, 4))
    assert taker.modules == [model]


def test_the_search_goes_on_while_the_hook_is_away() -> None:
    """Another thread may capture for long, and steps take little time."""
    model, taker = nn.Sequential(Net()), Taker()
    finder = ModuleFinder(model.parameters(), taker)
    with without_own():
        for _ in range(100):
            model(X)
            finder.count_step()
    assert taker.modules == []
    model(X)
    assert taker.modules == [model]


def test_iterations_in_which_a_call_may_have_come_unseen_do_not_count() -> None:
    """As where several threads train: another one captures in the midst of each iteration, and is done at its end."""
    model, taker = Net(), Taker()
    finder = ModuleFinder(model.parameters(), taker)
    for _ in range(3 * PATIENCE_STEPS):
        with without_own():
            model(X)
        finder.count_step()
    assert taker.modules == []
    model(X)
    assert taker.modules == [model]


@pytest.mark.support("Libraries", "`torch.jit.script(model)` of a model in training", "replayed")
def test_a_model_whose_calls_are_taken_over_can_be_scripted() -> None:
    model, taker = Net(), Taker()
    finder = ModuleFinder(model.parameters(), taker)
    model(X)
    taken = TakenOver(model, taker)
    assert torch.equal(model(X), 2 * call_module(model, (X,), {}))
    expected = call_module(model.eval(), (X,), {})
    assert torch.equal(torch.jit.script(model)(X), expected)
    assert torch.equal(torch.jit.script(nn.Sequential(model))(X), expected)
    assert taker.modules == [model]
    taken.give_back()
    finder.stop()


def test_the_search_gives_up_some_day() -> None:
    taker, before = Taker(), num_looking()
    finder = ModuleFinder([nn.Parameter(torch.ones(1))], taker)
    for _ in range(100):
        finder.count_step()
    assert num_looking() == before


def test_of_two_that_look_for_the_same_parameters_the_newer_one_finds_them() -> None:
    model, older, newer = Net(), Taker(), Taker()
    finders = [ModuleFinder(model.parameters(), taker) for taker in (older, newer)]
    model(X)
    assert (older.modules, newer.modules) == ([], [model])
    assert not any(finder._missing for finder in finders)


def test_an_older_one_finds_what_a_newer_one_gave_up() -> None:
    model, older, newer = Net(), Taker(), Taker()
    ModuleFinder(model.parameters(), older)
    ModuleFinder(model.parameters(), newer)
    del newer
    gc.collect()
    model(X)
    assert older.modules == [model]


def test_the_search_ends_with_its_taker() -> None:
    taker, before = Taker(), num_looking()
    finder = ModuleFinder(Net().parameters(), taker)
    del taker
    assert num_looking() == before
    finder.stop()


def taken_over() -> tuple[nn.Module, Taker, TakenOver]:
    model, taker = Net(), Taker()
    ModuleFinder(model.parameters(), taker).stop()
    return model, taker, TakenOver(model, taker)


def test_calls_are_answered_by_the_taker_until_it_gives_them_back() -> None:
    model, taker, taken = taken_over()
    expected = model.forward(X)
    assert torch.equal(model(X), expected * 2)
    assert taker.calls == 1
    taken.give_back()
    assert torch.equal(model(X), expected)
    assert taker.calls == 1
    assert model._compiled_call_impl is None
    taken.give_back()


def test_calls_come_back_when_the_taker_is_gone() -> None:
    model, taker, _ = taken_over()
    expected = model.forward(X)
    del taker
    gc.collect()
    assert torch.equal(model(X), expected)
    assert model._compiled_call_impl is None


def test_an_interceptor_gives_way_once_its_taker_was_dropped() -> None:
    model, taker, taken = taken_over()
    assert interceptor_in(model._compiled_call_impl) is taken
    assert not taken.gives_way()
    assert interceptor_in(model._compiled_call_impl) is taken
    taker.itself = taker  # type: ignore[attr-defined]  # so that it waits for the collector
    del taker
    assert taken.gives_way()
    assert model._compiled_call_impl is None


def test_giving_back_leaves_a_later_owner_alone() -> None:
    model, _taker, taken = taken_over()
    later = Taker()
    ModuleFinder(model.parameters(), later).stop()
    TakenOver(model, later)
    taken.give_back()
    model(X)
    assert later.calls == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_module_is_its_own(duplicate: Any) -> None:
    model, taker, _ = taken_over()
    twin = duplicate(model)
    assert twin._compiled_call_impl is None
    assert torch.equal(twin(X), model.forward(X))
    assert taker.calls == 0


def test_hooks_and_forward_stay_as_they_are() -> None:
    model, _taker, _ = taken_over()
    assert "forward" not in vars(model)
    seen: list[Tensor] = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output))
    model(X)
    assert len(seen) == 1
    handle.remove()
    assert set(model.state_dict()) == set(Net().state_dict())
