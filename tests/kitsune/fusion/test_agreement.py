"""What counts as agreement of a replacement with what it replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kitsune.capture.trace import trace
from kitsune.fusion import agreement
from kitsune.fusion.agreement import agree
from kitsune.fusion.examples import examples
from kitsune.fusion.match import Alone
from kitsune.kernels import adam, batch_norm, head, vocabulary  # noqa: F401 - define the operators
from tests.kitsune.fusion.running import parts

aten, kitsune = torch.ops.aten, torch.ops.kitsune

Function = Callable[..., list[Tensor]]

CPU = torch.device("cpu")
X = torch.zeros(4, 4)


def half_forgotten(x: Tensor) -> list[Tensor]:
    return [torch.cat([torch.zeros_like(x[:1]), x[1:]]).sin() * 2]


def in_another_type(x: Tensor) -> list[Tensor]:
    return [(x.sin() * 2).bfloat16()]


def hardly_updated(x: Tensor) -> list[Tensor]:
    return [x.mul_(1.00095).sum()]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda x: [x.sin() * 2], half_forgotten),
        (lambda x: [x.sin() * 2], in_another_type),
        (lambda x: [x.mul_(1.001).sum()], hardly_updated),
        (lambda x: [torch.where(x.isnan(), x, x * 2)], lambda x: [x * 2.5]),
    ],
)
def test_small_differences_are_seen(before: Function, after: Function) -> None:
    assert agree(parts(before, before, X), CPU)
    assert not agree(parts(before, after, X), CPU)


def test_masks_are_not_all_the_same() -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    with_mask = trace(lambda x, mask: [torch.where(mask, x, 0)], [X, mask])
    without = trace(lambda x, mask: [x * 0], [X, mask])
    given = trace(lambda *tensors: list(tensors), [X, mask])
    assert not agree(Alone(with_mask, without, given), CPU)


def test_low_precision_is_allowed_its_rounding() -> None:
    def before(x: Tensor) -> list[Tensor]:
        return [(x.bfloat16().sin() * 3).float()]

    assert agree(parts(before, lambda x: [x.sin() * 3], X), CPU)
    assert not agree(parts(lambda x: [x.sin() * 3], before, X), CPU)


def test_float32_stays_float32() -> None:
    """An error as of TF32 in one of two operands is ten times that of a sum in another order."""

    def summed(x: Tensor) -> list[Tensor]:
        return [x.sin() @ x.t()]

    def in_another_order(x: Tensor) -> list[Tensor]:
        return [x[:, 512:].sin() @ x[:, 512:].t() + x[:, :512].sin() @ x[:, :512].t()]

    given = torch.zeros(8, 1024)
    assert agree(parts(summed, in_another_order, given), CPU)
    assert not agree(parts(summed, lambda x: [summed(x)[0] * (1 + 2e-5)], given), CPU)


def in_float32_alone(x: Tensor, y: Tensor) -> list[Tensor]:
    """As PyTorch's own kernels do where cuDNN's do not."""
    return [(x.bfloat16().float() @ y.float()).bfloat16()]


def in_parts(x: Tensor, y: Tensor) -> list[Tensor]:
    """A product whose sums are rounded again and again, as those of some libraries are."""
    total = torch.zeros(4, 4, dtype=torch.bfloat16)
    for one, other in zip(x.bfloat16().split(4, 1), y.split(4), strict=True):
        total = (total + one @ other).to(torch.bfloat16)
    return [total]


def test_a_replacement_may_be_more_exact() -> None:
    given = torch.zeros(4, 1024), torch.zeros(1024, 4, dtype=torch.bfloat16)
    assert agree(parts(in_parts, in_float32_alone, *given), CPU)
    assert not agree(parts(in_float32_alone, in_parts, *given), CPU)
    assert not agree(parts(in_parts, lambda x, y: [in_float32_alone(x, y)[0] * 1.03], *given), CPU)


def counting(x: Tensor, total: Tensor) -> list[Tensor]:
    total.add_(in_parts(x, x.t().bfloat16())[0].float())
    return []


def counting_alone(x: Tensor, total: Tensor) -> list[Tensor]:
    total.add_(in_float32_alone(x, x.t().bfloat16())[0].float())
    return []


def test_so_may_what_it_writes() -> None:
    given = torch.zeros(4, 1024), torch.zeros(4, 4)
    assert agree(parts(counting, counting_alone, *given), CPU)


class Convolutions(TorchDispatchMode):
    """Notes the types of what is convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.convolution.default and not isinstance(args[0], FakeTensor):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_in_float64_that_a_later_operator_does_not_take() -> None:
    def normalized(x: Tensor, weight: Tensor) -> list[Tensor]:
        made = aten.convolution.default(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        options = {"momentum": 0.1, "eps": 1e-5, "relu": True}
        return list(kitsune.batch_norm.default(made, None, None, None, None, None, **options))

    given = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16), torch.zeros(4, 3, 3, 3, dtype=torch.bfloat16)
    with Convolutions() as seen:
        assert agree(parts(normalized, normalized, *given), CPU)
        assert not agree(parts(normalized, lambda *inputs: [one * 1.1 for one in normalized(*inputs)], *given), CPU)
    assert set(seen.dtypes) == {torch.bfloat16}


def test_examples_are_valid_and_repeat() -> None:
    numbers = torch.zeros(5, dtype=torch.int64)
    inputs = torch.zeros(3, 2).t(), torch.zeros(3), numbers, torch.zeros((), dtype=torch.half), X[:1].expand(7, 4)
    given = trace(lambda *tensors: list(tensors), inputs)
    made = examples(Alone(given, given, given), CPU)
    for one, wanted in zip(made, inputs, strict=True):
        assert (one.dtype, one.size(), one.stride()) == (wanted.dtype, wanted.size(), wanted.stride())
    assert (made[1] > 0).all()
    assert not made[2].any()
    assert all(map(torch.equal, made, examples(Alone(given, given, given), CPU)))


# Indices

ROWS, TARGETS = torch.zeros(64, 10), torch.zeros(64, dtype=torch.int64)


def likelihood(ignore_index: int = -100) -> Function:
    def call(logits: Tensor, targets: Tensor) -> list[Tensor]:
        softmax, options = aten._log_softmax.default(logits, 1, False), (targets, None, 1, ignore_index)
        loss, total = aten.nll_loss_forward.default(softmax, *options)
        return [loss, aten.nll_loss_backward.default(torch.ones_like(loss), softmax, *options, total)]

    return call


def of_class_0(logits: Tensor, targets: Tensor) -> list[Tensor]:
    return likelihood()(logits, torch.zeros_like(targets))


def ignoring_nothing(logits: Tensor, targets: Tensor) -> list[Tensor]:
    return likelihood()(logits, torch.where(targets == -100, 0, targets))


def scattered(padding_idx: int = -1) -> Function:
    return lambda grad, indices: [aten.embedding_dense_backward.default(grad, indices, 10, padding_idx, False)]


def all_to_the_first(grad: Tensor, _: Tensor) -> list[Tensor]:
    return [torch.cat([grad.sum(0)[None], torch.zeros(9, 10)])]


def gathered(rows: Tensor, indices: Tensor) -> list[Tensor]:
    return [aten.embedding.default(rows, indices)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (likelihood(), of_class_0),
        (likelihood(), ignoring_nothing),
        (likelihood(0), likelihood()),
        (scattered(), all_to_the_first),
        (scattered(0), lambda *_: [torch.zeros(10, 10)]),
        (scattered(0), scattered()),
        (gathered, lambda rows, _: [rows[:1].expand(64, 10)]),
    ],
)
def test_indices_matter(before: Function, after: Function) -> None:
    assert agree(parts(before, before, ROWS, TARGETS), CPU)
    assert not agree(parts(before, after, ROWS, TARGETS), CPU)


def by_entropy(logits: Tensor, targets: Tensor) -> list[Tensor]:
    return [kitsune.cross_entropy.default(logits, targets, reduction="mean", ignore_index=3, label_smoothing=0.0)[0]]


def by_head(logits: Tensor, targets: Tensor) -> list[Tensor]:
    weight = torch.ones(10, 10)
    return [
        kitsune.cross_entropy_head.default(
            logits, weight, None, targets, None, "none", dtype=torch.float32, ignore_index=3
        )[0]
    ]


def by_table(logits: Tensor, targets: Tensor) -> list[Tensor]:
    return [kitsune.embedding_backward.default(logits, targets, num_embeddings=10, padding_idx=3, dtype=torch.float32)]


@pytest.mark.parametrize(
    "taking",
    [
        likelihood(3),
        scattered(3),
        by_entropy,
        by_head,
        by_table,
    ],
)
def test_indices_are_valid_and_some_left_out(taking: Function) -> None:
    """Those that only the replacement is known to take as such, through a view and a cast."""
    numbers = torch.zeros(32, 2, dtype=torch.int32)

    def taken(logits: Tensor, numbers: Tensor, count: Tensor) -> list[Tensor]:
        return [*taking(logits, numbers.view(64).long()), count + 1]

    def not_known(logits: Tensor, numbers: Tensor, count: Tensor) -> list[Tensor]:
        return [logits + numbers.sum(), count + 1]

    _, made, count = examples(parts(not_known, taken, ROWS, numbers, torch.zeros((), dtype=torch.int64)), CPU)
    assert made.dtype == torch.int32
    assert set(made.flatten().tolist()) == set(range(10))
    assert 0 < int((made == 3).sum()) < 16
    assert count == 0


def test_indices_suit_all_that_take_them() -> None:
    def before(logits: Tensor, targets: Tensor, table: Tensor) -> list[Tensor]:
        return [*likelihood()(logits, targets), aten.embedding.default(table, targets)]

    _, made, _ = examples(parts(before, before, ROWS, TARGETS, torch.zeros(5, 2)), CPU)
    assert set(made.tolist()) == set(range(5))


# Float32 and what is written


def descended(parameter: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    parameter.add_(a.t() @ b, alpha=-0.1)
    return []


def descended_too_far(parameter: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    parameter.add_((a.t() @ b) * (1 + 1.9e-4), alpha=-0.1)
    return []


def descended_in_another_order(parameter: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    parameter.sub_(0.1 * (a[:128].t() @ b[:128] + a[128:].t() @ b[128:]))
    return []


UPDATED = torch.zeros(32, 32), torch.zeros(256, 32), torch.zeros(256, 32)


def test_what_is_written_in_float32_stays_float32() -> None:
    assert agree(parts(descended, descended_in_another_order, *UPDATED), CPU)
    assert not agree(parts(descended, descended_too_far, *UPDATED), CPU)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adam_is_compared_in_float64(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(Tensor, "cpu", Tensor.clone)  # as if it came from elsewhere
    options = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "decoupled": False, "maximize": False}

    def step(factor: float) -> Function:
        def update(*inputs: Tensor) -> list[Tensor]:
            parameter, a, b, mean, square, count, lr = inputs
            gradient = (a.t() @ b) * factor
            kitsune.adam_.default([parameter], [gradient], [mean], [square], [], [count], lr=lr, **options)
            return []

        return update

    shapes = (32, 32), (4096, 32), (4096, 32), (32, 32), (32, 32), (), ()
    given = [torch.zeros(shape, device=device) for shape in shapes]
    compared = parts(step(1.0), step(1.0), *given)._replace(
        given=trace(lambda p, a, b, mean, square, *rest: [p, a, b, mean, square.abs(), *rest], given)
    )
    assert agree(compared, torch.device(device))
    assert not agree(compared._replace(after=trace(step(1 + 9e-5), given)), torch.device(device))


def fail_in_float64(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(agreement, "_in_float64", fail)


def test_without_float64_float32_is_compared_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_float64(monkeypatch, ValueError("takes float32: got float64"))
    assert agree(parts(descended, descended_in_another_order, *UPDATED), CPU)
    assert not agree(parts(descended, descended_too_far, *UPDATED), CPU)
    assert not agree(parts(lambda x: [x.sin()], lambda x: [x.sin() * (1 + 2e-5)], X), CPU)


def test_what_may_fail_in_passing_leaves_the_matter_open(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_float64(monkeypatch, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
    assert agree(parts(descended, descended_in_another_order, *UPDATED), CPU)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        agree(parts(descended, descended_too_far, *UPDATED), CPU)


def test_what_is_close_in_low_precision_needs_no_memory_for_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_float64(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    assert agree(parts(lambda x: [(x.half() * 3).float()], lambda x: [x * 3], X), CPU)
    with pytest.raises(torch.OutOfMemoryError):
        agree(parts(lambda x: [(x.half() * 3).float()], lambda x: [x * 4], X), CPU)


# Low precision

IMAGES = torch.zeros(64, 64, 8, 8, dtype=torch.bfloat16)


def doubled(x: Tensor) -> list[Tensor]:
    return [torch.relu(x) * 2]


def without_a_plane(x: Tensor) -> list[Tensor]:
    (y,) = doubled(x)
    return [torch.cat([torch.cat([torch.zeros_like(y[:1, :1]), y[:1, 1:]], 1), y[1:]])]


def with_a_wrong_column(x: Tensor) -> list[Tensor]:
    (y,) = doubled(x)
    return [torch.cat([y[..., :-1], torch.cat([y[:32, ..., -1:], -y[32:, ..., -1:]])], -1)]


def with_a_stray(x: Tensor) -> list[Tensor]:
    (y,) = doubled(x)
    first, rest = y.view(-1)[:1], y.view(-1)[1:]
    return [torch.cat([first + 3, rest]).view(y.shape)]


def test_wrong_slices_of_low_precision_are_seen() -> None:
    assert not agree(parts(doubled, without_a_plane, IMAGES), CPU)
    assert not agree(parts(doubled, with_a_wrong_column, torch.zeros(64, 16384, dtype=torch.bfloat16)), CPU)
    assert agree(parts(doubled, with_a_stray, IMAGES), CPU)


def weights_gradient(a: Tensor, b: Tensor) -> list[Tensor]:
    return [(a.t() @ b).float()]


def test_float32_beside_low_precision_is_as_exact_as_it_was() -> None:
    given = torch.zeros(256, 64, dtype=torch.bfloat16), torch.zeros(256, 64, dtype=torch.bfloat16)
    assert agree(parts(weights_gradient, lambda a, b: [a.float().t() @ b.float()], *given), CPU)
    assert not agree(parts(weights_gradient, lambda a, b: [weights_gradient(a, b)[0] * 1.01], *given), CPU)
    assert not agree(parts(lambda a, _: [a.float() * 3], lambda a, _: [a.float() * 3.001], *given), CPU)


def test_so_is_what_is_written_in_float32() -> None:
    def before(total: Tensor, x: Tensor) -> list[Tensor]:
        return [total.add_(x.float(), alpha=0.1).bfloat16()]

    def after(total: Tensor, x: Tensor) -> list[Tensor]:
        return [total.add_(x.float(), alpha=0.1003).bfloat16()]

    given = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16)
    assert agree(parts(before, before, *given), CPU)
    assert not agree(parts(before, after, *given), CPU)


def test_a_cast_may_be_left_out() -> None:
    assert agree(parts(lambda x: [x.bfloat16().float()], lambda x: [x * 1], X), CPU)


def test_a_loss_may_be_lucky() -> None:
    """Its error says little of what rounding costs."""
    assert agree(parts(lambda x: [x.bfloat16().float().mean()], lambda x: [x.half().float().mean()], X), CPU)
