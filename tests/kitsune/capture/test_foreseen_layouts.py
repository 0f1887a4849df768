"""What was traced runs on what operators give, where torch foresees another layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kitsune.capture.foreseen_layouts import lay_out_as_foreseen
from kitsune.capture.trace import trace
from kitsune.errors import RefusedError
from tests.kitsune.training import FORMS, Batch, adam, compare


def image() -> Tensor:
    return torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)


def test_a_result_that_lies_otherwise_is_copied() -> None:
    function: Callable[[Tensor], list[Tensor]] = lambda x: [x.roll(1, 1).flatten(1) * 2]  # noqa: E731
    x = image()
    module = trace(function, [x])
    lay_out_as_foreseen(module, [x])
    (found,), (wanted,) = module(x), function(x)
    assert torch.equal(found, wanted)


def test_a_graph_as_foreseen_stays_as_it_is() -> None:
    inputs = [image(), torch.zeros(3)]
    module = trace(lambda x, total: [x.relu().flatten(1), total.add_(torch.rand(3))], inputs)
    before, state = str(module.graph), torch.get_rng_state()
    lay_out_as_foreseen(module, inputs)
    assert str(module.graph) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert inputs[1].tolist() == [0.0] * 3, "inputs are not written to"


def test_running_statistics_and_what_is_updated_stay_as_they_are() -> None:
    def step(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor) -> list[Tensor]:
        normed = functional.batch_norm(x, mean, variance, training=True)
        torch._foreach_add_([weight], [normed.mean((0, 2, 3))])
        return [normed.roll(1, 1), weight.mul_(2).view(2, 4) + 1]

    inputs = [image(), torch.zeros(8), torch.ones(8), torch.randn(8)]
    module = trace(step, inputs)
    before = [tensor.clone() for tensor in inputs]
    versions = [tensor._version for tensor in inputs]
    lay_out_as_foreseen(module, inputs)
    assert all(map(torch.equal, inputs, before))
    assert [tensor._version for tensor in inputs] == versions
    twins = [tensor.clone() for tensor in inputs]
    for one, other in zip([*module(*inputs), *inputs], [*step(*twins), *twins], strict=True):
        torch.testing.assert_close(one, other)


def test_an_operator_that_fails_is_a_refusal_for_once() -> None:
    module = trace(lambda table, place: [table[place]], [torch.zeros(3), torch.zeros(2, dtype=torch.long)])
    with pytest.raises(RefusedError, match="out of bounds") as refused:
        lay_out_as_foreseen(module, [torch.zeros(3), torch.full((2,), 5)])
    assert refused.value.passing


def attention(x: Tensor) -> list[Tensor]:
    return [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]]


def test_attention_is_not_called_with_operands_that_it_does_not_take() -> None:
    """Some of its kernels raise once, and take the process with them the next time."""
    x = torch.randn(2, 3, 4, 8)
    module, called = trace(attention, [x]), list[object]()
    with Calls(called), pytest.raises(RefusedError, match="lie one after the other: query of shape"):
        lay_out_as_foreseen(module, [torch.randn(2, 3, 8, 4).transpose(2, 3)])
    assert ATTENTION not in called
    with Calls(called):
        lay_out_as_foreseen(module, [x])
    assert ATTENTION in called


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Calls(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self, called: list[object]) -> None:
        super().__init__()
        self._called = called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._called.append(func)
        return func(*args, **(kwargs or {}))


class Rolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(288, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).roll(1, 1).flatten(1))


class RolledInCheckpoint(Rolled):
    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda x: self.layer(x).roll(1, 1).sin().roll(1, 2).cos(), x, use_reentrant=False)
        return self.head(inner.flatten(1))


class Positions(nn.Module):
    """Learned positions that are interpolated, as for images of other sizes. Their gradient is laid out otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(288, 3)
        self.positions = nn.Parameter(torch.randn(1, 36, 8))

    def forward(self, x: Tensor) -> Tensor:
        square = self.positions.view(1, 6, 6, -1).permute(0, 3, 1, 2)
        positions = functional.interpolate(square, size=(6, 6), mode="bilinear").view(1, -1, 36).permute(0, 2, 1)
        return self.head((self.layer(x).flatten(2).transpose(1, 2) + positions).flatten(1))


@pytest.mark.parametrize("kind", [Rolled, RolledInCheckpoint, Positions])
@pytest.mark.parametrize("form", FORMS)
def test_models_with_such_results(form: str, kind: type[nn.Module]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = kind().to(memory_format=torch.channels_last)
        return model, adam(model)

    def batches(index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        return (x, torch.randint(3, (2,), generator=generator)), {}

    compare(form, build, batches=batches, rtol=1e-6, atol=1e-7)


def test_a_loss_with_such_results() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Convolution().to(memory_format=torch.channels_last)
        return model, adam(model)

    def batches(index: int) -> Batch:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(index))
        return (x.to(memory_format=torch.channels_last), torch.zeros(())), {}

    training = compare(
        "drop_in",
        build,
        loss_fn=lambda out, _: out.roll(1, 1).flatten(1).square().mean(),
        batches=batches,
        steps=8,
        defer_loss=True,
        rtol=1e-6,
        atol=1e-7,
    )
    assert "loss" in training.status().covered
