"""Batches of sequences, padded to few lengths."""

from __future__ import annotations

import collections
import copy
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import kitsune

FILL = {0: 7, 1: True, 2: -100}
LENGTHS = (3, 9, 4, 8, 5, 6, 7, 2, 11, 3, 9, 8)


class Texts(NamedTuple):
    tokens: Tensor
    is_padding: Tensor
    labels: Tensor


def texts(length: int, seed: int = 0) -> Texts:
    """Three texts of up to `length` tokens, with a label for each token."""
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 7, (3, length), generator=source)
    is_padding = torch.zeros(3, length, dtype=torch.bool)
    is_padding[0, length - 1] = length > 2
    labels = torch.randint(0, 5, (3, length), generator=source).masked_fill(is_padding, -100)
    return Texts(tokens, is_padding, labels)


@pytest.mark.parametrize(
    ("to", "lengths"), [(4, [4, 4, 8, 12]), ((4, 6, 11), [4, 4, 6, 11]), ([9], [9, 9, 9, 9]), (1, [3, 4, 5, 9])]
)
def test_lengths_are_those_asked_for(to: Any, lengths: list[int]) -> None:
    batches = [texts(length) for length in (3, 4, 5, 9)]
    padded = list(kitsune.bucketed(batches, to, FILL))
    assert [batch.tokens.shape[1] for batch in padded] == lengths
    for before, after in zip(batches, padded, strict=True):
        length = before.tokens.shape[1]
        for place, value in FILL.items():
            torch.testing.assert_close(after[place][:, :length], before[place], rtol=0, atol=0)
            assert after[place].dtype == before[place].dtype
            assert (after[place][:, length:] == value).all()


def test_a_batch_of_the_right_length_is_not_copied() -> None:
    batch = texts(8)
    (found,) = kitsune.bucketed([batch], 8, FILL)
    assert found is batch


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict, tuple, list, Texts])
def test_batches_keep_their_type(kind: Any) -> None:
    named = texts(5)._asdict() | {"name": "a text"}
    batch: Any
    if kind is Texts:
        batch, fill = texts(5), FILL
    elif kind in (tuple, list):
        batch, fill = kind(named.values()), FILL
    else:
        batch, fill = kind(named), dict(zip(named, FILL.values(), strict=False))
    before = copy.copy(batch)
    (found,) = kitsune.bucketed([batch], 8, fill)
    assert type(found) is type(batch)
    for name in fill:
        assert found[name].shape == (3, 8)
        assert batch[name] is before[name], "the loader's own batch was changed"
    if kind is not Texts:
        assert (found[3] if kind in (tuple, list) else found["name"]) == "a text"


def test_what_is_not_named_stays() -> None:
    batch = {"tokens": torch.ones(2, 5), "ids": torch.arange(2)}
    (found,) = kitsune.bucketed([batch], 8, {"tokens": 0})
    assert found["ids"] is batch["ids"]


def test_other_dimensions_are_padded_too() -> None:
    """The number of samples, for a last batch that is smaller; and floats."""
    (images,) = next(iter(kitsune.bucketed([(torch.ones(2, 3, 4),)], 5, {0: 0.5}, dim=0)))
    assert images.shape == (5, 3, 4)
    assert (images[2:] == 0.5).all()
    (images,) = next(iter(kitsune.bucketed([(torch.ones(2, 3, 4),)], 5, {0: 0.5}, dim=-1)))
    assert images.shape == (2, 3, 5)


def test_a_longer_batch_stays_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kitsune"):
        found = list(kitsune.bucketed([texts(9), texts(10)], (4, 8), FILL))
    assert [batch.tokens.shape[1] for batch in found] == [9, 10]
    assert [record.getMessage() for record in caplog.records] == [
        "a batch of length 9 is longer than the longest that bucketed pads to, 8, and stays as it is"
    ]


def test_every_pass_is_a_new_one_and_lengths_are_the_loaders() -> None:
    loader: DataLoader[Any] = DataLoader(
        [torch.ones(5) for _ in range(6)], batch_size=2, collate_fn=lambda rows: (torch.stack(rows),)
    )
    batches = kitsune.bucketed(loader, 8, {0: 0})
    assert len(batches) == 3
    for _ in range(2):
        assert [x.shape for (x,) in batches] == [(2, 8)] * 3

    def stream() -> Iterator[tuple[Tensor]]:
        yield (torch.ones(1, 3),)

    with pytest.raises(TypeError, match="object of type 'generator' has no len"):
        len(kitsune.bucketed(stream(), 8, {0: 0}))
    assert [x.shape for (x,) in kitsune.prefetch(kitsune.bucketed(stream(), 8, {0: 0}), "cpu")] == [(1, 8)]


def test_lengths_may_be_numpys() -> None:
    assert [x.shape for (x,) in kitsune.bucketed([(torch.ones(1, 3),)], np.int64(4), {0: 0})] == [(1, 4)]


@pytest.mark.parametrize("to", [0, -4, (), (4, 4), (8, 4), True, (2.5,), "4"])
def test_lengths_that_make_no_sense_are_refused(to: Any) -> None:
    with pytest.raises(ValueError, match="to must be a whole number from 1 up, or several that ascend"):
        kitsune.bucketed([texts(3)], to, FILL)


@pytest.mark.parametrize(
    ("batch", "fill", "error", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(2, 4)),
            {0: 0, 1: 0},
            ValueError,
            r"differ in length, in dimension 1: \{0: 3, 1: 4\}",
        ),
        ((torch.ones(2, 3),), {1: 0}, ValueError, "fill names 1, and a batch has the places 0 to 0"),
        ({"x": torch.ones(2, 3)}, {"y": 0}, ValueError, r"fill names 'y', and a batch has \['x'\]"),
        ((torch.ones(2, 3), torch.ones(2)), {0: 0, 1: 0}, ValueError, "without a dimension 1"),
        ((torch.ones(2, 3),), {-1: 0}, ValueError, "fill names -1, and a batch has the places 0 to 0"),
        ((torch.ones(2, 3, dtype=torch.uint8),), {0: -100}, ValueError, "has -100 for 0 of a batch, which torch.uint8"),
        ((torch.ones(2, 3, dtype=torch.long),), {0: 0.5}, ValueError, "has 0.5 for 0 of a batch, which torch.int64"),
        (("text",), {0: 0}, TypeError, "0 of a batch is of type str"),
        (torch.ones(2, 3), {0: 0}, TypeError, "dicts, tuples or lists of tensors, not Tensor"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batch: Any, fill: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(kitsune.bucketed([batch], 8, fill))


def test_nothing_to_iterate_or_to_fill_is_refused() -> None:
    nothing: Any = 5
    with pytest.raises(TypeError, match="needs an iterable of batches, such as a DataLoader, not int"):
        kitsune.bucketed(nothing, 8, FILL)
    with pytest.raises(ValueError, match="what to pad"):
        kitsune.bucketed([texts(3)], 8, {})


class Tagger(nn.Module):
    """A transformer that gives each token a class."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor, is_padding: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=is_padding))
        return found


def train(batches: Any, double: bool = False, **options: Any) -> tuple[list[Tensor], nn.Module, Any]:
    torch.manual_seed(1)
    model = Tagger()
    if double:
        model.double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if options:
        optimizer = kitsune.KitsuneOptimizer(optimizer, **options)
    losses = []
    for tokens, is_padding, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens, is_padding).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model, optimizer


def test_losses_and_training_are_those_of_the_batches_as_they_were() -> None:
    batches = [texts(length, seed) for seed, length in enumerate(LENGTHS)]
    as_they_were, model, _ = train(batches, double=True)
    padded, other, _ = train(kitsune.bucketed(batches, 4, FILL), double=True)
    torch.testing.assert_close(padded, as_they_were, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()), rtol=1e-10, atol=1e-12)


@pytest.mark.support("Shapes and modes", "sequences padded to a few lengths (`kitsune.bucketed`)", "replayed")
def test_few_lengths_are_captured_and_replayed() -> None:
    batches = [texts(length, seed) for seed, length in enumerate(3 * LENGTHS)]
    expected, _, _ = train(kitsune.bucketed(batches, (4, 8, 12), FILL))
    found, _, optimizer = train(kitsune.bucketed(batches, (4, 8, 12), FILL), mode="replay")
    torch.testing.assert_close(found, expected)
    status = optimizer.status()
    assert status.graphs == 3
    assert status.replays >= len(batches) - 2 * 3
