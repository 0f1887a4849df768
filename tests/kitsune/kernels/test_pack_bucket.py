"""Packing gradients against PyTorch's own functions, and that others may wait for a pack alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kitsune.kernels.pack_bucket import Ready, pack_bucket

GPU = pytest.param("cuda", marks=pytest.mark.gpu)

devices = pytest.mark.parametrize("device", ["cpu", GPU])


def _inputs(device: str) -> tuple[list[Tensor], list[list[int]]]:
    shapes = [(3, 4), (), (2, 3, 4, 5), (7,), (0, 2)]
    orders = [[1, 0], [], [0, 2, 3, 1], [0], [0, 1]]
    return [torch.randn(shape, device=device) for shape in shapes], orders


@devices
def test_values_come_in_the_given_orders(device: str) -> None:
    grads, orders = _inputs(device)
    wanted = [grads[0].t(), grads[1], grads[2].permute(0, 2, 3, 1), grads[3], grads[4]]
    packed = pack_bucket(grads, orders, 0.25, None)
    assert torch.equal(packed, torch.cat([grad.reshape(-1) for grad in wanted]) / 4)


@devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_rounds_as_one_multiplication_does(device: str, dtype: torch.dtype) -> None:
    grads = [torch.randn(5, 3, device=device).to(dtype)]
    assert torch.equal(pack_bucket(grads, [[0, 1]], 1 / 3, None), grads[0].flatten() * (1 / 3))


@devices
def test_inputs_stay_as_they_are(device: str) -> None:
    grads = [torch.randn(6, device=device)]
    before = grads[0].clone()
    assert pack_bucket(grads, [[0]], 0.5, None).data_ptr() != grads[0].data_ptr()
    assert torch.equal(grads[0], before)


@devices
def test_schema_and_fakes(device: str) -> None:
    grads, orders = _inputs(device)
    flat = [place for order in orders for place in order]
    operator = torch.ops.kitsune.pack_bucket.default
    torch.library.opcheck(operator, (grads, flat, 0.5, 0), test_utils=("test_schema", "test_faketensor"))


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        pack_bucket([torch.ones(2), torch.ones(2).half()], [[0], [0]], 1.0, None)
    with pytest.raises(ValueError, match="an order of all dimensions"):
        pack_bucket([torch.ones(2, 3)], [[1]], 1.0, None)


@pytest.mark.gpu
def test_a_stream_waits_for_a_pack_in_a_graph_and_for_no_more() -> None:
    ready, stream = Ready(), torch.cuda.Stream()
    grads, orders = _inputs("cuda")
    pack_bucket(grads, orders, 0.5, ready)
    torch.cuda._sleep(1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(50_000_000)
        packed = pack_bucket(grads, orders, 0.5, ready)
        torch.cuda._sleep(200_000_000)
    for round_ in range(3):
        for grad in grads:
            grad.fill_(round_ + 1)
        torch.cuda.synchronize()
        graph.replay()
        ended = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(stream):
            stream.wait_event(ready.event)
            seen = packed.clone()
        stream.synchronize()
        assert not ended.query()
        assert torch.equal(seen, torch.full_like(seen, (round_ + 1) / 2))
        torch.cuda.synchronize()
