"""What torch would keep of captures is given back, and what it keeps for the user is left alone."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import CleanupManager, get_metrics_context, orig_code_map
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

from kitsune.capture.frontend import GuardedFunction
from kitsune.capture.retention import no_traces
from kitsune.capture.trace import trace
from kitsune.errors import RefusedError
from tests.kitsune.training import FORMS, Training, adam, batch, net_and_adam


def kept() -> dict[str, int]:
    """How much there is of what torch keeps of captures."""
    gc.collect()
    return {
        "compiled codes": sum(reference() is not None for reference in CleanupManager.instance.refs.values()),
        "original codes": len(orig_code_map.values),
        "finalizers": len(weakref.finalize._registry),
        "fake results": len(FakeTensorMode.cache),
        "sources": len(graph_module._loader.eval_cache),
        "lines": sum(name.startswith("<eval_with_key>") for name in linecache.cache),
        "metrics": len(get_metrics_context()._edits),
    }


@pytest.mark.parametrize("options", [{}, {"defer_loss": True}])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_kept_of_a_training_that_is_over(form: str, options: dict[str, Any]) -> None:
    def train() -> None:
        model, _ = net_and_adam()
        training = Training(form, model, adam(model), **options)
        for size in (5, 6):
            for index in range(3):
                training.step(*batch(index, size=size)[0])
        assert training.status().replays >= 2

    train()  # what is imported meanwhile has finalizers of its own
    before = kept()
    train()
    assert kept() == before


def test_what_is_compiled_by_the_user_stays_compiled() -> None:
    compiled = 0

    def backend(graph: fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    @torch.compile(backend=backend, dynamic=False)
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2

    x = torch.randn(3)
    twice(x)
    before = kept()
    model, optimizer = net_and_adam()
    training = Training("drop_in", model, optimizer)
    training.run(3)
    twice(x)
    del training, model, optimizer
    gc.collect()
    twice(x)
    assert compiled == 1
    assert kept() == before


def test_sources_of_graphs_that_others_make_stay() -> None:
    """Before, and meanwhile in another thread."""

    def made() -> fx.GraphModule:
        return fx.GraphModule({}, fx.symbolic_trace(nn.ReLU()).graph)

    before = made()
    with no_traces():
        own = made()
        with ThreadPoolExecutor(1) as threads:
            beside = threads.submit(made).result()
    kept = [graph.forward.__code__.co_filename in graph_module._loader.eval_cache for graph in (before, own, beside)]
    assert kept == [True, False, True]
    assert torch.equal(own(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


def test_an_error_in_a_graph_without_its_source_is_told() -> None:
    graph = trace(lambda x: [x.reshape(2, 3) * 2], [torch.randn(6)])
    with pytest.raises(RuntimeError, match="shape"):
        graph(torch.randn(5))


def test_a_function_whose_guarded_object_is_gone_is_refused() -> None:
    """The finalizers that Dynamo would keep for ever work as long as the function is there."""

    def make(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * factor

    helper = make(2.0)

    def call(x: torch.Tensor) -> torch.Tensor:
        return helper(x)

    class Runner:
        def run(self, graph: fx.GraphModule, flat: Any) -> Any:
            return graph(*flat)

    runner = Runner()
    guarded = GuardedFunction(call, runner.run)
    x = torch.ones(2)
    assert guarded(x).tolist() == [2.0, 2.0]
    helper = make(3.0)
    gc.collect()
    with pytest.raises(RefusedError):
        guarded(x)
