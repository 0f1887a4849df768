"""The buckets of a reducer, and when gradients are averaged in its place."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kitsune
from kitsune.capture.data_parallel import Buckets, Reduction, active_wrapper, reduced_facts
from kitsune.capture.watch import sending_hook_facts
from kitsune.native.facts import PythonFacts
from tests.kitsune.training import Net, batch

_groups: list[object] = []
"""Kept: one that is destroyed waits for its thread, which may be letting go of its latest work, and wait for Python."""


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    _groups.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """With parameters of several layouts, and one number."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 64).t())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.randn(1, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.convolution(x).flatten(1) @ self.turned) + self.one.sum(0).t()


def _loop(wrapper: DistributedDataParallel, steps: int, optimizer: Any) -> list[list[Tensor]]:
    seen = []
    for index in range(steps):
        (x, y), _ = batch(index)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapper(x), y).backward()
        seen.append([param.grad.clone() for param in wrapper.parameters() if param.grad is not None])
        optimizer.step()
    return seen


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
@pytest.mark.parametrize("bucket_mb", [25, 1e-4])
def test_packed_gradients_are_those_that_the_reducer_sends(alone: None, bucket_mb: float) -> None:
    torch.manual_seed(3)
    wrapper = DistributedDataParallel(Model(), bucket_cap_mb=bucket_mb)
    sent: list[Tensor] = []

    def send(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().clone())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    send.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # it wants no strings
    wrapper.register_comm_hook(None, send)
    for _ in range(3):
        sent.clear()
        wrapper.zero_grad()
        wrapper(torch.randn(2, 3, 6, 6)).square().sum().backward()
    buckets = Buckets(wrapper)
    grads = {id(param): param.grad for param in wrapper.parameters() if param.grad is not None}
    packed = buckets.packed(grads)
    assert (len(sent) == 1) == (bucket_mb == 25)
    assert len(packed) == len(sent)
    assert all(map(torch.equal, packed, sent))
    assert buckets.params == grads.keys()
    unpacked = buckets.unpacked(packed)
    for param in wrapper.parameters():
        assert torch.equal(unpacked[id(param)], grads[id(param)])
        assert unpacked[id(param)].stride() == param.stride()


def test_a_parameter_with_gaps_has_no_place(alone: None) -> None:
    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6)[:, ::2])

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    wrapper = DistributedDataParallel(Gaps())
    with pytest.raises(ValueError, match="gaps"):
        Buckets(wrapper)


def test_sparse_gradients_are_left_to_the_reducer(alone: None) -> None:
    wrapper = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
    for _ in range(3):
        wrapper(torch.tensor([1, 2])).sum().backward()
    refusal = Reduction.of(wrapper).refuse()
    assert refusal is not None
    assert "are left to it" in refusal.reason


def test_a_hook_of_torchs_own_is_left_to_the_reducer(alone: None) -> None:
    wrapper = DistributedDataParallel(Net())
    wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    _loop(wrapper, 3, torch.optim.SGD(wrapper.parameters(), lr=0.1))
    refusal = Reduction.of(wrapper).refuse()
    assert refusal is not None
    assert "communication hook" in refusal.reason


def test_every_wrapper_has_one_reduction(alone: None) -> None:
    first, second = DistributedDataParallel(Net()), DistributedDataParallel(Net())
    assert Reduction.of(first) is Reduction.of(first)
    assert Reduction.of(first) is not Reduction.of(second)


def test_no_wrapper_is_active_between_calls(alone: None) -> None:
    seen = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(active_wrapper())
            return super().forward(x)

    wrapper = DistributedDataParallel(Inner(4, 3))
    wrapper(torch.randn(2, 4))
    assert seen == [wrapper]
    assert active_wrapper() is None


def test_facts_tell_of_wrappers_that_call_and_of_groups(tmp_path: Path) -> None:
    """Before there is any group, within one, in a call of a wrapper, and afterwards."""
    before = PythonFacts([*reduced_facts(), *sending_hook_facts([])])
    assert before.hold()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    _groups.append(dist.group.WORLD)
    try:
        assert not before.hold()
        outside, inside = PythonFacts([*reduced_facts(), *sending_hook_facts([])]), []

        class Inner(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                inside.append(PythonFacts(reduced_facts()))
                assert inside[-1].hold()
                assert not outside.hold()
                return super().forward(x)

        wrapper = DistributedDataParallel(Inner(4, 3))
        assert outside.hold()
        wrapper(torch.randn(2, 4))
        assert outside.hold()
        assert not inside[0].hold()
    finally:
        dist.destroy_process_group()
    assert before.hold()


def test_a_wrapper_that_is_gone_before_the_backward_pass_reduces_nothing(alone: None) -> None:
    wrapper, (x, y) = DistributedDataParallel(Net()), batch(20)[0]
    inner = wrapper.module
    plain = torch.optim.Adam(wrapper.parameters(), lr=0.05, fused=True)
    optimizer = kitsune.KitsuneOptimizer(plain, mode="replay", defer_loss=True)
    _loop(wrapper, 8, optimizer)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(inner(x), y), list(inner.parameters()))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(wrapper(x), y)
    assert Reduction.of(wrapper).is_owed
    gone = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert gone() is None
    loss.backward()
    for param, grad in zip(inner.parameters(), wanted, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, grad)


def test_gradients_that_come_past_a_replayed_call_are_the_reducers(alone: None) -> None:
    """Which then objects to those of the loss, with plain PyTorch too."""
    wrapper, (x, y) = DistributedDataParallel(Net()), batch(20)[0]
    plain = torch.optim.Adam(wrapper.parameters(), lr=0.05, fused=True)
    optimizer = kitsune.KitsuneOptimizer(plain, mode="replay", defer_loss=True)
    _loop(wrapper, 8, optimizer)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(wrapper(x), y)
    wrapper.module.get_submodule("first")(x).sum().backward()
    assert not Reduction.of(wrapper).is_owed
    with pytest.raises(RuntimeError, match="mark a variable ready only once"):
        loss.backward()


def test_an_interrupted_call_leaves_the_reducer_to_the_next_one(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = DistributedDataParallel(Net())
    reducer = wrapper.reducer
    plain = torch.optim.Adam(wrapper.parameters(), lr=0.05, fused=True)
    optimizer = kitsune.KitsuneOptimizer(plain, mode="replay", defer_loss=True)
    _loop(wrapper, 8, optimizer)
    assert "loss" in optimizer.status().covered

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wrapper, "_post_forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _loop(wrapper, 1, optimizer)
    assert wrapper.reducer is not reducer
    wrapper.module.register_forward_hook(lambda *_: None)  # the next call runs as it is
    replays = optimizer.status().replays
    _loop(wrapper, 1, optimizer)
    assert wrapper.reducer is reducer
    assert optimizer.status().replays == replays
