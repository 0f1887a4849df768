"""The guarded front end: one graph for a call, until what it depends on changes."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy
import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import config

from kitsune.capture.frontend import GuardedFunction, refuse_dynamo
from kitsune.errors import Refusal, RefusedError
from tests.kitsune.versions import skip_before_2_13


class Runner:
    """Runs the graphs that it is given, and counts."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def run(self, graph: fx.GraphModule, flat: Sequence[Tensor]) -> Sequence[Any]:
        self.graphs.append(graph)
        outputs: Sequence[Any] = graph(*flat)
        return outputs


def guarded(function: Callable[..., Any]) -> tuple[GuardedFunction, Runner]:
    runner = Runner()
    return GuardedFunction(function, runner.run), runner


def test_calls_run_the_graph() -> None:
    call, runner = guarded(lambda x: x * 2 + 1)
    for value in (1.0, 2.0, 3.0):
        assert call(torch.full((2,), value)).tolist() == [2 * value + 1] * 2
    assert len(runner.graphs) == 3
    assert all(graph is runner.graphs[0] for graph in runner.graphs)


def test_what_is_said_only_once_does_not_break_the_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `transformers` lets all loggers warn and inform. Dynamo itself has nothing to say about it."""
    said: list[str] = []

    @functools.cache
    def warning_once(logger: logging.Logger, message: str) -> None:
        said.append(message)

    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    monkeypatch.setattr(logging.Logger, "info_once", functools.cache(logging.Logger.info), raising=False)
    logger: Any = logging.getLogger("a model's")

    def function(x: Tensor) -> Tensor:
        logger.warning_once("deprecated")
        return x * 2

    function(torch.ones(2))
    call, runner = guarded(function)
    assert [call(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert len(runner.graphs) == 2
    assert said == ["deprecated"]
    assert caplog.messages == []


def test_one_thread_captures_at_a_time() -> None:
    """The call of the other runs as it is, and is captured the next time."""
    refused: list[RefusedError] = []
    others, runner = guarded(lambda x: x * 2)

    def elsewhere() -> None:
        try:
            others(torch.ones(2))
        except RefusedError as error:
            refused.append(error)

    class Meanwhile(Runner):
        def run(self, graph: fx.GraphModule, flat: Sequence[Tensor]) -> Sequence[Any]:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return super().run(graph, flat)

    assert GuardedFunction(lambda x: x + 1, Meanwhile().run)(torch.ones(2)).tolist() == [2, 2]
    (error,) = refused
    assert error.passing
    assert "another thread" in str(error)
    elsewhere()
    assert len(refused) == 1
    assert len(runner.graphs) == 1


def test_what_is_logged_each_time_is_refused() -> None:
    logger = logging.getLogger("a model's")

    def function(x: Tensor) -> Tensor:
        logger.warning("called")
        return x * 2

    call, _ = guarded(function)
    with pytest.raises(RefusedError, match="a message is logged"):
        call(torch.ones(2))


@pytest.mark.skipif(not hasattr(config, "ignore_logging_functions"), reason="Dynamo ignores loggers alone")
@pytest.mark.parametrize("action", ["default", "always"])
def test_warnings_that_are_shown_once_are_in_nobodys_way(action: Literal["default", "always"]) -> None:
    def function(x: Tensor) -> Tensor:
        warnings.warn(f"deprecated for {x.shape}", stacklevel=1)
        return x * 2

    call, _ = guarded(function)
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        warnings.simplefilter(action)
        warnings.simplefilter("always", numpy.exceptions.RankWarning)  # as NumPy does
        function(torch.ones(2))
        with nullcontext() if action == "default" else pytest.raises(RefusedError, match="not one graph"):
            assert [call(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert [str(one.message) for one in shown] == ["deprecated for torch.Size([2])"]


def test_what_depends_on_a_value_is_told_without_dynamos_names() -> None:
    call, _ = guarded(lambda x: x * 2 if x.max().item() > 1 else x)
    with pytest.raises(RefusedError, match="depends on the values of a tensor"):
        call(torch.ones(2))


def defining(x: Tensor) -> Tensor:
    class Doubled:
        factor = 2

    return x * Doubled.factor


IN_WORDS: dict[str, Callable[[Tensor], Any]] = {
    "a class is defined in the call": defining,
    r"Tensor.retain_grad\(\) is called in the model": lambda x: ((y := x * 2).retain_grad(), y)[1],
}


@pytest.mark.parametrize("reason", IN_WORDS)
def test_what_cannot_be_captured_is_told_in_words_of_the_program(reason: str) -> None:
    skip_before_2_13(reason, {"a class is defined in the call"})
    call, _ = guarded(lambda x: IN_WORDS[reason](x))
    with pytest.raises(RefusedError, match=reason):
        call(torch.ones(2, requires_grad=True))


def test_the_culprit_is_a_line_of_the_users() -> None:
    """Of `all` Dynamo has a form of its own."""

    def function(x: Tensor) -> Tensor:
        return x * 2 if all(x > 0) else x

    call, _ = guarded(function)
    with pytest.raises(RefusedError, match=r"test_frontend\.py:\d+ in function: return x \* 2 if all"):
        call(torch.ones(2))


def test_the_culprit_is_a_line_of_the_users_and_the_one_of_torchs_that_it_led_to() -> None:
    softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4])

    def function(x: Tensor, labels: Tensor) -> Tensor:
        output, _ = softmax(x, labels)
        return cast(Tensor, output)

    call, _ = guarded(function)
    lines = r"\[\S*test_frontend\.py:\d+ in function: output.* -> \S*adaptive\.py:\d+ in forward"
    with pytest.raises(RefusedError, match=f"the values of a tensor {lines}"):
        call(torch.ones(3, 4), torch.tensor([0, 3, 5]))


def test_the_culprit_in_a_model_of_torchs_own_is_its_line() -> None:
    call, _ = guarded(nn.AdaptiveLogSoftmaxWithLoss.forward)
    with pytest.raises(RefusedError, match=r"values of a tensor \[\S*adaptive\.py:\d+ in forward"):
        call(nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4]), torch.ones(3, 4), torch.tensor([0, 3, 5]))


def test_an_exception_that_dynamo_observes_is_told() -> None:
    def function(x: Tensor) -> Tensor:
        raise ValueError("too few dimensions")

    call, _ = guarded(function)
    with pytest.raises(
        RefusedError, match=r"raised exception ValueError\(.*too few dimensions.*\) \[\S*test_frontend\.py"
    ):
        call(torch.ones(2))


def test_what_cannot_be_traced_after_a_change_is_told_as_a_change() -> None:
    """It may be traced again after another one."""
    holder = SimpleNamespace(looks=False)
    call, runner = guarded(lambda x: x * 2 if holder.looks and x.sum() > 0 else x)
    call(torch.ones(2))
    holder.looks = True
    with pytest.raises(RefusedError, match="has changed") as caught:
        call(torch.ones(2))
    assert caught.value.passing
    holder.looks = False
    assert call(torch.ones(2)).tolist() == [1, 1]
    assert all(graph is runner.graphs[0] for graph in runner.graphs)


class Interceptions:
    """Counts the calls that go through Dynamo's interception of frames."""

    def __init__(self, call: GuardedFunction) -> None:
        self.count = 0
        self._compiled, call._compiled = call._compiled, self

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self._compiled(*args)


def test_only_the_first_call_is_intercepted() -> None:
    scale = 2.0

    def function(x: Tensor) -> Tensor:
        return x * scale

    call, runner = guarded(function)
    interceptions = Interceptions(call)
    for value in (1.0, 2.0, 3.0):
        assert call(torch.full((2,), value)).tolist() == [2 * value] * 2
    assert (interceptions.count, len(runner.graphs)) == (1, 3)
    scale = 3.0
    with pytest.raises(RefusedError, match="has changed"):
        call(torch.ones(2))
    assert (interceptions.count, len(runner.graphs)) == (1, 3)


def test_what_a_call_changes_in_python_is_changed_by_every_call() -> None:
    holder = nn.Module()
    holder.latest = None

    def function(x: Tensor) -> Tensor:
        holder.latest = x
        return x + 1

    call, runner = guarded(function)
    for _ in range(3):
        x = torch.ones(2)
        call(x)
        assert holder.latest is x
    assert len(runner.graphs) == 3


def test_where_what_is_guarded_is_gone_no_call_fits_any_more() -> None:
    """Dynamo knows built-in methods by their addresses, where others may lie once they are dead."""
    holder = SimpleNamespace(note=[1.0].append)
    call, runner = guarded(lambda x: x if holder.note is None else x * 2)
    for _ in range(3):
        assert call(torch.ones(2)).tolist() == [2, 2]
    holder.note = None
    gc.collect()
    holder.note = [1.0].append
    with pytest.raises(RefusedError, match="has changed"):
        call(torch.ones(2))
    assert call.stale
    assert len(runner.graphs) == 3


def test_another_class_of_the_same_name_is_another_one() -> None:
    holder = SimpleNamespace(scale=type("Scale", (), {"value": 2.0})())
    call, runner = guarded(lambda x: x * holder.scale.value)
    for _ in range(3):
        assert call(torch.ones(2)).tolist() == [2, 2]
    holder.scale = type("Scale", (), {"value": 3.0})()
    with pytest.raises(RefusedError, match="has changed"):
        call(torch.ones(2))
    assert call.misfits
    assert len(runner.graphs) == 3


def test_a_refused_first_call_is_no_reason_to_intercept_all() -> None:
    call, runner = guarded(lambda x: x + 1)
    run = runner.run
    runner.run = lambda graph, flat: (_ for _ in ()).throw(RefusedError(Refusal("not now"), passing=True))
    call._run = lambda: runner.run
    with pytest.raises(RefusedError, match="not now"):
        call(torch.ones(2))
    runner.run = run
    interceptions = Interceptions(call)
    for _ in range(4):
        assert call(torch.ones(2)).tolist() == [2, 2]
    assert interceptions.count == 0


def test_functions_that_cannot_be_called_directly_are_intercepted() -> None:
    def variadic(*tensors: Tensor) -> Tensor:
        return tensors[0] + 1

    call, runner = guarded(variadic)
    interceptions = Interceptions(call)
    for _ in range(3):
        assert call(torch.ones(2)).tolist() == [2, 2]
    assert interceptions.count == len(runner.graphs) == 3


def test_results_are_put_together_as_the_function_would() -> None:
    def function(x: Tensor, names: list[str]) -> dict[str, Any]:
        return {name: (x + index, "constant") for index, name in enumerate(names)}

    call, _ = guarded(function)
    found = call(torch.zeros(2), ["a", "b"])
    assert list(found) == ["a", "b"]
    assert found["b"][1] == "constant"
    assert found["b"][0].tolist() == [1.0, 1.0]


def test_what_has_changed_may_be_again_as_it_was() -> None:
    scale = 2.0

    def function(x: Tensor) -> Tensor:
        return x * scale

    call, runner = guarded(function)
    for index in range(6):
        scale = 2.0 + index % 2
        assert call.fits(torch.ones(2)) == (scale == 2.0)
        if scale == 2.0:
            assert call(torch.ones(2)).tolist() == [2, 2]
            continue
        with pytest.raises(RefusedError, match="has changed") as caught:
            call(torch.ones(2))
        assert caught.value.passing
        assert (call.misfits, call.stale) == (True, False)
    assert len(runner.graphs) == 3
    assert all(graph is runner.graphs[0] for graph in runner.graphs)


def test_a_changed_shape_is_no_silent_recapture() -> None:
    call, runner = guarded(lambda x: x * 2)
    call(torch.ones(2))
    with pytest.raises(RefusedError):
        call(torch.ones(3))
    assert len(runner.graphs) == 1


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


@pytest.mark.parametrize("bound", [3, None])
def test_a_deque_is_filled_up_to_its_bound(bound: int | None) -> None:
    latest: deque[int] = deque(maxlen=bound)

    def call_with_history(x: torch.Tensor) -> torch.Tensor:
        latest.append(1)
        return x * 2

    call, _ = guarded(call_with_history)
    if bound is None:
        call(torch.ones(2))
        assert list(latest) == [1]
        return
    with pytest.raises(RefusedError, match=r"a collections\.deque with a maxlen is used"):
        call(torch.ones(2))
    assert not latest


def test_what_cannot_be_captured_names_the_line() -> None:
    call, runner = guarded(branch)
    with pytest.raises(RefusedError) as caught:
        call(torch.ones(2))
    refusal = caught.value.refusal
    assert not caught.value.passing
    assert "if x.sum() > 0" in (refusal.culprit or "")
    assert __file__ in (refusal.culprit or "")
    assert runner.graphs == []


def test_a_refusal_of_the_runner_passes_through() -> None:
    class Refusing(Runner):
        def run(self, graph: fx.GraphModule, flat: Sequence[Tensor]) -> Sequence[Any]:
            raise RefusedError(fine, passing=True)

    fine = Refusal("not today")
    runner = Refusing()
    call = GuardedFunction(lambda x: x + 1, runner.run)
    with pytest.raises(RefusedError, match="not today"):
        call(torch.ones(2))


def test_an_assertion_of_dynamos_is_a_refusal_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As "Guard failed on the same frame it was created", where an exception comes while a guard is asked."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("Guard failed")

    with monkeypatch.context() as patch:
        patch.setattr(torch._dynamo.guards.CheckFunctionManager, "__init__", fail)
        call, _ = guarded(lambda x: x + 1)
        with pytest.raises(RefusedError, match="Guard failed") as refused:
            call(torch.ones(2))
        assert refused.value.passing
    call, _ = guarded(lambda x: x + 1)
    assert call(torch.ones(2)).tolist() == [2.0, 2.0]


def test_an_assertion_of_the_runner_passes_through() -> None:
    class Failing(Runner):
        def run(self, graph: fx.GraphModule, flat: Sequence[Tensor]) -> Sequence[Any]:
            raise AssertionError("mine")

    runner = Failing()
    with pytest.raises(AssertionError, match="mine"):
        GuardedFunction(lambda x: x + 1, runner.run)(torch.ones(2))


def test_two_guarded_functions_of_one_code_do_not_share_graphs() -> None:
    def make(scale: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * scale

    pairs = [guarded(make(float(scale))) for scale in range(20)]
    for _ in range(2):
        assert [call(torch.ones(())).item() for call, _ in pairs] == list(range(20))


def calling(module: nn.Module) -> Callable[[Tensor], Any]:
    return lambda x: module(x)


def test_nothing_is_kept_alive() -> None:
    module = nn.Linear(2, 2)
    call, runner = guarded(calling(module))
    call(torch.ones(1, 2))
    references = [weakref.ref(thing) for thing in (call, runner, module, runner.graphs[0])]
    del call, runner, module
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_random_state_survives_a_capture() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    call, _ = guarded(lambda x: x + torch.rand(3))
    assert torch.equal(call(torch.zeros(3)), expected)


def test_a_switched_off_dynamo_is_noticed() -> None:
    assert refuse_dynamo() is None
    torch.compiler.set_stance("force_eager")
    try:
        assert refuse_dynamo() is not None
    finally:
        torch.compiler.set_stance("default")
    assert refuse_dynamo() is None


class View(Sequence[float]):
    """What a property makes at each look."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __len__(self) -> int:
        return len(self.config.factors)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return self.config.factors[index]


class Config:
    def __init__(self) -> None:
        self.factors = [2.0, 3.0]

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)

    @property
    def view(self) -> View:
        return View(self)


def test_a_property_may_make_an_object_at_each_look() -> None:
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: Tensor) -> Tensor:
            return x * sum(one for one in self.config.view)

    summing = Summing()
    call, runner = guarded(lambda x: summing(x))
    assert [call(torch.ones(1)).item() for _ in range(2)] == [5.0, 5.0]
    assert len(runner.graphs) == 2
