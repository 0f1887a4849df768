"""Where the backward pass is cut for a wrapper that sends gradients in buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from kitsune.capture import split_program
from kitsune.capture.frontend import GuardedFunction
from kitsune.capture.split_program import SplitProgram, trace_split
from kitsune.errors import Refusal, RefusedError

WIDTH = 8
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


class Deep(nn.Module):
    """Eight layers; `skips` are added to the input of the layer that comes so many later."""

    def __init__(self, skips: int = 0, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        if tied:
            self.layers[7].weight = self.layers[0].weight
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        earlier = [x]
        for layer in self.layers:
            skipped = earlier[-self.skips] if 0 < self.skips <= len(earlier) else 0.0
            earlier.append(torch.tanh(layer(earlier[-1] + skipped)))
        return earlier[-1]


class Tracing:
    def __init__(self, bucket_bytes: int | None) -> None:
        self.bucket_bytes = bucket_bytes
        self.program: SplitProgram | None = None
        self.flat: list[Tensor] = []

    def run(self, graph: fx.GraphModule, flat: Sequence[Tensor]) -> Sequence[Any]:
        self.flat = list(flat)
        self.program = trace_split(graph, flat, bucket_bytes=self.bucket_bytes)
        outputs: Sequence[Any] = graph(*flat)
        return outputs


def traced(model: nn.Module, bucket_bytes: int | None) -> tuple[SplitProgram, list[Tensor]]:
    tracing = Tracing(bucket_bytes)
    GuardedFunction(lambda x: model(x), tracing.run)(torch.randn(3, WIDTH, dtype=next(model.parameters()).dtype))
    assert tracing.program is not None
    return tracing.program, tracing.flat


def bytes_of_parts(model: nn.Module, bucket_bytes: int | None) -> list[int]:
    """Of the parameters whose gradients each part of the backward pass gives, in its order."""
    program, flat = traced(model, bucket_bytes)
    places = [[place for place in part.gradient_places if place < len(flat)] for part in program.parts]
    return [sum(flat[place].nbytes for place in part) for part in places]


@pytest.mark.parametrize(("layers", "expected"), [(1, [1] * 8), (2, [2] * 4), (3, [2, 3, 3]), (8, [8]), (100, [8])])
def test_each_part_but_the_first_has_a_bucket(layers: int, expected: list[int]) -> None:
    assert bytes_of_parts(Deep(), layers * LAYER_BYTES) == [count * LAYER_BYTES for count in expected]


def test_by_itself_it_is_whole() -> None:
    assert bytes_of_parts(Deep(), None) == [8 * LAYER_BYTES]


@pytest.mark.parametrize(("skips", "parts"), [(1, 8), (2, 3)])
def test_a_part_begins_at_one_gradient(skips: int, parts: int) -> None:
    """It is not cut where two layers' results go on, as between the second layer and the last one's input."""
    assert len(bytes_of_parts(Deep(skips), 1)) == parts


@pytest.mark.parametrize("make", [Deep, lambda: Deep(1), lambda: Deep(tied=True)])
def test_the_parts_together_give_the_gradients(make: Callable[[], nn.Module]) -> None:
    model = make().double()
    program, flat = traced(model, 1)
    assert len(program.parts) > 1
    values = [tensor.detach() for tensor in flat]
    result, *saved = program.forward(*values)
    roots = {0: torch.ones_like(result)}
    found: dict[int, Tensor] = {}
    for part in program.parts:
        grads = part.backward(*(saved[index] for index in part.saved), *(roots.pop(root) for root in part.roots))
        for place, grad in zip(part.gradient_places, grads, strict=True):
            into, key = (found, place) if place < len(flat) else (roots, place - len(flat))
            into[key] = into[key] + grad if key in into else grad
    assert not roots
    trained = [place for place, tensor in enumerate(flat) if tensor.requires_grad]
    expected = torch.autograd.grad(model(flat[_input(flat)]).sum(), [flat[place] for place in trained])
    for place, grad in zip(trained, expected, strict=True):
        torch.testing.assert_close(found[place], grad)


def _input(flat: Sequence[Tensor]) -> int:
    return next(place for place, tensor in enumerate(flat) if not tensor.requires_grad)


def test_what_cannot_be_cut_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(graph: Any, flat: Any, autocast: Any, stages: Any) -> SplitProgram:
        if stages.num_stages > 1:
            raise RefusedError(Refusal("of two outputs one is computed from a third"))
        return original(graph, flat, autocast, stages)

    original = split_program._traced
    monkeypatch.setattr(split_program, "_traced", refusing)
    assert bytes_of_parts(Deep(), 1) == [8 * LAYER_BYTES]
