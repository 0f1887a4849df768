"""What is compiled before parts are tried, and what comes of failures, interrupts and limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kitsune.background import Background, is_quiet, wait_until_quiet
from kitsune.fusion import ahead
from kitsune.fusion.ahead import Foresight, compile_ahead
from kitsune.fusion.judge import Verdict, key_of
from kitsune.fusion.match import Alone
from kitsune.kernels import tuning
from kitsune.timing import CostCache
from tests.kitsune.fusion.running import parts

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
X = torch.zeros(4, 4)

SAME = parts(lambda x: [x.sin() + x.sin()], lambda x: [x.sin() * 2], X)


def part(kernel: Callable[[Tensor], Tensor]) -> Alone:
    """One that `kernel` would replace."""
    graph = fx.Graph()
    graph.output([graph.call_function(kernel, (graph.placeholder("x"),))])
    return SAME._replace(after=fx.GraphModule({}, graph))


def prepare(*some: Alone, limit_s: float = 60.0) -> None:
    before = set(threading.enumerate())
    for background in compile_ahead(some, CPU, limit_s=limit_s):
        assert background.num_jobs > 0
        wait_until_quiet()
    began = [thread.name for thread in set(threading.enumerate()) - before]
    assert set(began) <= {"kitsune-compile-server"}, "its threads go on"


def test_parts_run_at_the_same_time_as_they_do_when_they_are_tried() -> None:
    together, modes = threading.Barrier(3), list[tuple[bool, bool]]()

    def kernel(x: Tensor) -> Tensor:
        together.wait(timeout=60)
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return x

    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        prepare(*[part(lambda x: kernel(x)) for _ in range(3)])
    assert modes == [(False, False)] * 3


@pytest.mark.parametrize("is_known", [False, True])
def test_compilers_are_expected_where_nothing_is_known(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, started = CostCache(tmp_path, {}), list[str]()
    if is_known:
        cache.put("mm", 1.0)
    monkeypatch.setattr(CostCache, "of", lambda device: cache)
    monkeypatch.setattr(ahead.compile_client, "start", lambda: started.append("compilers"))
    monkeypatch.setattr(ahead.triton_key, "make_ahead", lambda: started.append("key"))
    ahead.expect(CUDA)
    assert started == (["key"] if is_known else ["key", "compilers"])


def test_only_few_parts_have_their_values_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MOST_PARTS", 2)
    threads = set()

    def kernel(x: Tensor) -> Tensor:
        threads.add(threading.current_thread())
        return x

    prepare(*[part(kernel) for _ in range(8)])
    assert 1 <= len(threads) <= 2


@pytest.mark.parametrize(("share", "most"), [(0.9, 0), (1.0, 1), (3.5, 3), (100.0, 16)])
def test_most_memory_is_left_to_the_training(share: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes more alone is left to its trial."""
    some = [part(lambda x: x) for _ in range(40)]
    num_bytes = ahead._num_bytes(some[0])
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (int(4 * share * num_bytes), 2**40))
        most_bytes = ahead._most_bytes(CUDA)
    monkeypatch.setattr(ahead, "_most_bytes", lambda _: most_bytes)
    at_a_time: list[int] = []

    def background(jobs: list[Any], most_at_a_time: int, stop: Callable[[], None]) -> Background[bool]:
        at_a_time.append(most_at_a_time)
        return Background(jobs, most_at_a_time, stop)

    monkeypatch.setattr(ahead, "Background", background)
    prepare(*some)
    assert at_a_time == [most] * (most > 0)


@pytest.mark.parametrize("error", [RuntimeError("no code"), torch.OutOfMemoryError("CUDA out of memory"), TypeError()])
def test_failures_are_left_to_the_trials(error: Exception) -> None:
    ran = []

    def fail(x: Tensor) -> Tensor:
        raise error

    def kernel(x: Tensor) -> Tensor:
        ran.append(x)
        return x

    prepare(part(fail), part(kernel), part(fail))
    assert len(ran) == 1


def test_what_has_nothing_to_compile_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are convolutions: cuDNN may be timing its algorithms."""
    monkeypatch.setattr(ahead, "examples", lambda *_: pytest.fail("run"))

    def convolution(x: Tensor) -> list[Tensor]:
        return [torch.nn.functional.conv2d(x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)).view(1)]

    with_kernel = part(torch.neg)._replace(given=parts(convolution, convolution, X).before)
    prepare(SAME, with_kernel)


@pytest.mark.parametrize("way", ["close", "delete"])
def test_closed_it_ends_soon_and_waits_for_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    begun, end, ran = threading.Event(), threading.Event(), []

    def kernel(x: Tensor) -> Tensor:
        ran.append(x)
        begun.set()
        end.wait(60)
        return x

    monkeypatch.setattr(ahead, "_MOST_PARTS", 1)
    course = compile_ahead([part(kernel) for _ in range(200)], CPU, limit_s=60.0)
    next(course)
    assert begun.wait(60)
    if way == "close":
        course.close()
    del course
    assert not is_quiet(), "a kernel is still being compiled"
    end.set()
    wait_until_quiet()
    assert len(ran) == 1
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_when_the_time_is_up_nothing_more_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MOST_PARTS", 1)
    ran, late = [], threading.Event()

    def kernel(x: Tensor) -> Tensor:
        ran.append(x)
        late.wait(0.2)
        return x

    prepare(*[part(kernel) for _ in range(200)], limit_s=0.05)
    assert 1 <= len(ran) < 200


def test_only_what_ran_is_timed_for_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there was no time for would be compiled then, while the training waits."""
    ran, late, waiting = (part(lambda x: x) for _ in range(3))
    outcomes, timed = {id(ran): [False], id(late): [None], id(waiting): [True, False]}, list[Alone]()
    monkeypatch.setattr(ahead, "_compile", lambda one, *_: outcomes[id(one)].pop(0))
    monkeypatch.setattr(ahead, "_run", lambda one, _: timed.append(one))
    prepare(ran, late, waiting)
    assert list(map(id, timed)) == [id(ran)]
    assert not any(outcomes.values())


class Kernel:
    """Of two forms, the later of which takes less time; counts what is compiled."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def variant(self, name: str) -> Alone:
        def launch(x: Tensor) -> Tensor:
            form = tuning.choose("kernel", ("small", "large"), lambda form: self.compiled.append(name + form), CUDA)
            self.compiled.append(name + form)
            return x

        return part(launch)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[float]]:
    """Microseconds that are still to be said by the timer."""
    said: list[float] = []

    def device_us(run: Callable[[], object], *_: object, **__: object) -> float:
        assert threading.current_thread() is threading.main_thread(), "timed while others run"
        return said.pop(0)

    monkeypatch.setattr(tuning, "device_us", device_us)
    monkeypatch.setattr(tuning, "synchronize", lambda _: None)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(CostCache, "of", classmethod(lambda cls, _: cls(tmp_path, {"device": "of the test"})))
    return said


def test_without_variants_nothing_is_timed(timed: list[float]) -> None:
    kernel = Kernel()
    prepare(kernel.variant(""))
    assert set(kernel.compiled) == {"small", "large"}
    assert tuning._chosen == {}


def test_variants_are_compiled_in_the_form_that_is_chosen_for_the_first(timed: list[float]) -> None:
    timed += [2.0, 1.0]
    kernel = Kernel()
    prepare(*[kernel.variant(name) for name in ("a ", "b ", "c ")])
    assert timed == []
    compiled = [{form for form in kernel.compiled if form.startswith(name)} for name in "abc"]
    assert sorted(map(len, compiled)) == [1, 1, 2]
    assert all("large" in " ".join(forms) for forms in compiled)


def test_foreseen_is_what_is_not_known_to_be_refused() -> None:
    others = [SAME._replace(after=part(kernel).after) for kernel in (torch.neg, torch.exp, torch.cos)]
    verdicts = {key_of(SAME): Verdict(None, 2.0, 1.0), key_of(others[0]): Verdict("it is not faster", 1.0, 2.0)}
    foresight = Foresight(verdicts.get)
    assert [foresight(one) for one in (SAME, others[0])] == list(verdicts.values())
    assert list(foresight.parts.values()) == [SAME]
    assert foresight.is_certain
    assert [foresight(one) for one in (*others[1:], others[1])] == [Verdict(None)] * 3
    assert list(foresight.parts.values()) == [SAME, *others[1:]], "the same replacement counts once"
    assert not foresight.is_certain
