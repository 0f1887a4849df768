"""Backward passes of memory-efficient attention look for the state of random numbers where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kitsune.graph.attention import ATTENTIONS, look_for_random_state, original, run_looking, unmet_demand
from kitsune.passes.spare_copies import spare_copies
from kitsune.schedule.analytic import work

aten = torch.ops.aten

SHAPE = (2, 3, 16, 8)  # batch, heads, length, features


@pytest.fixture(autouse=True)
def _fake_tensors() -> Iterator[None]:
    """Devices are told apart without a GPU."""
    with FakeTensorMode():
        yield


def attend(device: str = "cuda", layout: Callable[[Tensor], Tensor] = lambda x: x) -> fx.GraphModule:
    """Attention with dropout and its backward pass, of queries, keys and values at once."""

    def both(x: Tensor, grad: Tensor) -> list[Tensor]:
        x = layout(x.sin())
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(x, x, x, None, True, 0.1)
        mask = [True, True, True, False]
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, x, x, x, None, out, lse, seed, offset, 0.1, mask
        )
        return [out, *grads[:3]]

    return make_fx(both, tracing_mode="real")(torch.empty(SHAPE, device=device), torch.empty(SHAPE, device=device))


def backward_of(module: fx.GraphModule) -> fx.Node:
    (node,) = (node for node in module.graph.nodes if "efficient_attention_backward" in str(node.target))
    return node


def test_it_is_replaced_and_stays_as_much_work() -> None:
    module = attend()
    before = work(backward_of(module))
    look_for_random_state(module)
    node = backward_of(module)
    assert str(node.target) == "kitsune.scaled_dot_product_efficient_attention_backward.default"
    assert original(node.target) is aten._scaled_dot_product_efficient_attention_backward.default
    assert work(node) == before
    assert before.flops > 0
    found = module(torch.empty(SHAPE, device="cuda"), torch.empty(SHAPE, device="cuda"))
    assert [(one.device.type, one.shape) for one in found] == [("cuda", torch.Size(SHAPE))] * 4


def test_copies_before_it_are_spared_as_ever() -> None:
    def copied(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    plain, looking = attend("meta", copied), attend("meta", copied)
    look_for_random_state(looking)
    left, also_left = (num_copies(spare_copies(one)) for one in (plain, looking))
    assert left == also_left < num_copies(plain)


def num_copies(module: fx.GraphModule) -> int:
    return sum(node.target is aten.clone.default for node in module.graph.nodes)


class Device:
    """Stands for `torch.cuda`: whether the stream is recorded, and whether the host may wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, recording: bool) -> None:
        self.modes = list[Any]()
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.modes.append)


def run(monkeypatch: pytest.MonkeyPatch, state: str, dropout: float = 0.1) -> list[Tensor]:
    """What the operator hands on as seed and offset that are on the device `state`."""
    given = list[Tensor]()
    x = torch.empty(SHAPE, device="cuda")
    seed, offset = (torch.empty((), dtype=torch.int64, device=state) for _ in range(2))

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten._scaled_dot_product_efficient_attention_backward.default:
                given.extend(args[7:9])
                return x, x, x, None
            return func(*args, **(kwargs or {}))

    lse = torch.empty(2, 3, 32, device="cuda")
    operator = aten._scaled_dot_product_efficient_attention_backward.default
    with Seen():
        run_looking(operator, x, x, x, x, None, x, lse, seed, offset, dropout, [True, True, True, False])
    return given


@pytest.mark.parametrize("state", ["cpu", "cuda"])
def test_what_is_not_recorded_reads_it_on_the_host(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    device = Device(monkeypatch, recording=False)
    assert [one.device.type for one in run(monkeypatch, state)] == ["cpu", "cpu"]
    assert device.modes == ["default", 2] * 2, "the host may wait for a moment, also where that is forbidden"


def test_what_is_recorded_reads_it_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, recording=True)
    assert [one.device.type for one in run(monkeypatch, "cuda")] == ["cuda", "cuda"]
    with pytest.raises(RuntimeError, match="its forward pass was not"):
        run(monkeypatch, "cpu")
    assert device.modes == []


def test_without_dropout_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, recording=False)
    assert [one.device.type for one in run(monkeypatch, "cuda", dropout=0.0)] == ["cuda", "cuda"]
    assert device.modes == []


FORWARD = [one for one in sorted(ATTENTIONS, key=str) if "backward" not in str(one)]


@pytest.mark.parametrize("operator", FORWARD, ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_heads_have_to_lie_one_element_after_the_other(operator: torch._ops.OpOverload, name: str) -> None:
    lying, across = torch.empty(SHAPE), torch.empty(2, 3, 8, 16).transpose(2, 3)
    given = {"query": lying, "key": lying, "value": lying}
    assert unmet_demand(operator, [*given.values()]) is None
    demand = unmet_demand(operator, [*(given | {name: across}).values()])
    assert demand is not None
    assert demand.startswith(f"{operator} takes heads whose elements lie one after the other: {name} of shape")


def test_what_is_no_attention_and_what_has_one_element_demands_nothing() -> None:
    across = torch.empty(2, 3, 8, 16).transpose(2, 3)
    assert unmet_demand(aten.bmm.default, [across, across]) is None
    narrow = torch.empty(2, 3, 1, 16).transpose(2, 3)
    assert unmet_demand(aten._scaled_dot_product_cudnn_attention.default, [narrow] * 3) is None


def test_the_form_that_looks_demands_the_same() -> None:
    module = attend()
    look_for_random_state(module)
    across, lying = torch.empty(2, 3, 8, 16).transpose(2, 3), torch.empty(SHAPE)
    assert unmet_demand(backward_of(module).target, [lying, across, lying, lying]) is not None
    assert unmet_demand(backward_of(module).target, [across, lying, lying, lying]) is None
