"""The judgement: times, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kitsune.fusion import judge
from kitsune.fusion.judge import Measured
from kitsune.fusion.match import Alone
from kitsune.timing import CostCache
from tests.kitsune.fusion.running import parts

CPU = torch.device("cpu")
X = torch.zeros(4, 4)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CostCache]:
    yield in_another_process(tmp_path)
    judge._failures.clear()


def in_another_process(tmp_path: Path) -> CostCache:
    judge._failures.clear()
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
    verdict = Measured(CPU, cache, limit_s=60.0)(DOUBLED)
    assert (verdict.refusal is None) == taken
    assert (verdict.before_us, verdict.after_us) == (before_us, after_us)


def test_times_are_taken_once(cache: CostCache, times: list[float], tmp_path: Path) -> None:
    times += [10.0, 5.0]
    first = Measured(CPU, cache, limit_s=60.0)(DOUBLED)
    assert Measured(CPU, cache, limit_s=60.0)(DOUBLED) == first
    cache.save()
    assert Measured(CPU, CostCache(tmp_path, {"device": "of the test"}), limit_s=60.0)(DOUBLED) == first
    assert times == []


def test_when_the_time_is_up_only_what_is_known_is_judged(cache: CostCache, times: list[float]) -> None:
    times += [10.0, 5.0]
    known = Measured(CPU, cache, limit_s=60.0)(DOUBLED)
    judge = Measured(CPU, cache, limit_s=-1.0)
    assert judge(DOUBLED) == known
    verdict = judge(parts(lambda x: [x.exp() + x.exp()], lambda x: [x.exp() * 2], X))
    assert "no time left" in (verdict.refusal or "")


def failing(error: Exception) -> Alone:
    def fail(x: Tensor) -> Tensor:
        raise error

    broken = fx.Graph()
    broken.output([broken.call_function(fail, (broken.placeholder("x"),))])
    return DOUBLED._replace(after=fx.GraphModule({}, broken))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


MEMORY = torch.OutOfMemoryError("CUDA out of memory")


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
    verdict = Measured(CPU, cache, limit_s=60.0)(compared)
    assert "differ" in (verdict.refusal or "")
    assert (verdict.before_us, verdict.after_us) == (None, None)
    assert "before" in (Measured(CPU, cache, limit_s=-1.0)(compared).refusal or "")


def out_of_resources() -> Exception:
    pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.errors import OutOfResources  # Triton is optional

    return OutOfResources(2, 1, "shared memory")


def test_what_differs_is_known_to_other_processes(cache: CostCache, tmp_path: Path) -> None:
    compared = parts(lambda x: [x.sin() + x.sin()], scaled, X)
    Measured(CPU, cache, limit_s=60.0)(compared)
    cache.save()
    verdict = Measured(CPU, in_another_process(tmp_path), limit_s=-1.0)(compared)
    assert "tried before" in (verdict.refusal or "")


def test_what_fails_is_refused_with_its_reason_by_this_process(cache: CostCache, tmp_path: Path) -> None:
    compared = failing(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED\nand more"))
    assert Measured(CPU, cache, limit_s=60.0)(compared).refusal == "it failed: CUBLAS_STATUS_ALLOC_FAILED"
    assert Measured(CPU, cache, limit_s=-1.0)(compared).refusal == "it failed: CUBLAS_STATUS_ALLOC_FAILED"
    cache.save()
    verdict = Measured(CPU, in_another_process(tmp_path), limit_s=-1.0)(compared)
    assert "no time left" in (verdict.refusal or "")


def test_what_does_not_compile_is_known_to_other_processes(cache: CostCache, tmp_path: Path) -> None:
    compared = failing(caused(RuntimeError("no form of a kernel works"), out_of_resources()))
    assert Measured(CPU, cache, limit_s=60.0)(compared).refusal == "it failed: no form of a kernel works"
    cache.save()
    verdict = Measured(CPU, in_another_process(tmp_path), limit_s=-1.0)(compared)
    assert "tried before" in (verdict.refusal or "")


@pytest.mark.parametrize("error", [MEMORY, caused(RuntimeError("Inductor failed"), MEMORY)])
def test_what_needs_more_memory_is_tried_again(error: Exception, cache: CostCache) -> None:
    compared = failing(error)
    assert Measured(CPU, cache, limit_s=60.0)(compared).refusal == "there is too little memory to try it"
    assert "no time left" in (Measured(CPU, cache, limit_s=-1.0)(compared).refusal or "")


def test_the_random_numbers_of_the_user_are_not_touched(cache: CostCache) -> None:
    state = torch.get_rng_state()
    Measured(CPU, cache, limit_s=60.0)(DOUBLED)
    assert torch.equal(torch.get_rng_state(), state)
