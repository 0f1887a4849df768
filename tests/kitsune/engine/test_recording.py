"""What a recording accepts, checks, and costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitsune.capture.trace import trace
from kitsune.config import Config
from kitsune.engine.recording import Recording, most_live_bytes
from kitsune.errors import RefusedError
from kitsune.execution.graph_pool import GraphPool
from kitsune.execution.stream_pool import StreamPool
from kitsune.fallback import RefusalLog
from kitsune.graph import liveness


def record(inputs: list[Tensor], *, stable: set[int], writes: bool = True, **options: object) -> Recording:
    def function(x: Tensor, weight: Tensor) -> list[Tensor]:
        if writes:
            weight.mul_(2)
        return [x @ weight]

    module = trace(function, inputs)
    pool = GraphPool(StreamPool())
    return Recording(
        module, inputs, stable=stable, config=Config.from_options(options), pool=pool, log=RefusalLog("it")
    )


def pair() -> list[Tensor]:
    return [torch.randn(4, 4), torch.randn(4, 4)]


def test_it_runs_on_the_inputs_of_each_call() -> None:
    inputs = pair()
    recording = record(inputs, stable={1})
    for _ in range(3):
        x = torch.randn(4, 4)
        expected = x @ (inputs[1] * 2)
        (product,) = recording([x, inputs[1]])
        assert torch.equal(product, expected)


def test_stable_inputs_must_stay() -> None:
    x, weight = pair()
    recording = record([x, weight], stable={1})
    assert recording.fits([torch.randn(4, 4), weight])
    assert not recording.fits([x, weight.clone()])
    weight.requires_grad_()
    assert not recording.fits([x, weight])
    weight.requires_grad_(False)
    assert recording.fits([x, weight])
    weight.data = weight.data.clone()
    assert not recording.fits([x, weight])


def test_an_argument_that_is_written_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"aten\.mul_.* writes to an argument"):
        record(pair(), stable={0})


def test_tensors_of_several_devices_are_refused() -> None:
    inputs = pair()
    module = trace(lambda x, y: [x + 1], inputs)
    with pytest.raises(RefusedError, match="on cpu and on meta"):
        Recording(
            module,
            [inputs[0], inputs[1].to("meta")],
            stable=set(),
            config=Config(),
            pool=GraphPool(StreamPool()),
            log=RefusalLog("it"),
        )


@pytest.mark.parametrize("writes", [False, True])
def test_the_bound_on_memory_counts_copies_and_intermediates(writes: bool) -> None:
    """The result, the copy of the argument, and the copy of what is written, 64 bytes each."""
    inputs = pair()
    need = 64 * (3 if writes else 2)
    record(inputs, stable={1}, writes=writes, max_memory=need)
    with pytest.raises(RefusedError, match="max_memory allows"):
        record(inputs, stable={1}, writes=writes, max_memory=need - 1)


@pytest.mark.parametrize("writes", [False, True])
def test_what_a_plan_may_need_is_what_copies_leave(writes: bool) -> None:
    """At the bound a plan with these values is recorded; one with a byte more is not."""
    inputs = pair()
    module = trace(lambda x, weight: [x @ (weight.mul_(2) if writes else weight)], inputs)
    config = Config(max_memory=1000)
    most = most_live_bytes(module, inputs, {1}, config)
    assert most == 1000 - 64 * (2 if writes else 1)
    assert most_live_bytes(module, inputs, {1}, Config()) is None
    assert most_live_bytes(module, inputs, {1}, Config(max_memory=10)) == 0
    conditions = {"stable": {1}, "config": config, "pool": GraphPool(StreamPool()), "log": RefusalLog("it")}
    Recording(module, inputs, live_bytes=lambda: most, **conditions)
    with pytest.raises(RefusedError, match="max_memory allows"):
        Recording(module, inputs, live_bytes=lambda: most + 1, **conditions)


def test_the_bound_names_both_amounts() -> None:
    inputs = [torch.randn(512, 512), torch.randn(512, 512)]
    peak = liveness.peak_bytes(trace(lambda x, weight: [x @ weight], inputs).graph)
    assert peak == 2**20
    with pytest.raises(RefusedError, match=r"about 2\.0 MiB, max_memory allows 1\.5") as caught:
        record(inputs, stable={1}, writes=False, max_memory="1536KB")
    assert caught.value.refusal.remedy == "raise max_memory or lower the batch size"
