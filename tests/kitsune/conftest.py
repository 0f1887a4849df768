"""What the tests of kitsune share: one thread, nothing left over from test to test, readable reports of failures."""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.guards

from kitsune import fallback
from kitsune.background import Background, wait_until_quiet
from kitsune.budget import CaptureBudget
from kitsune.capture import global_hooks
from kitsune.engine import contest, rewriting
from kitsune.fallback import Chooser
from kitsune.loop.whole_step import WholeStep
from tests.kitsune import plans, static_memory
from tests.kitsune.clock import Clock
from tests.kitsune.compiling import Compiling
from tests.kitsune.training import FORMS, Training, net_and_adam


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and one thread adds up in the same order always."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _untimed_guards() -> None:
    """With each capture, torch times its guards after it has emptied the processor's cache."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(scope="session")
def _frozen(_untimed_guards: None) -> Iterator[None]:
    """Keeps all that torch loads for a first capture out of the collections after each test."""
    for form in FORMS:
        Training(form, *net_and_adam()).run(3)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _collected(_frozen: None) -> Iterator[None]:
    """Optimizers of one test that wait for the collector would take their hooks away in the middle of another.

    What Dynamo keeps of each capture is set aside, or every collection would take longer than the one before. What was
    compiled for them ends, too: meanwhile the next test would time nothing.
    """
    yield
    gc.collect()
    gc.freeze()
    wait_until_quiet()


@pytest.fixture(params=["in order", "static memory", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, of each kind in turn: a CPU, one whose graphs keep their memory as CUDA graphs do, and a GPU."""
    if request.param == "static memory":
        static_memory.install(monkeypatch)
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """No steps are run for the pace of the loop alone: trainings here are short, and plans are chosen for them."""
    monkeypatch.setattr(contest, "_RUNOFF_TURN", contest._TURN)


@pytest.fixture(autouse=True)
def _captures_are_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they have their share of a training's time: those of tests take less than a second."""
    monkeypatch.setattr(CaptureBudget, "put_off_until", lambda *_: None)


@pytest.fixture(autouse=True)
def _nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test asks for it: on a GPU it takes long, and would change what other tests count and compare."""
    monkeypatch.setenv("KITSUNE_ENABLE_FUSION", "0")


@pytest.fixture(autouse=True)
def _compilers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step that asks for kernels, so that tests know in which step what is fused."""
    monkeypatch.setattr(rewriting, "compile_ahead", plans.compile_at_once)


@pytest.fixture
def nobody_else_looks() -> Iterator[None]:
    """Optimizers of other tests may look for models, and torch warns of the hook for that where it compiles modules."""
    gc.collect()
    own = global_hooks._own
    others = own._looks.copy()
    own._looks.clear()
    own._settle()
    yield
    own._looks.update(others)
    own._settle()


@pytest.fixture
def noise() -> Iterator[Callable[[bool], None]]:
    """Called with True, something goes on in the background; with False, it has ended."""
    end = threading.Event()

    def set_noise(is_on: bool) -> None:
        end.set()
        wait_until_quiet()
        end.clear()
        if is_on:
            Background([partial(end.wait, 60.0)], 1, end.set)

    yield set_noise
    set_noise(False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Times eager steps and replays."""
    clock = Clock()
    monkeypatch.setattr(fallback, "time", clock)
    monkeypatch.setattr(fallback, "involuntary_switches", lambda: clock.switches)
    for module in ("step_loop", "drop_in"):
        monkeypatch.setattr(f"kitsune.loop.{module}.synchronize", clock.synchronize)
    return clock


@pytest.fixture
def compiling(_compilers_are_waited_for: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    """Compilers that end when the test lets them: three parts, then two."""
    compiling = Compiling(3, 2)
    monkeypatch.setattr(rewriting, "compile_ahead", compiling)
    yield compiling
    for place in range(2):
        compiling.finish(place)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def replay_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets replay win against eager whatever their times."""

    def settle(chooser: Chooser) -> None:
        chooser.settled = True

    monkeypatch.setattr(Chooser, "_settle", settle)
    monkeypatch.setattr(Chooser, "_is_clear", lambda chooser: True)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call that a `WholeStep` was asked to repeat in the short way, whether it did."""
    answers: list[bool] = []
    repeat = WholeStep.repeat

    def watched(step: WholeStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        answers.append(False)
        loss = repeat(step, args, kwargs)
        answers[-1] = loss is not None
        return loss

    monkeypatch.setattr(WholeStep, "repeat", watched)
    return answers


@pytest.fixture
def short_way(request: pytest.FixtureRequest, taken: list[bool]) -> Iterator[None]:
    """Demands that the short way is in use, where the test is of a `TrainStep`."""
    yield
    assert any(taken) == (request.node.callspec.params.get("form", "train_step") == "train_step")


_MOST_CASES = {"kernels": 2, "fusion": 2, "passes": 2}
"""Of each test, by directory: the first ones. Operators are interpreted on the CPU, which is slow."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test of many cases some are enough on the CPU; the others are for long runs, and for GPUs."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        is_ours = item.path.is_relative_to(Path(__file__).parent)
        if is_ours and not torch.cuda.is_available() and not any(map(item.get_closest_marker, ("gpu", "slow"))):
            tests.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for (path, _), cases in tests.items():
        for item in _long_cases(path, cases):
            item.add_marker(pytest.mark.slow)


def _long_cases(path: Path, cases: list[pytest.Item]) -> list[pytest.Item]:
    if path.name == "test_parity.py":
        return [item for item in cases if _is_long_parity(item.name)]
    most = _MOST_CASES.get(path.parent.name)
    kept = _covering(cases) if most is None else cases[:most]
    return [item for item in cases if item not in kept]


def _is_long_parity(name: str) -> bool:
    is_long_model = "cpu-resnet18" in name and not name.endswith("fp32-train_step]")
    return is_long_model or name.endswith(("streams]", "fused]"))


def _covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Cases in which each value of each parameter occurs, and others as often as one another as far as that goes."""
    # By identity: their indices are those of the cases in newer versions of pytest.
    values = {
        item: tuple((name, id(value)) for name, value in item.callspec.params.items())
        for item in cases
        if hasattr(item, "callspec")
    }
    kept = [item for item in cases if item not in values]
    used = Counter[tuple[str, int]]()
    missing = {value for some in values.values() for value in some}
    while missing:
        best = max(
            values, key=lambda item: (len(missing.intersection(values[item])), -sum(used[v] for v in values[item]))
        )
        kept.append(best)
        used.update(values[best])
        missing.difference_update(values[best])
    return kept
