"""The arguments of a call: every one is copied in or checked, whatever its kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.kitsune.training import FORMS, Batch, Build, Net, Training, adam, batch, compare

pytestmark = pytest.mark.parametrize("form", FORMS)


class Flexible(Net):
    """Takes its input in many shapes."""

    def forward(self, x: Any, *, scale: Any = 1.0, shift: Tensor | None = None, kind: str = "plain") -> Tensor:
        if isinstance(x, Point):
            x = x.values * x.weight
        elif isinstance(x, Pair):
            x = x.first + x.second
        elif isinstance(x, dict):
            x = x["inner"][0]["x"] + x["offset"]
        elif isinstance(x, (list, tuple)):
            x = sum(x[1:], x[0])
        if shift is not None:
            x = x + shift
        output = super().forward(x) * scale
        return torch.tanh(output) if kind == "tanh" else output


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Point:
    values: Tensor
    weight: float


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Flexible()
    return model, adam(model)


def shaped(shape: Callable[[Tensor, int], Any], **keywords: Callable[[int], Any]) -> Callable[[int], Batch]:
    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (shape(x, index), y), {name: make(index) for name, make in keywords.items()}

    return batches


@pytest.mark.support("Shapes and modes", "arguments in tuples, dictionaries and objects", "replayed")
@pytest.mark.parametrize(
    "shape",
    [
        lambda x, index: [x, x * 2],
        lambda x, index: (x, x + index),
        lambda x, index: {"inner": [{"x": x}], "offset": x[0] * 0.1},
        lambda x, index: Pair(x, x * index),
    ],
    ids=["list", "tuple", "dict", "named tuple"],
)
def test_structured_arguments(form: str, shape: Callable[[Tensor, int], Any]) -> None:
    compare(form, build, batches=shaped(shape))


def test_a_list_that_grows(form: str) -> None:
    compare(form, build, steps=12, batches=shaped(lambda x, index: [x] * (1 + index // 4)), replays=5)


def test_an_object_with_tensors(form: str) -> None:
    """What the signature cannot see, the guards do; in the end the step may run eagerly, but always right."""
    compare(form, build, steps=8, batches=shaped(lambda x, index: Point(x, 1.0)), replays=4)
    compare(form, build, steps=10, batches=shaped(lambda x, index: Point(x, float(index))), replays=0)
    compare(
        form,
        build,
        steps=10,
        batches=shaped(lambda x, index: Point(x[: 6 - index % 2], 1.0)),
        replays=0,
        loss_fn=lambda output, target: torch.nn.functional.cross_entropy(output, target[: len(output)]),
    )


def test_tensors_by_keyword(form: str) -> None:
    compare(form, build, batches=shaped(lambda x, index: x, shift=lambda index: torch.full((4,), float(index))))


def test_keywords_that_come_and_go(form: str) -> None:
    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x, y), [{}, {"shift": torch.ones(4)}, {"kind": "tanh"}][index % 3]

    compare(form, build, steps=12, batches=batches, replays=6)


@pytest.mark.parametrize(
    "values",
    [
        (1, 2),
        (1.0, 2.0),
        (0.0, -0.0),
        (1, 1.0),
        (True, 1),
        (torch.tensor(2.0), torch.tensor(3.0)),
        (2, torch.tensor(2)),
    ],
    ids=str,
)
def test_scalars(form: str, values: tuple[Any, Any]) -> None:
    batches = shaped(lambda x, index: x, scale=lambda index: values[index % 2])
    compare(form, build, steps=8, batches=batches, replays=4)


def test_a_scalar_that_is_another_at_every_step(form: str) -> None:
    """Nothing is captured for what does not come back, and nothing piles up."""
    training = compare(form, build, steps=30, batches=shaped(lambda x, index: x, scale=float), replays=0)
    assert training.status().graphs == 0


def test_strings_and_none(form: str) -> None:
    batches = shaped(lambda x, index: x, kind=lambda index: ("plain", "tanh")[index % 2], shift=lambda index: None)
    compare(form, build, steps=8, batches=batches, replays=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:, :1].expand(-1, 4),
        lambda x: torch.stack([x, x], 2)[..., 0],
        lambda x: torch.cat([x, x])[::2],
        lambda x: x.t().contiguous().t(),
    ],
    ids=["expanded", "every second column", "every second row", "transposed"],
)
def test_strided_arguments(form: str, make: Callable[[Tensor], Tensor]) -> None:
    compare(form, build, batches=shaped(lambda x, index: make(x)), replays=0)


def test_overlapping_arguments(form: str) -> None:
    """Two arguments in one memory, also where a step's memory was the last one's."""
    memory = torch.zeros(7, 4)

    def make(x: Tensor, index: int) -> list[Tensor]:
        memory[:6] = x
        return [memory[:6], memory[1:]]

    compare(form, build, batches=shaped(make))


@pytest.mark.support("Shapes and modes", "a batch that is written where the last one was", "replayed")
def test_one_buffer_for_all_batches(form: str) -> None:
    memory = torch.zeros(6, 4)
    compare(form, build, batches=shaped(lambda x, index: memory.copy_(x)))


def test_an_argument_that_is_the_models_own_parameter(form: str) -> None:
    class Shared(Net):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return super().forward(x) + x @ weight[:4, :3]

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Shared()
        return model, adam(model)

    def edit(training: Training, index: int) -> None:
        current.append(training)

    current: list[Training] = []

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x, current[-1].model.first.weight[:4].detach(), y), {}

    compare(form, make, batches=batches, edit=edit, replays=0)


class Editing(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


def test_a_model_that_edits_its_argument(form: str) -> None:
    """The caller sees the edit, as in eager."""
    seen: dict[str, list[Tensor]] = {"eager": [], form: []}

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Editing()
        return model, adam(model)

    given: list[Tensor] = []

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        given.append(x)
        return (x, y), {}

    def edit(training: Training, index: int) -> None:
        if index:
            seen[training.form].append(given[-1].clone())

    compare(form, make, batches=batches, edit=edit, replays=0)
    assert seen["eager"]
    assert all(torch.equal(*pair) for pair in zip(seen[form], seen["eager"], strict=True))


def test_a_tensor_subclass(form: str) -> None:
    class Tagged(Tensor):
        pass

    training = compare(form, build, batches=shaped(lambda x, index: x.as_subclass(Tagged)), replays=0)
    assert training.status().mode == "eager"


@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.decorators.mark_unbacked])
def test_dimensions_that_are_marked_as_dynamic(
    mark: Callable[[Tensor, int], None], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As for `torch.compile`. Dynamo would raise in the user's training, since a capture has one shape."""

    def shape(x: Tensor, index: int) -> Tensor:
        mark(x, 0)
        return x

    training = compare(form, build, batches=shaped(shape), replays=0)
    assert "marked as dynamic" in training.status().reason
    assert {record.name for record in caplog.records} == {"kitsune"}


def test_dimensions_that_may_be_dynamic(form: str) -> None:
    """A step is captured as if they were not marked; a model's call, which has such a size for an argument, is not."""

    def shape(x: Tensor, index: int) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return x

    training = compare(form, build, batches=shaped(shape), replays=1 if form == "train_step" else 0)
    assert form == "train_step" or "marked as dynamic" in training.status().reason


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(form: str) -> None:
    class Ragged(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.stack([row.sum(0) for row in x.unbind()]))

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Ragged()
        return model, adam(model)

    def shape(x: Tensor, index: int) -> Tensor:
        return torch.nested.nested_tensor([x[:1], x[1:3], x[3:]])

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (shape(x, index), y[:3]), {}

    compare(form, make, batches=batches, replays=0)


@pytest.mark.parametrize("is_output", [False, True])
def test_jagged_tensors(is_output: bool, form: str) -> None:
    """Nested tensors of this layout are what Dynamo takes, of sizes that are no numbers."""
    offsets = torch.tensor([0, 2, 5, 8])

    class Ragged(Net):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x if is_output else x.values())
            return torch.nested.nested_tensor_from_jagged(logits, offsets) if is_output else logits

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Ragged()
        return model, adam(model)

    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x if is_output else torch.nested.nested_tensor_from_jagged(x, offsets), y), {}

    def loss_fn(output: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output.values() if is_output else output, y)

    training = compare(form, make, batches=batches, loss_fn=loss_fn, replays=0)
    is_within = is_output and form == "train_step"  # of what is captured, which does not return it
    assert is_within or "nested tensor" in training.status().reason


@pytest.mark.parametrize(
    "make", [lambda x: torch.complex(x, -x).conj(), lambda x: torch.complex(x, -x).conj().imag], ids=["conj", "neg"]
)
def test_lazily_conjugated_arguments(form: str, make: Callable[[Tensor], Tensor]) -> None:
    class Real(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.view_as_real(x.resolve_conj())[..., 1] if x.is_complex() else x)

    def build_real() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Real()
        return model, adam(model)

    compare(form, build_real, batches=shaped(lambda x, index: make(x)), replays=0)


def test_an_empty_batch_of_a_kind_eager_takes(form: str) -> None:
    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x[: 0 if index == 4 else None], y[: 0 if index == 4 else None]), {}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output, target, reduction="sum")

    compare(form, build, batches=batches, loss_fn=loss_fn, steps=8, replays=5)


def test_values_that_are_not_finite(form: str) -> None:
    def batches(index: int) -> Batch:
        (x, y), _ = batch(index)
        return (x * float("nan") if index == 4 else x, y), {}

    compare(form, build, batches=batches)


def bad_label(index: int) -> Batch:
    (x, y), _ = batch(index)
    return (x, torch.full_like(y, 7) if index == 4 else y), {}


def test_a_label_out_of_range_fails_as_in_eager(form: str) -> None:
    build_pair: Build = build
    model, plain = build_pair()
    training = Training(form, model, plain)
    training.run(4)
    with pytest.raises(IndexError, match="out of bounds"):
        training.run(1, bad_label, start=4)
    training.run(2, start=5)
    assert training.status().mode == "replay"
