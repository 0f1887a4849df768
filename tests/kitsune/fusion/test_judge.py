"""The judgement: agreement, times, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kitsune.capture.trace import trace
from kitsune.fusion import judge
from kitsune.fusion.judge import Measured, agree, examples
from kitsune.fusion.match import Alone
from kitsune.timing import CostCache

CPU = torch.device("cpu")
X = torch.zeros(4, 4)


def graph(function: Callable[..., list[Tensor]], *inputs: Tensor) -> fx.GraphModule:
    return trace(function, inputs)


def parts(before: Callable[..., list[Tensor]], after: Callable[..., list[Tensor]], *inputs: Tensor) -> Alone:
    return Alone(graph(before, *inputs), graph(after, *inputs), graph(lambda *tensors: list(tensors), *inputs))


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache(tmp_path, {"device": "of the test"})


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the timer says, one after the other."""
    said: list[float] = []

    def device_us(run: Callable[[], object], device: torch.device, **_: Any) -> float:
        run()
        return said.pop(0)

    monkeypatch.setattr(judge, "device_us", device_us)
    return said


DOUBLED = parts(lambda x: [x.sin() + x.sin()], lambda x: [x.sin() * 2], X)


@pytest.mark.parametrize(("before_us", "after_us", "taken"), [(10.0, 5.0, True), (10.0, 9.9, False), (5.0, 9.0, False)])
def test_what_is_clearly_faster_is_taken(
    before_us: float, after_us: float, taken: bool, cache: CostCache, times: list[float]
) -> None:
    times += [before_us, after_us]
    verdict = Measured(CPU, cache)(DOUBLED)
    assert (verdict.refusal is None) == taken
    assert (verdict.before_us, verdict.after_us) == (before_us, after_us)


def test_times_are_taken_once(cache: CostCache, times: list[float], tmp_path: Path) -> None:
    times += [10.0, 5.0]
    first = Measured(CPU, cache)(DOUBLED)
    assert Measured(CPU, cache)(DOUBLED) == first
    cache.save()
    assert Measured(CPU, CostCache(tmp_path, {"device": "of the test"}))(DOUBLED) == first
    assert times == []


def test_when_the_time_is_up_only_what_is_known_is_judged(cache: CostCache, times: list[float]) -> None:
    times += [10.0, 5.0]
    known = Measured(CPU, cache)(DOUBLED)
    judge = Measured(CPU, cache, limit_s=-1.0)
    assert judge(DOUBLED) == known
    verdict = judge(parts(lambda x: [x.exp() + x.exp()], lambda x: [x.exp() * 2], X))
    assert "no time left" in (verdict.refusal or "")


def scaled(x: Tensor) -> list[Tensor]:
    return [x.sin() * 2.1]


def not_a_number(x: Tensor) -> list[Tensor]:
    return [x.sin() * float("nan")]


def overwriting(x: Tensor) -> list[Tensor]:
    y = x.sin() * 2
    x.zero_()
    return [y]


@pytest.mark.parametrize("after", [scaled, not_a_number, overwriting])
def test_what_differs_is_refused_and_not_tried_again(after: Callable[..., list[Tensor]], cache: CostCache) -> None:
    compared = parts(lambda x: [x.sin() + x.sin()], after, X)
    verdict = Measured(CPU, cache)(compared)
    assert "differ" in (verdict.refusal or "")
    assert (verdict.before_us, verdict.after_us) == (None, None)
    assert "before" in (Measured(CPU, cache, limit_s=-1.0)(compared).refusal or "")


def half_forgotten(x: Tensor) -> list[Tensor]:
    return [torch.cat([torch.zeros_like(x[:1]), x[1:]]).sin() * 2]


def in_another_type(x: Tensor) -> list[Tensor]:
    return [(x.sin() * 2).bfloat16()]


def hardly_updated(x: Tensor) -> list[Tensor]:
    return [x.mul_(1.00095).sum()]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda x: [x.sin() * 2], half_forgotten),
        (lambda x: [x.sin() * 2], in_another_type),
        (lambda x: [x.mul_(1.001).sum()], hardly_updated),
        (lambda x: [torch.where(x.isnan(), x, x * 2)], lambda x: [x * 2.5]),
    ],
)
def test_small_differences_are_seen(before: Callable[..., list[Tensor]], after: Callable[..., list[Tensor]]) -> None:
    assert agree(parts(before, before, X), CPU)
    assert not agree(parts(before, after, X), CPU)


def test_masks_are_not_all_the_same() -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    with_mask = graph(lambda x, mask: [torch.where(mask, x, 0)], X, mask)
    without = graph(lambda x, mask: [x * 0], X, mask)
    given = graph(lambda *tensors: list(tensors), X, mask)
    assert not agree(Alone(with_mask, without, given), CPU)


def test_low_precision_is_allowed_its_rounding() -> None:
    def before(x: Tensor) -> list[Tensor]:
        return [(x.bfloat16().sin() * 3).float()]

    assert agree(parts(before, lambda x: [x.sin() * 3], X), CPU)
    assert not agree(parts(lambda x: [x.sin() * 3], before, X), CPU)


def test_what_fails_is_refused_with_its_reason(cache: CostCache) -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("out of resources\nand more")

    broken = fx.Graph()
    broken.output([broken.call_function(fail, (broken.placeholder("x"),))])
    verdict = Measured(CPU, cache)(DOUBLED._replace(after=fx.GraphModule({}, broken)))
    assert verdict.refusal == "it failed: out of resources"


def test_examples_are_valid_and_repeat() -> None:
    numbers = torch.zeros(5, dtype=torch.int64)
    inputs = torch.zeros(3, 2).t(), torch.zeros(3), numbers, torch.zeros((), dtype=torch.half), X[:1].expand(7, 4)
    given = graph(lambda *tensors: list(tensors), *inputs)
    made = examples(given, CPU)
    for one, wanted in zip(made, inputs, strict=True):
        assert (one.dtype, one.size(), one.stride()) == (wanted.dtype, wanted.size(), wanted.stride())
    assert (made[1] > 0).all()
    assert not made[2].any()
    assert all(map(torch.equal, made, examples(given, CPU)))


def test_the_random_numbers_of_the_user_are_not_touched(cache: CostCache) -> None:
    state = torch.get_rng_state()
    Measured(CPU, cache)(DOUBLED)
    assert torch.equal(torch.get_rng_state(), state)
