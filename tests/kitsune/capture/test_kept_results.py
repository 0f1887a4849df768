"""Functions that keep their results (`functools.lru_cache`): replays go by what plain PyTorch would be given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitsune.errors import RefusedError
from tests.kitsune.capture.changing import model, noticed
from tests.kitsune.capture.test_frontend import guarded
from tests.kitsune.training import FORMS, Net, Training, adam, compare

FACTORS = {"k": 1.0}


class Recipe:
    """What libraries keep: an object with constants in it."""

    def __init__(self, k: float) -> None:
        self.k = k


def keeping() -> Any:
    """A function that keeps numbers, and one that keeps objects, of what is now in `FACTORS`."""
    FACTORS["k"] = 1.0
    return (
        functools.lru_cache(lambda by=1, *, more=0: FACTORS["k"] * by + more),
        functools.lru_cache(lambda by=1: Recipe(FACTORS["k"] * by)),
    )


def cleared() -> Any:
    number, _ = keeping()

    def change() -> None:
        FACTORS["k"] = 5.0
        number.cache_clear()

    return model(lambda self, x: x * number()), change


def cleared_object() -> Any:
    _, recipe = keeping()

    def change() -> None:
        FACTORS["k"] = 5.0
        recipe.cache_clear()

    return model(lambda self, x: x * recipe().k), change


def edited() -> Any:
    _, recipe = keeping()
    return model(lambda self, x: x * recipe().k), lambda: setattr(recipe(), "k", 5.0)


def another_argument() -> Any:
    number, _ = keeping()
    made = model(lambda self, x: x * number(self.by), by=1)
    return made, lambda: setattr(made, "by", 5)


def another_keyword() -> Any:
    number, _ = keeping()
    made = model(lambda self, x: x * number(2, more=self.more), more=1)
    return made, lambda: setattr(made, "more", 5)


def another_function() -> Any:
    number, _ = keeping()
    made = model(lambda self, x: x * self.number(), number=number)
    return made, lambda: setattr(made, "number", functools.lru_cache(lambda: 5.0))


def another_object_with_a_method() -> Any:
    kind: Any = type("Kind", (Recipe,), {"by": functools.lru_cache(lambda self, by: self.k * by)})
    made = model(lambda self, x: x * self.own.by(2), own=kind(1.0))
    return made, lambda: setattr(made, "own", kind(5.0))


@pytest.mark.parametrize(
    "build",
    [
        cleared,
        cleared_object,
        edited,
        another_argument,
        another_keyword,
        another_function,
        another_object_with_a_method,
    ],
)
def test_another_result_is_noticed(build: Callable[[], Any]) -> None:
    noticed(build)


def test_what_is_kept_stays_whatever_is_read_becomes() -> None:
    number, recipe = keeping()
    call, runner = guarded(lambda x: x * number() * recipe().k)
    for k in (1.0, 2.0, 3.0):
        FACTORS["k"] = k
        assert call(torch.ones(2)).tolist() == [1.0, 1.0]
    assert len(runner.graphs) == 3


def test_what_is_kept_before_the_capture_is_taken() -> None:
    """Dynamo would compute it anew."""
    number, recipe = keeping()
    assert (number(), recipe().k) == (1.0, 1.0)
    FACTORS["k"] = 5.0
    call, _ = guarded(lambda x: x * number() * recipe().k)
    assert call(torch.ones(2)).tolist() == [1.0, 1.0]


def test_numbers_that_were_forgotten_and_come_out_as_before_are_no_others() -> None:
    number, _ = keeping()
    call, runner = guarded(lambda x: x * number())
    for _ in range(3):
        assert call(torch.ones(2)).tolist() == [1.0, 1.0]
        number.cache_clear()
    assert len(runner.graphs) == 3


def test_tensors_that_are_kept_are_refused() -> None:
    kept = functools.lru_cache(lambda: {"noise": torch.ones(2)})
    call, _ = guarded(lambda x: x * kept()["noise"])
    with pytest.raises(RefusedError, match=r"keeps tensors that it makes"):
        call(torch.ones(2))


def test_what_the_call_makes_is_refused_as_an_argument() -> None:
    kept = functools.lru_cache(lambda recipe: 1.0)
    call, _ = guarded(lambda x: x * kept(Recipe(1.0)))
    with pytest.raises(RefusedError, match="keeps results, and is given what the call makes"):
        call(torch.ones(2))


class Scaled(Net):
    def __init__(self, number: Callable[..., float], recipe: Callable[..., Recipe]) -> None:
        super().__init__()
        self.number, self.recipe = number, recipe

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number(x.shape[1]) * self.recipe(2).k


@pytest.mark.support("Models", "functools.lru_cache around a function that reads what may change", "replayed")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forgets", [False, True], ids=["keeps", "forgets"])
def test_a_function_that_keeps_results_reads_what_changes(form: str, forgets: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Scaled(*keeping())
        return made, adam(made)

    def edit(training: Training, index: int) -> None:
        if index == 6:
            FACTORS["k"] = 0.5
        if index == 6 and forgets:
            training.model.number.cache_clear()  # type: ignore[union-attr]

    training = compare(form, build, steps=12, edit=edit, replays=7)
    assert training.status().mode == "replay"


class InTurns(Net):
    """Asks for one of two results, by turns."""

    def __init__(self, number: Callable[[float], float]) -> None:
        super().__init__()
        self.number, self.k = number, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number(self.k)


@pytest.mark.support("Models", "functools.lru_cache, asked for different results by turns", "replayed")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, None], ids=["one result", "all results"])
def test_a_function_is_asked_for_nothing_that_the_call_does_not_ask_for(form: str, size: int | None) -> None:
    """What is asked for is kept, of what can be read by then, and takes the place of something else."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        @functools.lru_cache(maxsize=size)
        def number(k: float) -> float:
            return k * FACTORS["k"]

        FACTORS["k"] = 1.0
        made = InTurns(number)
        return made, adam(made)

    def edit(training: Training, index: int) -> None:
        FACTORS["k"] = 1.0 + 0.1 * index
        if index == 6:
            training.model.number.cache_clear()  # type: ignore[union-attr]
        training.model.k = 1.0 + index // 3 % 2  # type: ignore[assignment]

    compare(form, build, steps=14, edit=edit, replays=2)


@pytest.mark.libraries
@pytest.mark.support("Models", "einops", "replayed")
@pytest.mark.parametrize("form", FORMS)
def test_einops(form: str) -> None:
    einops = pytest.importorskip("einops")

    class Rearranging(Net):
        def forward(self, x: Tensor) -> Tensor:
            wide = einops.rearrange(super().forward(x), "b (h d) -> b h d", h=3)
            return einops.rearrange(wide, "b h d -> b (d h)") + einops.reduce(wide, "b h d -> b 1", "mean")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = Rearranging()
        return made, adam(made)

    assert compare(form, build).status().mode == "replay"
