"""What makes two calls the same call."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from kitsune.capture.signature import call_signature, refuse_arguments

CPU = torch.device("cpu")
MODULE = nn.Linear(2, 2)


class Pair(NamedTuple):
    first: Any
    second: Any


def signature(*args: Any, module: nn.Module = MODULE, **kwargs: Any) -> object:
    key = call_signature(args, kwargs, module, CPU)
    hash(key)
    return key


X = torch.ones(2, 3)

SAME: list[tuple[Any, Any]] = [
    (torch.ones(2, 3), torch.zeros(2, 3)),
    ([X, 1], [X + 1, 1]),
    ({"a": X, "b": None}, {"a": X * 2, "b": None}),
    (Pair(X, 1.5), Pair(X + 1, 1.5)),
    ("text", "text"),
    (torch.float32, torch.float32),
]

DIFFERENT: list[tuple[Any, Any]] = [
    (torch.ones(2, 3), torch.ones(3, 2)),
    (torch.ones(2, 3), torch.ones(2, 3).t().contiguous().t()),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (torch.ones(2), torch.ones(2, requires_grad=True)),
    (torch.ones(2), torch.ones(2, device="meta")),
    (torch.ones(1), 1.0),
    (1, 2),
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ("a", "b"),
    ("a", b"a"),
    (None, 0),
    ([X], (X,)),
    ([X], [X, X]),
    (Pair(X, 1), (X, 1)),
    ({"a": X}, {"b": X}),
    ({"a": X}, {"a": 1}),
    (torch.float32, torch.float64),
    (object(), "an object"),
    ([1, [2]], [[1], 2]),
]


@pytest.mark.parametrize(("first", "second"), SAME, ids=str)
def test_equal_signatures(first: Any, second: Any) -> None:
    assert signature(first) == signature(second)
    assert signature(x=first) == signature(x=second)


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)))
def test_different_signatures(first: Any, second: Any) -> None:
    assert signature(first) != signature(second)
    assert signature(x=first) != signature(x=second)
    assert signature([first]) != signature([second])


def test_positions_and_names_count() -> None:
    assert signature(X) != signature(x=X)
    assert signature(x=X) != signature(y=X)
    assert signature(X, 1) != signature(1, X)


def test_the_mode_of_the_module_counts() -> None:
    module = nn.Linear(2, 2)
    before = signature(X, module=module)
    assert signature(X, module=module.eval()) != before
    assert signature(X, module=module.train()) == before


@pytest.mark.parametrize(
    "surroundings",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
)
def test_the_surroundings_count(surroundings: Callable[[], AbstractContextManager[Any]]) -> None:
    before = signature(X)
    with surroundings():
        assert signature(X) != before
    assert signature(X) == before


def test_the_dtype_of_autocast_counts() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        first = signature(X)
    with torch.autocast("cpu", torch.float16):
        assert signature(X) != first


def test_the_default_dtype_counts() -> None:
    before = signature(X)
    torch.set_default_dtype(torch.float64)
    try:
        assert signature(X) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_arguments_that_a_replay_can_copy() -> None:
    assert refuse_arguments([X, X.t(), X[:, ::2], torch.ones(()), nn.Parameter(X), torch.ones(0, 3)]) is None


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (X.as_subclass(Tagged), "is a Tagged, a tensor subclass"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.ones(3, 1).expand(3, 4), "of shape (3, 4) overlaps itself"),
    ],
)
def test_arguments_that_it_cannot(argument: torch.Tensor, words: str) -> None:
    refusal = refuse_arguments([X, argument])
    assert refusal is not None
    assert words in refusal.reason
