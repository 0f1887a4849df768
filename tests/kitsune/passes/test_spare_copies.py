"""Steps with fewer copies into another order: which are left out, and that nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import models
from kitsune.capture.trace import trace
from kitsune.passes import pipeline
from kitsune.passes.spare_copies import spare_copies
from tests.kitsune.fusion.running import InAutocast, run
from tests.kitsune.passes.running import InFloat64, calls
from tests.kitsune.passes.test_channels_last import assert_laid_out, error, layout
from tests.kitsune.steps import TracedStep, traced_step

aten = torch.ops.aten
Function = Callable[..., Sequence[Tensor]]

BATCH, LENGTH, FEATURES, LAYERS = 3, 7, 16, 2

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALF = [pytest.param(False, id="float32"), pytest.param(True, id="autocast")]
ORDERS = [pytest.param(True, id="batch first"), pytest.param(False, id="sequence first")]


class Encoder(nn.Module):
    """Attention of `nn.MultiheadAttention`, which puts the sequence first whatever its input does."""

    def __init__(self, *, batch_first: bool, norm_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            FEATURES, 2, 32, dropout, "gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x.sin()).mean(1))
        return logits


@cache
def step(
    *, batch_first: bool = True, norm_first: bool = True, dropout: float = 0.0, half: bool = False, device: str = "cpu"
) -> TracedStep:
    """Cleared of what is in the way; under autocast if `half`."""
    torch.manual_seed(0)
    module = Encoder(batch_first=batch_first, norm_first=norm_first, dropout=dropout)
    x, y = torch.randn(BATCH, LENGTH, FEATURES), torch.randint(5, (BATCH,))
    wrapped = InAutocast(module.to(device), torch.bfloat16 if half else torch.float32)
    traced = traced_step(wrapped, F.cross_entropy, x.to(device), y.to(device))
    return TracedStep(pipeline.run(traced.module, pipeline.CLEARING), traced.inputs)


def spared(module: fx.GraphModule) -> fx.GraphModule:
    return pipeline.run(module, (("spare copies", spare_copies),), verify=True)


def copied_bytes(module: fx.GraphModule) -> int:
    return sum(node.meta["val"].nbytes for node in calls(module, aten.clone.default))


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", ORDERS)
def test_attention_copies_one_gradient_alone(batch_first: bool, norm_first: bool, half: bool) -> None:
    """That of queries, keys and values, which autograd makes one after the other, and a product reads side by side."""
    before = step(batch_first=batch_first, norm_first=norm_first, half=half).module
    copies = calls(spared(before), aten.clone.default)
    assert len(calls(before, aten.clone.default)) >= 8 * LAYERS
    assert sorted(copy.meta["val"].numel() for copy in copies) == [3 * BATCH * LENGTH * FEATURES] * LAYERS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", ORDERS)
def test_results_are_as_exact(batch_first: bool, norm_first: bool, dropout: float, half: bool, device: str) -> None:
    """Against float32 for autocast, else against float64; with dropout as before, up to what rounding makes of it."""
    options = {"batch_first": batch_first, "norm_first": norm_first, "dropout": dropout, "device": device}
    # What attention is computed by on a GPU takes no float64.
    traced, single = step(**options, half=half), step(**{**options, "device": "cpu"})
    module = spared(traced.module)
    assert_laid_out(module, traced.fresh_inputs())
    found, wanted = seeded(module, traced.inputs), seeded(traced.module, traced.inputs)
    exact = wanted
    if not dropout:
        dtype = torch.float32 if half else torch.float64
        inputs = [one.to(dtype) if one.is_floating_point() else one for one in single.inputs]
        exact = seeded(single.module if half else InFloat64(single.module).run, inputs)
    lowest = torch.finfo(torch.bfloat16 if half else torch.float32).eps
    for one, other, true in zip(found, wanted, exact, strict=True):
        assert (one.size(), one.stride(), one.dtype) == (other.size(), other.stride(), other.dtype)
        norm = float(torch.linalg.vector_norm(true.detach().double()))
        true = true.to(device)
        chance = 0.05 * norm if dropout else 1e-5  # another mask would make them strangers to each other
        assert error(one, true) <= 2 * error(other, true) + 8 * lowest * norm + chance


def seeded(module: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(3)
    return run(module, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("half", HALF)
def test_vision_transformer(half: bool) -> None:
    workload = models.build("vit_b_16", seed=0)
    module = InAutocast(workload.module, torch.bfloat16 if half else torch.float32)
    traced = traced_step(module, workload.loss_fn, *workload.batch(2, index=0))
    before = pipeline.run(traced.module, pipeline.CLEARING)
    after = spared(before)
    assert copied_bytes(after) < 0.25 * copied_bytes(before)
    assert_laid_out(after, traced.fresh_inputs())


# What stays


def random_inputs() -> list[Tensor]:
    return [torch.randn(BATCH, LENGTH, FEATURES), torch.randn(FEATURES, FEATURES)]


def nothing_copied(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1) @ weight]


def returned(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).contiguous()]


def returned_in_part(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).contiguous()[1:, 0]]


def written_later(x: Tensor, weight: Tensor) -> list[Tensor]:
    copy = x.transpose(0, 1).contiguous()
    x.add_(1)
    return [copy.view(-1, FEATURES) @ weight]


def copy_written(x: Tensor, weight: Tensor) -> list[Tensor]:
    copy = x.transpose(0, 1).contiguous()
    copy.mul_(2)
    return [copy.view(-1, FEATURES) @ weight]


def drawn(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Random numbers are drawn in the order of memory."""
    return [F.dropout(x.transpose(0, 1).contiguous(), 0.5).sum(0)]


@pytest.mark.parametrize("function", [nothing_copied, returned, returned_in_part, written_later, copy_written, drawn])
def test_what_is_needed_stays(function: Function) -> None:
    before = trace(function, random_inputs())
    assert spare_copies(before) is before


# What goes


def multiplied(x: Tensor, weight: Tensor) -> list[Tensor]:
    rows = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES)
    return [(rows @ weight).view(LENGTH, BATCH, FEATURES).transpose(0, 1).contiguous().sin()]


def gradient_of_a_weight(x: Tensor, weight: Tensor) -> list[Tensor]:
    rows = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES)
    return [(rows.t() @ (rows @ weight)), rows.sum(0), rows.sum([0], keepdim=True)]


def in_heads(x: Tensor, weight: Tensor) -> list[Tensor]:
    """The second dimension of the last view is a part of two dimensions of memory, but no view between has strides."""
    sequence = x.sin().transpose(0, 1).contiguous()
    heads = sequence.view(LENGTH, BATCH * 2, FEATURES // 2).transpose(0, 1).view(BATCH, 2, LENGTH, FEATURES // 2)
    return [heads.exp().sum(-1)]


def rows_with_a_bias(x: Tensor, weight: Tensor) -> list[Tensor]:
    rows = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES)
    biased = F.gelu(rows @ weight + weight[0]) * rows
    return [biased.view(LENGTH, BATCH, FEATURES).transpose(0, 1).sum(1)]


@pytest.mark.parametrize("function", [multiplied, gradient_of_a_weight, in_heads, rows_with_a_bias])
def test_no_copy_is_left(function: Function) -> None:
    inputs = random_inputs()
    before = trace(function, inputs)
    assert calls(before, aten.clone.default)
    after = spared(before)
    assert not calls(after, aten.clone.default)
    for one, other in zip(run(after, inputs), run(before, inputs), strict=True):
        torch.testing.assert_close(one, other)
        assert layout(one) == layout(other)


def test_a_product_and_its_bias_stay_together() -> None:
    """As templates look for them."""
    after = spared(trace(rows_with_a_bias, random_inputs()))
    (product,) = calls(after, aten.mm.default)
    assert [user.target for user in product.users] == [aten.add.Tensor]


# Where the order that is left behind matters


def of_itself(x: Tensor, weight: Tensor) -> list[Tensor]:
    rows = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES)
    return [(rows @ rows.t()).sin()]


def turned_in_place(x: Tensor, weight: Tensor) -> list[Tensor]:
    rows = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES).clone()
    rows.t_()
    return [(weight @ rows).sin(), rows * 1]


def a_dimension_more_in_place(x: Tensor, weight: Tensor) -> list[Tensor]:
    copy = x.sin().transpose(0, 1).contiguous()
    copy.unsqueeze_(1)
    return [copy.exp(), (copy.view(-1, FEATURES) @ weight).sin()]


def times_a_scalar_of_another_type(x: Tensor, weight: Tensor) -> list[Tensor]:
    rows = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES)
    return [(rows * torch.full((), 2.0, dtype=torch.float64, device=x.device)).sum(0), (rows * weight[0, 0]).sum(0)]


def in_other_types(x: Tensor, weight: Tensor) -> list[Tensor]:
    rows = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES).to(torch.bfloat16)
    return [(rows @ weight.to(torch.bfloat16)).float().sin()]


def nothing_of_it(x: Tensor, weight: Tensor) -> list[Tensor]:
    copy = x.sin().transpose(0, 1).contiguous()
    return [copy[:0].exp(), copy[:, :0].sum(1), copy.view(-1, FEATURES)[:0] @ weight, copy.sum(2)]


def along_a_dimension(x: Tensor, weight: Tensor) -> list[Tensor]:
    rows = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES)
    return [rows.cumsum(0), rows.softmax(0), rows.argmax(0), rows.topk(2, 0).values, rows[1:4] + rows[0], rows.flip(0)]


def repeated(x: Tensor, weight: Tensor) -> list[Tensor]:
    """One head of keys for two of queries."""
    heads = x.sin().view(BATCH, LENGTH, 2, -1).transpose(1, 2).contiguous()
    keys = heads[:, :1].expand(-1, 2, -1, -1)
    return [F.scaled_dot_product_attention(heads, keys, keys).sin()]


def joined(x: Tensor, weight: Tensor) -> list[Tensor]:
    copy = x.sin().transpose(0, 1).contiguous()
    return [torch.cat([copy, copy.cos()], 1).view(-1, FEATURES) @ weight, torch.stack([copy, copy]).sum(0)]


def read_by_address(x: Tensor, weight: Tensor) -> list[Tensor]:
    copy = x.sin().transpose(0, 1).contiguous()
    return [copy.as_strided((4, 5), (5, 1), 3).exp()]


def result_and_its_view(x: Tensor, weight: Tensor) -> list[Tensor]:
    product = x.sin().transpose(0, 1).contiguous().view(-1, FEATURES) @ weight
    return [product, product.view(LENGTH, BATCH, FEATURES)[1], x.transpose(0, 1)]


ORDER_MATTERS = [
    of_itself,
    turned_in_place,
    a_dimension_more_in_place,
    times_a_scalar_of_another_type,
    in_other_types,
    nothing_of_it,
    along_a_dimension,
    repeated,
    joined,
    read_by_address,
    result_and_its_view,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", ORDER_MATTERS)
def test_results_stay_what_they_were(function: Function, device: str) -> None:
    inputs = [one.to(device) for one in random_inputs()]
    before = trace(function, inputs)
    after = spared(before)
    found, wanted = run(after, inputs), run(before, inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert layout(one) == layout(other)
    assert aliases([*found, *inputs]) == aliases([*wanted, *inputs])


def aliases(tensors: Sequence[Tensor]) -> list[list[bool]]:
    places = [one.untyped_storage().data_ptr() for one in tensors]
    return [[place == other for other in places] for place in places]


# Any program


class Program:
    """Views, copies, products, sums and point-wise operators, drawn by chance."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, x: Tensor, weight: Tensor) -> list[Tensor]:
        chance = random.Random(self._seed)
        values = [x, x.sin()]
        for _ in range(14):
            made = self._next(chance, chance.choice(values[-4:]), values, weight)
            values += [made] if made is not None and made.numel() else []
        results = chance.sample(values[2:], min(3, len(values) - 2)) or [x * 2]
        return [*(one * 1 if chance.random() < 0.5 else one.clone() for one in results), *self._sums(values)]

    @staticmethod
    def _sums(values: list[Tensor]) -> list[Tensor]:
        return [one.cos().sum() for one in values[-3:]]

    @staticmethod
    def _next(chance: random.Random, value: Tensor, values: list[Tensor], weight: Tensor) -> Tensor | None:
        kind = chance.randrange(11)
        dims = value.dim()
        if kind < 3 and dims > 1:
            one, other = chance.sample(range(dims), 2)
            return value.transpose(one, other).contiguous() if kind else value.transpose(one, other)
        if kind == 3 and dims > 1:
            place = chance.randrange(dims - 1)
            return value.reshape(*value.shape[:place], -1, *value.shape[place + 2 :])
        if kind == 4 and dims < 4:
            place = chance.randrange(dims)
            sizes = [size for size in (2, 3, 7, 8) if value.size(place) % size == 0 and size < value.size(place)]
            return value.unflatten(place, (-1, chance.choice(sizes))) if sizes else None
        if kind in (5, 6) and dims == 2:
            matrices = [other for other in values if other.dim() == 2 and other.size(0) == value.size(1)]
            return value @ chance.choice(matrices) / 8 if matrices else None
        if kind == 7 and dims > 1 and value.size(-1) == FEATURES:
            return value.reshape(-1, FEATURES) @ weight + weight[0]
        if kind == 8:
            alike = [other for other in values if other.shape == value.shape]
            return torch.tanh(value) * chance.choice(alike)
        if kind == 9 and dims > 1:
            return value.sum(chance.randrange(dims), keepdim=chance.random() < 0.5)
        if kind == 10 and value.size(0) > 1:
            return value.select(0, chance.randrange(value.size(0))) if dims > 1 else value[1:]
        return None


@pytest.mark.parametrize("seed", range(600))
def test_random_programs(seed: int) -> None:
    torch.manual_seed(seed)
    program, inputs = Program(seed), [one.double() for one in random_inputs()]
    before = trace(program, inputs)
    after = spared(before)
    assert copied_bytes(after) <= copied_bytes(before)
    assert_laid_out(after, inputs)
    for one, other in zip(run(after, inputs), run(before, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        assert layout(one) == layout(other)
